"""Snapshots that hot has no space for: copied from memory to the cold tiers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.rooms import RUN, Rooms, rooms_at
from tierd.catalog import listing
from tierd.errors import TierUnreachable
from tierd.format import layout, wire
from tierd.format.health import Diagnosis
from tierd.format.ids import Generation, Rank, checkpoint_id
from tierd.memory.slot import SlotState
from tierd.memory.snapshot_set import SnapshotSet
from tierd.workers import write_through
from tierd.workers.write_through import WriteThrough


@pytest.fixture
async def rooms(tmp_path: Path) -> AsyncIterator[Rooms]:
    async with rooms_at(tmp_path, cold=("cold", "dr")) as rooms:
        await rooms.look()
        yield rooms


def refused(rooms: Rooms, step: int, *contents: bytes, **fields: Any) -> SnapshotSet:
    """A sealed snapshot that the persister could not write, because hot is full."""
    snapshot_set = rooms.seal(step, contents or (b"one", b"two"), **fields)
    snapshot_set.refused_by.add("hot")
    snapshot_set.failures = 1
    return snapshot_set


def make_unreachable(rooms: Rooms, tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*arguments: object, **options: object) -> None:
        raise TierUnreachable(f"write in {tier}: no answer")

    monkeypatch.setattr(rooms.cold[tier].store, "put", fails)


def states(snapshot_set: SnapshotSet) -> set[SlotState]:
    return {snapshot.slot.state for snapshot in snapshot_set.snapshots.values()}


async def test_a_snapshot_is_committed_unchanged_in_every_cold_tier_and_leaves_the_queue(rooms: Rooms) -> None:
    snapshot_set = refused(rooms, 7, b"one", b"two" * 100_000, milestone="best")
    assert await WriteThrough(rooms.context).run_once()
    for tier in ("cold", "dr"):
        folder = rooms.folder(tier, snapshot_set.id)
        assert (folder / layout.shard_name(Rank(1), 2)).read_bytes() == b"two" * 100_000
        assert (folder / "milestone-best.json").exists()
    entry = rooms.catalog.get(snapshot_set.id)
    assert entry is not None
    assert (entry.tiers, entry.all_milestones, entry.manifest.sequence) == ({"cold", "dr"}, {"best"}, 1)
    assert states(snapshot_set) == {SlotState.RETAINED}
    assert rooms.steps("hot") == []
    assert {(type(message), getattr(message, "tier", "")) for message in rooms.sent} == {
        (wire.Replicated, "cold"),
        (wire.Replicated, "dr"),
    }, "and not Persisted, which means hot"
    assert rooms.events[-1] == ("persist_ended", RUN)
    assert rooms.count("tierd_snapshots_total", run=RUN, outcome="written_through") == 1
    assert rooms.count("tierd_bytes_total", tier="dr", direction="write") == 300_003


async def test_a_snapshot_that_hot_may_still_take_is_left_to_the_persister(rooms: Rooms) -> None:
    rooms.seal(7)
    assert await WriteThrough(rooms.context).run_once()
    assert rooms.steps("cold") == []


async def test_one_cold_tier_is_enough(rooms: Rooms, monkeypatch: pytest.MonkeyPatch) -> None:
    make_unreachable(rooms, "cold", monkeypatch)
    snapshot_set = refused(rooms, 7)
    assert await WriteThrough(rooms.context).run_once()
    assert rooms.steps("dr") == [7]
    assert states(snapshot_set) == {SlotState.RETAINED}
    assert [incident.stage for incident in rooms.incidents.recent()] == ["replicate"]


async def test_a_snapshot_that_no_tier_takes_stays_and_is_tried_again(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_unreachable(rooms, "cold", monkeypatch)
    make_unreachable(rooms, "dr", monkeypatch)
    snapshot_set = refused(rooms, 7)
    worker = WriteThrough(rooms.context)
    assert not await worker.run_once()
    assert states(snapshot_set) == {SlotState.SEALED}
    assert snapshot_set.refused_by == {"hot", "cold", "dr"}
    monkeypatch.undo()
    assert await worker.run_once()
    assert rooms.steps("cold") == rooms.steps("dr") == [7]


async def test_the_newest_snapshot_is_copied_first(rooms: Rooms) -> None:
    refused(rooms, 7, run="older")
    refused(rooms, 8, run="newer")
    assert await WriteThrough(rooms.context).run_once()
    assert [message.step for message in rooms.sent if isinstance(message, wire.Replicated)][::2] == [8, 7]


async def test_a_slow_tier_gets_limited_time_after_another_has_committed(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_through, "EXTRA_TIME_MIN_S", 0.05)

    async def hangs(*arguments: object, **options: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(rooms.cold["dr"].store, "put", hangs)
    snapshot_set = refused(rooms, 7)
    assert await WriteThrough(rooms.context).run_once()
    assert rooms.steps("cold") == [7]
    assert rooms.steps("dr") == []
    assert states(snapshot_set) == {SlotState.RETAINED}


async def test_a_cancelled_pass_gives_the_snapshot_back(rooms: Rooms, monkeypatch: pytest.MonkeyPatch) -> None:
    began = asyncio.Event()

    async def hangs(*arguments: object, **options: object) -> None:
        began.set()
        await asyncio.Event().wait()

    for tier in rooms.cold.values():
        monkeypatch.setattr(tier.store, "put", hangs)
    snapshot_set = refused(rooms, 7)
    passing = asyncio.ensure_future(WriteThrough(rooms.context).run_once())
    await began.wait()
    assert states(snapshot_set) == {SlotState.PERSISTING}
    passing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await passing
    assert states(snapshot_set) == {SlotState.SEALED}
    assert (await rooms.cold["cold"].listing()).committed == set()


async def test_the_diagnosis_of_the_snapshot_is_committed_with_it(rooms: Rooms) -> None:
    snapshot_set = refused(rooms, 7)
    snapshot_set.diagnosis = Diagnosis(healthy=False, examined_at="now")
    assert await WriteThrough(rooms.context).run_once()
    entry = rooms.catalog.get(checkpoint_id(RUN, 7, 1))
    assert entry is not None
    assert entry.healthy is False
    assert (rooms.folder("cold", entry.id) / layout.UNHEALTHY).exists()


async def test_bytes_that_differ_from_the_checksums_are_not_committed(rooms: Rooms) -> None:
    snapshot_set = refused(rooms, 7, b"state")
    await rooms.memory.compute_checksums(snapshot_set)
    (snapshot,) = snapshot_set.snapshots.values()
    os.pwrite(snapshot.slot.fd, b"other", 0)
    assert not await WriteThrough(rooms.context).run_once()
    assert rooms.steps("cold") == rooms.steps("dr") == []
    assert {incident.kind for incident in rooms.incidents.recent()} == {"corrupt"}


async def test_a_commit_in_hot_during_a_copy_from_memory_gets_another_sequence(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention by `keep_every` counts sequences."""
    slow, real_put = refused(rooms, 7, b"one"), rooms.cold["cold"].store.put
    is_begun, is_answering = asyncio.Event(), asyncio.Event()

    async def put(*arguments: Any, **options: Any) -> Any:
        is_begun.set()
        await is_answering.wait()
        return await real_put(*arguments, **options)

    monkeypatch.setattr(rooms.cold["cold"].store, "put", put)
    monkeypatch.setattr(rooms.cold["dr"].store, "put", put)
    async with asyncio.TaskGroup() as group:
        group.create_task(WriteThrough(rooms.context).run_once())
        await is_begun.wait()
        fast = rooms.seal(8, [b"two"])
        assert await rooms.persister().run_once()
        is_answering.set()
    assert slow.manifest is not None
    assert fast.manifest is not None
    assert slow.manifest.sequence != fast.manifest.sequence


