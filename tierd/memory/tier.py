"""The memory tier: the slots of every rank, and the snapshots that lie in them.

A snapshot set is one step of one generation; it is whole when all ranks have sealed. The newest whole set is
retained until a newer one is whole, so a crash in the middle of a copy never destroys it. `fenced`: nothing of
a generation older than the run's current one is taken. Plain bookkeeping: no socket, no file, no clock.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from tierd.errors import BadRequest, Stale
from tierd.format import checksum, layout
from tierd.format.health import Diagnosis
from tierd.format.ids import CheckpointId, Generation, Rank, Run, checkpoint_id
from tierd.format.manifest import FORMAT_VERSION, FileEntry, Manifest, plain_metrics
from tierd.format.wire import Sealed
from tierd.memory.outcomes import RunOutcomes
from tierd.memory.slot import MappedSlot
from tierd.memory.slot_states import SlotEvent, SlotState

SLOTS_PER_RANK_MAX = 16


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
    """All ranks' snapshots of one step. `sealed_at_s` is the monotonic time when it became whole."""

    id: CheckpointId
    world_size: int
    snapshots: dict[Rank, Snapshot] = field(default_factory=dict)
    sealed_at_s: float = 0.0
    failures: int = 0
    manifest: Manifest | None = None  # of the committed checkpoint, or a provisional one made for a restore
    diagnosis: Diagnosis | None = None

    @property
    def is_whole(self) -> bool:
        return len(self.snapshots) == self.world_size

    @property
    def is_persisted(self) -> bool:
        return self.is_whole and self._is(SlotState.RETAINED)

    @property
    def is_pending(self) -> bool:
        return self.is_whole and not self.is_persisted

    @property
    def is_at_rest(self) -> bool:
        """Sealed, and not being written at this moment."""
        return self._is(SlotState.SEALED)

    @property
    def head(self) -> Sealed:
        """Rank 0's message: the one whose metrics, milestone and parent count."""
        return self.snapshots[Rank(0)].sealed

    def make_manifest(self, *, sequence: int) -> Manifest:
        """The manifest of a whole set, from rank 0's `Sealed` message. Files not checked yet have no checksums."""
        # By rank: the same set gives the same manifest.
        snapshots = [snapshot for _, snapshot in sorted(self.snapshots.items())]
        files = [snapshot.entry or _unchecked(snapshot, self.world_size) for snapshot in snapshots]
        return Manifest(
            format_version=FORMAT_VERSION,
            run=self.id.run,
            step=self.id.step,
            generation=self.id.generation,
            sequence=sequence,
            parent=self.head.parent,
            world_size=self.world_size,
            created_at=self.head.created_at,
            kind="snapshot",
            metrics=plain_metrics(self.head.metrics),
            architecture_hash=self.head.architecture_hash,
            versions=self.head.versions,
            files=files,
        )

    def _is(self, state: SlotState) -> bool:
        return all(one.slot.state is state for one in self.snapshots.values())

    def move(self, event: SlotEvent) -> None:
        for snapshot in self.snapshots.values():
            snapshot.slot.move(event)


def _unchecked(snapshot: Snapshot, world_size: int) -> FileEntry:
    name = layout.shard_name(snapshot.rank, world_size)
    size_bytes = snapshot.sealed.size_bytes
    return FileEntry(name=name, size_bytes=size_bytes, crc64nvme="", chunk_bytes=checksum.CHUNK_BYTES, chunks=[])


@dataclass(slots=True)
class _RunMemory:
    generation: Generation
    world_size: int
    slots: dict[Rank, dict[int, MappedSlot]] = field(default_factory=dict)
    sets: dict[CheckpointId, SnapshotSet] = field(default_factory=dict)
    present: set[Rank] = field(default_factory=set)
    departed_s: float = 0.0  # monotonic time when a rank last left
    lost: deque[CheckpointId] = field(default_factory=lambda: deque(maxlen=SLOTS_PER_RANK_MAX))


