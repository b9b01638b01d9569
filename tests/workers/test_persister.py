"""From slots to the hot tier: durable, whole or absent, and no run in another's way."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from tests.support.rooms import RUN, Rooms, rooms_at
from tierd.format import layout, wire
from tierd.format.ids import Rank, checkpoint_id
from tierd.format.manifest import decode
from tierd.memory.slot_states import SlotState

MIB = 1 << 20


@pytest.fixture
async def rooms(tmp_path: Path) -> AsyncIterator[Rooms]:
    async with rooms_at(tmp_path) as found:
        yield found


def shard_path(rooms: Rooms, step: int, rank: int, world_size: int) -> Path:
    return rooms.folder("hot", checkpoint_id(RUN, step, 1)) / layout.shard_name(Rank(rank), world_size)


def block(path: Path) -> None:
    """Makes the name unusable for a file, by a folder that is there; `path.rmdir()` makes room again."""
    path.mkdir(parents=True)


async def test_set_is_written_byte_by_byte_and_committed_with_what_rank_0_said(rooms: Rooms) -> None:
    shards = [os.urandom(100_000), os.urandom(5), os.urandom(4096)]
    found = rooms.seal(7, shards, milestone="best", metrics={"loss": 1.5})
    assert await rooms.persister().run_once()
    folder = rooms.folder("hot", found.id)
    assert [(folder / layout.shard_name(Rank(rank), 3)).read_bytes() for rank in range(3)] == shards
    manifest = decode((folder / "manifest.json").read_bytes(), where="hot", expect=found.id)
    assert (manifest.sequence, manifest.metrics, manifest.world_size) == (1, {"loss": 1.5}, 3)
    assert (folder / "milestone-best.json").exists()
    entry = rooms.catalog.get(found.id)
    assert entry is not None
    assert (entry.manifest, entry.tiers, entry.all_milestones) == (manifest, {"hot"}, {"best"})
    assert found.is_persisted
    assert [type(message) for message in rooms.told] == [wire.Persisted]
    assert rooms.count("tierd_snapshots_total", run=RUN, outcome="persisted") == 1
    assert rooms.count("tierd_bytes_total", tier="hot", direction="write") == sum(map(len, shards))


async def test_metrics_that_json_cannot_hold_do_not_spoil_the_manifest(rooms: Rooms) -> None:
    """JSON turns nan into null, and a manifest with null is unreadable: it would halt deletion for ever."""
    found = rooms.seal(7, metrics={"loss": math.nan, "norm": math.inf, "note": "nan"})
    await rooms.persister().run_once()
    raw = (rooms.folder("hot", found.id) / "manifest.json").read_bytes()
    assert decode(raw, where="hot").metrics == {"loss": "nan", "norm": "inf", "note": "nan"}


async def test_sets_are_numbered_in_the_order_in_which_they_were_sealed(rooms: Rooms) -> None:
    for step in (30, 40, 50):
        rooms.seal(step)
    await rooms.persister().run_once()
    assert [(one.step, one.sequence) for one in reversed(rooms.catalog.held("hot"))] == [(50, 3), (40, 2), (30, 1)]
    assert [one.id.step for one in rooms.memory.complete(RUN)] == [50]


async def test_error_in_one_rank_cancels_the_other_and_leaves_nothing_behind(rooms: Rooms) -> None:
    found = rooms.seal(7, [bytes(64 * MIB), b"small"])
    block(shard_path(rooms, 7, 1, 2))
    assert not await rooms.persister().run_once()
    assert [path for path in rooms.hot_store.root.rglob("*") if path.is_file()] == []
    assert rooms.catalog.get(found.id) is None
    assert {one.slot.state for one in found.snapshots.values()} == {SlotState.SEALED}
    (told,) = rooms.told
    assert isinstance(told, wire.Failed)
    assert (told.step, told.stage, told.is_final) == (7, "persist", False)
    assert rooms.incidents.recent()[0]["step"] == 7


async def test_whole_shards_of_a_set_that_failed_do_not_fill_the_disk(rooms: Rooms) -> None:
    """On a full disk each superseded set would else leave its first ranks' shards behind, until nothing fits."""
    rooms.seal(7, [b"small", b"small"])
    block(shard_path(rooms, 7, 1, 2))
    await rooms.persister().run_once()
    assert not shard_path(rooms, 7, 0, 2).exists()


async def test_set_that_failed_is_written_when_it_can_be(rooms: Rooms) -> None:
    rooms.seal(7, [b"a", b"b"])
    block(shard_path(rooms, 7, 1, 2))
    persister = rooms.persister()
    assert not await persister.run_once()
    shard_path(rooms, 7, 1, 2).rmdir()
    assert await persister.run_once()
    assert rooms.steps("hot") == [7]
    assert [type(message) for message in rooms.told] == [wire.Failed, wire.Persisted]


