"""What a restore may select from: the replicas of a catalog, and those that cannot be used, with the reason."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from tierd.catalog.catalog import Catalog
from tierd.format.ids import HOT, MEMORY, CheckpointId, Run
from tierd.format.layout import MANIFEST, parse_key
from tierd.lifecycle.selection import Candidate, SelectableReplicas, UnreadableReplica


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
        entry = listed.get(checkpoint)
        tiers = [MEMORY] if checkpoint in in_memory else []
        tiers += [tier for tier in catalog.tiers if entry and tier in entry.tiers and not entry.is_part_in(tier)]
        if not tiers:
            continue
        is_healthy = entry.healthy if entry else None
        candidates.append(
            Candidate(
                id=checkpoint,
                milestones=entry.all_milestones if entry else frozenset(),
                tiers=tuple(tiers),
                is_healthy=health.get(checkpoint) if is_healthy is None else is_healthy,
            )
        )
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
