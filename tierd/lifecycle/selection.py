"""Selects the checkpoint of a restore and the replica to read next: one rule for the daemon and for the CLI.

Pure: it takes what the tiers were last seen to hold and the replicas that have failed since. The newest checkpoint
comes first, by generation and step; of its replicas the nearest. `passed_over` says what was skipped, and why.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from tierd.errors import (
    BadConfig,
    Corrupt,
    Foreign,
    Incomplete,
    NewerFormat,
    NotFound,
    TierdError,
    TierUnreachable,
    Unhealthy,
    unhealthy,
)
from tierd.format.ids import AUTO, HOT, CheckpointId, Run
from tierd.format.text import listed

LISTED_MAX = 20  # names in a hint
_PART_HINT = (
    "a cold tier has it whole once every node has copied its part there; a start of a training with tierd's client "
    "reads the parts from the nodes that have them; `tierd ls` shows older steps"
)
_OLDER_HINT = "to go back on purpose, name an older step (--step; in a trainer, resume=); "


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointQuery:
    """Which checkpoint is asked for. `run` None: the only run there is. `step` and `milestone` None: the newest.

    `allow_older`: if no replica of the newest can be read, take an older one. A trainer does; an operator decides.
    """

    run: Run | None = None
    step: int | None = None
    milestone: str | None = None
    generation: int | None = None
    tier: str = AUTO
    allow_unhealthy: bool = False
    allow_older: bool = False

    @property
    def is_named(self) -> bool:
        """Whether one checkpoint is meant, so that no other may take its place."""
        return self.step is not None or self.milestone is not None

    def matches(self, checkpoint: CheckpointId, milestones: frozenset[str] = frozenset()) -> bool:
        return (
            self.run in (None, checkpoint.run)
            and self.step in (None, checkpoint.step)
            and self.generation in (None, checkpoint.generation)
            and (self.milestone is None or self.milestone in milestones)
        )

    def allows(self, tier: str) -> bool:
        return self.tier in (AUTO, tier)

    def __str__(self) -> str:
        words = "any step" if self.step is None else f"step {self.step}"
        if self.milestone is not None:
            words = f"milestone {self.milestone}"
        if self.generation is not None:
            words += f" of generation {self.generation}"
        if self.run is not None:
            words += f" of run {self.run}"
        return f"{words} in {'any tier' if self.tier == AUTO else self.tier}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A checkpoint whose manifest was read. `tiers`: nearest first. `is_healthy` None: not examined yet."""

    id: CheckpointId
    milestones: frozenset[str]
    tiers: tuple[str, ...]
    is_healthy: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableReplica:
    """A replica that is listed and cannot be used. `is_newer_format`: a later tierd wrote its manifest. `is_part`: only
    one node's part of a checkpoint; there is nothing to repair."""

    id: CheckpointId
    tier: str
    reason: str
    is_newer_format: bool = False
    is_part: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectableReplicas:
    """What the tiers hold, as last seen. `unlisted`: tiers that could not be listed, and why. `foreign`: replicas that
    are not signed by a key of the config, which are never selected."""

    candidates: Sequence[Candidate]
    unreadable: Sequence[UnreadableReplica] = ()
    unlisted: Mapping[str, str] = field(default_factory=dict[str, str])
    foreign: Sequence[UnreadableReplica] = ()


@dataclass(frozen=True, slots=True)
class Selected:
    """`errors` and `unreadable`: what could not be read so far; both grow while the selection goes on."""

    candidate: Candidate
    tier: str
    errors: Sequence[TierdError]
    unreadable: Sequence[UnreadableReplica]

    @property
    def passed_over(self) -> list[str]:
        """Why nothing newer or nearer was selected."""
        newer = (replica.reason for replica in self.unreadable if replica.id.recency >= self.candidate.id.recency)
        return [*map(str, self.errors), *newer]


def select(
    query: CheckpointQuery,
    inventory: SelectableReplicas,
    failed: Mapping[tuple[CheckpointId, str], TierdError | None] = MappingProxyType({}),
) -> Selected:
    """The replica to read next: the first of `select_each`, with the same arguments and errors."""
    return next(select_each(query, inventory, failed))


def select_each(
    query: CheckpointQuery,
    inventory: SelectableReplicas,
    failed: Mapping[tuple[CheckpointId, str], TierdError | None],
) -> Iterator[Selected]:
    """The replicas to read, one after the other. `failed`: (checkpoint, tier) of replicas that could not be read, and
    the error; None where a trainer found the bytes damaged. The caller adds a replica before it asks for the next one.

    Raises NewerFormat when a later tierd wrote a newer checkpoint; Foreign when a newer one in hot is not signed: only
    this node writes there, so it is no forgery but work that would be lost; Unhealthy; the gravest error of `failed`
    when no replica is left; Corrupt when all that matches is unreadable; TierUnreachable when nothing matches and a
    tier could not be listed; Incomplete when only parts match, and NotFound when nothing does; BadConfig when the query
    leaves open which run.
    """
    query = with_run(query, (candidate.id.run for candidate in inventory.candidates))
    matching = [
        candidate
        for candidate in inventory.candidates
        if query.matches(candidate.id, candidate.milestones) and any(map(query.allows, candidate.tiers))
    ]
    listed = (*inventory.unreadable, *inventory.foreign)
    unreadable = [replica for replica in listed if query.matches(replica.id) and query.allows(replica.tier)]
    newer_formats = [replica for replica in unreadable if replica.is_newer_format]
    foreign_in_hot = [replica for replica in inventory.foreign if replica in unreadable and replica.tier == HOT]
    errors: list[TierdError] = []
    for candidate in sorted(matching, key=lambda candidate: candidate.id.recency, reverse=True):
        checkpoint = candidate.id
        for replica in newer_formats:
            if replica.id.recency > checkpoint.recency:
                raise _newer_format(replica)
        for replica in foreign_in_hot:
            if replica.id.recency > checkpoint.recency:
                raise _foreign(f"select {replica.id}, the newest in hot: {replica.reason}", replica, _OLDER_HINT)
        if candidate.is_healthy is False and not query.allow_unhealthy:
            errors.append(unhealthy(checkpoint))
            if query.is_named:
                break
            continue
        for tier in filter(query.allows, candidate.tiers):
            if (checkpoint, tier) not in failed:
                yield Selected(candidate, tier, errors, unreadable)
            if error := failed.get((checkpoint, tier)):
                errors.append(error)
        if query.is_named or not query.allow_older:
            break
    raise _refusal(query, inventory, unreadable, errors, failed)