async def test_failure_of_one_run_does_not_hold_up_another(rooms: Rooms) -> None:
    rooms.seal(7, run="broken")
    block(rooms.folder("hot", checkpoint_id("broken", 7, 1)) / layout.shard_name(Rank(0), 1))
    rooms.seal(8, run="healthy")
    assert not await rooms.persister().run_once()
    assert rooms.steps("hot", "healthy") == [8]
    assert rooms.settled == ["broken", "healthy"]


async def test_newer_set_supersedes_one_that_cannot_be_written(rooms: Rooms) -> None:
    persister = rooms.persister()
    older = rooms.seal(7)
    block(shard_path(rooms, 7, 0, 1))
    await persister.run_once()
    rooms.seal(8)
    assert await persister.run_once(), "what was given up is no trouble any more"
    assert rooms.steps("hot") == [8]
    assert rooms.memory.find(older.id) is None
    assert {one.slot.state for one in older.snapshots.values()} == {SlotState.FREE}


async def test_snapshot_sent_again_after_its_commit_is_not_written_twice(rooms: Rooms) -> None:
    rooms.seal(7)
    await rooms.persister().run_once()
    path = rooms.folder("hot", checkpoint_id(RUN, 7, 1)) / "manifest.json"
    before = path.stat().st_ino
    async with rooms_at(rooms.hot_store.root.parent) as restarted:
        await restarted.look()
        restarted.seal(7, resent=True)
        assert await restarted.persister().run_once()
        assert [type(message) for message in restarted.told] == [wire.Persisted]
        assert restarted.count("tierd_bytes_total", tier="hot", direction="write") == 0
        assert path.stat().st_ino == before
        restarted.seal(8)
        await restarted.persister().run_once()
        newest = restarted.catalog.newest(RUN, "hot")
        assert newest is not None
        assert newest.sequence == 2


async def test_snapshot_sent_again_that_has_gone_on_to_cold_is_not_written_either(rooms: Rooms) -> None:
    """A second manifest, with a later sequence, would be another checkpoint of the same name."""
    rooms.seal(7)
    await rooms.persister().run_once()
    manifest = rooms.catalog.held("hot")[0]
    rooms.catalog.add(manifest, "cold")
    rooms.catalog.drop(manifest.id, "hot")
    await rooms.hot.delete(manifest.id)
    rooms.seal(8)  # makes 7 needless in memory
    await rooms.persister().run_once()
    rooms.seal(7, resent=True)
    await rooms.persister().run_once()
    assert rooms.steps("hot") == [8]


async def test_another_checkpoint_of_the_same_name_is_never_overwritten_nor_cleared_away(rooms: Rooms) -> None:
    foreign = await rooms.commit("hot", step=7)
    rooms.seal(7, [b"other", b"bytes"])
    before = {path: path.read_bytes() for path in rooms.folder("hot", foreign.id).iterdir()}
    assert not await rooms.persister().run_once()
    assert {path: path.read_bytes() for path in rooms.folder("hot", foreign.id).iterdir()} == before
    assert rooms.incidents.recent()[0]["kind"] == "corrupt"


async def test_cancelled_in_the_middle_nothing_is_listed_and_the_snapshot_is_still_there(rooms: Rooms) -> None:
    found = rooms.seal(7, [bytes(64 * MIB)])
    run = asyncio.ensure_future(rooms.persister().run_once())
    while not list(rooms.hot_store.root.rglob("*.partial")):
        await asyncio.sleep(0)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert (await rooms.hot.listing()).committed == set()
    assert list(rooms.hot_store.root.rglob("*.partial")) == []
    assert found.is_pending


async def test_bytes_that_differ_from_checksums_told_before_are_not_committed(rooms: Rooms) -> None:
    """A restore from memory has told the checksums already: what is written must be the same snapshot."""
    found = rooms.seal(7, [b"state"])
    snapshot = found.snapshots[Rank(0)]
    persister = rooms.persister()
    await persister.run_once()
    assert snapshot.entry is not None
    snapshot.entry = msgspec.structs.replace(snapshot.entry, chunks=["AAAAAAAAAAA="])
    rooms.catalog.drop(found.id, "hot")
    await rooms.hot.delete(found.id)
    rooms.memory.leave(RUN, Rank(0), now_s=0.0)
    found.snapshots[Rank(0)].slot.state = SlotState.SEALED
    assert not await persister.run_once()
    assert rooms.incidents.recent()[0]["kind"] == "corrupt"
    assert rooms.steps("hot") == []
