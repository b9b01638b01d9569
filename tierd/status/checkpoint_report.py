"""What `tierd ls` and `tierd show` print of checkpoints, as JSON or as text, and what the daemon answers over HTTP."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

import msgspec
from msgspec import UNSET, UnsetType

from tierd.catalog.catalog import Catalog
from tierd.catalog.entry import Entry
from tierd.catalog.selectable import candidate_of
from tierd.format.health import Diagnosis
from tierd.format.ids import HOT, MEMORY, CheckpointId, Run, checkpoint_id
from tierd.format.manifest import Manifest
from tierd.format.node_file import NodeFile
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


class CheckpointRows:
    """The rows of a catalog, of one run or of all. `in_memory` and `health` as of `checkpoint_rows`. They can be made
    some at a time: a checkpoint that is deleted meanwhile has none."""

    def __init__(
        self, catalog: Catalog, run: Run | None, in_memory: Iterable[Manifest], health: Mapping[CheckpointId, bool]
    ) -> None:
        self._catalog, self._health = catalog, health
        self._held = {manifest.id: manifest for manifest in in_memory if run in (None, manifest.run)}
        ids = [entry.id for entry in catalog.entries(run)]
        ids += [checkpoint for checkpoint in self._held if catalog.get(checkpoint) is None]
        self.ids = sorted(ids, key=lambda checkpoint: (checkpoint.run, -checkpoint.generation, -checkpoint.step))
        """Newest first within a run, runs by name."""

    def make(self, ids: Iterable[CheckpointId]) -> list[CheckpointRow]:
        return [row for checkpoint in ids if (row := self._row(checkpoint)) is not None]

    def _row(self, checkpoint: CheckpointId) -> CheckpointRow | None:
        held, entry = self._held.get(checkpoint), self._catalog.get(checkpoint)
        manifest = entry.manifest if entry is not None else held
        if manifest is None:
            return None
        is_in_memory = held is not None and not isinstance(held, NodeFile)
        is_healthy = self._health.get(checkpoint)
        candidate = candidate_of(self._catalog, checkpoint, is_in_memory=is_in_memory, is_healthy=is_healthy)
        if not candidate.tiers:  # a part, and no tier has it whole
            diagnosed = entry.view.healthy if entry is not None else False if is_healthy is False else None
            candidate = replace(candidate, is_healthy=diagnosed)
        return CheckpointRow(
            run=checkpoint.run,
            step=checkpoint.step,
            generation=checkpoint.generation,
            tiers=list(candidate.tiers),
            milestone=min(candidate.milestones, default=None),
            healthy=candidate.is_healthy,
            size_bytes=manifest.size_bytes,
            created_at=manifest.created_at,
            metrics=manifest.metrics,
            parts=parts_of(self._catalog, checkpoint, held) or UNSET,
        )


def checkpoint_rows(
    catalog: Catalog,
    run: Run | None = None,
    *,
    in_memory: Iterable[Manifest] = (),
    health: Mapping[CheckpointId, bool] = MappingProxyType({}),
) -> list[CheckpointRow]:
    """Newest first within a run, runs by name. `in_memory`: manifests, and node files of parts. `health`: of the
    checkpoints in memory."""
    rows = CheckpointRows(catalog, run, in_memory, health)
    return rows.make(rows.ids)


def parts_of(catalog: Catalog, checkpoint: CheckpointId, in_memory: Manifest | None = None) -> dict[str, PartReport]:
    """What memory, hot, and each cold tier without all of it have of a checkpoint over several nodes."""
    parts = {MEMORY: part_report(in_memory)} if isinstance(in_memory, NodeFile) else {}
    entry = catalog.get(checkpoint)
    if entry is not None and entry.part is not None:
        parts[HOT] = part_report(entry.part)
    return parts | {tier: sent_report(sent) for tier, sent in catalog.sent_of(checkpoint).items()}


async def read_diagnosis(entry: Entry, tiers: Mapping[str, ReadableTier]) -> Diagnosis | None:
    """The diagnosis in the health marker of one replica. None if the checkpoint was not examined, and the training did
    not report it as unhealthy."""
    if entry.manifest.is_reported_unhealthy and False not in entry.diagnoses.values():
        return Diagnosis(healthy=False)
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
