"""What `tierd ls` and `tierd show` print of checkpoints, as JSON or as text, and what the daemon answers over HTTP."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import msgspec
from msgspec import UNSET, UnsetType

from tierd.catalog.catalog import Catalog
from tierd.catalog.entry import Entry
from tierd.catalog.selectable import selectable_replicas
from tierd.format.health import Diagnosis
from tierd.format.ids import HOT, MEMORY, CheckpointId, Run, checkpoint_id
from tierd.format.manifest import Manifest
from tierd.format.node_file import NodeFile
from tierd.lifecycle.selection import Candidate
from tierd.status.node_reports import PartReport, part_report, sent_report
from tierd.tiers.readable_tier import ReadableTier


class CheckpointRow(msgspec.Struct, kw_only=True):
    """One row of `tierd ls`. `tiers`: those that have it whole, nearest first. `healthy` None: not examined. `parts`:
    what tiers have of a checkpoint over several nodes that they do not have whole; not set if there is none."""

    run: str
    step: int
    generation: int
    tiers: list[str]
    milestone: str | None
    healthy: bool | None
    size_bytes: int
    created_at: str
    metrics: dict[str, float | str]
    parts: dict[str, PartReport] | UnsetType = UNSET

    @property
    def id(self) -> CheckpointId:
        return checkpoint_id(self.run, self.step, self.generation)

    def is_in(self, tier: str) -> bool:
        """Whether the tier has the checkpoint, or a part of it."""
        return tier in self.tiers or (self.parts is not UNSET and tier in self.parts)


class CheckpointReport(msgspec.Struct, kw_only=True):
    """What `tierd show` prints. `manifest`: of the part, where no tier here has it whole. `parts`: as of a row."""

    manifest: Manifest
    tiers: list[str]
    milestones: list[str]
    healthy: bool | None
    diagnosis: Diagnosis | None
    parts: dict[str, PartReport] | UnsetType = UNSET


def checkpoint_rows(
    catalog: Catalog,
    run: Run | None = None,
    *,
    in_memory: Iterable[Manifest] = (),
    health: Mapping[CheckpointId, bool] = MappingProxyType({}),
) -> list[CheckpointRow]:
    """Newest first within a run, runs by name. `in_memory`: manifests, and node files of parts. `health`: of the
    checkpoints in memory."""
    held = {manifest.id: manifest for manifest in in_memory if run in (None, manifest.run)}
    whole = [checkpoint for checkpoint, manifest in held.items() if not isinstance(manifest, NodeFile)]
    entries = {entry.id: entry for entry in catalog.entries(run)}
    manifests = held | {checkpoint: entry.manifest for checkpoint, entry in entries.items()}
    candidates = {
        candidate.id: candidate
        for candidate in selectable_replicas(catalog, run, in_memory=whole, health=health).candidates
    }
    parts = {checkpoint: parts_of(catalog, checkpoint, held.get(checkpoint)) for checkpoint in manifests}
    for checkpoint in manifests.keys() - candidates.keys():  # a part, and no tier has it whole
        entry = entries.get(checkpoint)
        is_healthy = entry.healthy if entry is not None else False if health.get(checkpoint) is False else None
        names = entry.all_milestones if entry is not None else frozenset[str]()
        candidates[checkpoint] = Candidate(id=checkpoint, milestones=names, tiers=(), is_healthy=is_healthy)
    rows = [
        CheckpointRow(
            **msgspec.to_builtins(candidate.id),
            tiers=list(candidate.tiers),
            milestone=min(candidate.milestones, default=None),
            healthy=candidate.is_healthy,
            size_bytes=manifests[candidate.id].size_bytes,
            created_at=manifests[candidate.id].created_at,
            metrics=manifests[candidate.id].metrics,
            parts=parts[candidate.id] or UNSET,
        )
        for candidate in candidates.values()
    ]
    return sorted(rows, key=lambda row: (row.run, -row.generation, -row.step))


def parts_of(catalog: Catalog, checkpoint: CheckpointId, in_memory: Manifest | None = None) -> dict[str, PartReport]:
    """What memory, hot, and each cold tier without all of it have of a checkpoint over several nodes."""
    parts = {MEMORY: part_report(in_memory)} if isinstance(in_memory, NodeFile) else {}
    entry = catalog.get(checkpoint)
    if entry is not None and entry.part is not None:
        parts[HOT] = part_report(entry.part)
    sent = catalog.sent(checkpoint.run)
    names = [tier for tier in catalog.tiers if (tier, checkpoint) in sent]
    return parts | {tier: sent_report(sent[tier, checkpoint]) for tier in names}


async def read_diagnosis(entry: Entry, tiers: Mapping[str, ReadableTier]) -> Diagnosis | None:
    """The diagnosis in the health marker of one replica; None if the checkpoint was not examined."""
    if not entry.diagnoses:
        return None
    tier, is_healthy = min(entry.diagnoses.items(), key=lambda marker: marker[1])  # the worst counts
    return await tiers[tier].diagnosis(entry.id, is_healthy=is_healthy)


def checkpoint_report(
    catalog: Catalog, entry: Entry, tiers: list[str], diagnosis: Diagnosis | None, in_memory: Manifest | None = None
) -> CheckpointReport:
    """`in_memory`: its manifest, or the node file of a part."""
    return CheckpointReport(
        manifest=entry.manifest,
        tiers=tiers,
        milestones=sorted(entry.all_milestones),
        healthy=diagnosis.healthy if diagnosis else None,
        diagnosis=diagnosis,
        parts=parts_of(catalog, entry.id, in_memory) or UNSET,
    )
