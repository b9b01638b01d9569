"""Persisting snapshots from slots to the hot tier."""

from __future__ import annotations

import asyncio
import errno
import math
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.cli import content
from tests.support.rooms import RUN, Rooms, rooms_at
from tierd.catalog.listing import next_sequence
from tierd.errors import TierUnreachable
from tierd.format import layout, wire
from tierd.format.ids import Rank, checkpoint_id
from tierd.format.manifest import decode
from tierd.memory.slot import SlotEvent, SlotState
from tierd.tiers import direct_io

MIB = 1 << 20


@pytest.fixture
async def rooms(tmp_path: Path) -> AsyncIterator[Rooms]:
    async with rooms_at(tmp_path) as rooms:
        yield rooms


def shard_path(rooms: Rooms, step: int, rank: int, world_size: int) -> Path:
    return rooms.folder("hot", checkpoint_id(RUN, step, 1)) / layout.shard_name(Rank(rank), world_size)


def make_unwritable(path: Path) -> None:
    """Create a folder, so that no file with this name can be written; `path.rmdir()` ends that."""
    path.mkdir(parents=True)


async def test_a_set_is_written_unchanged_and_committed_with_the_fields_of_rank_0(rooms: Rooms) -> None:
    shards = [os.urandom(100_000), os.urandom(5), os.urandom(4096)]
    snapshot_set = rooms.seal(7, shards, milestone="best", metrics={"loss": 1.5})
    assert await rooms.persister().run_once()
    folder = rooms.folder("hot", snapshot_set.id)
    assert [(folder / layout.shard_name(Rank(rank), 3)).read_bytes() for rank in range(3)] == shards
    manifest = decode((folder / "manifest.json").read_bytes(), where="hot", expect=snapshot_set.id)
    assert (manifest.sequence, manifest.metrics, manifest.world_size) == (1, {"loss": 1.5}, 3)
    assert (folder / "milestone-best.json").exists()
    entry = rooms.catalog.get(snapshot_set.id)
    assert entry is not None
    assert (entry.manifest, entry.tiers, entry.all_milestones) == (manifest, {"hot"}, {"best"})
    assert not snapshot_set.is_pending
    assert [type(message) for message in rooms.sent] == [wire.Persisted]
    assert rooms.count("tierd_snapshots_total", run=RUN, outcome="persisted") == 1
    assert rooms.count("tierd_bytes_total", tier="hot", direction="write") == sum(map(len, shards))


async def test_metrics_that_json_cannot_contain_are_written_as_text(rooms: Rooms) -> None:
    """The JSON encoder writes nan as null, and a manifest with null is unreadable and halts deletion."""
    snapshot_set = rooms.seal(7, metrics={"loss": math.nan, "norm": math.inf, "note": "nan"})
    await rooms.persister().run_once()
    raw = (rooms.folder("hot", snapshot_set.id) / "manifest.json").read_bytes()
    assert decode(raw, where="hot").metrics == {"loss": "nan", "norm": "inf", "note": "nan"}


async def test_sequences_follow_the_order_of_sealing(rooms: Rooms) -> None:
    for step in (30, 40, 50):
        rooms.seal(step)
    await rooms.persister().run_once()
    assert [(manifest.step, manifest.sequence) for manifest in reversed(rooms.catalog.manifests_in("hot"))] == [
        (50, 3),
        (40, 2),
        (30, 1),
    ]
    assert [snapshot_set.id.step for snapshot_set in rooms.memory.complete(RUN)] == [50]


async def test_an_error_in_one_shard_cancels_the_others_and_leaves_no_file(rooms: Rooms) -> None:
    snapshot_set = rooms.seal(7, [bytes(64 * MIB), b"small"])
    make_unwritable(shard_path(rooms, 7, 1, 2))
    assert not await rooms.persister().run_once()
    assert [path for path in rooms.hot_store.root.rglob("*") if path.is_file()] == []
    assert rooms.catalog.get(snapshot_set.id) is None
    assert {snapshot.slot.state for snapshot in snapshot_set.snapshots.values()} == {SlotState.SEALED}
    (message,) = rooms.sent
    assert isinstance(message, wire.Failed)
    assert (message.step, message.stage, message.is_final) == (7, "persist", False)
    assert rooms.incidents.recent()[0].step == 7


async def test_complete_shards_of_a_failed_set_are_deleted(rooms: Rooms) -> None:
    """Otherwise, each superseded set would leave shards on a full disk until nothing fits."""
    rooms.seal(7, [b"small", b"small"])
    make_unwritable(shard_path(rooms, 7, 1, 2))
    await rooms.persister().run_once()
    assert not shard_path(rooms, 7, 0, 2).exists()


