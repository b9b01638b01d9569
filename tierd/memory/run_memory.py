"""What the memory tier has of one run: its slots, and the sets of snapshots in them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from tierd.format.ids import CheckpointId, Generation, Rank
from tierd.format.node_messages import NodeRanks
from tierd.format.wire import SLOTS_MAX
from tierd.memory.slot import MappedSlot, SlotEvent, SlotState
from tierd.memory.snapshot_set import SnapshotSet


@dataclass(slots=True)
class RunMemory:
    """Changed by the memory tier alone."""

    generation: Generation
    world_size: int
    node: NodeRanks | None = None
    slots: dict[Rank, dict[int, MappedSlot]] = field(default_factory=dict)
    sets: dict[CheckpointId, SnapshotSet] = field(default_factory=dict)
    present: set[Rank] = field(default_factory=set)
    departed_s: float = 0.0  # monotonic time when a rank last left
    given_up: deque[CheckpointId] = field(default_factory=lambda: deque(maxlen=SLOTS_MAX))
    lost_since_s: float = math.inf  # when the first set was complete that is lost, and no newer one was persisted

    @property
    def ranks(self) -> Collection[int]:
        """The ranks of the run on this node."""
        return range(self.world_size) if self.node is None else self.node.ranks

    @property
    def is_idle(self) -> bool:
        """No rank is connected, and there is nothing left to persist."""
        return not self.present and not any(snapshot_set.is_pending for snapshot_set in self.sets.values())

    @property
    def unsaved_since_s(self) -> float:
        """When the first set was complete since the newest one that was persisted; infinite if that is the newest."""
        persisted = [
            snapshot_set.sealed_at_s for snapshot_set in self.sets.values() if snapshot_set.is_in(SlotState.RETAINED)
        ]
        unsaved = [snapshot_set.sealed_at_s for snapshot_set in self.sets.values() if snapshot_set.is_pending]
        unsaved += [self.lost_since_s] if self.present or unsaved else []  # else nobody can save it any more
        return min((at_s for at_s in unsaved if at_s > max(persisted, default=-math.inf)), default=math.inf)

    def discard(self, snapshot_set: SnapshotSet, event: SlotEvent) -> None:
        """Remove a set, and close those of its slots that their rank no longer uses."""
        del self.sets[snapshot_set.id]
        if snapshot_set.is_in(SlotState.RETAINED) and snapshot_set.sealed_at_s >= self.lost_since_s:
            self.lost_since_s = math.inf
        elif snapshot_set.is_pending:
            self.lost_since_s = min(self.lost_since_s, snapshot_set.sealed_at_s)
        for snapshot in snapshot_set.snapshots.values():
            snapshot.slot.move(event)
            attached = self.slots.get(snapshot.rank, {})
            if attached.get(snapshot.index) is not snapshot.slot:
                snapshot.slot.close()  # the rank has detached or replaced it
            elif snapshot.rank not in self.ranks:
                attached.pop(snapshot.index).close()  # the run no longer has this rank

    def is_staging(self) -> bool:
        """Whether a rank that is connected fills a slot, or all ranks that an incomplete set lacks are connected."""
        slots = [slot for rank in self.present for slot in self.slots.get(rank, {}).values()]
        open_sets = [
            snapshot_set
            for snapshot_set in self.sets.values()
            if snapshot_set.id.generation == self.generation and not snapshot_set.is_complete
        ]
        return any(slot.state is SlotState.FILLING for slot in slots) or any(
            set(snapshot_set.ranks) <= snapshot_set.snapshots.keys() | self.present for snapshot_set in open_sets
        )

    def detach(self, rank: Rank) -> None:
        for slot in self.slots.pop(rank, {}).values():
            self.close_if_empty(slot)

    def close_if_empty(self, slot: MappedSlot) -> None:
        """Close a detached slot, unless it holds a snapshot; then `discard` closes it."""
        if not any(
            snapshot.slot is slot for snapshot_set in self.sets.values() for snapshot in snapshot_set.snapshots.values()
        ):
            slot.close()
