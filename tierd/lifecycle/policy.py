"""The lifecycle as one pure function: what should be copied, evicted or expired, given what is.

last_replica: nothing here deletes the last committed replica of what any policy keeps, nor the newest healthy
checkpoint, nor a hot replica whose selected cold copy is pending. halt, not guess: a tier whose contents are
unknown loses nothing, and nothing is deleted on the strength of what it might hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from types import MappingProxyType

from tierd.config import LifecycleConfig, TierPolicy
from tierd.format.ids import CheckpointId, Run

HOT = "hot"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointView:
    """What the plan needs to know of one checkpoint. `tiers`: names of the tiers where it is committed.

    `created_at`: in UTC; None where its manifest gives no time. `metrics`: as in its manifest.
    """

    id: CheckpointId
    sequence: int
    milestones: frozenset[str]
    healthy: bool | None
    tiers: frozenset[str]
    created_at: datetime | None = None
    metrics: Mapping[str, float | str] = field(default_factory=dict[str, "float | str"], hash=False)


@dataclass(frozen=True, slots=True)
class Replicate:
    """Copy a checkpoint from hot into `tier`."""

    checkpoint: CheckpointId
    tier: str
    reason: str


@dataclass(frozen=True, slots=True)
class Evict:
    """Drop the replica in `tier`; others remain."""

    checkpoint: CheckpointId
    tier: str
    reason: str


@dataclass(frozen=True, slots=True)
class Expire:
    """Drop the last replica, in `tier`: no policy keeps the checkpoint any more."""

    checkpoint: CheckpointId
    tier: str
    reason: str


Action = Replicate | Evict | Expire


class Verdict(Enum):
    KEEP = "keep"
    REPLICATE = "replicate"
    WAIT = "wait"  # it should be copied there, but that tier cannot be listed now
    EVICT = "evict"
    EXPIRE = "expire"


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of one checkpoint in one tier, and why."""

    checkpoint: CheckpointView
    tier: str
    verdict: Verdict
    reason: str


def kept(checkpoints: Iterable[CheckpointView], policy: TierPolicy) -> dict[CheckpointId, str]:
    """What a tier with this policy keeps of one run, and why ("last 3", "every 10th", "milestone best").

    An unhealthy checkpoint counts for nothing but a milestone, and for evidence. The newest
    that may be healthy is always kept, and the newest that was found healthy, however many unjudged ones are newer;
    and the newest of all when none is healthy: a verdict never empties a run.

    What is kept of many is kept of any part of them that has it: no rule may look at how many there are.
    """
    newest_first = sorted(checkpoints, key=lambda one: one.id.recency, reverse=True)
    healthy = [one for one in newest_first if one.healthy is not False]
    keep_last = max(policy.keep_last, 1)
    unhealthy = [one for one in newest_first if one.healthy is False]
    found = {one.id: "newest unhealthy, as evidence" for one in unhealthy[: policy.keep_unhealthy]}
    for one in [one for one in healthy if one.healthy][:1]:
        found[one.id] = "newest that was found healthy"
    found |= {one.id: f"last {keep_last}" for one in healthy[:keep_last]}
    if newest_first and not healthy:
        found.setdefault(newest_first[0].id, "newest, though none is healthy")
    # The longest-lived reason is the one that is told.
    found |= _by_time(healthy, policy) | _best(healthy, policy)
    found |= {one.id: reason for one in newest_first if (reason := lasting(one, policy))}
    return found


def lasting(one: CheckpointView, policy: TierPolicy) -> str | None:
    """Why this one is kept for ever, whatever comes after it."""
    if policy.milestones and one.milestones:
        return "milestone " + ", ".join(sorted(one.milestones))
    if one.healthy is False:
        return None
    if policy.keep_every and one.sequence % policy.keep_every == 0:
        return f"every {_ordinal(policy.keep_every)}"
    if policy.keep_every_steps and one.id.step % policy.keep_every_steps == 0:
        return f"every {policy.keep_every_steps} steps"
    return None


