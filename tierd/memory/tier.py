"""The memory tier: the slots of every rank, and the snapshots in them.

A snapshot set is one step of one generation; it is complete when all ranks of this node have sealed. The newest
complete set is retained until a newer one is complete, so a trainer that dies during a copy never destroys the last
snapshot. `fenced`: nothing of a generation older than the run's current one is accepted. Bookkeeping only: no socket,
no file, no clock.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterator

from tierd.errors import BadRequest, Stale, TierdError, Transient
from tierd.format import layout
from tierd.format.ids import CheckpointId, Generation, Rank, Run, checkpoint_id
from tierd.format.node_messages import NodeRanks
from tierd.format.wire import SLOTS_MAX, Sealed
from tierd.memory.outcomes import RunOutcomes
from tierd.memory.progress import RunProgress
from tierd.memory.run_memory import RunMemory
from tierd.memory.slot import MappedSlot, SlotEvent, SlotState, snapshot_entry
from tierd.memory.snapshot_set import Snapshot, SnapshotSet


class MemoryTier:
    def __init__(self, *, algorithm: str = "") -> None:
        """`algorithm`: of the digests of chunks that signed manifests hold; empty: none."""
        self.algorithm = algorithm
        self._runs: dict[Run, RunMemory] = {}
        self.outcomes = RunOutcomes()
        self.progress = RunProgress()

    # ── called for trainers ──

    def enter(
        self, run: Run, generation: Generation, rank: Rank, world_size: int, node: NodeRanks | None = None
    ) -> None:
        """A rank of this generation has connected. `node`: of a run over several nodes. Raises Stale when the run has
        a newer generation, BadRequest when its other ranks say something else about the run."""
        memory = self._runs.setdefault(run, RunMemory(generation, world_size, node))
        if generation < memory.generation:
            raise Stale.by(memory.generation, f"join run {run}", generation)
        if generation > memory.generation:
            memory.generation = generation
            memory.world_size = world_size
            memory.node = node
            memory.present.clear()
            memory.given_up.clear()
            for incomplete in [snapshot_set for snapshot_set in memory.sets.values() if not snapshot_set.is_complete]:
                memory.discard(incomplete, SlotEvent.SUPERSEDE)
            for removed in [each for each in memory.slots if each not in memory.ranks]:
                memory.detach(removed)
        elif world_size != memory.world_size:
            raise BadRequest(
                f"join run {run} generation {generation}: world size {world_size}, but its other ranks have "
                f"{memory.world_size}",
            )
        elif node != memory.node:
            raise BadRequest(f"join run {run} generation {generation}: its other ranks name other nodes")
        memory.present.add(rank)
        self.outcomes.rank_entered(run, generation, rank)
        for slot in memory.slots.get(rank, {}).values():
            slot.move(SlotEvent.TRAINER_DIED)  # after a reconnect too: the rank fills unsealed slots again

    def present(self, run: Run) -> set[Rank]:
        """The ranks that are connected now."""
        return set(self._get(run).present)

    def generation(self, run: Run) -> int:
        """The run's current generation; 0 when no trainer has connected since the daemon started."""
        return self._get(run).generation

    def world_size(self, run: Run) -> int:
        return self._runs[run].world_size

    def ranks(self, run: Run) -> Collection[int]:
        """The ranks of the run on this node."""
        return self._get(run).ranks

    def node(self, run: Run) -> NodeRanks | None:
        """None: the run is on this node alone, or has no trainer here."""
        return self._get(run).node

    def slots(self, run: Run, rank: Rank) -> dict[int, MappedSlot]:
        """A rank's slots by index; a restarted trainer may adopt them."""
        return dict(self._get(run).slots.get(rank, {}))

    def slots_of(self, run: Run) -> dict[tuple[Rank, int], MappedSlot]:
        """The slots of all ranks of a run, by (rank, index)."""
        of_ranks = self._get(run).slots
        return {(rank, index): slot for rank, slots in of_ranks.items() for index, slot in slots.items()}

    def attach(self, run: Run, generation: Generation, rank: Rank, index: int, slot: MappedSlot) -> None:
        """Add a slot, and close it when it is no longer used. It replaces the slot with this index."""
        try:
            memory = self._current(run, generation, f"attach slot {index} of {run}")
            if not 0 <= index < SLOTS_MAX:
                raise BadRequest(f"attach slot {index}: a rank has at most {SLOTS_MAX}")
        except TierdError:
            slot.close()
            raise
        replaced = memory.slots.setdefault(rank, {}).get(index)
        if replaced is not None and replaced.is_same_memory(slot):
            slot.close()  # the trainer has reconnected and attached the same memory
            return
        memory.slots[rank][index] = slot
        if replaced is not None:
            memory.close_if_empty(replaced)

    def detach(self, run: Run, rank: Rank) -> None:
        """Give up a rank's slots, because its former process may be alive and write into them. A snapshot in one of
        them stays restorable: a trainer writes only into free slots."""
        self._runs[run].detach(rank)

    def detach_run(self, run: Run) -> int:
        """Give up the slots of all ranks, because processes that the run no longer admits may write into them. Returns
        their number. A complete set of an earlier generation that is not durable yet stays restorable, because nothing
        else has its bytes, and so does one that is being persisted."""
        memory = self._runs[run]
        for snapshot_set in list(memory.sets.values()):
            if snapshot_set.is_in(SlotState.RETAINED):
                memory.discard(snapshot_set, SlotEvent.RELEASE)
            elif not snapshot_set.is_complete or (
                snapshot_set.is_in(SlotState.SEALED) and snapshot_set.id.generation == memory.generation
            ):
                memory.discard(snapshot_set, SlotEvent.SUPERSEDE)
        detached = sum(map(len, memory.slots.values()))
        for rank in list(memory.slots):
            memory.detach(rank)
        return detached

    def fill(self, run: Run, generation: Generation, rank: Rank, index: int) -> None:
        self._slot(run, generation, rank, index).move(SlotEvent.FILL)

    def abandon(self, run: Run, generation: Generation, rank: Rank, index: int) -> None:
        self._slot(run, generation, rank, index).move(SlotEvent.ABANDON)

    def seal(self, run: Run, generation: Generation, rank: Rank, sealed: Sealed, *, now_s: float) -> SnapshotSet:
        """A rank has sealed its snapshot. Returns the set, which may be complete now."""
        slot = self._slot(run, generation, rank, sealed.slot)
        memory = self._runs[run]
        checkpoint = checkpoint_id(run, sealed.step, generation)
        known = memory.sets.get(checkpoint)
        if known is not None and rank in known.snapshots:
            if sealed.resent:
                return known
            raise BadRequest(f"seal {checkpoint}: rank {rank} has sealed this step before")
        own_sets = [each.id for each in memory.sets.values() if rank in each.snapshots]
        newest = max((each.step for each in own_sets if each.generation == generation), default=-1)
        if sealed.step < newest and not sealed.resent:
            raise BadRequest(
                f"seal {checkpoint}: step {newest} of this generation is sealed already",
                hint="to go back to an earlier step, restore it: that begins a new generation",
            )
        if not 0 < sealed.size_bytes <= slot.capacity_bytes:
            raise BadRequest(f"seal {checkpoint}: {sealed.size_bytes} bytes in a slot of {slot.capacity_bytes}")
        if not slot.is_allocated(sealed.size_bytes):
            raise BadRequest(f"seal {checkpoint}: most of its {sealed.size_bytes} bytes were never written")
        if sealed.resent and slot.state is SlotState.FREE:
            slot.move(SlotEvent.FILL)  # it was filled before this daemon started
        slot.move(SlotEvent.SEAL)
        snapshot_set = memory.sets.setdefault(checkpoint, SnapshotSet(checkpoint, memory.world_size, memory.node))
        snapshot_set.snapshots[rank] = Snapshot(rank, sealed.slot, slot, sealed)
        if snapshot_set.is_complete:
            snapshot_set.sealed_at_s = now_s
        return snapshot_set

    def give_up(self, run: Run, generation: Generation, step: int) -> list[tuple[Rank, int]]:
        """Discard the set of a step that one rank will never seal; other ranks may still seal it afterwards.

        Returns the (rank, index) of each slot that this has freed.
        """
        checkpoint = checkpoint_id(run, step, generation)
        memory = self._current(run, generation, f"give up {checkpoint}")
        snapshot_set = memory.sets.get(checkpoint)
        if snapshot_set is not None and snapshot_set.is_complete:
            raise BadRequest(f"give up {checkpoint}: every rank has sealed it")
        if checkpoint not in memory.given_up:
            memory.given_up.append(checkpoint)
        if snapshot_set is None:
            return []
        freed = [
            (rank, snapshot.index)
            for rank, snapshot in snapshot_set.snapshots.items()
            if memory.slots.get(rank, {}).get(snapshot.index) is snapshot.slot
        ]
        memory.discard(snapshot_set, SlotEvent.SUPERSEDE)
        return freed

    def is_given_up(self, checkpoint: CheckpointId) -> bool:
        return checkpoint in self._get(checkpoint.run).given_up

    def leave(self, run: Run, rank: Rank, *, now_s: float) -> None:
        """The rank has disconnected: slots that it was filling are free, sealed snapshots stay."""
        for slot in self.slots(run, rank).values():
            slot.move(SlotEvent.TRAINER_DIED)
        memory = self._runs[run]
        memory.present.discard(rank)
        self.outcomes.rank_disconnected(run, rank, now_s=now_s)
        if not memory.present:
            self.progress.left(run)
        memory.departed_s = now_s

    # ── called by workers ──

    def pending(self) -> list[SnapshotSet]:
        """Complete sets that are not persisted: the last ones of runs that stop, then by number of failed attempts,
        then oldest first."""
        pending = [
            snapshot_set
            for memory in self._runs.values()
            for snapshot_set in memory.sets.values()
            if snapshot_set.is_pending
        ]
        return sorted(pending, key=lambda each: (not each.is_last, each.failures, each.sealed_at_s))

    def unsaved_since_s(self, run: Run) -> float:
        """The monotonic time since when what a run has sealed is in memory only; infinite if its newest set is
        persisted. A newer set that takes the place of one that could not be persisted does not begin it again."""
        return self._get(run).unsaved_since_s

    def sequence_max(self, run: Run) -> int:
        """The highest sequence of a manifest that was made for a snapshot here; 0 when there is none."""
        sets = self._runs[run].sets.values() if run in self._runs else ()
        return max((each.manifest.sequence for each in sets if each.manifest is not None), default=0)

    def unsealed(self) -> list[Run]:
        """The runs whose connected ranks stage a snapshot now, or have yet to seal one that others have sealed."""
        return [run for run, memory in self._runs.items() if memory.is_staging()]

    async def compute_checksums(self, snapshot_set: SnapshotSet) -> None:
        """Compute the checksums of a complete set that it does not have yet: reads its slots, in a thread.

        Raises Transient when a newer snapshot replaced it meanwhile.
        """
        for rank, snapshot in sorted(snapshot_set.snapshots.items()):
            if snapshot.entry is None:
                name = layout.shard_name(rank, snapshot_set.world_size)
                # The thread's own view stays valid if the slot is closed meanwhile.
                entry = await asyncio.to_thread(snapshot_entry, snapshot.view, name, self.algorithm)
                if self.find(snapshot_set.id) is not snapshot_set:
                    # The bytes and their checksums may be those of another snapshot.
                    raise Transient(f"read {snapshot_set.id} in memory: a newer snapshot replaced it meanwhile")
                snapshot.entry = entry

    def slot_of(self, checkpoint: CheckpointId, rank: Rank) -> int | None:
        """The index of the slot that holds a rank's snapshot of this step, if it is in memory."""
        snapshot_set = self._get(checkpoint.run).sets.get(checkpoint)
        snapshot = snapshot_set.snapshots.get(rank) if snapshot_set is not None else None
        return snapshot.index if snapshot is not None else None

    def is_unpersisted(self, checkpoint: CheckpointId) -> bool:
        """Whether a set of this id, complete or not, is in memory and not persisted."""
        snapshot_set = self._get(checkpoint.run).sets.get(checkpoint)
        return snapshot_set is not None and not snapshot_set.is_in(SlotState.RETAINED)

    def release(self, run: Run) -> Iterator[tuple[SnapshotSet, bool]]:
        """Discard every set that a newer complete set replaces, which frees its slots.

        Yields (set, is lost): lost when it was not persisted, because that failed or a rank never sealed.
        """
        memory = self._runs[run]
        newest = next(iter(self.complete(run)), None)
        for older in list(memory.sets.values()):
            if newest is None or older.id.recency >= newest.id.recency:
                continue
            if older.is_in(SlotState.RETAINED):
                memory.discard(older, SlotEvent.RELEASE)
                yield older, False
            elif older.is_in(SlotState.SEALED) and (older.failures > 0 or not older.is_complete):
                memory.discard(older, SlotEvent.SUPERSEDE)
                yield older, True

    def give_way(self, run: Run, rank: Rank, *, is_last: bool) -> SnapshotSet | None:
        """The rank waits for a free slot: discard the oldest complete set that is not durable and is not being
        written, if another complete set remains. Normally only one that failed to persist; `is_last`: the run stops and
        waits for a slot for its last snapshot, so also one that only waits for its turn. None: nothing was discarded.
        """
        complete = self.complete(run)
        waiting = [each for each in complete if each.is_in(SlotState.SEALED) and (is_last or each.failures)]
        has_free_slot = any(slot.state is SlotState.FREE for slot in self.slots(run, rank).values())
        if has_free_slot or not waiting or len(complete) < 2:
            return None
        self._runs[run].discard(waiting[-1], SlotEvent.SUPERSEDE)
        return waiting[-1]

    def forget_ended(self, run: Run) -> bool:
        """Free the memory of a run that has ended in good order, unless a set is not persisted yet: no restart is
        expected soon, and hot has all of it. Memory after a crash stays for the restart. False: nothing was freed.
        """
        memory = self._runs.get(run)
        if memory is None or not memory.is_idle or not self.outcomes.is_in_good_order(run, len(memory.ranks)):
            return False
        self._forget(run)
        return True

    def forget_departed(self, *, now_s: float, grace_s: float) -> list[Run]:
        """Free the memory of runs that no rank has been connected to for `grace_s`. Sets that are not persisted stay.

        Returns these runs.
        """
        idle = [run for run, memory in self._runs.items() if memory.is_idle]
        departed = [run for run in idle if now_s - self._runs[run].departed_s >= grace_s]
        for run in departed:
            self._forget(run)
        return departed

    def _forget(self, run: Run) -> None:
        memory = self._runs[run]
        for snapshot_set in list(memory.sets.values()):
            memory.discard(snapshot_set, SlotEvent.TRAINER_DIED)
        for rank in list(memory.slots):
            memory.detach(rank)
        del self._runs[run]

    # ── queries ──

    def runs(self) -> list[Run]:
        return sorted(self._runs)

    def complete(self, run: Run | None = None) -> list[SnapshotSet]:
        """The sets that can be restored, of one run or of all; newest first within a run."""
        of_runs = self._runs.values() if run is None else [self._get(run)]
        complete = [
            snapshot_set for memory in of_runs for snapshot_set in memory.sets.values() if snapshot_set.is_complete
        ]
        return sorted(complete, key=lambda each: each.id.recency, reverse=True)

    def find(self, checkpoint: CheckpointId) -> SnapshotSet | None:
        """The complete set of this step, if it is in memory."""
        snapshot_set = self._get(checkpoint.run).sets.get(checkpoint)
        return snapshot_set if snapshot_set and snapshot_set.is_complete else None

    def newest_restorable(self, run: Run) -> SnapshotSet | None:
        """The newest complete set that is not known to be unhealthy."""
        return next((snapshot_set for snapshot_set in self.complete(run) if snapshot_set.is_healthy is not False), None)

    def slot_counts(self) -> Counter[SlotState]:
        return Counter(
            slot.state for memory in self._runs.values() for slots in memory.slots.values() for slot in slots.values()
        )

    def _get(self, run: Run) -> RunMemory:
        """The memory of a run, or an empty one to read from."""
        return self._runs.get(run) or RunMemory(Generation(0), world_size=0)

    def _slot(self, run: Run, generation: Generation, rank: Rank, index: int) -> MappedSlot:
        memory = self._current(run, generation, f"use slot {index} of {run}")
        slot = memory.slots.get(rank, {}).get(index)
        if slot is None:
            raise BadRequest(f"use slot {index} of {run} rank {rank}: the rank has not attached it")
        return slot

    def _current(self, run: Run, generation: Generation, action: str) -> RunMemory:
        memory = self._runs.get(run)
        if memory is None:  # a newer generation has fenced this one, and has ended since
            raise Stale(f"{action} as generation {generation}: no trainer of this generation is connected")
        if generation != memory.generation:
            raise Stale.by(memory.generation, action, generation)
        return memory
