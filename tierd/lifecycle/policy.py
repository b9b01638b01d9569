"""The lifecycle as one pure function: which replicas to copy, evict or expire, given which exist.

last_replica: it never deletes the last committed replica of a checkpoint that any policy keeps, the newest healthy
checkpoint, or a hot replica whose cold copy is selected or in progress. halt, not guess: it deletes nothing in a tier
whose contents are unknown, and nothing because of what such a tier might hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from functools import cache

from tierd.config.sections import LifecycleConfig, TierPolicy
from tierd.format.ids import HOT, CheckpointId, Run


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointView:
    """What the plan needs to know of one checkpoint. `tiers`: names of the tiers where it is committed. `gone`: those
    that will not get the part that hot has of it, because they have deleted the checkpoint, or it never became whole.

    `created_at`: in UTC; None if its manifest gives no valid time. `metrics`: as in its manifest. `foreign`: why no
    daemon of the run seems to have committed it: it is kept, and nothing is deleted because of it; empty otherwise.
    `is_part`: hot has only this node's part, which replaces no replica elsewhere.
    """

    id: CheckpointId
    sequence: int
    milestones: frozenset[str]
    healthy: bool | None
    tiers: frozenset[str]
    gone: frozenset[str] = frozenset()
    created_at: datetime | None = None
    metrics: Mapping[str, float | str] = field(default_factory=dict[str, "float | str"], hash=False)
    foreign: str = ""
    is_part: bool = False


class Action(Enum):
    KEEP = "keep"
    REPLICATE = "replicate"  # copy it from hot
    WAIT = "wait"  # copy it once the tier can be listed again
    EVICT = "evict"  # delete this replica; others remain
    EXPIRE = "expire"  # delete the last replica: no policy keeps the checkpoint


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of one checkpoint in one tier, and why."""

    checkpoint: CheckpointId
    tier: str
    action: Action
    reason: str


def copies(
    decisions: Iterable[Decision], milestones: Container[CheckpointId], lasting: Container[CheckpointId] = ()
) -> list[Decision]:
    """The copies to make, in order: milestones, then those of `lasting`, then the others; of each the newest first."""
    copied = [decision for decision in decisions if decision.action is Action.REPLICATE]

    def urgency(copy: Decision) -> tuple[bool, bool, tuple[int, int]]:
        return copy.checkpoint in milestones, copy.checkpoint in lasting, copy.checkpoint.recency

    return sorted(copied, key=urgency, reverse=True)


def lasting(
    checkpoints: Iterable[CheckpointView], policy: TierPolicy, *, among: Iterable[CheckpointView] | None = None
) -> set[CheckpointId]:
    """Of those that the policy keeps, the ones that newer checkpoints do not replace: kept for good, or kept although
    there are `keep_last` newer ones. It may name others too, which the policy does not keep. `among`: only of these."""
    views = list(checkpoints)
    newest: set[CheckpointId] = set()
    for _, of_run in by_run(views):
        healthy = sorted((view for view in of_run if view.healthy is not False), key=_recency)
        newest |= {view.id for view in healthy[-max(policy.keep_last, 1) :]}
    return {
        view.id
        for view in (views if among is None else among)
        if kept_forever(view, policy) or (view.healthy is not False and view.id not in newest)
    }


def deletions(decisions: Iterable[Decision]) -> list[Decision]:
    """The deletions to make, in order: by run, the oldest first."""
    deleted = [decision for decision in decisions if decision.action in (Action.EVICT, Action.EXPIRE)]
    return sorted(deleted, key=lambda deletion: (deletion.checkpoint.run, deletion.checkpoint.recency))


def explain_run(
    views: Iterable[CheckpointView],
    policy: LifecycleConfig,
    *,
    cold: Mapping[str, bool],
    hot_known: bool,
    own: Mapping[str, TierPolicy],
    copying: Mapping[str, Container[CheckpointId]],
    with_kept: bool = True,
    only: CheckpointId | None = None,
) -> list[Decision]:
    """What becomes of every checkpoint of a run in every tier that holds it or should: newest first.

    `cold`: each cold tier's name, and whether its contents are known now. `own`: the policies of the cold tiers that do
    not use the common one. `copying`: by cold tier, what is being copied to it. The tier selects it until it is there,
    whatever is newer by then; unless it was found unhealthy. `with_kept`: also the replicas that stay, and why. `only`:
    of this checkpoint.
    """
    decisions: list[Decision] = []
    newest_first = sorted(views, key=_recency, reverse=True)
    run_policy = _RunPolicy(newest_first, policy, cold=cold, hot_known=hot_known, own=own, copying=copying)
    for view in newest_first:
        if only in (None, view.id) and (with_kept or not run_policy.stays(view)):
            decisions += run_policy.decide(view, with_kept=with_kept)
    return decisions


