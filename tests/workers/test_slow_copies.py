"""The copy in progress: it stays in hot, continues after failures and restarts, and others wait for their turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.rooms import RUN, Rooms, rooms_at
from tierd.catalog.listing import refresh
from tierd.config.sections import ColdPolicy, LifecycleConfig
from tierd.copies import Reason
from tierd.errors import TierUnreachable
from tierd.format import wire
from tierd.format.ids import CheckpointId, checkpoint_id
from tierd.workers.reaper import Reaper

LAST_THREE = LifecycleConfig(cold=ColdPolicy(keep_every=0))


@pytest.fixture
async def rooms(tmp_path: Path) -> AsyncIterator[Rooms]:
    async with rooms_at(tmp_path, cold=("cold", "dr"), lifecycle=LAST_THREE) as rooms:
        yield rooms


class Gate:
    """Holds back the puts of one checkpoint in a tier until it is opened."""

    def __init__(self, rooms: Rooms, tier: str, checkpoint: CheckpointId) -> None:
        self.is_reached, self._is_open = asyncio.Event(), asyncio.Event()
        store = rooms.cold[tier].store
        real_put = store.put

        async def put(key: str, *arguments: object, **more: object) -> object:
            if checkpoint.name in key:
                self.is_reached.set()
                await self._is_open.wait()
            return await real_put(key, *arguments, **more)  # type: ignore[arg-type]

        store.put = put  # type: ignore[method-assign, assignment]

    def open(self) -> None:
        self._is_open.set()


async def commit_steps(rooms: Rooms, *steps: int) -> None:
    for step in steps:
        await rooms.commit("hot", step=step, sequence=step)
    await rooms.look()


@pytest.mark.parametrize("slow", ["cold", "dr"])
async def test_what_is_being_copied_to_a_slow_tier_stays_in_hot_and_does_not_delay_the_other(
    rooms: Rooms, slow: str
) -> None:
    (fast,) = {"cold", "dr"} - {slow}
    await commit_steps(rooms, 100)
    gate = Gate(rooms, slow, checkpoint_id(RUN, 100, 1))
    copy = asyncio.create_task(rooms.replicator(slow).run_once())
    await gate.is_reached.wait()
    reaper, other = Reaper(rooms.context), rooms.replicator(fast)
    for step in (200, 300, 400, 500):
        await commit_steps(rooms, step)
        assert await reaper.run_once()
        assert await other.run_once()
    assert await reaper.run_once()
    assert rooms.steps("hot") == [500, 400, 300, 100]
    assert rooms.steps(fast) == [500, 400, 300]
    assert rooms.context.copies[fast].given_up == {}
    gate.open()
    assert await copy
    assert rooms.steps(slow) == [500, 400, 300, 100]
    assert await reaper.run_once()
    assert rooms.steps("hot") == rooms.steps(slow) == [500, 400, 300]
    assert rooms.context.copies[slow].given_up == {Reason.REPLACED: 1}, "200 was replaced before its turn"
    assert rooms.count("tierd_copies_given_up_total", tier=slow, reason="replaced") == 1


async def test_a_deletion_stops_when_a_copy_of_the_checkpoint_begins(rooms: Rooms) -> None:
    await commit_steps(rooms, 100, 200, 300, 400)
    oldest = checkpoint_id(RUN, 100, 1)
    real_list = rooms.hot.store.list

    async def list_and_begin_a_copy(prefix: str = "") -> object:
        rooms.catalog.set_copying("dr", oldest)
        return await real_list(prefix)

    rooms.hot.store.list = list_and_begin_a_copy  # type: ignore[method-assign, assignment]
    assert await Reaper(rooms.context).run_once()
    assert rooms.steps("hot") == [400, 300, 200, 100]


async def test_after_an_older_checkpoint_a_newer_one_is_copied(rooms: Rooms) -> None:
    """However many milestones wait, every second copy makes the newest checkpoint in the tier newer."""
    await rooms.commit("hot", "cold", step=500, sequence=5)
    for step in (100, 200, 300):
        await rooms.commit("hot", step=step, milestones=("best",))
    await commit_steps(rooms, 600, 700, 800)
    replicator = rooms.replicator()
    assert await replicator.run_once()
    replicated = [message.step for message in rooms.sent if isinstance(message, wire.Replicated)]
    assert replicated == [300, 800, 200, 100, 700, 600]


async def test_runs_take_turns(rooms: Rooms) -> None:
    await commit_steps(rooms, 100, 200)
    for step in (10, 20):
        await rooms.commit("hot", step=step, run="other")
    await rooms.look()
    assert await rooms.replicator().run_once()
    assert [message.step for message in rooms.sent if isinstance(message, wire.Replicated)] == [200, 20, 100, 10]


async def test_a_milestone_that_failed_waits_for_three_copies(tmp_path: Path) -> None:
    """Not for all: with uploads slower than snapshots there is always a newer one."""
    async with rooms_at(tmp_path, lifecycle=LifecycleConfig(cold=ColdPolicy(keep_last=10))) as rooms:
        await rooms.commit("hot", step=100, milestones=("best",))
        await commit_steps(rooms, 200, 300, 400, 500, 600)
        real_put, failures = rooms.cold["cold"].store.put, 0

        async def put(key: str, *arguments: object, **more: object) -> object:
            nonlocal failures
            if not failures:
                failures += 1
                raise TierUnreachable(f"write {key}: connection reset")
            return await real_put(key, *arguments, **more)  # type: ignore[arg-type]

        rooms.cold["cold"].store.put = put  # type: ignore[method-assign, assignment]
        rooms.cold["cold"].store.puts_at_once = 1  # type: ignore[misc]
        replicator = rooms.replicator()
        with pytest.raises(TierUnreachable):
            await replicator.run_once()
        assert await replicator.run_once()
        replicated = [message.step for message in rooms.sent if isinstance(message, wire.Replicated)]
        assert replicated == [600, 500, 400, 100, 300, 200]


async def test_a_copy_that_progresses_between_failures_is_continued(tmp_path: Path) -> None:
    """Two shards of the first checkpoint take two attempts, while newer checkpoints arrive."""
    clock_s = 0.0
    async with rooms_at(tmp_path, lifecycle=LAST_THREE, clocks={"monotonic_s": lambda: clock_s}) as rooms:
        await commit_steps(rooms, 1)
        real_put, failures = rooms.cold["cold"].store.put, 0

        async def put(key: str, *arguments: object, **more: object) -> object:
            nonlocal clock_s, failures
            clock_s += 100.0
            if "rank-00001" in key and failures < 1:
                failures += 1
                raise TierUnreachable(f"write {key}: connection reset")
            return await real_put(key, *arguments, **more)  # type: ignore[arg-type]

        rooms.cold["cold"].store.puts_at_once = 1  # type: ignore[misc]
        rooms.cold["cold"].store.put = put  # type: ignore[method-assign, assignment]
        replicator, reaper = rooms.replicator(), Reaper(rooms.context)
        with pytest.raises(TierUnreachable):
            await replicator.run_once()
        await commit_steps(rooms, 2, 3, 4, 5)
        assert await reaper.run_once()
        assert rooms.steps("hot") == [5, 4, 3, 1]
        assert await replicator.run_once()
        assert [message.step for message in rooms.sent if isinstance(message, wire.Replicated)] == [1, 5, 4, 3]


async def test_a_copy_without_progress_is_dropped_after_the_time_it_had_taken(tmp_path: Path) -> None:
    clock_s = 0.0
    async with rooms_at(tmp_path, lifecycle=LAST_THREE, clocks={"monotonic_s": lambda: clock_s}) as rooms:
        await commit_steps(rooms, 1)
        real_put = rooms.cold["cold"].store.put

        async def put(key: str, *arguments: object, **more: object) -> object:
            nonlocal clock_s
            if "rank-00001" in key:
                clock_s += 100.0
                raise TierUnreachable(f"write {key}: connection reset")
            return await real_put(key, *arguments, **more)  # type: ignore[arg-type]

        rooms.cold["cold"].store.puts_at_once = 1  # type: ignore[misc]
        rooms.cold["cold"].store.put = put  # type: ignore[method-assign, assignment]
        replicator, reaper = rooms.replicator(), Reaper(rooms.context)
        with pytest.raises(TierUnreachable):
            await replicator.run_once()
        await commit_steps(rooms, 2, 3, 4)
        assert await reaper.run_once()
        assert rooms.steps("hot") == [4, 3, 2, 1]
        rooms.catalog.listing_failed("cold", "503")  # no attempt is made while the tier cannot be listed
        clock_s += 90.0
        assert await replicator.run_once()
        assert await reaper.run_once()
        assert rooms.steps("hot") == [4, 3, 2, 1]
        clock_s += 20.0
        assert await replicator.run_once()
        assert await reaper.run_once()
        assert rooms.steps("hot") == [4, 3, 2]


async def test_after_a_start_nothing_is_deleted_from_hot_before_a_former_copy_is_found(rooms: Rooms) -> None:
    for name in ("cold", "dr"):
        rooms.catalog.forget_copying(name)
    for step in (100, 200, 300, 400, 500):
        await rooms.commit("hot", step=step, sequence=step)
    await rooms.commit("cold", step=200, sequence=200)
    (rooms.folder("cold", checkpoint_id(RUN, 200, 1)) / "manifest.json").unlink()
    await refresh(rooms.catalog, rooms.hot)
    replicators, reaper = [rooms.replicator(name) for name in ("cold", "dr")], Reaper(rooms.context)

    async def pass_of_all() -> None:
        for replicator in replicators:
            await replicator.run_once()
        await reaper.run_once()

    await pass_of_all()
    assert rooms.steps("hot") == [500, 400, 300, 200, 100], "the tiers are not listed yet"
    await refresh(rooms.catalog, rooms.cold["cold"])
    rooms.catalog.listing_failed("dr", "503")
    gate = Gate(rooms, "cold", checkpoint_id(RUN, 200, 1))
    copy = asyncio.create_task(replicators[0].run_once())
    await gate.is_reached.wait()
    assert await replicators[1].run_once()
    assert await reaper.run_once()
    assert rooms.steps("hot") == [500, 400, 300, 200]
    gate.open()
    assert await copy


async def test_milestone_that_is_set_during_a_copy_reaches_the_cold_tier(rooms: Rooms) -> None:
    """The copy had begun without the marker: hot has the only one until the replicator has copied it."""
    await commit_steps(rooms, 100)
    saved = checkpoint_id(RUN, 100, 1)
    gate = Gate(rooms, "cold", saved)
    async with asyncio.TaskGroup() as group:
        copying = group.create_task(rooms.replicator().run_once())
        await gate.is_reached.wait()
        await rooms.hot.mark_milestone(saved, "best", "now")
        await refresh(rooms.catalog, rooms.hot)
        gate.open()
    assert copying.result()
    await rooms.replicator().run_once()
    assert (rooms.folder("cold", saved) / "milestone-best.json").exists()