async def test_a_failed_set_is_persisted_by_a_later_pass(rooms: Rooms) -> None:
    rooms.seal(7, [b"a", b"b"])
    make_unwritable(shard_path(rooms, 7, 1, 2))
    persister = rooms.persister()
    assert not await persister.run_once()
    shard_path(rooms, 7, 1, 2).rmdir()
    assert await persister.run_once()
    assert rooms.steps("hot") == [7]
    assert [type(message) for message in rooms.sent] == [wire.Failed, wire.Persisted]


async def test_a_failure_of_one_run_does_not_delay_another(rooms: Rooms) -> None:
    rooms.seal(7, run="broken")
    make_unwritable(rooms.folder("hot", checkpoint_id("broken", 7, 1)) / layout.shard_name(Rank(0), 1))
    rooms.seal(8, run="healthy")
    assert not await rooms.persister().run_once()
    assert rooms.steps("hot", "healthy") == [8]
    assert rooms.events == [("persist_ended", "broken"), ("persist_ended", "healthy")]


async def test_a_newer_set_supersedes_a_failed_one(rooms: Rooms) -> None:
    persister = rooms.persister()
    older = rooms.seal(7)
    make_unwritable(shard_path(rooms, 7, 0, 1))
    await persister.run_once()
    rooms.seal(8)
    assert await persister.run_once(), "the superseded set is not a failure"
    assert rooms.steps("hot") == [8]
    assert rooms.memory.find(older.id) is None
    assert {snapshot.slot.state for snapshot in older.snapshots.values()} == {SlotState.FREE}


async def test_a_snapshot_that_is_resent_after_its_commit_is_not_written_again(rooms: Rooms) -> None:
    rooms.seal(7)
    await rooms.persister().run_once()
    path = rooms.folder("hot", checkpoint_id(RUN, 7, 1)) / "manifest.json"
    before = path.stat().st_ino
    async with rooms_at(rooms.hot_store.root.parent) as restarted:
        await restarted.look()
        restarted.seal(7, resent=True)
        assert await restarted.persister().run_once()
        assert [type(message) for message in restarted.sent] == [wire.Persisted]
        assert restarted.count("tierd_bytes_total", tier="hot", direction="write") == 0
        assert path.stat().st_ino == before
        restarted.seal(8)
        await restarted.persister().run_once()
        newest = restarted.catalog.newest(RUN, "hot")
        assert newest is not None
        assert newest.sequence == 2


async def test_a_resent_snapshot_that_is_only_in_cold_is_not_written_again(rooms: Rooms) -> None:
    """A second manifest with a later sequence would be another checkpoint with the same id."""
    rooms.seal(7)
    await rooms.persister().run_once()
    manifest = rooms.catalog.manifests_in("hot")[0]
    rooms.catalog.add(manifest, "cold")
    rooms.catalog.drop(manifest.id, "hot")
    await rooms.hot.delete(manifest.id)
    rooms.seal(8)  # replaces step 7 in memory
    await rooms.persister().run_once()
    rooms.seal(7, resent=True)
    await rooms.persister().run_once()
    assert rooms.steps("hot") == [8]


@pytest.mark.parametrize("tier", ["hot", "cold"])
@pytest.mark.parametrize(
    ("contents", "resent"),
    [((b"other", b"bytes"), False), ((b"other", b"bytes"), True), (None, False), ((b"fewer ranks",), True)],
)
async def test_another_checkpoint_with_the_same_id_is_not_taken_for_the_snapshot(
    rooms: Rooms, tier: str, contents: tuple[bytes, ...] | None, resent: bool
) -> None:
    """`Persisted` may be said only of the bytes in memory. None: the same bytes, from a second trainer."""
    committed = await rooms.commit(tier, step=7)
    await rooms.look()
    same = [content(committed.id, rank, 20_000) for rank in (0, 1)]
    snapshot_set = rooms.seal(7, contents or same, resent=resent)
    assert not await rooms.persister().run_once()
    (message,) = rooms.sent
    assert isinstance(message, wire.Failed)
    assert message.kind == "corrupt"
    assert "under this name" in message.message
    assert snapshot_set.is_pending
    assert rooms.steps(tier) == [7]


async def test_a_checkpoint_that_is_listed_during_the_write_is_not_taken_for_the_snapshot(rooms: Rooms) -> None:
    """The first commit of a run lists the cold tiers: one may have a checkpoint of another node with the same id."""
    committed = await rooms.commit("cold", step=7)
    await rooms.list_tiers("hot")
    rooms.seal(7, (b"other", b"bytes"))
    assert not await rooms.persister().run_once()
    assert [(type(message), getattr(message, "kind", "")) for message in rooms.sent] == [(wire.Failed, "corrupt")]
    assert (rooms.steps("hot"), rooms.steps("cold")) == ([], [7])
    assert rooms.catalog.manifests_in("cold") == [committed]