def with_run(query: CheckpointQuery, runs: Iterable[Run]) -> CheckpointQuery:
    """The query with its run filled in, if there is only one. Raises BadConfig when there are several."""
    names = sorted(set(runs))
    if query.run is not None or not names:
        return query
    if len(names) > 1:
        hint = f"--run takes one of {listed(names, LISTED_MAX)}"
        raise BadConfig(f"find {query}: there are {len(names)} runs", hint=hint)
    return replace(query, run=names[0])


def _newer_format(replica: UnreadableReplica) -> NewerFormat:
    """The error for a checkpoint that a later tierd wrote. Only a person may choose an older one instead."""
    return NewerFormat(
        f"select {replica.id}: a later tierd wrote it: {replica.reason}",
        hint="upgrade tierd, or name an older step (--step; in a trainer, resume=) to go back on purpose",
    )


def _foreign(message: str, replica: UnreadableReplica, more: str) -> Foreign:
    run, step = replica.id.run, replica.id.step
    hint = f"`tierd key sign {run}` signs what you trust; `tierd restore --allow-unsigned --run {run} --step {step}` "
    hint += "copies it unchecked; "
    return Foreign(message, hint=f"{hint}{more}docs/RUNBOOK.md#foreign-checkpoints")


def _refusal(
    query: CheckpointQuery,
    inventory: SelectableReplicas,
    unreadable: Sequence[UnreadableReplica],
    errors: Sequence[TierdError],
    failed: Mapping[tuple[CheckpointId, str], TierdError | None],
) -> TierdError:
    """The error to raise. NotFound, after which a trainer starts fresh, only if nothing exists and nothing failed."""
    gravest = [*errors, *(error for error in failed.values() if error is not None)]
    for (checkpoint, tier), error in failed.items():
        if error is None:
            hint = "`tierd verify` reads every replica; docs/RUNBOOK.md#corrupt-chunk"
            gravest.append(Corrupt(f"restore {checkpoint}: its replica in {tier} is damaged", hint=hint))
    if gravest:
        return min(gravest, key=_gravity)
    parts = [replica for replica in unreadable if replica.is_part]
    unreadable = [replica for replica in unreadable if not replica.is_part]
    if unreadable:
        for replica in unreadable:
            if replica.is_newer_format:
                return _newer_format(replica)
        foreign = [replica for replica in unreadable if replica in inventory.foreign]
        if len(foreign) == len(unreadable):
            newest = max(foreign, key=lambda replica: replica.id.recency)
            message = f"find {query}: all that exist are foreign; the newest is {newest.id}: {newest.reason}"
            return _foreign(message, newest, "")
        why = f"find {query}: no manifest can be read: {unreadable[0].reason}"
        return Corrupt(why, hint="docs/RUNBOOK.md#unreadable-manifest")
    unlisted = [f"{name} ({why})" for name, why in inventory.unlisted.items() if query.allows(name)]
    if unlisted:
        return TierUnreachable(
            f"find {query}: none found, and these tiers could not be listed: {'; '.join(unlisted)}",
            hint="the checkpoint may be there: bring the tier back; a new run starts with TIERD_RESUME=scratch in the "
            "trainer's environment; docs/RUNBOOK.md#new-run-refused",
        )
    if parts:
        newest = max(parts, key=lambda replica: replica.id.recency)
        return Incomplete(f"find {query}: none is whole: {newest.reason}", hint=_PART_HINT)
    return NotFound(f"find {query}: there is none", hint=_alternatives(query, inventory.candidates))


def _gravity(error: TierdError) -> int:
    """Smaller is graver: one damaged replica counts more than any number of unreachable ones."""
    for gravity, kind in enumerate((Corrupt, NewerFormat, TierUnreachable)):
        if isinstance(error, kind):
            return gravity
    return 5 if isinstance(error, NotFound) else 4 if isinstance(error, Unhealthy) else 3


def _alternatives(query: CheckpointQuery, candidates: Sequence[Candidate]) -> str:
    of_run = [candidate for candidate in candidates if candidate.id.run == query.run]
    if not of_run:
        runs = sorted({candidate.id.run for candidate in candidates})
        return f"there are the runs {listed(runs, LISTED_MAX)}" if runs else "`tierd status` says what each tier holds"
    if query.milestone is not None:
        names = sorted({name for candidate in of_run for name in candidate.milestones})
        return f"milestones of the run: {listed(names, LISTED_MAX)}" if names else "the run has no milestone"
    newest = sorted((candidate.id for candidate in of_run), key=lambda checkpoint: checkpoint.recency, reverse=True)
    steps = [f"{checkpoint.step} (generation {checkpoint.generation})" for checkpoint in newest[:8]]
    return f"the newest steps of the run: {', '.join(steps)}"
