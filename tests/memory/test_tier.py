"""The rules of the memory tier, on real slots and without a clock."""

from __future__ import annotations

import math
import os

import pytest

from tests.support.slots import make_sealed, make_slot
from tierd.errors import BadRequest, Stale
from tierd.format.ids import Generation, Rank, Run, checkpoint_id
from tierd.format.run_state import RunState
from tierd.memory.slot import MappedSlot, SlotEvent, SlotState
from tierd.memory.snapshot_set import SnapshotSet
from tierd.memory.tier import MemoryTier

RUN = Run("run42")


class Trainers:
    """All ranks of one generation, with two slots each."""

    def __init__(self, memory: MemoryTier, *, world_size: int = 1, generation: int = 1) -> None:
        self.memory = memory
        self.generation = Generation(generation)
        self.ranks = [Rank(rank) for rank in range(world_size)]
        for rank in self.ranks:
            memory.enter(RUN, self.generation, rank, world_size)
            for index in {0, 1} - memory.slots(RUN, rank).keys():
                memory.attach(RUN, self.generation, rank, index, make_slot())

    def seal(self, step: int, slot: int, *, ranks: list[int] | None = None, resent: bool = False) -> SnapshotSet:
        """Fill and seal a slot of each rank. Returns the set."""
        snapshot_set = None
        for rank in self.ranks if ranks is None else map(Rank, ranks):
            if not resent:
                self.memory.fill(RUN, self.generation, rank, slot)
            sealed = make_sealed(step, slot=slot, resent=resent)
            snapshot_set = self.memory.seal(RUN, self.generation, rank, sealed, now_s=float(step))
        assert snapshot_set is not None
        return snapshot_set

    def persist(self, snapshot_set: SnapshotSet, *, succeeds: bool = True) -> None:
        snapshot_set.move(SlotEvent.PERSIST)
        snapshot_set.failures += not succeeds
        snapshot_set.move(SlotEvent.PERSISTED if succeeds else SlotEvent.PERSIST_FAILED)

    def release(self) -> list[tuple[int, bool]]:
        return [(snapshot_set.id.step, is_lost) for snapshot_set, is_lost in self.memory.release(RUN)]

    def states(self, rank: int = 0) -> list[SlotState]:
        return [slot.state for _, slot in sorted(self.memory.slots(RUN, Rank(rank)).items())]

    def restorable(self) -> list[int]:
        return [snapshot_set.id.step for snapshot_set in self.memory.complete(RUN)]


@pytest.fixture
def memory() -> MemoryTier:
    return MemoryTier()


# ── retention ──


def test_the_newest_complete_set_is_kept_until_a_newer_one_is_complete(memory: MemoryTier) -> None:
    trainers = Trainers(memory, world_size=2)
    trainers.persist(trainers.seal(1, 0))
    trainers.seal(2, 1, ranks=[0])
    assert trainers.release() == []
    assert trainers.restorable() == [1]
    trainers.seal(2, 1, ranks=[1])
    assert trainers.release() == [(1, False)]
    assert trainers.restorable() == [2]
    assert trainers.states(0) == trainers.states(1) == [SlotState.FREE, SlotState.SEALED]


def test_a_snapshot_that_is_being_written_is_released_only_afterwards(memory: MemoryTier) -> None:
    trainers = Trainers(memory)
    older = trainers.seal(1, 0)
    older.move(SlotEvent.PERSIST)
    trainers.seal(2, 1)
    assert trainers.release() == []
    older.move(SlotEvent.PERSISTED)
    assert trainers.release() == [(1, False)]


def test_an_unpersisted_set_is_kept_unless_it_failed_and_a_newer_one_is_complete(memory: MemoryTier) -> None:
    trainers = Trainers(memory)
    older = trainers.seal(1, 0)
    trainers.seal(2, 1)
    assert trainers.release() == []
    assert [pending.id.step for pending in memory.pending()] == [1, 2]
    trainers.persist(older, succeeds=False)
    assert [pending.id.step for pending in memory.pending()] == [2, 1]
    assert trainers.release() == [(1, True)]
    assert [pending.id.step for pending in memory.pending()] == [2]


