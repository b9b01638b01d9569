"""Forecasts what the lifecycle will keep of a run in each tier, what that costs, and when a disk will be full.

Pure. The run is assumed to continue at its pace. Sizes, times and steps come from manifests, and the policy itself
judges simulated checkpoints. What rules such as keep_last keep reaches a limit; what is kept forever (every n-th,
every n steps, milestones) grows each month.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from statistics import median

import msgspec

from tierd.config.sections import LifecycleConfig, TierPolicy
from tierd.format.ids import HOT, CheckpointId, Run, Step, checkpoint_id
from tierd.lifecycle.policy import CheckpointView, by_run, kept, kept_forever

GIB = 1 << 30
MONTH_S = 30 * 86400.0
FULL_SOON_S = 6 * MONTH_S  # a disk that lasts longer is large enough
_BISECTIONS = 10  # the result is exact to 2 %
_GOES_ON_INTERVALS = 3.0  # a run whose newest checkpoint is older than so many intervals has ended, or pauses
_PACE_INTERVALS = 9  # of their median, a new cadence is the pace after five intervals, and four pauses are ignored
SIMULATED_MAX = 20_000  # checkpoints: one for each hour of two years; /api/v1/lifecycle computes it on the event loop
_ANY_TIME = datetime(2025, 1, 1, tzinfo=UTC)
_PERIODS_S = {"keep_hourly": 3600.0, "keep_daily": 86400.0, "keep_weekly": 7 * 86400.0}


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """The forecast for one run in one tier. None where a value is unknown: the interval needs two checkpoints of one
    generation, and a cost needs a price. `steady_gib`: the limit of the rules that drop checkpoints, and what is kept
    forever so far; `growth_gib`: what each month of 30 days adds. Costs are per month, in the currency of the price."""

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
    """The forecasts by run and tier. `sizes`: the bytes of each checkpoint. `cold`: each cold tier's price per GiB and
    month, 0 if it is unknown. `own`: as for `explain`."""
    policies = rules_by_tier(policy, cold=cold, own=own)
    forecasts: list[Forecast] = []
    for run, checkpoints_of_run in by_run(checkpoints):
        views = sorted(checkpoints_of_run, key=lambda view: view.id.recency)
        checkpoint_gib = sizes[views[-1].id] / GIB
        pace = pace_of(views)
        for tier, rules in policies.items():
            steady_gib = growth_gib = None
            if pace is not None:
                steady_gib = _steady_count(views, rules, pace) * checkpoint_gib
                growth_gib = _growth_count(views, rules, pace) * checkpoint_gib
            price = cold.get(tier, 0.0)
            forecasts.append(
                Forecast(
                    run=run,
                    tier=tier,
                    checkpoint_gib=checkpoint_gib,
                    interval_s=pace and pace.interval_s,
                    held_gib=sum(sizes[view.id] for view in views if tier in view.tiers) / GIB,
                    steady_gib=steady_gib,
                    growth_gib=growth_gib,
                    steady_cost=None if steady_gib is None or not price else steady_gib * price,
                    growth_cost=None if growth_gib is None or not price else growth_gib * price,
                )
            )
    return forecasts


def needs(
    policy: LifecycleConfig,
    *,
    cold: Mapping[str, float],
    own: Mapping[str, TierPolicy],
    checkpoint_bytes: int,
    interval_s: float,
    steps: int,
) -> list[Forecast]:
    """The forecast of each tier before there is any checkpoint, for a run that saves `checkpoint_bytes` every
    `interval_s`, which is every `steps` steps. Without milestones, best and unhealthy checkpoints: their number is not
    known before. `cold`, `own`: as of `forecast`."""
    # Two, because the interval and the steps are computed from one checkpoint to the next.
    first, views = checkpoint_id("forecast", steps, 1), list[CheckpointView]()
    for number in (1, 2):
        created_at = _ANY_TIME + timedelta(seconds=number * interval_s)
        views.append(_simulated(first, number, number * steps, created_at))
    return forecast(views, {view.id: checkpoint_bytes for view in views}, policy, cold=cold, own=own)


def rules_by_tier(
    policy: LifecycleConfig, *, cold: Iterable[str], own: Mapping[str, TierPolicy]
) -> dict[str, list[TierPolicy]]:
    """The rules of each tier. Without a cold tier, those of cold also hold for hot."""
    names = list(cold)
    rules = {HOT: [policy.hot] if names else [policy.hot, policy.cold]}
    return rules | {name: [own.get(name, policy.cold)] for name in names}


class Late(msgspec.Struct, frozen=True, kw_only=True):
    """A cold tier that does not get all copies in time, so that hot keeps what it lacks. `rule`: what the tier keeps.
    `share`: how much of what lasts there, as every tenth checkpoint, is never copied at this pace: 1.0 in a tier that
    cannot be reached; 0.0 where only those are late that newer ones replace."""

    tier: str
    rule: TierPolicy
    share: float


class RunInTier(msgspec.Struct, frozen=True, kw_only=True):
    """One run in one tier. `views`: all checkpoints of the run, oldest first. `sizes`: the bytes of those that the tier
    has, and of the newest. `rules`: what the tier keeps. `late`: of hot, the cold tiers for which it keeps more."""

    tier: str
    views: Sequence[CheckpointView]
    sizes: Mapping[CheckpointId, int]
    rules: Sequence[TierPolicy]
    late: Sequence[Late] = ()

    @property
    def run(self) -> Run:
        return self.views[-1].id.run

    @property
    def checkpoint_bytes(self) -> int:
        return self.sizes[self.views[-1].id]


def full_in_s(runs: Sequence[RunInTier], free_bytes: float) -> float | None:
    """The seconds until the tiers of one disk need `free_bytes` more for these runs than now. Infinite if that is later
    than FULL_SOON_S. None if a run has no pace yet."""
    growths: list[tuple[RunInTier, CheckpointPace, float]] = []
    for run in runs:
        pace = pace_of(run.views)
        if pace is None:
            return None
        growths.append((run, pace, _forever_per_s(run, pace)))

    def is_full(after_s: float) -> bool:
        grown = (_grown_bytes(run, pace, after_s, forever_per_s=rate) for run, pace, rate in growths)
        return sum(grown) > free_bytes

    if not is_full(FULL_SOON_S):
        return math.inf
    fits_s, full_s = min((pace.interval_s for _, pace, _ in growths), default=1.0) / 2, FULL_SOON_S
    if is_full(0.0) or fits_s >= full_s:
        return 0.0
    for _ in range(_BISECTIONS):
        middle_s = math.sqrt(fits_s * full_s)
        fits_s, full_s = (fits_s, middle_s) if is_full(middle_s) else (middle_s, full_s)
    return full_s


def lasting_per_s(run: RunInTier) -> float:
    """How many checkpoints a second the tier keeps for good, or until an hour, a day or a week has passed: those must
    be copied, whatever is newer. 0 before the run has shown its pace."""
    pace = pace_of(run.views)
    if pace is None:
        return 0.0
    by_time = max(
        (1 / s for key, s in _PERIODS_S.items() if any(getattr(rule, key) for rule in run.rules)), default=0.0
    )
    return min(1 / pace.interval_s, _growth_count(run.views, run.rules, pace) / MONTH_S + by_time)


def _forever_per_s(run: RunInTier, pace: CheckpointPace) -> float:
    """Of what is kept for ever, how much comes each second. Late cold tiers wait for much the same."""
    own = _growth_count(run.views, run.rules, pace)
    more = ((_growth_count(run.views, [*run.rules, tier.rule], pace) - own) * tier.share for tier in run.late)
    return (own + max(more, default=0.0)) / MONTH_S


def _grown_bytes(run: RunInTier, pace: CheckpointPace, after_s: float, *, forever_per_s: float) -> float:
    """By how many bytes the tier has more of the run after `after_s`."""
    there, count = [view for view in run.views if run.tier in view.tiers], int(after_s / pace.interval_s)
    late = [each.rule if each.share else TierPolicy(keep_last=each.rule.keep_last) for each in run.late]
    rules = [*run.rules, *late]
    last = max(1, *(rule.keep_last for rule in rules))
    coming = _coming(run.views, rules, pace, count)
    held = {view.id for view in there if any(kept_forever(view, rule) for rule in run.rules)}
    for each in run.late:
        lacking = (view for view in there if each.share and each.tier not in view.tiers)
        held |= {view.id for view in lacking if kept_forever(view, each.rule)}
    for rule in map(_forgetting, rules):
        held |= kept([*there, *coming], msgspec.structs.replace(rule, keep_last=0)).keys()
        if rule.keep_last > count:  # keep_last still keeps some that are there now
            held |= kept(there, msgspec.structs.replace(rule, keep_last=rule.keep_last - count)).keys()
    older = sum(view.id in held for view in coming if view.sequence <= run.views[-1].sequence + count - last)
    grown_bytes = -sum(run.sizes[view.id] for view in there if view.id not in held)
    return grown_bytes + (min(count, last) + older + forever_per_s * after_s) * run.checkpoint_bytes


def _coming(
    views: Sequence[CheckpointView], rules: Sequence[TierPolicy], pace: CheckpointPace, count: int
) -> list[CheckpointView]:
    """The last of the next `count` checkpoints. If a rule keeps by time, also the others, at most one per hour."""
    newest = views[-1]
    newest_at = max(view.created_at for view in views if view.created_at is not None)
    is_by_time = any(getattr(rule, key) for rule in rules for key in _PERIODS_S)
    hourly = range(count, 0, -(max(1, int(3600 / pace.interval_s)) if is_by_time else max(1, count)))[:SIMULATED_MAX]
    coming: list[CheckpointView] = []
    for ahead in hourly:
        created_at = newest_at + timedelta(seconds=ahead * pace.interval_s)
        coming.append(_simulated(newest.id, newest.sequence + ahead, newest.id.step + ahead, created_at))
    return coming


def _forgetting(rule: TierPolicy) -> TierPolicy:
    return msgspec.structs.replace(rule, keep_every=0, keep_every_steps=0, milestones=False)


class CheckpointPace(msgspec.Struct, frozen=True):
    """The time and the steps from one checkpoint of a run to the next."""

    interval_s: float
    steps: int


def goes_on(views: Sequence[CheckpointView], now: datetime) -> bool:
    """Whether the next checkpoint is not overdue. `views`: of one run, oldest first."""
    pace = pace_of(views)
    if pace is None:
        return False
    newest_at = next(view.created_at for view in reversed(views) if view.created_at is not None)
    # A time in the future comes from a wrong clock: until that time, the run would seem to go on.
    return abs((now - newest_at).total_seconds()) <= _GOES_ON_INTERVALS * pace.interval_s


def pace_of(views: Sequence[CheckpointView]) -> CheckpointPace | None:
    """The pace of the newest checkpoints. The sequence counts deleted ones too; the median ignores pauses."""
    intervals_s: list[float] = []
    steps: list[float] = []
    for view, following in pairwise(views):
        count = following.sequence - view.sequence
        is_comparable = view.id.generation == following.id.generation and count >= 1
        if not is_comparable or not view.created_at or not following.created_at:
            continue
        intervals_s.append((following.created_at - view.created_at).total_seconds() / count)
        steps.append((following.id.step - view.id.step) / count)
    intervals_s, steps = intervals_s[-_PACE_INTERVALS:], steps[-_PACE_INTERVALS:]
    if not intervals_s or median(intervals_s) <= 0:
        return None
    return CheckpointPace(median(intervals_s), max(1, round(median(steps))))


def _steady_count(views: Sequence[CheckpointView], rules: Sequence[TierPolicy], pace: CheckpointPace) -> int:
    """How many checkpoints are kept late in a long training. Checkpoints that two kinds of rules keep count twice, so
    the true number may be slightly lower."""
    forgetting = [msgspec.structs.replace(_forgetting(rule), keep_best=0) for rule in rules]
    past = _past(views, forgetting, pace)
    kept_past = set[CheckpointId]().union(*(kept(past, rule) for rule in forgetting))
    forever = sum(any(kept_forever(view, rule) for rule in rules) for view in views)
    best = max(
        min(rule.keep_best, sum(rule.best_metric in view.metrics for view in views)) if rule.keep_best else 0
        for rule in rules
    )
    unhealthy = min(max(rule.keep_unhealthy for rule in rules), sum(view.healthy is False for view in views))
    return len(kept_past) + forever + best + unhealthy


def _past(views: Sequence[CheckpointView], rules: Sequence[TierPolicy], pace: CheckpointPace) -> list[CheckpointView]:
    """Simulated checkpoints before the newest: all that the rules can keep, beyond `keep_last` at most one per hour."""
    newest = views[-1]
    newest_at = max(view.created_at for view in views if view.created_at is not None)
    last = max(rule.keep_last for rule in rules)
    span_s = max(
        getattr(rule, key) * max(period_s, pace.interval_s) for rule in rules for key, period_s in _PERIODS_S.items()
    )
    hourly = range(0, int(span_s / pace.interval_s) + 1, max(1, int(3600 / pace.interval_s)))
    past: list[CheckpointView] = []
    for back in sorted({*range(min(last, SIMULATED_MAX)), *hourly[:SIMULATED_MAX]}):
        try:
            created_at = newest_at - timedelta(seconds=back * pace.interval_s)
        except OverflowError:  # before the year 1
            break
        past.append(_simulated(newest.id, -back, -back, created_at))
    return past


def _simulated(other: CheckpointId, sequence: int, step: int, created_at: datetime | None) -> CheckpointView:
    return CheckpointView(
        id=CheckpointId(other.run, Step(step), other.generation),
        sequence=sequence,
        milestones=frozenset(),
        healthy=None,
        tiers=frozenset(),
        created_at=created_at,
    )


def _growth_count(views: Sequence[CheckpointView], rules: Sequence[TierPolicy], pace: CheckpointPace) -> float:
    """How many of the checkpoints of a month are kept forever."""
    newest = views[-1]
    count_max = SIMULATED_MAX // 2 if any(rule.keep_every or rule.keep_every_steps for rule in rules) else 1
    future = (
        _simulated(newest.id, newest.sequence + count, newest.id.step + count * pace.steps, None)
        for count in range(1, count_max + 1)
    )
    by_number = [msgspec.structs.replace(rule, milestones=False) for rule in rules]
    rate = sum(any(kept_forever(view, rule) for rule in by_number) for view in future) / count_max
    marked = [view for view in views if any(kept_forever(view, rule) for rule in rules)]
    marked = [view for view in marked if not any(kept_forever(view, rule) for rule in by_number)]
    rate += len(marked) / max(newest.sequence, len(views))
    return min(rate, 1.0) * MONTH_S / pace.interval_s