def by_run(checkpoints: Iterable[CheckpointView]) -> list[tuple[Run, list[CheckpointView]]]:
    """The runs by name, each with its checkpoints."""
    runs: dict[Run, list[CheckpointView]] = {}
    for view in checkpoints:
        runs.setdefault(view.id.run, []).append(view)
    return sorted(runs.items())


def _recency(view: CheckpointView) -> tuple[int, int]:
    return view.id.recency


def _newest_healthy(newest_first: Iterable[CheckpointView]) -> set[CheckpointId]:
    """The newest that may be healthy, and the newest that was found healthy."""
    newest: set[CheckpointId] = set()
    for view in newest_first:
        if view.healthy is not False and not newest:
            newest.add(view.id)
        if view.healthy:
            return newest | {view.id}
    return newest


class _Selection:
    """What a tier with this policy keeps of some checkpoints of one run, newest first. As `kept`, but what each
    checkpoint alone decides is found out only for those that are asked for."""

    def __init__(self, newest_first: list[CheckpointView], policy: TierPolicy) -> None:
        self._policy = policy
        self._beside_others = _kept_beside_others(newest_first, policy)

    def reason(self, view: CheckpointView) -> str | None:
        """Why it is kept; None if it is not. Only of these checkpoints."""
        return kept_forever(view, self._policy) or self._beside_others.get(view.id)