def test_a_failing_set_is_kept_while_no_newer_one_is_complete(memory: MemoryTier) -> None:
    trainers = Trainers(memory)
    only = trainers.seal(1, 0)
    for _ in range(3):
        trainers.persist(only, succeeds=False)
    assert trainers.release() == []
    assert trainers.restorable() == [1]


# ── generations ──


def test_a_stale_generation_is_refused_in_every_call(memory: MemoryTier) -> None:
    old = Trainers(memory)
    memory.fill(RUN, old.generation, Rank(0), 0)
    Trainers(memory, generation=2)
    for stale in (
        lambda: memory.enter(RUN, old.generation, Rank(0), 1),
        lambda: memory.fill(RUN, old.generation, Rank(0), 1),
        lambda: memory.abandon(RUN, old.generation, Rank(0), 0),
        lambda: memory.seal(RUN, old.generation, Rank(0), make_sealed(9), now_s=0.0),
        lambda: memory.seal(RUN, old.generation, Rank(0), make_sealed(9, resent=True), now_s=0.0),
    ):
        with pytest.raises(Stale):
            stale()


def test_a_newer_generation_keeps_the_complete_set_and_frees_the_incomplete_one(memory: MemoryTier) -> None:
    old = Trainers(memory, world_size=2)
    old.seal(1, 0)
    old.seal(2, 1, ranks=[0])
    new = Trainers(memory, world_size=2, generation=2)
    assert new.restorable() == [1]
    assert new.states(0) == [SlotState.SEALED, SlotState.FREE]
    assert memory.present(RUN) == {0, 1}


def test_a_set_of_a_newer_generation_is_newer_at_any_step(memory: MemoryTier) -> None:
    old = Trainers(memory)
    old.persist(old.seal(900, 0))
    new = Trainers(memory, generation=2)
    new.seal(500, 1)
    assert new.release() == [(900, False)]


def test_slots_of_ranks_beyond_a_smaller_world_size_are_closed(memory: MemoryTier) -> None:
    old = Trainers(memory, world_size=2)
    old.persist(old.seal(1, 0))
    removed = list(memory.slots(RUN, Rank(1)).values())
    new = Trainers(memory, world_size=1, generation=2)
    assert memory.present(RUN) == {0}
    assert memory.slots(RUN, Rank(1)) == {}
    assert new.restorable() == [1], "its snapshot is still needed"
    assert not is_open(removed[1])
    new.seal(1, 1)
    assert new.release() == [(1, False)]
    assert not is_open(removed[0])


def test_a_rank_with_another_world_size_is_refused(memory: MemoryTier) -> None:
    Trainers(memory, world_size=2)
    with pytest.raises(BadRequest, match="world size 3"):
        memory.enter(RUN, Generation(1), Rank(2), 3)


# ── connections ──


def test_a_slot_that_was_being_filled_is_free_after_a_disconnect_or_a_reconnect(memory: MemoryTier) -> None:
    trainers = Trainers(memory)
    trainers.seal(1, 0)
    memory.fill(RUN, trainers.generation, Rank(0), 1)
    memory.leave(RUN, Rank(0), now_s=0.0)
    assert trainers.states() == [SlotState.SEALED, SlotState.FREE]
    memory.fill(RUN, trainers.generation, Rank(0), 1)
    memory.enter(RUN, trainers.generation, Rank(0), 1)
    assert trainers.states() == [SlotState.SEALED, SlotState.FREE]


def test_a_slot_that_is_attached_again_keeps_its_snapshot(memory: MemoryTier) -> None:
    trainers = Trainers(memory)
    snapshot_set = trainers.seal(1, 0)
    slot = memory.slots(RUN, Rank(0))[0]
    memory.attach(RUN, Generation(1), Rank(0), 0, make_slot_of_same_memory(slot))
    assert memory.slots(RUN, Rank(0))[0] is slot
    assert snapshot_set.snapshots[Rank(0)].slot is slot