async def test_a_resent_snapshot_with_the_committed_bytes_is_persisted_and_replicated(rooms: Rooms) -> None:
    committed = await rooms.commit("hot", "cold", step=7)
    await rooms.look()
    snapshot_set = rooms.seal(7, [content(committed.id, rank, 20_000) for rank in (0, 1)], resent=True)
    assert await rooms.persister().run_once()
    assert [type(message) for message in rooms.sent] == [wire.Persisted, wire.Replicated]
    assert snapshot_set.manifest == committed


async def test_another_checkpoint_with_the_same_id_is_never_overwritten_or_deleted(rooms: Rooms) -> None:
    foreign = await rooms.commit("hot", step=7)
    rooms.seal(7, [b"other", b"bytes"])
    before = {path: path.read_bytes() for path in rooms.folder("hot", foreign.id).iterdir()}
    assert not await rooms.persister().run_once()
    assert {path: path.read_bytes() for path in rooms.folder("hot", foreign.id).iterdir()} == before
    assert rooms.incidents.recent()[0].kind == "corrupt"


async def test_a_cancelled_pass_commits_nothing_and_keeps_the_snapshot(rooms: Rooms) -> None:
    snapshot_set = rooms.seal(7, [bytes(64 * MIB)])
    run = asyncio.ensure_future(rooms.persister().run_once())
    while not list(rooms.hot_store.root.rglob("*.partial")):
        await asyncio.sleep(0)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert (await rooms.hot.listing()).committed == set()
    assert list(rooms.hot_store.root.rglob("*.partial")) == []
    assert snapshot_set.is_pending


async def test_bytes_that_differ_from_earlier_checksums_are_not_committed(rooms: Rooms) -> None:
    """A restore from memory may have sent the checksums to a trainer: the same bytes must be committed."""
    snapshot_set = rooms.seal(7, [b"state"])
    snapshot = snapshot_set.snapshots[Rank(0)]
    persister = rooms.persister()
    await persister.run_once()
    assert snapshot.entry is not None
    snapshot.entry = msgspec.structs.replace(snapshot.entry, chunks=["AAAAAAAAAAA="])
    rooms.catalog.drop(snapshot_set.id, "hot")
    await rooms.hot.delete(snapshot_set.id)
    rooms.memory.leave(RUN, Rank(0), now_s=0.0)
    snapshot.slot.state = SlotState.SEALED
    assert not await persister.run_once()
    assert rooms.incidents.recent()[0].kind == "corrupt"
    assert rooms.steps("hot") == []


# ── a full disk ──


def limit_space(rooms: Rooms, monkeypatch: pytest.MonkeyPatch, capacity_bytes: int) -> None:
    """Hot has no space beyond `capacity_bytes` of shards, as with a quota: the free space does not show it."""
    real = direct_io.fallocate

    def fallocate(fd: int, size_bytes: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        used = sum(file.stat().st_size for file in rooms.hot_store.root.rglob("*.safetensors"))
        if path.startswith(str(rooms.hot_store.root)) and used + size_bytes > capacity_bytes:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, size_bytes)

    monkeypatch.setattr(direct_io, "fallocate", fallocate)


async def commit_three(rooms: Rooms, *tiers: str) -> None:
    for number, step in enumerate((100, 200, 300)):
        await rooms.commit(*tiers, step=step, sequence=number + 1)
    await rooms.look()