async def test_a_tier_that_hangs_does_not_delay_the_snapshots_of_other_runs(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drain ends after `daemon.drain_timeout_s`, and loses those that were not written."""

    async def hangs(*arguments: object, **options: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(rooms.cold["dr"].store, "put", hangs)
    for run in ("first", "second"):
        refused(rooms, 7, run=run)
    writing = asyncio.ensure_future(WriteThrough(rooms.context).run_once())
    try:
        await asyncio.wait([writing], timeout=1.0)
        assert {manifest.run for manifest in rooms.catalog.manifests_in("cold")} == {"first", "second"}
    finally:
        writing.cancel()
        await asyncio.wait([writing])
        for snapshot_set in rooms.memory.pending():
            assert states(snapshot_set) == {SlotState.SEALED}


async def test_hot_is_tried_again_while_a_copy_to_cold_goes_on(rooms: Rooms, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy to a slow cold tier took hours, and the snapshot was not durable although hot had room again."""
    began, free_bytes = asyncio.Event(), 0

    async def hangs(*arguments: object, **options: object) -> None:
        began.set()
        await asyncio.Event().wait()

    async def free() -> int:
        return free_bytes

    for tier in rooms.cold.values():
        monkeypatch.setattr(tier.store, "put", hangs)
    monkeypatch.setattr(rooms.hot_store, "free_bytes", free)
    snapshot_set = refused(rooms, 7)
    snapshot_set.is_hot_full = True
    passing = asyncio.ensure_future(WriteThrough(rooms.context).run_once())
    await began.wait()
    free_bytes = 1 << 30
    assert not await passing
    assert rooms.events[-2:] == [("space_freed",), ("persist_ended", RUN)]
    assert states(snapshot_set) == {SlotState.SEALED}
    assert await WriteThrough(rooms.context).run_once(), "it is the persister's again"
    assert await rooms.persister().run_once()
    assert rooms.steps("hot") == [7]


async def test_a_commit_in_cold_while_hot_is_asked_for_room_counts(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the snapshot is reported as lost if a newer one is complete."""
    answers: list[int] = [0]

    async def free() -> int:
        if answers:
            return answers.pop()
        while rooms.steps("cold") != [7] or not rooms.sent:
            await asyncio.sleep(0.01)
        return 1 << 30

    monkeypatch.setattr(rooms.hot_store, "free_bytes", free)
    snapshot_set = refused(rooms, 7)
    snapshot_set.is_hot_full = True
    assert await WriteThrough(rooms.context).run_once()
    assert states(snapshot_set) == {SlotState.RETAINED}


def slow_puts(rooms: Rooms, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy polls several times while a cold tier writes one file."""
    monkeypatch.setattr(write_through, "POLL_S", 0.01)

    def slowed(real_put: Any) -> Any:
        async def put(*arguments: Any, **options: Any) -> Any:
            await asyncio.sleep(0.1)  # longer than POLL_S
            return await real_put(*arguments, **options)

        return put

    for tier in rooms.cold.values():
        monkeypatch.setattr(tier.store, "put", slowed(tier.store.put))


async def test_a_copy_to_cold_goes_on_where_the_room_in_hot_does_not_show(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a quota, hot is full while its disk has room."""
    slow_puts(rooms, monkeypatch)
    snapshot_set = refused(rooms, 7)
    snapshot_set.is_hot_full = True
    assert await WriteThrough(rooms.context).run_once()
    assert rooms.steps("cold") == [7]


async def test_a_copy_to_cold_goes_on_when_the_free_space_of_hot_is_not_known(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that was full and then stops answering has no room."""
    slow_puts(rooms, monkeypatch)
    answers: list[int] = [0]

    async def free() -> int:
        if answers:
            return answers.pop()
        raise TierUnreachable("read the free space of hot: no answer")

    monkeypatch.setattr(rooms.hot_store, "free_bytes", free)
    snapshot_set = refused(rooms, 7)
    snapshot_set.is_hot_full = True
    assert await WriteThrough(rooms.context).run_once()
    assert rooms.steps("cold") == [7]


# ── after a restart of the daemon ──


async def write_through_two(tmp_path: Path) -> None:
    """Leaves step 1 in hot, which was full then, and steps 2 and 3 in cold only."""
    async with rooms_at(tmp_path, cold=("cold",)) as rooms:
        await rooms.look()
        rooms.seal(1)
        assert await rooms.persister().run_once()
        await rooms.context.claim(rooms.hot, RUN, Generation(1), rooms.context.new_claim())
        for step in (2, 3):
            rooms.seal(step).refused_by.add("hot")
            assert await WriteThrough(rooms.context).run_once()
        assert (rooms.steps("hot"), rooms.steps("cold")) == ([1], [3, 2])


def manifest_of(rooms: Rooms, tier: str, step: int) -> bytes:
    return (rooms.folder(tier, checkpoint_id(RUN, step, 1)) / layout.MANIFEST).read_bytes()


async def test_a_snapshot_that_is_in_cold_only_gets_the_same_manifest_in_hot(tmp_path: Path) -> None:
    """Its trainer sends it again before cold is listed. Two manifests of one checkpoint halt all deletions."""
    await write_through_two(tmp_path)
    async with rooms_at(tmp_path, cold=("cold",)) as rooms:
        await rooms.list_tiers("hot")
        rooms.seal(3, resent=True)
        assert await rooms.persister().run_once()
        assert manifest_of(rooms, "hot", 3) == manifest_of(rooms, "cold", 3)
        newest = rooms.seal(4)
        assert await rooms.persister().run_once()
        assert newest.manifest is not None
        assert newest.manifest.sequence == 4


@pytest.mark.parametrize("listed", [("hot", "dr"), ("hot", "cold", "dr")])
async def test_a_snapshot_that_is_in_one_cold_tier_gets_no_other_manifest_in_another(
    tmp_path: Path, listed: tuple[str, ...]
) -> None:
    await write_through_two(tmp_path)
    async with rooms_at(tmp_path, cold=("cold", "dr")) as rooms:
        await rooms.list_tiers(*listed)
        resent = rooms.seal(3, resent=True)
        resent.refused_by.add("hot")
        assert not await WriteThrough(rooms.context).run_once()
        assert rooms.steps("dr") == []
        assert "replicate" not in {incident.stage for incident in rooms.incidents.recent()}
        assert await WriteThrough(rooms.context).run_once(), "it is the persister's again"
        assert await rooms.persister().run_once()
        assert [message.tier for message in rooms.sent if isinstance(message, wire.Replicated)] == ["cold"]
        assert states(resent) == {SlotState.RETAINED}


async def test_what_was_written_through_before_is_not_doubted_once_it_is_sent_again(tmp_path: Path) -> None:
    """Deletions in cold were halted, because another node seemed to hold the generation."""
    await write_through_two(tmp_path)
    async with rooms_at(tmp_path, cold=("cold",)) as rooms:
        await rooms.look()
        assert {checkpoint.step for _, checkpoint in rooms.catalog.shared_generations()} == {2, 3}
        rooms.seal(3, resent=True)
        assert await rooms.persister().run_once()
        assert rooms.steps("hot") == [1]
        assert rooms.catalog.shared_generations() == {}


async def test_a_cold_tier_that_does_not_answer_after_a_restart_delays_a_run_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await write_through_two(tmp_path)
    monkeypatch.setattr(listing, "SEQUENCE_TIMEOUT_S", 0.01)
    listings = 0

    async def hangs(*arguments: object, **options: object) -> None:
        nonlocal listings
        listings += 1
        await asyncio.Event().wait()

    async with rooms_at(tmp_path, cold=("cold",)) as rooms:
        await rooms.list_tiers("hot")
        monkeypatch.setattr(rooms.cold["cold"].store, "list", hangs)
        for step in (4, 5, 6):
            rooms.seal(step)
            assert await rooms.persister().run_once()
        assert (rooms.steps("hot"), listings) == ([6, 5, 4, 1], 1)