def test_a_replaced_slot_stays_open_as_long_as_its_snapshot(memory: MemoryTier) -> None:
    trainers = Trainers(memory)
    former = memory.slots(RUN, Rank(0))
    trainers.persist(trainers.seal(1, 0))
    for index in (0, 1):
        memory.attach(RUN, Generation(1), Rank(0), index, make_slot())
    assert is_open(former[0])
    assert not is_open(former[1])
    trainers.seal(2, 0)
    assert trainers.release() == [(1, False)]
    assert not is_open(former[0])


def test_detached_slots_stay_restorable_and_cannot_be_adopted(memory: MemoryTier) -> None:
    trainers = Trainers(memory)
    former = memory.slots(RUN, Rank(0))
    trainers.seal(1, 0)
    memory.detach(RUN, Rank(0))
    assert memory.slots(RUN, Rank(0)) == {}
    assert trainers.restorable() == [1]
    assert is_open(former[0])
    assert not is_open(former[1])


def test_memory_of_a_run_is_freed_after_the_grace_time_if_everything_is_persisted(memory: MemoryTier) -> None:
    trainers = Trainers(memory, world_size=2)
    snapshot_set = trainers.seal(1, 0)
    slots = [slot for rank in trainers.ranks for slot in memory.slots(RUN, rank).values()]
    memory.leave(RUN, Rank(0), now_s=100.0)
    assert memory.forget_departed(now_s=1e9, grace_s=10.0) == [], "rank 1 is still connected"
    memory.leave(RUN, Rank(1), now_s=100.0)
    assert memory.forget_departed(now_s=1e9, grace_s=10.0) == [], "it is not persisted yet"
    trainers.persist(snapshot_set)
    assert memory.forget_departed(now_s=109.0, grace_s=10.0) == []
    assert memory.forget_departed(now_s=110.0, grace_s=10.0) == [RUN]
    assert not any(is_open(slot) for slot in slots)
    assert memory.generation(RUN) == 0
    assert memory.complete(RUN) == []


@pytest.mark.parametrize(
    ("outcomes", "is_freed"),
    [
        (("finished", "finished"), True),
        (("finished", "stopped"), True),
        (("halted", "finished"), True),
        (("finished", "failed"), False),
        (("finished", "lost"), False),
        (("finished", None), False),
    ],
)
def test_memory_of_a_run_is_freed_at_once_only_if_every_rank_left_in_good_order(
    memory: MemoryTier, outcomes: tuple[str | None, ...], is_freed: bool
) -> None:
    trainers = Trainers(memory, world_size=2)
    snapshot_set = trainers.seal(1, 0)
    slots = [slot for rank in trainers.ranks for slot in memory.slots(RUN, rank).values()]
    for rank, outcome in zip(trainers.ranks, outcomes, strict=True):
        assert not memory.forget_ended(RUN), f"rank {rank} is still connected"
        if outcome is not None:
            memory.outcomes.rank_exited(RUN, rank, RunState(outcome), "")
        memory.leave(RUN, rank, now_s=100.0)
    assert not memory.forget_ended(RUN), "it is not persisted yet"
    trainers.persist(snapshot_set)
    assert memory.forget_ended(RUN) == is_freed
    assert any(is_open(slot) for slot in slots) != is_freed
    assert memory.runs() == ([] if is_freed else [RUN])
    assert (memory.outcomes.state(RUN) or ("",))[0] != "running", "status still says how it ended"
    assert memory.forget_departed(now_s=1e9, grace_s=10.0) == ([] if is_freed else [RUN])


def test_memory_stays_until_ranks_that_never_connected_have_ended_too(memory: MemoryTier) -> None:
    memory.enter(RUN, Generation(1), Rank(0), 2)
    memory.outcomes.rank_exited(RUN, Rank(0), RunState.FINISHED, "")
    memory.leave(RUN, Rank(0), now_s=100.0)
    assert not memory.forget_ended(RUN)