def _by_time(healthy: list[CheckpointView], policy: TierPolicy) -> dict[CheckpointId, str]:
    """Of the last n hours, days and weeks that have one, the newest each: only times of checkpoints count, no clock,
    so that a run that rests for a month loses nothing by it."""
    rules: list[tuple[int, str, Callable[[datetime], Hashable]]] = [
        (policy.keep_hourly, "hourly", lambda at: (at.date(), at.hour)),
        (policy.keep_daily, "daily", lambda at: at.date()),
        (policy.keep_weekly, "weekly", lambda at: at.isocalendar()[:2]),
    ]
    if not any(count for count, _, _ in rules):
        return {}
    timed = [(one.created_at, one.id) for one in healthy if one.created_at is not None]
    timed.sort(key=lambda one: (one[0], one[1].recency), reverse=True)
    found: dict[CheckpointId, str] = {}
    for count, word, period_of in rules:
        newest: dict[Hashable, CheckpointId] = {}
        for at, checkpoint in timed:
            period = period_of(at)
            if period not in newest:
                if len(newest) == count:
                    break
                newest[period] = checkpoint
        found |= dict.fromkeys(newest.values(), f"{word}, of the last {count}")
    return found


def _best(healthy: list[CheckpointView], policy: TierPolicy) -> dict[CheckpointId, str]:
    """Of equals the newer; what has no such number is none of the best."""
    if not policy.keep_best:
        return {}
    sign = 1 if policy.best_mode == "min" else -1
    measured: list[tuple[float, CheckpointId]] = []
    for one in healthy:
        value = one.metrics.get(policy.best_metric)
        if isinstance(value, int | float) and math.isfinite(value):
            measured.append((sign * value, one.id))
    measured.sort(key=lambda one: one[0])  # stable: newest first among equals
    return {
        checkpoint: f"best {place} of {policy.keep_best} by {policy.best_mode} {policy.best_metric}: {sign * value:g}"
        for place, (value, checkpoint) in enumerate(measured[: policy.keep_best], start=1)
    }


def plan(
    checkpoints: Iterable[CheckpointView],
    policy: LifecycleConfig,
    *,
    cold: Mapping[str, bool],
    hot_known: bool,
    own: Mapping[str, TierPolicy] = MappingProxyType({}),
) -> list[Action]:
    """What to do. `cold`: each cold tier's name, and whether its contents are known right now. `own`: the policies of
    the cold tiers that have one of their own.

    Copies come first: milestones, then the newest. Then deletions, oldest first.
    """
    decisions = explain(checkpoints, policy, cold=cold, hot_known=hot_known, own=own)
    copies = [one for one in decisions if one.verdict is Verdict.REPLICATE]
    copies.sort(key=lambda one: one.checkpoint.id.recency, reverse=True)
    copies.sort(key=lambda one: not one.checkpoint.milestones)
    deletions = [one for one in decisions if one.verdict in (Verdict.EVICT, Verdict.EXPIRE)]
    deletions.sort(key=lambda one: one.checkpoint.id.recency)
    action = {Verdict.REPLICATE: Replicate, Verdict.EVICT: Evict, Verdict.EXPIRE: Expire}
    return [action[one.verdict](one.checkpoint.id, one.tier, one.reason) for one in copies + deletions]


def explain(
    checkpoints: Iterable[CheckpointView],
    policy: LifecycleConfig,
    *,
    cold: Mapping[str, bool],
    hot_known: bool,
    own: Mapping[str, TierPolicy] = MappingProxyType({}),
) -> list[Decision]:
    """What becomes of every checkpoint in every tier that holds it or should: newest first, runs by name."""
    runs: dict[Run, list[CheckpointView]] = {}
    for one in checkpoints:
        runs.setdefault(one.id.run, []).append(one)
    found: list[Decision] = []
    for run in sorted(runs):
        run_policy = _RunPolicy(runs[run], policy, cold=cold, hot_known=hot_known, own=own)
        for one in sorted(runs[run], key=lambda one: one.id.recency, reverse=True):
            found += run_policy.decide(one)
    return found