class MemoryTier:
    def __init__(self) -> None:
        self._runs: dict[Run, _RunMemory] = {}
        self.endings = RunOutcomes()

    # ── what trainers do ──

    def enter(self, run: Run, generation: Generation, rank: Rank, world_size: int) -> None:
        """A rank of this generation has come. Raises Stale when the run has moved on to a newer one."""
        memory = self._runs.setdefault(run, _RunMemory(generation, world_size))
        if generation < memory.generation:
            raise Stale(
                f"join run {run} as generation {generation}: generation {memory.generation} has taken over",
                hint="another trainer of this run was started later; stop this one",
            )
        if generation > memory.generation:
            memory.generation = generation
            memory.world_size = world_size
            memory.present.clear()
            memory.lost.clear()
            for unfinished in [one for one in memory.sets.values() if not one.is_whole]:
                self._forget(memory, unfinished, SlotEvent.SUPERSEDE)
            for gone in [one for one in memory.slots if one >= world_size]:
                self._let_go(memory, gone)
        elif world_size != memory.world_size:
            raise BadRequest(
                f"join run {run} generation {generation}: world size {world_size}, its other ranks said "
                f"{memory.world_size}",
            )
        memory.present.add(rank)
        self.endings.entered(run, generation, rank)
        for slot in memory.slots.get(rank, {}).values():
            slot.move(SlotEvent.TRAINER_DIED)  # or has lost its connection: what it was filling, it fills anew

    def present(self, run: Run) -> set[Rank]:
        """The ranks that are connected now."""
        memory = self._runs.get(run)
        return set(memory.present) if memory else set()

    def generation(self, run: Run) -> int:
        """The run's current generation; 0 when no trainer has come since the daemon started."""
        memory = self._runs.get(run)
        return memory.generation if memory else 0

    def world_size(self, run: Run) -> int:
        return self._runs[run].world_size

    def slots(self, run: Run, rank: Rank) -> dict[int, MappedSlot]:
        """A rank's slots by index: what a restarted trainer may adopt."""
        memory = self._runs.get(run)
        return dict(memory.slots.get(rank, {})) if memory else {}

    def attach(self, run: Run, rank: Rank, index: int, slot: MappedSlot) -> None:
        """Take a new slot. One it replaces is closed, unless it still holds a snapshot."""
        if not 0 <= index < SLOTS_PER_RANK_MAX:
            slot.close()
            raise BadRequest(f"attach slot {index}: a rank has at most {SLOTS_PER_RANK_MAX}")
        memory = self._runs[run]
        replaced = memory.slots.setdefault(rank, {}).get(index)
        if replaced is not None and replaced.is_same_memory(slot):
            slot.close()  # the trainer only lost its connection for a moment
            return
        memory.slots[rank][index] = slot
        if replaced is not None and not self._holds(memory, replaced):
            replaced.close()

    def detach(self, run: Run, rank: Rank) -> None:
        """Let go of a rank's slots, because a process that may still live could write into them. A snapshot in
        one of them stays restorable: a trainer writes only into free slots."""
        self._let_go(self._runs[run], rank)

    def fill(self, run: Run, generation: Generation, rank: Rank, index: int) -> None:
        self._slot(run, generation, rank, index).move(SlotEvent.FILL)

    def abandon(self, run: Run, generation: Generation, rank: Rank, index: int) -> None:
        self._slot(run, generation, rank, index).move(SlotEvent.ABANDON)

    def seal(self, run: Run, generation: Generation, rank: Rank, sealed: Sealed, *, now_s: float) -> SnapshotSet:
        """A rank's snapshot is whole. Returns its set, which this may have completed."""
        slot = self._slot(run, generation, rank, sealed.slot)
        memory = self._runs[run]
        checkpoint = checkpoint_id(run, sealed.step, generation)
        known = memory.sets.get(checkpoint)
        if known is not None and rank in known.snapshots:
            if sealed.resent:
                return known
            raise BadRequest(f"seal {checkpoint}: rank {rank} has sealed this step before")
        newest = max((c.step for c, s in memory.sets.items() if c.generation == generation and rank in s.snapshots),
                     default=-1)  # fmt: skip
        if sealed.step < newest and not sealed.resent:
            raise BadRequest(
                f"seal {checkpoint}: step {newest} of this generation is sealed already",
                hint="to go back to an earlier step, restore it: that begins a new generation",
            )
        if not 0 < sealed.size_bytes <= slot.capacity_bytes:
            raise BadRequest(f"seal {checkpoint}: {sealed.size_bytes} bytes in a slot of {slot.capacity_bytes}")
        if sealed.resent and slot.state is SlotState.FREE:
            slot.move(SlotEvent.FILL)  # it was filled in the time of another daemon
        slot.move(SlotEvent.SEAL)
        found = memory.sets.setdefault(checkpoint, SnapshotSet(checkpoint, memory.world_size))
        found.snapshots[rank] = Snapshot(rank, sealed.slot, slot, sealed)
        if found.is_whole:
            found.sealed_at_s = now_s
        return found

    def lose(self, run: Run, generation: Generation, step: int) -> list[tuple[Rank, int]]:
        """A rank will never seal this step, so its set is given up; remembered for those that are yet to seal it.

        Returns the (rank, index) of each slot that is free again because of it.
        """
        checkpoint = checkpoint_id(run, step, generation)
        memory = self._current(run, generation, f"give up {checkpoint}")
        found = memory.sets.get(checkpoint)
        if found is not None and found.is_whole:
            raise BadRequest(f"give up {checkpoint}: every rank has sealed it")
        if checkpoint not in memory.lost:
            memory.lost.append(checkpoint)
        if found is None:
            return []
        slots = [
            (rank, one.index)
            for rank, one in found.snapshots.items()
            if memory.slots.get(rank, {}).get(one.index) is one.slot
        ]
        self._forget(memory, found, SlotEvent.SUPERSEDE)
        return slots

    def is_lost(self, checkpoint: CheckpointId) -> bool:
        memory = self._runs.get(checkpoint.run)
        return memory is not None and checkpoint in memory.lost

    def leave(self, run: Run, rank: Rank, *, now_s: float) -> None:
        """The rank's trainer is gone: what it was filling is free again, what it sealed stays."""
        for slot in self.slots(run, rank).values():
            slot.move(SlotEvent.TRAINER_DIED)
        memory = self._runs[run]
        memory.present.discard(rank)
        self.endings.left(run, rank)
        memory.departed_s = now_s

    # ── what workers do ──

    def pending(self) -> list[SnapshotSet]:
        """Whole sets that are not persisted, oldest first; those that have gone wrong before come last."""
        found = [one for memory in self._runs.values() for one in memory.sets.values() if one.is_pending]
        return sorted(found, key=lambda one: (one.failures, one.sealed_at_s))

    def release(self, run: Run) -> Iterator[tuple[SnapshotSet, bool]]:
        """Forget every set that a newer whole one has made needless; its slots are free.

        Yields (set, lost): lost when it was not persisted, because that went wrong or a rank never sealed.
        """
        memory = self._runs[run]
        newest = self.newest_whole(run)
        for one in list(memory.sets.values()):
            if newest is None or one.id.recency >= newest.id.recency:
                continue
            if one.is_persisted:
                self._forget(memory, one, SlotEvent.RELEASE)
                yield one, False
            elif one.is_at_rest and (one.failures > 0 or not one.is_whole):
                self._forget(memory, one, SlotEvent.SUPERSEDE)
                yield one, True

    def forget_departed(self, *, now_s: float, grace_s: float) -> list[Run]:
        """Give back the memory of runs whose trainers have been gone for so long. What is not persisted stays."""
        gone = [
            run
            for run, memory in self._runs.items()
            if not memory.present
            and now_s - memory.departed_s >= grace_s
            and not any(one.is_pending for one in memory.sets.values())
        ]
        for run in gone:
            memory = self._runs.pop(run)
            held = {id(one.slot): one.slot for found in memory.sets.values() for one in found.snapshots.values()}
            held |= {id(slot): slot for slots in memory.slots.values() for slot in slots.values()}
            for slot in held.values():
                slot.close()
        return gone

    # ── questions ──

    def runs(self) -> list[Run]:
        return sorted(self._runs)

    def whole(self, run: Run | None = None) -> list[SnapshotSet]:
        """Restorable sets, newest first within a run."""
        found = [
            one
            for name, memory in self._runs.items()
            for one in memory.sets.values()
            if one.is_whole and run in (None, name)
        ]
        return sorted(found, key=lambda one: one.id.recency, reverse=True)

    def find(self, checkpoint: CheckpointId) -> SnapshotSet | None:
        """The restorable set of this step, if it is still in memory."""
        memory = self._runs.get(checkpoint.run)
        found = memory.sets.get(checkpoint) if memory else None
        return found if found and found.is_whole else None

    def newest_whole(self, run: Run) -> SnapshotSet | None:
        return next(iter(self.whole(run)), None)

    def newest_restorable(self, run: Run) -> SnapshotSet | None:
        """The newest whole set that is not known to be unhealthy."""
        return next((one for one in self.whole(run) if one.diagnosis is None or one.diagnosis.healthy), None)

    def slot_counts(self) -> Counter[SlotState]:
        return Counter(
            slot.state for memory in self._runs.values() for slots in memory.slots.values() for slot in slots.values()
        )

    # ── inside ──

    def _slot(self, run: Run, generation: Generation, rank: Rank, index: int) -> MappedSlot:
        memory = self._current(run, generation, f"use slot {index} of {run}")
        slot = memory.slots.get(rank, {}).get(index)
        if slot is None:
            raise BadRequest(f"use slot {index} of {run} rank {rank}: it was never attached")
        return slot

    def _current(self, run: Run, generation: Generation, doing: str) -> _RunMemory:
        memory = self._runs[run]
        if generation != memory.generation:
            raise Stale(
                f"{doing} as generation {generation}: generation {memory.generation} has taken over",
                hint="another trainer of this run was started later; stop this one",
            )
        return memory

    def _forget(self, memory: _RunMemory, gone: SnapshotSet, event: SlotEvent) -> None:
        del memory.sets[gone.id]
        for snapshot in gone.snapshots.values():
            snapshot.slot.move(event)
            owned = memory.slots.get(snapshot.rank, {})
            if owned.get(snapshot.index) is not snapshot.slot:
                snapshot.slot.close()  # replaced meanwhile, and kept only for this snapshot
            elif snapshot.rank >= memory.world_size:
                owned.pop(snapshot.index).close()  # of a rank that the run no longer has

    def _let_go(self, memory: _RunMemory, rank: Rank) -> None:
        for slot in memory.slots.pop(rank, {}).values():
            if not self._holds(memory, slot):
                slot.close()

    def _holds(self, memory: _RunMemory, slot: MappedSlot) -> bool:
        return any(one.slot is slot for found in memory.sets.values() for one in found.snapshots.values())