def test_an_old_trainer_of_a_run_whose_memory_was_freed_is_refused(memory: MemoryTier) -> None:
    trainers = Trainers(memory)
    memory.outcomes.rank_exited(RUN, Rank(0), RunState.FINISHED, "")
    memory.leave(RUN, Rank(0), now_s=100.0)
    assert memory.forget_ended(RUN)
    with pytest.raises(Stale, match="no trainer of this generation is connected"):
        memory.fill(RUN, Generation(1), Rank(0), 0)
    slot = make_slot()
    with pytest.raises(Stale):
        memory.attach(RUN, Generation(1), Rank(0), 0, slot)
    assert not is_open(slot)
    with pytest.raises(Stale):
        trainers.seal(1, 0)


def test_a_slot_of_a_fenced_trainer_does_not_replace_one_of_its_successor(memory: MemoryTier) -> None:
    """Its last messages may be read after the successor has attached its own slots."""
    Trainers(memory)
    Trainers(memory, generation=2)
    slots, slot = memory.slots(RUN, Rank(0)), make_slot()
    with pytest.raises(Stale, match="generation 2 has taken over"):
        memory.attach(RUN, Generation(1), Rank(0), 0, slot)
    assert not is_open(slot)
    assert memory.slots(RUN, Rank(0)) == slots


# ── invalid messages ──


def test_a_resent_snapshot_is_accepted_once(memory: MemoryTier) -> None:
    trainers = Trainers(memory)
    snapshot_set = trainers.seal(1, 0)
    assert trainers.seal(1, 0, resent=True) is snapshot_set
    with pytest.raises(BadRequest, match="sealed this step before"):
        trainers.seal(1, 1)


def test_snapshots_resent_to_a_new_daemon_may_come_in_any_order(memory: MemoryTier) -> None:
    trainers = Trainers(memory)
    trainers.seal(2, 1, resent=True)
    trainers.seal(1, 0, resent=True)
    assert trainers.restorable() == [2, 1]
    assert trainers.states() == [SlotState.SEALED, SlotState.SEALED]


def test_a_lower_step_of_the_same_generation_is_refused(memory: MemoryTier) -> None:
    trainers = Trainers(memory)
    trainers.seal(5, 0)
    with pytest.raises(BadRequest, match="step 5 of this generation is sealed already"):
        trainers.seal(4, 1)


@pytest.mark.parametrize("index", [-1, 16, 1 << 40])
def test_a_slot_with_an_index_out_of_range_is_refused_and_closed(memory: MemoryTier, index: int) -> None:
    Trainers(memory)
    slot = make_slot()
    with pytest.raises(BadRequest):
        memory.attach(RUN, Generation(1), Rank(0), index, slot)
    assert not is_open(slot)


@pytest.mark.parametrize(
    "break_rules",
    [
        lambda memory: memory.fill(RUN, Generation(1), Rank(0), 5),
        lambda memory: memory.seal(RUN, Generation(1), Rank(0), make_sealed(1, slot=1), now_s=0.0),
        lambda memory: memory.seal(RUN, Generation(1), Rank(0), make_sealed(1, 0), now_s=0.0),
        lambda memory: memory.seal(RUN, Generation(1), Rank(0), make_sealed(1, -5), now_s=0.0),
        lambda memory: memory.seal(RUN, Generation(1), Rank(0), make_sealed(1, 1 << 40), now_s=0.0),
        lambda memory: memory.seal(RUN, Generation(1), Rank(0), make_sealed(10**12), now_s=0.0),
        lambda memory: memory.abandon(RUN, Generation(1), Rank(0), 1),
        lambda memory: memory.fill(RUN, Generation(1), Rank(0), 0),
    ],
    ids=["never attached", "not filled", "empty", "negative", "too large", "step", "abandon free", "fill twice"],
)
def test_an_invalid_message_is_refused_and_changes_nothing(memory: MemoryTier, break_rules: object) -> None:
    trainers = Trainers(memory)
    memory.fill(RUN, Generation(1), Rank(0), 0)
    with pytest.raises(BadRequest):
        break_rules(memory)  # type: ignore[operator]
    assert trainers.states() == [SlotState.FILLING, SlotState.FREE]
    assert memory.find(checkpoint_id(RUN, 1, 1)) is None