class _RunPolicy:
    """What each tier keeps of one run, from confirmed replicas only: a tier that is unknown counts as empty.

    That never deletes too much: fewer checkpoints to choose from only makes each one likelier to be kept.
    """

    def __init__(
        self,
        views: list[CheckpointView],
        policy: LifecycleConfig,
        *,
        cold: Mapping[str, bool],
        hot_known: bool,
        own: Mapping[str, TierPolicy],
    ) -> None:
        self._cold = cold
        self._hot_known = hot_known
        self._known = {HOT, *(name for name, is_known in cold.items() if is_known)}
        policies = {HOT: policy.hot, **{name: own.get(name, policy.cold) for name in cold}}
        present = [one for one in views if one.tiers & self._known]
        # What each tier should have, of all that there is.
        self._selects = {tier: kept(present, one) for tier, one in policies.items()}
        self._orphaned = {} if cold else kept(present, policy.cold)
        # A tier keeps what its policy keeps of its own contents, which is never less than its part of the whole.
        # Else a cold tier that lags would drop its newest because newer ones exist that have not arrived yet.
        self._own_keeps = {
            tier: kept((one for one in present if tier in one.tiers), policies[tier]) for tier in self._known
        }

    def decide(self, one: CheckpointView) -> Iterator[Decision]:
        left = set(one.tiers & self._known)
        for tier in (HOT, *self._cold):
            if tier not in one.tiers & self._known:
                yield from self._missing(one, tier)
                continue
            reason = self._keeps_in(one, tier, left)
            if reason:
                yield Decision(one, tier, Verdict.KEEP, reason)
                continue
            left.discard(tier)
            if left:
                reason = f"not kept in {tier}; still in {', '.join(sorted(left))}"
                yield Decision(one, tier, Verdict.EVICT, reason)
            else:
                yield Decision(one, tier, Verdict.EXPIRE, "no policy keeps it")

    def _missing(self, one: CheckpointView, tier: str) -> Iterator[Decision]:
        """Of a checkpoint with no confirmed replica in `tier`."""
        selected = self._selects[tier].get(one.id)
        if tier == HOT or HOT not in one.tiers or selected is None:
            return
        if self._cold[tier]:
            yield Decision(one, tier, Verdict.REPLICATE, selected)
        else:
            yield Decision(one, tier, Verdict.WAIT, f"{selected}; {tier} cannot be listed now")

    def _keeps_in(self, one: CheckpointView, tier: str, left: set[str]) -> str | None:
        """Why the replica in `tier` stays, or None. `left`: where a replica remains, `tier` included."""
        if one.id in self._own_keeps[tier]:
            return self._own_keeps[tier][one.id]
        if not self._hot_known:
            return "nothing is deleted while hot cannot be listed"
        if tier == HOT:
            selecting = [name for name in self._cold if one.id in self._selects[name]]
            pending = [name for name in selecting if name not in one.tiers or not self._cold[name]]
            if pending:
                return f"{self._selects[pending[0]][one.id]}; not yet known to be in {', '.join(pending)}"
            if one.id in self._orphaned:
                return f"{self._orphaned[one.id]}; there is no cold tier to hold it"
        if left == {tier}:
            for name, selects in self._selects.items():
                if one.id in selects:
                    return f"last replica of what {name} keeps: {selects[one.id]}"
            unknown = [name for name, is_known in self._cold.items() if not is_known]
            # Hot goes on: its disk is finite, and no policy keeps this one whatever the unknown tier holds.
            if unknown and tier != HOT:
                return f"last replica known while {', '.join(unknown)} cannot be listed"
        return None


def _ordinal(number: int) -> str:
    suffix = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"
