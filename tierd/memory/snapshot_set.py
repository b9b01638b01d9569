"""A snapshot set: what all ranks of a run on this node have sealed of one step, and the manifest that it gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tierd.format import checksum, layout
from tierd.format.health import Diagnosis
from tierd.format.ids import CheckpointId, Rank
from tierd.format.manifest import FORMAT_VERSION, REPORTED_UNHEALTHY, SNAPSHOT, FileEntry, Manifest, plain_metrics
from tierd.format.node_file import NodeFile
from tierd.format.node_messages import NodeRanks
from tierd.format.wire import Sealed
from tierd.memory.slot import MappedSlot, SlotEvent, SlotState


@dataclass(slots=True)
class Snapshot:
    """One rank's state at one step. `entry` is None until its checksums are known."""

    rank: Rank
    index: int
    slot: MappedSlot
    sealed: Sealed
    entry: FileEntry | None = None

    @property
    def view(self) -> memoryview:
        return self.slot.view[: self.sealed.size_bytes]


@dataclass(slots=True)
class SnapshotSet:
    """The snapshots of one step of all ranks of this node.

    `node`: of a run over several nodes. `sealed_at_s`: the monotonic time when the last rank sealed. `failures`: failed
    attempts to persist the set. `refused_by`: the tiers that could not take it at the last attempt: hot, when it is
    full or has failed twice, and cold tiers. `is_hot_full`: hot had no space for it at the last attempt; any other
    error may pass. `is_last`: the run stops, and its trainers wait for this set. `manifest`: of the committed
    checkpoint.
    """

    id: CheckpointId
    world_size: int
    node: NodeRanks | None = None
    snapshots: dict[Rank, Snapshot] = field(default_factory=dict)
    sealed_at_s: float = 0.0
    failures: int = 0
    refused_by: set[str] = field(default_factory=set)
    is_hot_full: bool = False
    is_last: bool = False
    manifest: Manifest | None = None
    diagnosis: Diagnosis | None = None

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks whose snapshots make the set complete."""
        return range(self.world_size) if self.node is None else self.node.ranks

    @property
    def is_complete(self) -> bool:
        return len(self.snapshots) == len(self.ranks)

    @property
    def size_bytes(self) -> int:
        return sum(snapshot.sealed.size_bytes for snapshot in self.snapshots.values())

    @property
    def is_pending(self) -> bool:
        return self.is_complete and not self.is_in(SlotState.RETAINED)

    @property
    def head(self) -> Sealed:
        """The message of the lowest rank. The manifest takes metrics, milestone and parent from it; over several nodes
        all ranks send the same ones."""
        return self.snapshots[Rank(self.ranks[0])].sealed

    @property
    def is_reported_unhealthy(self) -> bool:
        return self.head.metrics.get(REPORTED_UNHEALTHY, 0) != 0

    @property
    def is_healthy(self) -> bool | None:
        """Of a complete set, by its examination and by what the training reported; None: not examined yet."""
        if self.is_reported_unhealthy:
            return False
        return None if self.diagnosis is None else self.diagnosis.healthy

    def make_manifest(self, *, sequence: int) -> Manifest:
        """The manifest of a whole set, from the lowest rank's `Sealed` message. Files not checked yet have no
        checksums."""
        return Manifest(**self._manifest_fields(sequence))

    def make_node_file(self) -> NodeFile:
        """This node's part of a checkpoint over several nodes. All nodes number it alike."""
        assert self.node is not None
        return NodeFile(
            **self._manifest_fields(self.node.base + self.head.number),
            claim=self.node.claim,
            ranks=self.node.ranks,
            is_healthy=False if self.is_reported_unhealthy else None,
            milestone=self.head.milestone or "",
        )

    def _manifest_fields(self, sequence: int) -> dict[str, Any]:
        # By rank: the same set gives the same manifest.
        snapshots = [snapshot for _, snapshot in sorted(self.snapshots.items())]
        return {
            "format_version": FORMAT_VERSION,
            "run": self.id.run,
            "step": self.id.step,
            "generation": self.id.generation,
            "sequence": sequence,
            "parent": self.head.parent,
            "world_size": self.world_size,
            "created_at": self.head.created_at,
            "kind": SNAPSHOT,
            "metrics": plain_metrics(self.head.metrics),
            "architecture_hash": self.head.architecture_hash,
            "versions": self.head.versions,
            "files": [snapshot.entry or _unchecked(snapshot, self.world_size) for snapshot in snapshots],
        }

    def is_in(self, state: SlotState) -> bool:
        """Whether every slot of the set is in this state."""
        return all(snapshot.slot.state is state for snapshot in self.snapshots.values())

    def move(self, event: SlotEvent) -> None:
        for snapshot in self.snapshots.values():
            snapshot.slot.move(event)


def _unchecked(snapshot: Snapshot, world_size: int) -> FileEntry:
    name = layout.shard_name(snapshot.rank, world_size)
    size_bytes = snapshot.sealed.size_bytes
    return FileEntry(name=name, size_bytes=size_bytes, crc64nvme="", chunk_bytes=checksum.CHUNK_BYTES, chunks=[])