def test_slots_are_counted_by_state(memory: MemoryTier) -> None:
    trainers = Trainers(memory, world_size=2)
    trainers.persist(trainers.seal(1, 0))
    assert memory.slot_counts() == {SlotState.RETAINED: 2, SlotState.FREE: 2}
    assert memory.runs() == [RUN]
    assert memory.world_size(RUN) == 2


def is_open(slot: MappedSlot) -> bool:
    try:
        slot.view[0]
    except ValueError:
        return False
    return True


def make_slot_of_same_memory(slot: MappedSlot) -> MappedSlot:
    return MappedSlot(os.dup(slot.fd), slot.capacity_bytes)


# ── given-up steps ──


def test_giving_up_a_set_frees_the_slots_of_ranks_that_have_sealed(memory: MemoryTier) -> None:
    both = Trainers(memory, world_size=2)
    both.persist(both.seal(1, 0))
    both.seal(2, 1, ranks=[1])
    checkpoint = checkpoint_id(RUN, 2, 1)
    assert not memory.is_given_up(checkpoint)
    assert memory.give_up(RUN, both.generation, 2) == [(Rank(1), 1)]
    assert memory.is_given_up(checkpoint)
    assert both.states(1) == [SlotState.RETAINED, SlotState.FREE]
    assert memory.give_up(RUN, both.generation, 2) == []
    assert both.restorable() == [1]

    both.seal(3, 1)
    assert both.restorable() == [3, 1]


def test_giving_up_again_frees_the_slot_of_a_rank_that_sealed_meanwhile(memory: MemoryTier) -> None:
    both = Trainers(memory, world_size=2)
    assert memory.give_up(RUN, both.generation, 2) == []
    both.seal(2, 1, ranks=[1])
    assert memory.give_up(RUN, both.generation, 2) == [(Rank(1), 1)]


def test_a_complete_set_and_a_stale_generation_cannot_be_given_up(memory: MemoryTier) -> None:
    trainers = Trainers(memory)
    trainers.seal(1, 0)
    with pytest.raises(BadRequest, match="every rank has sealed it"):
        memory.give_up(RUN, trainers.generation, 1)
    Trainers(memory, generation=2)
    with pytest.raises(Stale):
        memory.give_up(RUN, trainers.generation, 2)
    assert trainers.restorable() == [1]


def test_the_list_of_given_up_steps_is_bounded_and_ends_with_the_generation(memory: MemoryTier) -> None:
    trainers = Trainers(memory)
    for step in range(100):
        memory.give_up(RUN, trainers.generation, step)
    assert sum(memory.is_given_up(checkpoint_id(RUN, step, 1)) for step in range(100)) == 16
    Trainers(memory, generation=2)
    assert not memory.is_given_up(checkpoint_id(RUN, 99, 1))


# ── a rank that waits for a slot ──


def test_a_set_that_waits_for_its_turn_gives_way_only_to_the_last_snapshot_of_a_run(memory: MemoryTier) -> None:
    trainers = Trainers(memory)
    trainers.seal(1, 0).move(SlotEvent.PERSIST)
    waiting = trainers.seal(2, 1)
    assert memory.give_way(RUN, Rank(0), is_last=False) is None
    assert memory.give_way(RUN, Rank(0), is_last=True) is waiting
    assert trainers.restorable() == [1]
    assert trainers.states() == [SlotState.PERSISTING, SlotState.FREE]
    assert memory.give_way(RUN, Rank(0), is_last=True) is None, "a slot is free now"


def test_a_set_that_failed_gives_way_while_another_one_is_being_written(memory: MemoryTier) -> None:
    trainers = Trainers(memory)
    trainers.seal(1, 0).move(SlotEvent.PERSIST)
    failed = trainers.seal(2, 1)
    trainers.persist(failed, succeeds=False)
    assert memory.give_way(RUN, Rank(0), is_last=False) is failed


