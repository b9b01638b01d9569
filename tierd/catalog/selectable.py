"""What a restore may select from: the replicas of a catalog, and those that cannot be used, with the reason."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from tierd.catalog.catalog import Catalog
from tierd.format.ids import HOT, MEMORY, CheckpointId, Run
from tierd.format.layout import MANIFEST, parse_key
from tierd.lifecycle.selection import Candidate, SelectableReplicas, UnreadableReplica


def candidate_of(
    catalog: Catalog, checkpoint: CheckpointId, *, is_in_memory: bool, is_healthy: bool | None
) -> Candidate:
    """A checkpoint with the tiers that have it whole, maybe none. `is_healthy`: where it has no diagnosis marker."""
    entry = catalog.get(checkpoint)
    tiers = [MEMORY] if is_in_memory else []
    tiers += [tier for tier in catalog.tiers if entry and entry.is_whole_in(tier)]
    diagnosed = entry.view.healthy if entry else None
    return Candidate(
        id=checkpoint,
        milestones=entry.view.milestones if entry else frozenset(),
        tiers=tuple(tiers),
        is_healthy=is_healthy if diagnosed is None else diagnosed,
    )


def selectable_replicas(
    catalog: Catalog,
    run: Run | None = None,
    *,
    in_memory: Collection[CheckpointId] = (),
    health: Mapping[CheckpointId, bool | None] = MappingProxyType({}),
    unlisted: Mapping[str, str] | None = None,
) -> SelectableReplicas:
    """What a restore selects from. `in_memory`: the checkpoints of the memory tier. `health`: of checkpoints that
    have no diagnosis marker yet. `unlisted`: why a tier could not be listed; default: the tiers not known now."""
    listed = {entry.id: entry for entry in catalog.entries(run)}
    candidates: list[Candidate] = []
    for checkpoint in {*in_memory, *listed}:
        is_in_memory = checkpoint in in_memory
        candidate = candidate_of(catalog, checkpoint, is_in_memory=is_in_memory, is_healthy=health.get(checkpoint))
        if candidate.tiers:
            candidates.append(candidate)
    unreadable = [
        UnreadableReplica(
            id=checkpoint, tier=tier, reason=reason, is_newer_format=checkpoint in catalog.tiers[tier].newer_format
        )
        for (tier, checkpoint), reason in catalog.unreadable().items()
    ]
    unreadable += [
        UnreadableReplica(id=part.id, tier=HOT, reason=f"{part.id} in {HOT}: {part.extent}", is_part=True)
        for part in (entry.part for entry in listed.values())
        if part is not None
    ]
    unreadable += [
        UnreadableReplica(id=checkpoint, tier=tier, reason=f"{checkpoint} in {tier}: {parts}", is_part=True)
        for (tier, checkpoint), parts in catalog.sent(run).items()
    ]
    unlisted = catalog.unlisted() if unlisted is None else unlisted
    foreign = [
        UnreadableReplica(id=checkpoint, tier=tier, reason=reason)
        for tier, knowledge in catalog.tiers.items()
        for key, reason in knowledge.foreign.items()
        if key.endswith(f"/{MANIFEST}") and (checkpoint := parse_key(key)) and run in (None, checkpoint.run)
    ]
    return SelectableReplicas(candidates=candidates, unreadable=unreadable, unlisted=unlisted, foreign=foreign)