async def test_a_full_hot_disk_makes_room_by_evicting_what_cold_holds(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    await commit_three(rooms, "hot", "cold")
    limit_space(rooms, monkeypatch, 125_000)
    rooms.seal(400, [bytes(20_000), bytes(20_000)])
    assert await rooms.persister().run_once()
    assert rooms.steps("hot") == [400, 300, 200]
    assert rooms.steps("cold") == [300, 200, 100]
    assert [type(message) for message in rooms.sent] == [wire.Persisted]
    assert ("hot_refused",) not in rooms.events


async def test_room_is_made_before_a_write_that_will_not_fit(rooms: Rooms, monkeypatch: pytest.MonkeyPatch) -> None:
    await commit_three(rooms, "hot", "cold")
    written: list[str] = []
    real_put = rooms.hot_store.put

    async def put(key: str, *arguments: object, **options: object) -> object:
        written.append(f"{len(rooms.steps('hot'))} in hot")
        return await real_put(key, *arguments, **options)  # type: ignore[arg-type]

    async def free_bytes() -> int:
        return 1 << 20

    monkeypatch.setattr(rooms.hot_store, "put", put)
    monkeypatch.setattr(rooms.hot_store, "free_bytes", free_bytes)
    rooms.seal(400, [bytes(20_000), bytes(20_000)])
    assert await rooms.persister().run_once()
    assert written[0] == "2 in hot"
    assert rooms.incidents.recent() == []


@pytest.mark.parametrize("tiers", [("hot",), ("cold",)])
async def test_a_snapshot_that_hot_has_no_space_for_is_left_to_the_cold_tiers(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch, tiers: tuple[str, ...]
) -> None:
    await commit_three(rooms, *tiers)
    limit_space(rooms, monkeypatch, 1000)
    snapshot_set = rooms.seal(400, [bytes(20_000)])
    assert not await rooms.persister().run_once()
    assert snapshot_set.refused_by == {"hot"}
    assert rooms.events[-2:] == [("hot_refused",), ("persist_ended", RUN)]
    (message,) = rooms.sent
    assert isinstance(message, wire.Failed)
    assert (message.kind, message.is_final) == ("full", False)
    assert rooms.steps("hot") == ([300, 200, 100] if tiers == ("hot",) else []), "no last replica is deleted"


async def test_an_attempt_that_is_cancelled_leaves_the_refusal_of_the_former_one(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error at the end of a drain names the tiers that refused the snapshot."""
    limit_space(rooms, monkeypatch, 1000)
    snapshot_set = rooms.seal(400, [bytes(20_000)])
    persister = rooms.persister()
    assert not await persister.run_once()

    async def put(key: str, *arguments: object, **options: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(rooms.hot_store, "put", put)
    attempt = asyncio.ensure_future(persister.run_once())
    await asyncio.wait([attempt], timeout=0.05)
    attempt.cancel()
    await asyncio.wait([attempt])
    assert snapshot_set.refused_by == {"hot"}


async def test_a_hot_disk_that_fails_twice_leaves_the_snapshot_to_the_cold_tiers(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def put(key: str, *arguments: object, **options: object) -> object:
        raise TierUnreachable("write: Read-only file system")

    monkeypatch.setattr(rooms.hot_store, "put", put)
    snapshot_set = rooms.seal(400)
    persister = rooms.persister()
    assert not await persister.run_once()
    assert snapshot_set.refused_by == set(), "an error that passes is tried again in hot"
    assert not await persister.run_once()
    assert snapshot_set.refused_by == {"hot"}
    assert rooms.events.count(("hot_refused",)) == 1


async def test_a_snapshot_that_is_being_written_to_cold_is_not_written_to_hot(rooms: Rooms) -> None:
    copied = rooms.seal(7)
    copied.move(SlotEvent.PERSIST)
    other = rooms.seal(8, run="other")
    assert await rooms.persister().run_once()
    assert rooms.steps("hot") == []
    assert not other.is_pending
    copied.move(SlotEvent.PERSISTED)


async def test_once_there_is_space_again_snapshots_go_to_hot(rooms: Rooms, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_space(rooms, monkeypatch, 1000)
    snapshot_set = rooms.seal(7, [bytes(20_000)])
    persister = rooms.persister()
    assert not await persister.run_once()
    monkeypatch.undo()
    assert await persister.run_once()
    assert rooms.steps("hot") == [7]
    assert not snapshot_set.is_pending


async def test_the_last_snapshot_of_a_run_that_stops_is_written_first(rooms: Rooms) -> None:
    for step in (10, 20, 30):
        rooms.seal(step)
    rooms.memory.pending()[2].is_last = True
    assert [each.id.step for each in rooms.memory.pending()] == [30, 10, 20]


async def test_a_resent_snapshot_that_only_cold_has_is_reported_for_cold(rooms: Rooms) -> None:
    committed = await rooms.commit("cold", step=7)
    await rooms.look()
    rooms.seal(7, [content(committed.id, rank, 20_000) for rank in (0, 1)], resent=True)
    assert await rooms.persister().run_once()
    assert rooms.sent == [wire.Replicated(step=7, generation=1, tier="cold")]


async def test_sequences_that_are_asked_for_at_once_all_wait_for_the_listing_of_cold(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a start, the persister and the write-through may ask for the same run."""
    await rooms.commit("hot", step=100, sequence=3)
    await rooms.commit("cold", step=150, sequence=20)
    await rooms.list_tiers("hot")
    cold = rooms.cold["cold"]
    real_list = cold.store.list

    async def slow_list(*arguments: Any, **options: Any) -> Any:
        await asyncio.sleep(0.05)
        return await real_list(*arguments, **options)

    monkeypatch.setattr(cold.store, "list", slow_list)
    asking = [
        next_sequence(rooms.catalog, [cold], RUN, rooms.context.identities, in_memory=lambda run: 0) for _ in range(2)
    ]
    assert await asyncio.gather(*asking) == [21, 21]