def test_the_only_complete_set_never_gives_way(memory: MemoryTier) -> None:
    trainers = Trainers(memory, world_size=2)
    trainers.persist(trainers.seal(1, 0), succeeds=False)
    trainers.seal(2, 1, ranks=[0])
    assert memory.give_way(RUN, Rank(0), is_last=True) is None
    assert trainers.restorable() == [1]


def test_the_slots_of_all_ranks_become_free_together(memory: MemoryTier) -> None:
    trainers = Trainers(memory, world_size=2)
    trainers.seal(1, 0).move(SlotEvent.PERSIST)
    waiting = trainers.seal(2, 1)
    assert memory.give_way(RUN, Rank(1), is_last=True) is waiting
    assert trainers.states(0) == trainers.states(1) == [SlotState.PERSISTING, SlotState.FREE]
    assert memory.give_way(RUN, Rank(0), is_last=True) is None


def test_the_last_snapshot_of_a_run_that_stops_is_pending_first(memory: MemoryTier) -> None:
    trainers = Trainers(memory)
    first, second = trainers.seal(1, 0), trainers.seal(2, 1)
    assert memory.pending() == [first, second]
    second.is_last = True
    assert memory.pending() == [second, first]


def test_detaching_a_run_keeps_only_what_nothing_else_has(memory: MemoryTier) -> None:
    former = Trainers(memory, world_size=2)
    former.persist(former.seal(1, slot=0))
    only_in_memory = former.seal(2, slot=1)
    Trainers(memory, world_size=2, generation=2)
    assert memory.detach_run(RUN) == 4
    assert memory.slots_of(RUN) == {}
    assert memory.pending() == [only_in_memory]
    assert former.restorable() == [2]
    former.persist(only_in_memory)


def test_detaching_a_run_discards_what_its_own_generation_has_sealed(memory: MemoryTier) -> None:
    trainers = Trainers(memory, world_size=2)
    trainers.seal(1, slot=0)
    trainers.seal(2, slot=1, ranks=[0])
    persisting = Trainers(memory, world_size=2)
    assert memory.detach_run(RUN) == 4
    assert (memory.slots_of(RUN), persisting.restorable()) == ({}, [])
    again = Trainers(memory, world_size=2)
    again.seal(1, slot=0)
    assert again.restorable() == [1]


# ── since when what was sealed is in memory only ──


def test_newer_snapshots_that_replace_a_failed_one_do_not_begin_its_age_again(memory: MemoryTier) -> None:
    trainers = Trainers(memory)
    assert memory.unsaved_since_s(RUN) == math.inf
    trainers.persist(trainers.seal(10, 0))
    assert memory.unsaved_since_s(RUN) == math.inf
    for step, slot in ((20, 1), (30, 0), (40, 1), (50, 0)):
        trainers.persist(trainers.seal(step, slot), succeeds=False)
        trainers.release()
        assert memory.unsaved_since_s(RUN) == 20.0
        memory.give_way(RUN, Rank(0), is_last=False)
        assert memory.unsaved_since_s(RUN) == 20.0
    trainers.persist(trainers.seal(60, 1))
    trainers.release()
    assert memory.unsaved_since_s(RUN) == math.inf
    trainers.seal(70, 0)
    trainers.release()  # of the one that was persisted
    assert memory.unsaved_since_s(RUN) == 70.0


def test_the_only_unsaved_snapshot_that_gives_way_counts_until_the_trainer_is_gone(memory: MemoryTier) -> None:
    trainers = Trainers(memory)
    trainers.persist(trainers.seal(10, 0))
    trainers.persist(trainers.seal(20, 1), succeeds=False)
    assert memory.give_way(RUN, Rank(0), is_last=False) is not None
    assert memory.unsaved_since_s(RUN) == 20.0
    memory.leave(RUN, Rank(0), now_s=21.0)
    assert memory.unsaved_since_s(RUN) == math.inf, "nobody can save it any more"
