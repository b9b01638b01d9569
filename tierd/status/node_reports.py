"""Reports of the newest checkpoint of a run, and of the parts and nodes of a run over several nodes."""

from __future__ import annotations

from datetime import datetime

import msgspec
from msgspec import UNSET, UnsetType

from tierd.catalog.catalog import Catalog
from tierd.catalog.entry import SentParts
from tierd.format.ids import CheckpointId, Run
from tierd.format.node_file import NodeFile, ranks_text
from tierd.format.text import parse_time

SKEW_S = 60.0  # between the clocks of two nodes


class NewestCheckpoint(msgspec.Struct, kw_only=True):
    """The newest checkpoint of a run in one tier that is not unhealthy. `age_s` None: it is not known, see `age_s`."""

    step: int
    generation: int
    created_at: str
    age_s: float | None = None

    @property
    def recency(self) -> tuple[int, int]:
        return self.generation, self.step


def _word(is_adopted: bool | UnsetType) -> str:
    return "nodes" if is_adopted is True else "ranks"


class PartReport(msgspec.Struct, kw_only=True):
    """What a tier has of a checkpoint over several nodes: the shards of `ranks`, of `world_size`. Nothing restores the
    checkpoint from this alone. `is_adopted`: another program wrote it, and `ranks` are nodes."""

    ranks: list[int]
    world_size: int
    is_adopted: bool | UnsetType = UNSET

    @property
    def whose(self) -> str:
        word = "node" if self.is_adopted is True and len(self.ranks) == 1 else _word(self.is_adopted)
        return f"{word} {ranks_text(self.ranks)} of {self.world_size}"

    def __str__(self) -> str:
        return f"part {len(self.ranks)}/{self.world_size} {_word(self.is_adopted)}"


class NewestPart(PartReport, kw_only=True):
    """The newest part of a run in one tier that is not unhealthy."""

    step: int
    generation: int
    created_at: str
    age_s: float | None = None


class PartnerReport(msgspec.Struct, kw_only=True):
    """The node whose parts are copied here. `fingerprint`: of its TLS certificate; empty without TLS.
    `has_same_lifecycle`: as this one, as far as it is known."""

    address: str
    has_same_lifecycle: bool
    fingerprint: str = ""


class NodeReport(msgspec.Struct, kw_only=True):
    """One node of a run, as it has just answered. `address`: where other nodes read it; empty: nowhere. `problem`: why
    it did not answer; empty if it did. `persisted`: its newest part in hot. `copied`: the newest part of another node
    of which it has a copy. `copy_lag_s`: the age of the oldest checkpoint whose copy is missing; None if it keeps none.
    `lacks_part`, `lacks_copy`: of the newest checkpoint that any of the nodes has persisted."""

    ranks: list[int]
    address: str
    is_here: bool
    problem: str = ""
    persisted: NewestPart | None = None
    copied: NewestPart | None = None
    copy_lag_s: float | None = None
    lacks_part: bool = False
    lacks_copy: bool = False


class NodesReport(PartReport, kw_only=True):
    """What this node has of a run over several nodes. `ranks`: of this node. `parts`: the newest, by tier. `copied`:
    the newest copy of a part of `partner`. `everywhere`: the newest checkpoint that all nodes have persisted; only the
    daemon knows, once trainers told it. `awaited`: by cold tier, the oldest checkpoint that is not committed
    there, with the ranks whose parts are missing. `roster`: all nodes of the newest start, by rank; not set
    unless they were asked."""

    parts: dict[str, NewestPart] = {}
    roster: list[NodeReport] | UnsetType = UNSET
    everywhere: NewestCheckpoint | None = None
    copied: NewestPart | None = None
    partner: PartnerReport | None = None
    awaited: dict[str, NewestPart] = {}

    def __str__(self) -> str:
        return self.whose


def newest_report(checkpoint: CheckpointId, created_at: str, now: datetime) -> NewestCheckpoint:
    age = age_s(created_at, now)
    return NewestCheckpoint(
        step=checkpoint.step, generation=checkpoint.generation, created_at=created_at, age_s=age and round(age, 1)
    )


def part_report(part: NodeFile) -> PartReport:
    return PartReport(ranks=part.ranks, world_size=part.world_size, is_adopted=part.is_adopted or UNSET)


def sent_report(sent: SentParts) -> PartReport:
    return PartReport(ranks=sent.ranks, world_size=sent.world_size, is_adopted=sent.is_adopted or UNSET)


def newest_part_report(part: NodeFile, now: datetime) -> NewestPart:
    newest = newest_report(part.id, part.created_at, now)
    return NewestPart(
        ranks=part.ranks,
        world_size=part.world_size,
        is_adopted=part.is_adopted or UNSET,
        **msgspec.to_builtins(newest),
    )


def awaited_report(catalog: Catalog, run: Run, now: datetime) -> dict[str, NewestPart]:
    found: dict[str, NewestPart] = {}
    for tier, of_runs in catalog.awaited.items():
        checkpoint, missing = of_runs.get(run, (None, []))
        entry = catalog.get(checkpoint) if checkpoint is not None else None
        if entry is not None and entry.part is not None:
            found[tier] = msgspec.structs.replace(newest_part_report(entry.part, now), ranks=missing)
    return found


def everywhere_report(catalog: Catalog, run: Run, now: datetime) -> NewestCheckpoint | None:
    checkpoint = catalog.everywhere.get(run)
    return checkpoint and newest_report(checkpoint, catalog.everywhere_created.get(run, ""), now)


def age_s(created_at: str, now: datetime) -> float | None:
    """Seconds from `created_at` to `now`; None if it is no time, because a manifest may hold any text, or a time to
    come, because then a clock was wrong and the age is not known."""
    if (created := parse_time(created_at)) is None:
        return None
    seconds = (now - created).total_seconds()
    return None if seconds < -SKEW_S else max(0.0, seconds)
