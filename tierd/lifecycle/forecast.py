"""What the lifecycle of a run will hold in each tier, and what that costs, if the run goes on as it has.

Pure: sizes, times and steps come from manifests, the verdicts on checkpoints that are still to come from the policy
itself. The rules that forget come to rest at some size; those that never do (every n-th, every n steps, milestones)
add something each month, for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from itertools import pairwise
from statistics import median

import msgspec

from tierd.config import LifecycleConfig, TierPolicy
from tierd.format.ids import CheckpointId, Run, Step
from tierd.lifecycle.policy import HOT, CheckpointView, kept, lasting

GIB = 1 << 30
MONTH_S = 30 * 86400.0
IMAGINED_MAX = 20_000  # checkpoints: one for each hour of two years; the daemon answers nobody else meanwhile
_PERIODS_S = {"keep_hourly": 3600.0, "keep_daily": 86400.0, "keep_weekly": 7 * 86400.0}


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """Of one run in one tier. None where it cannot be told: with no two checkpoints of one generation there is no
    cadence, without a price no cost. `steady_gib`: when the rules that forget are full, with what is kept for ever so
    far; `growth_gib`: what comes to that each month of 30 days. Costs are of a month, in the currency of the price."""

    run: str
    tier: str
    checkpoint_gib: float
    interval_s: float | None
    held_gib: float
    steady_gib: float | None
    growth_gib: float | None
    steady_cost: float | None
    growth_cost: float | None


def forecast(
    checkpoints: Iterable[CheckpointView],
    sizes: Mapping[CheckpointId, int],
    policy: LifecycleConfig,
    *,
    cold: Mapping[str, float],
    own: Mapping[str, TierPolicy],
) -> list[Forecast]:
    """By run and tier. `sizes`: bytes of each checkpoint. `cold`: each cold tier's price of a GiB for a month, 0 where
    it is not told. `own`: as for `plan`."""
    runs: dict[Run, list[CheckpointView]] = {}
    for one in checkpoints:
        runs.setdefault(one.id.run, []).append(one)
    # Without a cold tier hot holds what cold would.
    policies = {HOT: [policy.hot] if cold else [policy.hot, policy.cold]}
    policies |= {name: [own.get(name, policy.cold)] for name in cold}
    found: list[Forecast] = []
    for run in sorted(runs):
        views = sorted(runs[run], key=lambda one: one.id.recency)
        size_bytes = sizes[views[-1].id]
        pace = _pace(views)
        for tier, rules in policies.items():
            held_gib = sum(sizes[one.id] for one in views if tier in one.tiers) / GIB
            steady_gib = growth_gib = None
            if pace is not None:
                steady_gib = _steady_count(views, rules, pace) * size_bytes / GIB
                growth_gib = _growth_count(views, rules, pace) * size_bytes / GIB
            price = cold.get(tier, 0.0)
            found.append(
                Forecast(
                    run=run,
                    tier=tier,
                    checkpoint_gib=size_bytes / GIB,
                    interval_s=pace and pace.interval_s,
                    held_gib=held_gib,
                    steady_gib=steady_gib,
                    growth_gib=growth_gib,
                    steady_cost=None if steady_gib is None or not price else steady_gib * price,
                    growth_cost=None if growth_gib is None or not price else growth_gib * price,
                )
            )
    return found


class _Pace(msgspec.Struct, frozen=True):
    """Between one checkpoint and the next."""

    interval_s: float
    steps: int


def _pace(views: list[CheckpointView]) -> _Pace | None:
    """By sequence, which counts those that are gone too; the median, so that a night's rest is no training."""
    intervals_s: list[float] = []
    steps: list[float] = []
    for one, after in pairwise(views):
        count = after.sequence - one.sequence
        if one.id.generation != after.id.generation or count < 1 or not one.created_at or not after.created_at:
            continue
        intervals_s.append((after.created_at - one.created_at).total_seconds() / count)
        steps.append((after.id.step - one.id.step) / count)
    if not intervals_s or median(intervals_s) <= 0:
        return None
    return _Pace(median(intervals_s), max(1, round(median(steps))))


def _steady_count(views: list[CheckpointView], rules: list[TierPolicy], pace: _Pace) -> int:
    """When the newest is an old one of a long training. Rules that overlap are counted once, but for those that never
    forget: it may be a few less."""
    forgetting = [
        msgspec.structs.replace(one, keep_every=0, keep_every_steps=0, milestones=False, keep_best=0) for one in rules
    ]
    past = _past(views, forgetting, pace)
    kept_past: set[CheckpointId] = set()
    for one in forgetting:
        kept_past |= kept(past, one).keys()
    for_ever = sum(any(lasting(one, rule) for rule in rules) for one in views)
    best = max(
        min(rule.keep_best, sum(rule.best_metric in one.metrics for one in views)) if rule.keep_best else 0
        for rule in rules
    )
    unhealthy = min(max(one.keep_unhealthy for one in rules), sum(one.healthy is False for one in views))
    return len(kept_past) + for_ever + best + unhealthy


def _past(views: list[CheckpointView], rules: list[TierPolicy], pace: _Pace) -> list[CheckpointView]:
    """What had been before the newest, had it gone on like this for ever: all that the rules may look at, one an hour
    at least."""
    newest = views[-1]
    at = max(one.created_at for one in views if one.created_at is not None)
    last = max(one.keep_last for one in rules)
    span_s = max(
        getattr(one, key) * max(period_s, pace.interval_s) for one in rules for key, period_s in _PERIODS_S.items()
    )
    hourly = range(0, int(span_s / pace.interval_s) + 1, max(1, int(3600 / pace.interval_s)))
    found: list[CheckpointView] = []
    for back in sorted({*range(min(last, IMAGINED_MAX)), *hourly[:IMAGINED_MAX]}):
        try:
            created_at = at - timedelta(seconds=back * pace.interval_s)
        except OverflowError:  # before the year 1
            break
        found.append(_imagined(newest, -back, -back, created_at))
    return found


def _imagined(newest: CheckpointView, sequence: int, step: int, created_at: datetime | None) -> CheckpointView:
    return CheckpointView(
        id=CheckpointId(newest.id.run, Step(step), newest.id.generation),
        sequence=sequence,
        milestones=frozenset(),
        healthy=None,
        tiers=frozenset(),
        created_at=created_at,
    )


def _growth_count(views: list[CheckpointView], rules: list[TierPolicy], pace: _Pace) -> float:
    """How many of a month's checkpoints are never given up."""
    newest = views[-1]
    count_max = IMAGINED_MAX // 2
    coming = (
        _imagined(newest, newest.sequence + count, newest.id.step + count * pace.steps, None)
        for count in range(1, count_max + 1)
    )
    by_number = [msgspec.structs.replace(one, milestones=False) for one in rules]
    rate = sum(any(lasting(one, rule) for rule in by_number) for one in coming) / count_max
    marked = [one for one in views if any(lasting(one, rule) for rule in rules)]
    marked = [one for one in marked if not any(lasting(one, rule) for rule in by_number)]
    rate += len(marked) / max(newest.sequence, len(views))
    return min(rate, 1.0) * MONTH_S / pace.interval_s