class _RunPolicy:
    """What each tier keeps of one run. Only confirmed replicas count: an unknown tier counts as empty.

    That never deletes too much: a checkpoint that is kept of some checkpoints is also kept of fewer.
    """

    def __init__(
        self,
        newest_first: list[CheckpointView],
        policy: LifecycleConfig,
        *,
        cold: Mapping[str, bool],
        hot_known: bool,
        own: Mapping[str, TierPolicy],
        copying: Mapping[str, Container[CheckpointId]],
    ) -> None:
        self._cold = cold
        self._tiers = (HOT, *cold)
        self._hot_known = hot_known
        self._copying = copying
        self._known = frozenset({HOT, *(name for name, is_known in cold.items() if is_known)})
        policies = {HOT: policy.hot, **{name: own.get(name, policy.cold) for name in cold}}
        present = [view for view in newest_first if not (view.foreign or view.tiers.isdisjoint(self._known))]
        self._newest_healthy = _newest_healthy(present)
        has_gone = any(view.gone for view in present)
        # What each tier should hold, of all checkpoints that exist.
        self._selects = {
            tier: _Selection(
                [view for view in present if not self._is_gone(view, tier)] if has_gone else present, rules
            )
            for tier, rules in policies.items()
        }
        self._orphaned = None if cold else _Selection(present, policy.cold)
        # A tier also keeps what its policy selects from its own contents alone. Otherwise a cold tier that lags would
        # delete its newest checkpoints because of newer ones that have not arrived there yet.
        self._own_keeps = {
            tier: _Selection([view for view in present if tier in view.tiers], policies[tier]) for tier in self._known
        }

    def _is_gone(self, view: CheckpointView, tier: str) -> bool:
        """Whether the tier has deleted it and does not get it again. It does if the reason came after the deletion: it
        has become a milestone, or newer ones were found unhealthy since, and it is the newest healthy one now."""
        is_needed = not view.is_part and (view.milestones or view.id in self._newest_healthy)
        return tier in view.gone and not is_needed

    def _selected(self, view: CheckpointView, tier: str) -> str | None:
        """Why the tier should hold it; None if it should not. Only of those that are present and not foreign."""
        reason = None if view.gone and self._is_gone(view, tier) else self._selects[tier].reason(view)
        if reason is None and tier not in view.tiers and view.healthy is not False:
            reason = "it is being copied" if view.id in self._copying.get(tier, ()) else None
        return reason

    def stays(self, view: CheckpointView) -> bool:
        """Whether each replica stays by the policy of its own tier, and none is to be copied: so it is of most. A
        shorter way to what `decide` says."""
        if view.foreign or HOT in view.tiers or not view.tiers <= self._known:
            return False
        return all(self._own_keeps[tier].reason(view) for tier in view.tiers)

    def decide(self, view: CheckpointView, *, with_kept: bool) -> Iterator[Decision]:
        here = view.tiers & self._known
        if view.foreign:
            for tier in self._tiers if with_kept else ():
                if tier in here:
                    yield Decision(view.id, tier, Action.KEEP, f"foreign: {view.foreign}")
            return
        remaining = set(here)
        for tier in self._tiers:
            if tier not in here:
                if tier != HOT and HOT in view.tiers and (selected := self._selected(view, tier)) is not None:
                    if self._cold[tier]:
                        yield Decision(view.id, tier, Action.REPLICATE, selected)
                    else:
                        yield Decision(view.id, tier, Action.WAIT, f"{selected}; {tier} cannot be listed now")
                continue
            if view.is_part and tier != HOT:
                remaining.discard(HOT)
            if reason := self._keeps_in(view, tier, remaining):
                if with_kept:
                    yield Decision(view.id, tier, Action.KEEP, reason)
                continue
            remaining.discard(tier)
            if remaining:
                reason = f"not kept in {tier}; still in {', '.join(sorted(remaining))}"
                yield Decision(view.id, tier, Action.EVICT, reason)
            else:
                yield Decision(view.id, tier, Action.EXPIRE, "no policy keeps it")

    def _keeps_in(self, view: CheckpointView, tier: str, remaining: set[str]) -> str | None:
        """Why the replica in `tier` stays, or None. `remaining`: the tiers that still hold one, with `tier`."""
        if reason := self._own_keeps[tier].reason(view):
            return reason
        if not self._hot_known:
            return "nothing is deleted while hot cannot be listed"
        if tier == HOT:
            selecting = {name: reason for name in self._cold if (reason := self._selected(view, name)) is not None}
            pending = [name for name in selecting if name not in view.tiers or not self._cold[name]]
            if pending:
                return f"{selecting[pending[0]]}; not yet known to be in {', '.join(pending)}"
            if self._orphaned is not None and (reason := self._orphaned.reason(view)):
                return f"{reason}; there is no cold tier to hold it"
        if remaining == {tier}:
            for name in self._selects:
                if (reason := self._selected(view, name)) is not None:
                    return f"last replica of what {name} keeps: {reason}"
            unknown = [name for name, is_known in self._cold.items() if not is_known]
            # Hot still deletes: its disk is finite, and no policy keeps this one, whatever the unknown tier holds.
            if unknown and tier != HOT:
                return f"last replica known while {', '.join(unknown)} cannot be listed"
        return None


def kept(checkpoints: Iterable[CheckpointView], policy: TierPolicy) -> dict[CheckpointId, str]:
    """What a tier with this policy keeps of one run, and why ("last 3", "every 10th", "milestone best").

    An unhealthy checkpoint is kept only as a milestone or as evidence. Always kept are the newest that may be healthy,
    the newest that was found healthy, however many unexamined ones are newer, and the newest of all if none is healthy.

    Whatever is kept of a set of checkpoints is also kept of each subset that contains it.
    """
    newest_first = sorted(checkpoints, key=_recency, reverse=True)
    reasons = _kept_beside_others(newest_first, policy)
    # Of several reasons, the one that holds longest comes last and is reported.
    return reasons | {view.id: reason for view in newest_first if (reason := kept_forever(view, policy))}


def _kept_beside_others(newest_first: list[CheckpointView], policy: TierPolicy) -> dict[CheckpointId, str]:
    """As `kept`, by the rules where the other checkpoints count, too."""
    healthy = [view for view in newest_first if view.healthy is not False]
    unhealthy = [view for view in newest_first if view.healthy is False]
    keep_last = max(policy.keep_last, 1)
    reasons = {view.id: "newest unhealthy, as evidence" for view in unhealthy[: policy.keep_unhealthy]}
    if (found_healthy := next((view.id for view in healthy if view.healthy), None)) is not None:
        reasons[found_healthy] = "newest that was found healthy"
    reasons |= {view.id: f"last {keep_last}" for view in healthy[:keep_last]}
    if newest_first and not healthy:
        reasons.setdefault(newest_first[0].id, "newest, though none is healthy")
    return reasons | _left_behind(healthy, policy) | _by_time(healthy, policy) | _best(healthy, policy)


def kept_forever(view: CheckpointView, policy: TierPolicy) -> str | None:
    """Why the policy keeps it whatever comes after it; None if it does not."""
    if policy.milestones and view.milestones:
        return "milestone " + ", ".join(sorted(view.milestones))
    if view.healthy is False:
        return None
    if policy.keep_every and view.sequence % policy.keep_every == 0:
        return f"every {_ordinal(policy.keep_every)}"
    if policy.keep_every_steps and view.id.step % policy.keep_every_steps == 0:
        return f"every {policy.keep_every_steps} steps"
    return None


def _left_behind(healthy: list[CheckpointView], policy: TierPolicy) -> dict[CheckpointId, str]:
    """The newest checkpoint of each generation, until a later one has reached its step: a new start, made by mistake
    perhaps, must not push out what an older one reached. At most `keep_generations`, those with the highest steps."""
    newest: dict[int, CheckpointId] = {}
    for view in healthy:
        if view.id.generation not in newest:  # the newest comes first
            newest[view.id.generation] = view.id
    furthest = sorted((checkpoint.step for checkpoint in newest.values()), reverse=True)[: policy.keep_generations]
    reasons: dict[CheckpointId, str] = {}
    passed: int | None = None
    for generation in sorted(newest, reverse=True):
        checkpoint = newest[generation]
        if passed is not None and checkpoint.step > passed and checkpoint.step in furthest:
            reasons[checkpoint] = f"newest of generation {generation}, which no later one has passed"
        passed = max(passed or 0, checkpoint.step)
    return reasons


def _by_time(healthy: list[CheckpointView], policy: TierPolicy) -> dict[CheckpointId, str]:
    """The newest checkpoint of each of the last n hours, days and weeks that have one. Only the checkpoints' own times
    count, so a run that pauses for a month loses nothing."""
    rules: list[tuple[int, str, Callable[[datetime], Hashable]]] = [
        (policy.keep_hourly, "hourly", lambda at: (at.date(), at.hour)),
        (policy.keep_daily, "daily", lambda at: at.date()),
        (policy.keep_weekly, "weekly", lambda at: at.isocalendar()[:2]),
    ]
    if not any(count for count, _, _ in rules):
        return {}
    timed = [(view.created_at, view.id) for view in healthy if view.created_at is not None]
    timed.sort(key=lambda pair: (pair[0], pair[1].recency), reverse=True)
    reasons: dict[CheckpointId, str] = {}
    for count, word, period_of in rules:
        newest: dict[Hashable, CheckpointId] = {}
        for at, checkpoint in timed:
            period = period_of(at)
            if period not in newest:
                if len(newest) == count:
                    break
                newest[period] = checkpoint
        reasons |= dict.fromkeys(newest.values(), f"{word}, of the last {count}")
    return reasons


def _best(healthy: list[CheckpointView], policy: TierPolicy) -> dict[CheckpointId, str]:
    """The best by a metric, of equal ones the newer. A checkpoint whose metric is missing or not finite is left out."""
    if not policy.keep_best:
        return {}
    sign = 1 if policy.best_mode == "min" else -1
    measured: list[tuple[float, CheckpointId]] = []
    for view in healthy:
        value = view.metrics.get(policy.best_metric)
        if isinstance(value, int | float) and math.isfinite(value):
            measured.append((sign * value, view.id))
    measured.sort(key=lambda pair: pair[0])  # stable: newest first among equals
    return {
        checkpoint: f"best {place} of {policy.keep_best} by {policy.best_mode} {policy.best_metric}: {sign * value:g}"
        for place, (value, checkpoint) in enumerate(measured[: policy.keep_best], start=1)
    }


@cache
def _ordinal(number: int) -> str:
    suffix = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"
