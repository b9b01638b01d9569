"""The restorer: opens the right checkpoint from the nearest readable replica, or answers why there is none."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import itertools
import os
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.cli import content, flip_a_bit
from tests.support.rooms import RUN, Rooms, rooms_at
from tests.support.store_contract import BytesSource
from tests.support.waiting import wait_until
from tierd.catalog.listing import enter_listing
from tierd.config.sections import ColdPolicy, LifecycleConfig, TierPolicy
from tierd.descriptors import close_all
from tierd.errors import (
    BadRequest,
    Corrupt,
    Full,
    Lost,
    NewerFormat,
    NotFound,
    TierdError,
    TierUnreachable,
    Transient,
    Unhealthy,
)
from tierd.format import checksum, layout, wire
from tierd.format.ids import CheckpointId, Rank, Run, checkpoint_id
from tierd.format.manifest import FileEntry, Manifest
from tierd.memory import tier as memory_module
from tierd.memory.slot import SlotEvent
from tierd.tiers import direct_io
from tierd.tiers.store import StoredObject
from tierd.workers import fetcher
from tierd.workers import restorer as restorer_module
from tierd.workers.reaper import Reaper
from tierd.workers.restorer import Judge, OpenCheckpoint, Restorer

SHARD = layout.shard_name(Rank(1), 2)


@pytest.fixture
async def rooms(tmp_path: Path, frozen_heap: None) -> AsyncIterator[Rooms]:
    gc.collect()
    before = open_below(tmp_path)
    async with rooms_at(tmp_path, cold=("cold", "dr")) as found:
        yield found
    gc.collect()
    wait_until(lambda: open_below(tmp_path) == before, "all descriptors to be closed")  # a thread may still read a slot


def open_below(folder: Path) -> list[str]:
    """The files of this process that are open below the folder, and its memfds. Other tests leave others open."""
    targets: list[str] = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            targets.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sorted(target for target in targets if target.startswith((str(folder), "/memfd:")))


def restorer(rooms: Rooms, judge: Judge | None = None) -> Restorer:
    async def nobody_knows(checkpoint: CheckpointId) -> bool | None:
        return None

    return Restorer(rooms.context, judge or nobody_knows)


async def ask(rooms: Rooms, worker: Restorer | None = None, **fields: Any) -> tuple[str, Manifest, list[bytes]]:
    """(tier, manifest, contents of the files); closes every descriptor."""
    found = await find_with(worker or restorer(rooms), **fields)
    shards = [
        os.pread(descriptor, entry.size_bytes, 0)
        for descriptor, entry in zip(found.descriptors, found.manifest.files, strict=True)
    ]
    close_all(found.descriptors)
    return found.tier, found.manifest, shards


async def find_with(worker: Restorer, **fields: Any) -> OpenCheckpoint:
    on_progress = fields.pop("on_progress", lambda done, total: None)
    plain = {"request": 1, "step": None, "generation": None, "milestone": None, "tier": "auto", "exclude": []}
    return await worker.find(RUN, wire.Find(**plain | fields), on_progress)


async def where(rooms: Rooms, **fields: Any) -> tuple[int, str]:
    return await where_of(rooms, None, **fields)


async def where_of(rooms: Rooms, worker: Restorer | None, **fields: Any) -> tuple[int, str]:
    tier, manifest, shards = await ask(rooms, worker, **fields)
    for entry, shard in zip(manifest.files, shards, strict=True):
        assert checksum.encode(checksum.crc64nvme(shard)) == entry.crc64nvme
    return manifest.step, tier


# ── which one ──


async def test_run_whose_checkpoints_disappeared_does_not_start_fresh(rooms: Rooms) -> None:
    """`NotFound` is the trainer's permission to begin at step 0."""
    manifest = await rooms.commit("cold", step=100)
    await rooms.list_tiers()
    shutil.rmtree(rooms.folder("cold", manifest.id).parent)
    await rooms.list_tiers()
    with pytest.raises(Lost, match=r"000000000100-g0001 has disappeared"):
        await find_with(restorer(rooms))
    with pytest.raises(NotFound):
        await find_with(restorer(rooms), step=200)


async def test_replica_in_a_tier_that_is_not_mounted_is_unreachable_and_not_damaged(rooms: Rooms) -> None:
    manifest = await rooms.commit("cold", step=100)
    await rooms.list_tiers()
    root = rooms.folder("cold", manifest.id).parents[1]
    root.rename(root.with_name("unmounted"))
    root.mkdir()
    with pytest.raises(TierUnreachable):
        await rooms.list_tiers("cold")
    with pytest.raises(TierUnreachable, match="has no marker"):
        await find_with(restorer(rooms))
    assert rooms.count("tierd_verify_failures_total", tier="cold") == 0.0


async def test_answer_names_newer_checkpoints_that_were_passed_over(rooms: Rooms) -> None:
    """Going back to an older step loses work, so the trainer must know."""
    await rooms.commit("hot", step=100)
    newer = await rooms.commit("hot", step=200)
    (rooms.folder("hot", newer.id) / "manifest.json").write_text("{")
    await rooms.look()
    found = await find_with(restorer(rooms))
    close_all(found.descriptors)
    assert found.manifest.step == 100
    assert [str(newer.id) in why for why in found.passed_over] == [True]
    found = await find_with(restorer(rooms), step=100)
    close_all(found.descriptors)
    assert found.passed_over == []


def set_later_format(rooms: Rooms, tier: str, one: Manifest) -> None:
    """Replace the manifest by one of a later format."""
    (rooms.folder(tier, one.id) / "manifest.json").write_bytes(msgspec.structs.replace(one, format_version=2).encode())


async def test_newest_checkpoint_of_a_later_format_is_refused_unless_a_step_is_named(rooms: Rooms) -> None:
    """A person must decide whether to lose the work that a later tierd saved."""
    await rooms.commit("hot", step=100)
    set_later_format(rooms, "hot", await rooms.commit("hot", step=200))
    await rooms.look()
    with pytest.raises(NewerFormat, match="format version 2") as caught:
        await ask(rooms)
    assert "resume=" in caught.value.hint
    assert await where(rooms, step=100) == (100, "hot")


async def test_older_checkpoint_of_a_later_format_is_ignored(rooms: Rooms) -> None:
    set_later_format(rooms, "hot", await rooms.commit("hot", step=100))
    await rooms.commit("cold", step=200)
    await rooms.look()
    assert await where(rooms) == (200, "cold")


@pytest.mark.parametrize(("content", "error"), [("{", Corrupt), ('{"format_version": 2}', NewerFormat)])
async def test_run_with_only_an_unreadable_manifest_is_not_answered_with_not_found(
    rooms: Rooms, content: str, error: type[TierdError]
) -> None:
    """On NotFound a trainer may start from scratch."""
    one = await rooms.commit("hot")
    (rooms.folder("hot", one.id) / "manifest.json").write_text(content)
    await rooms.look()
    with pytest.raises(error):
        await ask(rooms)
    with pytest.raises(NotFound):
        await ask(rooms, step=one.step + 1)


async def test_newest_of_a_run_counts_every_tier_and_unreadable_checkpoints(rooms: Rooms) -> None:
    worker = restorer(rooms)
    assert worker.newest(RUN) is None
    cold = await rooms.commit("cold", step=100)
    await rooms.look()
    assert worker.newest(RUN) == cold.id
    torn = await rooms.commit("hot", step=200)
    (rooms.folder("hot", torn.id) / "manifest.json").write_text("{")
    await rooms.look()
    assert worker.newest(RUN) == torn.id
    sealed = rooms.seal(300, [b"one"])
    assert worker.newest(RUN) == sealed.id
    assert worker.newest(Run("other")) is None


async def test_nearest_tier_first_and_each_by_name(rooms: Rooms) -> None:
    rooms.seal(100, [content(checkpoint_id(RUN, 100, 1), rank, 20_000) for rank in (0, 1)])
    await rooms.persister().run_once()
    await rooms.look()
    (manifest,) = rooms.catalog.manifests_in("hot")
    raw = manifest.encode()
    for tier in rooms.cold.values():
        for rank, entry in enumerate(manifest.files):
            shard = content(manifest.id, rank, 20_000)
            await tier.store.put(
                layout.file_key(manifest.id, entry.name), BytesSource(shard), size_bytes=20_000, chunk_bytes=1 << 26
            )
        await tier.commit(manifest, raw=raw)
    await rooms.look()
    assert await where(rooms) == (100, "memory")
    for tier in ("memory", "hot", "cold", "dr"):
        assert await where(rooms, tier=tier) == (100, tier)
    assert await where(rooms, exclude=[f"{manifest.id.name}@memory"]) == (100, "hot")


async def test_newest_step_of_the_newest_generation_unless_asked_otherwise(rooms: Rooms) -> None:
    await rooms.commit("hot", step=900, milestones=("best",))
    await rooms.commit("hot", step=500, generation=2)
    await rooms.commit("hot", step=600, generation=2, run="another")
    await rooms.look()
    assert await where(rooms) == (500, "hot")
    assert await where(rooms, step=900) == (900, "hot")
    assert await where(rooms, generation=1) == (900, "hot")
    assert await where(rooms, milestone="best") == (900, "hot")
    for wanted in ({"step": 600}, {"generation": 3}, {"milestone": "worst"}, {"step": 500, "generation": 1}):
        with pytest.raises(NotFound):
            await ask(rooms, **wanted)


async def test_unhealthy_checkpoint_is_passed_over_unless_allowed(rooms: Rooms) -> None:
    await rooms.commit("hot", step=100)
    await rooms.commit("hot", step=200)
    await rooms.look()
    rooms.catalog.diagnosed(checkpoint_id(RUN, 200, 1), "hot", is_healthy=False)
    assert await where(rooms) == (100, "hot")
    with pytest.raises(Unhealthy, match="000000000200"):
        await ask(rooms, step=200)
    assert await where(rooms, step=200, allow_unhealthy=True) == (200, "hot")
    assert await where(rooms, allow_unhealthy=True) == (200, "hot")
    rooms.catalog.diagnosed(checkpoint_id(RUN, 100, 1), "hot", is_healthy=False)
    with pytest.raises(Unhealthy):  # not NotFound, on which a trainer starts from scratch
        await ask(rooms)


async def test_unexamined_checkpoint_is_examined_before_it_is_handed_over(rooms: Rooms) -> None:
    await rooms.commit("hot", "cold", step=100)
    await rooms.commit("cold", step=150, sequence=2)
    rooms.seal(200)
    await rooms.look()
    asked: list[int] = []

    async def judge(checkpoint: CheckpointId) -> bool | None:
        asked.append(checkpoint.step)
        return checkpoint.step != 200

    worker = restorer(rooms, judge=judge)
    found = await find_with(worker)
    close_all(found.descriptors)
    assert (found.manifest.step, found.tier) == (150, "cold")
    assert "not finite" in found.passed_over[0]
    assert asked == [200, 150]


async def test_snapshot_released_from_memory_while_it_was_examined_is_handed_over_from_hot(rooms: Rooms) -> None:
    rooms.seal(100)
    await rooms.look()

    async def judge(checkpoint: CheckpointId) -> bool | None:
        if rooms.memory.find(checkpoint):
            await rooms.persister().run_once()
            rooms.seal(200)
            list(rooms.memory.release(RUN))
        return True

    found = await find_with(restorer(rooms, judge=judge), step=100)
    close_all(found.descriptors)
    assert (found.manifest.step, found.tier) == (100, "hot")


async def test_find_in_an_unknown_tier_is_a_bad_request(rooms: Rooms) -> None:
    with pytest.raises(BadRequest, match="'colder'"):
        await ask(rooms, tier="colder")


# ── nothing there, and nothing to be seen ──


async def test_not_found_only_if_every_tier_was_listed(rooms: Rooms, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TierUnreachable, match="not listed yet"):
        await ask(rooms)  # hot, at the start of the daemon
    await rooms.look()
    with pytest.raises(NotFound):
        await ask(rooms)

    async def refuse(prefix: str = "", **options: str) -> list[StoredObject]:
        raise TierUnreachable("503")

    monkeypatch.setattr(rooms.cold["dr"].store, "list", refuse)
    for wanted in ("auto", "dr"):
        with pytest.raises(TierUnreachable, match=r"dr .503."):
            await ask(rooms, tier=wanted)
    for wanted in ("memory", "hot", "cold"):
        with pytest.raises(NotFound):
            await ask(rooms, tier=wanted)


async def test_find_lists_the_run_in_cold_tiers_again(rooms: Rooms) -> None:
    """Another node may have put a newer checkpoint there since the last listing."""
    await rooms.commit("hot", step=100)
    await rooms.look()
    newer = await rooms.commit("cold", step=200, sequence=2)
    assert (await ask(rooms, tier="hot"))[1].step == 100
    assert (await ask(rooms))[:2] == ("cold", newer)
    assert rooms.catalog.newest(RUN, "cold") == newer


async def test_a_tier_that_does_not_answer_delays_a_find_for_a_bounded_time(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rooms.commit("hot", step=100)
    await rooms.commit("cold", step=200, sequence=2)
    await rooms.look()

    async def never(prefix: str = "", **options: str) -> list[StoredObject]:
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(rooms.cold["dr"].store, "list", never)
    monkeypatch.setattr(restorer_module, "LISTING_TIMEOUT_S", 0.05)
    found = await find_with(restorer(rooms))
    close_all(found.descriptors)
    assert found.manifest.step == 200
    assert ["dr could not be listed" in why and "a newer one may be there" in why for why in found.passed_over] == [
        True
    ]
    with pytest.raises(TierUnreachable, match=r"dr \(no answer to a listing of"):
        await ask(rooms, step=300)


async def test_an_unexpected_error_of_one_tier_does_not_end_a_find(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rooms.commit("hot", step=100)
    await rooms.look()

    async def fail(prefix: str = "", **options: str) -> list[StoredObject]:
        raise AttributeError("of botocore")

    monkeypatch.setattr(rooms.cold["dr"].store, "list", fail)
    found = await find_with(restorer(rooms))
    close_all(found.descriptors)
    assert found.manifest.step == 100
    assert "AttributeError: of botocore" in found.passed_over[0]


async def test_a_listing_that_began_earlier_does_not_undo_the_one_of_a_find(rooms: Rooms) -> None:
    await rooms.look()
    since, listing = rooms.catalog.changes, await rooms.cold["cold"].listing()
    newer = await rooms.commit("cold", step=200, sequence=2)
    assert (await ask(rooms))[1] == newer
    await enter_listing(rooms.catalog, rooms.cold["cold"], listing, since=since)
    assert rooms.catalog.newest(RUN, "cold") == newer


async def test_an_unreadable_manifest_from_another_node_is_known_after_a_find(rooms: Rooms) -> None:
    await rooms.commit("hot", step=100)
    await rooms.look()
    torn = await rooms.commit("cold", step=200, sequence=2)
    (rooms.folder("cold", torn.id) / "manifest.json").write_text("{")
    await ask(rooms)
    assert ("cold", torn.id) in rooms.catalog.unreadable()


async def test_checkpoint_with_a_missing_file_is_corrupt_not_absent(rooms: Rooms) -> None:
    """If it were absent, the trainer would start from scratch, although the checkpoint can be repaired."""
    one = await rooms.commit("hot")
    await rooms.look()
    (rooms.folder("hot", one.id) / SHARD).unlink()
    with pytest.raises(Corrupt):
        await ask(rooms)
    assert rooms.incidents.recent()[0].stage == "restore"


async def test_every_replica_excluded_as_damaged_is_corrupt(rooms: Rooms) -> None:
    one = await rooms.commit("hot")
    await rooms.look()
    with pytest.raises(Corrupt, match="its replica in hot is damaged"):
        await ask(rooms, exclude=[f"{one.id.name}@hot"])


# ── from cold ──


async def test_cold_checkpoint_is_fetched_and_committed_in_hot(rooms: Rooms) -> None:
    one = await rooms.commit("cold", milestones=("best",))
    await rooms.look()
    progress: list[tuple[int, int]] = []
    assert await where(rooms, on_progress=lambda done, total: progress.append((done, total))) == (100, "cold")
    assert (progress[0], progress[-1]) == ((0, 40_000), (40_000, 40_000))
    await rooms.look()
    entry = rooms.catalog.get(one.id)
    assert entry is not None
    assert (entry.tiers, entry.milestones["hot"]) == ({"hot", "cold"}, {"best"})
    assert await where(rooms) == (100, "hot")


async def test_concurrent_ranks_fetch_each_chunk_once(rooms: Rooms) -> None:
    await rooms.commit("cold", size_bytes=3_000_000)
    await rooms.look()
    worker = restorer(rooms)
    answers = await asyncio.gather(*(ask(rooms, worker) for _ in range(8)))
    assert {tier for tier, _, _ in answers} == {"cold"}
    assert all(shards == answers[0][2] for _, _, shards in answers)
    assert rooms.count("tierd_bytes_total", tier="cold", direction="read") == 6_000_000


async def test_damaged_cold_replica_is_followed_by_the_next_tier_and_then_an_older_checkpoint(rooms: Rooms) -> None:
    await rooms.commit("cold", step=100)
    hurt = await rooms.commit("cold", "dr", step=200, sequence=2)
    await rooms.look()
    flip_a_bit(rooms.folder("cold", hurt.id) / SHARD)
    assert await where(rooms) == (200, "dr")
    assert [(one.stage, one.kind, one.step) for one in rooms.incidents.recent()] == [("restore", "corrupt", 200)]
    assert rooms.count("tierd_verify_failures_total", tier="cold") == 1
    await rooms.hot.delete(hurt.id)
    rooms.catalog.drop(hurt.id, "hot")
    flip_a_bit(rooms.folder("dr", hurt.id) / SHARD)
    assert await where(rooms) == (100, "cold")
    assert rooms.steps("hot") == [100]
    assert not rooms.folder("hot", hurt.id).exists(), "what was fetched of it is deleted"


async def test_damaged_hot_replica_is_replaced_from_cold(rooms: Rooms) -> None:
    one = await rooms.commit("hot", "cold")
    await rooms.look()
    flip_a_bit(rooms.folder("hot", one.id) / SHARD)
    bad = [f"{one.id.name}@hot"]
    assert await where(rooms, exclude=bad) == (100, "cold")
    assert await where(rooms) == (100, "hot"), "replaced"


async def test_hot_replica_with_a_missing_file_is_replaced_from_cold(rooms: Rooms) -> None:
    one = await rooms.commit("hot", "cold")
    await rooms.look()
    (rooms.folder("hot", one.id) / SHARD).unlink()
    assert await where(rooms) == (100, "cold")
    assert await where(rooms) == (100, "hot")


async def test_unreadable_hot_manifest_does_not_hide_the_cold_replica(rooms: Rooms) -> None:
    one = await rooms.commit("hot", "cold")
    (rooms.folder("hot", one.id) / "manifest.json").write_text("{")
    (rooms.folder("hot", one.id) / SHARD).unlink()
    await rooms.look()
    assert await where(rooms) == (100, "cold")
    assert (rooms.folder("hot", one.id) / "manifest.json").read_text() == "{", "it is left for a person to see"
    assert "hot" not in rooms.catalog.get(one.id).tiers  # type: ignore[union-attr]


async def test_different_hot_checkpoint_of_the_same_name_is_not_overwritten(rooms: Rooms) -> None:
    one = await rooms.commit("cold")
    await rooms.look()
    await rooms.commit("hot", size_bytes=77)
    with pytest.raises(BadRequest, match="another checkpoint"):
        await ask(rooms)
    assert (rooms.folder("hot", one.id) / SHARD).stat().st_size == 77


def arriving(rooms: Rooms) -> list[Path]:
    return sorted(rooms.hot_store.root.rglob("*.partial"))


async def begin_and_cancel(rooms: Rooms, worker: Restorer) -> None:
    """Cancel the fetch of shards of 32 MB once the first has arrived."""
    reached: list[int] = []
    asking = asyncio.ensure_future(ask(rooms, worker, on_progress=lambda done, total: reached.append(done)))
    while not any(reached):
        await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_cancelled_fetch_opens_nothing_and_the_next_one_continues_it(rooms: Rooms) -> None:
    one = await rooms.commit("cold", size_bytes=32 << 20)
    await rooms.look()
    await begin_and_cancel(rooms, restorer(rooms))
    assert len(arriving(rooms)) == 2
    assert rooms.steps("hot") == []
    assert (await ask(rooms, restorer(rooms)))[0] == "cold"
    read_bytes = rooms.count("tierd_bytes_total", tier="cold", direction="read")
    assert read_bytes
    assert read_bytes <= one.size_bytes, "nothing is fetched twice"
    assert arriving(rooms) == []


async def test_chunks_from_one_cold_tier_stay_when_the_next_gives_the_rest(rooms: Rooms) -> None:
    one = await rooms.commit("cold", "dr", size_bytes=20_000)
    await rooms.look()
    flip_a_bit(rooms.folder("cold", one.id) / SHARD)
    assert await where(rooms) == (100, "dr")
    for tier in ("cold", "dr"):
        assert rooms.count("tierd_bytes_total", tier=tier, direction="read") == 20_000


async def test_leftovers_of_a_fetch_are_deleted_once_the_run_restores_another_checkpoint(rooms: Rooms) -> None:
    await rooms.commit("cold", size_bytes=32 << 20)
    await rooms.look()
    await begin_and_cancel(rooms, worker := restorer(rooms))
    await rooms.commit("hot", step=200, sequence=2)
    await rooms.look()
    assert await where_of(rooms, worker) == (200, "hot")
    assert arriving(rooms) == []


async def test_chunks_fetched_before_a_tier_went_away_are_kept_for_the_next_attempt(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await rooms.commit("cold", size_bytes=32 << 20)
    await rooms.look()
    read = rooms.cold["cold"].store.read

    async def goes_away(key: str, offset: int, buffer: memoryview) -> None:
        if key.endswith(SHARD):
            raise TierUnreachable("gone")
        await read(key, offset, buffer)

    rooms.hot_store.pieces_in_flight = 1
    monkeypatch.setattr(rooms.cold["cold"].store, "read", goes_away)
    worker = restorer(rooms)
    with pytest.raises(TierUnreachable, match="gone"):
        await ask(rooms, worker)
    assert len(arriving(rooms)) == 2
    monkeypatch.undo()
    assert await where_of(rooms, worker) == (100, "cold")
    assert rooms.count("tierd_bytes_total", tier="cold", direction="read") == one.size_bytes


async def test_fetch_onto_a_full_disk_deletes_what_it_wrote(rooms: Rooms, monkeypatch: pytest.MonkeyPatch) -> None:
    one = await rooms.commit("cold")
    await rooms.look()

    def no_room(fd: int, size_bytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(direct_io, "fallocate", no_room)
    monkeypatch.setattr(fetcher, "available_bytes", lambda: 0)  # so that there is no memory for it either
    with pytest.raises(Full):
        await ask(rooms)
    assert arriving(rooms) == []
    assert not rooms.folder("hot", one.id).exists()


# ── from memory ──


async def test_unpersisted_snapshot_is_restored_from_memory_with_checksums(rooms: Rooms) -> None:
    found = rooms.seal(7, [b"one", b"two"])
    await rooms.look()
    tier, manifest, shards = await ask(rooms)
    assert (tier, shards) == ("memory", [b"one", b"two"])
    assert [entry.crc64nvme for entry in manifest.files] == [
        checksum.encode(checksum.crc64nvme(shard)) for shard in shards
    ]
    assert manifest.encode(), "it can be encoded"
    assert all(one.entry is not None for one in found.snapshots.values()), "the checksums are kept"


async def test_snapshot_replaced_while_it_was_read_is_not_handed_over(rooms: Rooms) -> None:
    """Its slot may hold the next step by then, with valid checksums."""
    size_bytes = 32 << 20
    older = rooms.seal(7, [bytes(size_bytes)])
    await rooms.look()
    asking = asyncio.ensure_future(ask(rooms, tier="memory"))
    await asyncio.sleep(0)
    older.failures = 1
    rooms.seal(8, [b"newer"])
    list(rooms.memory.release(RUN))
    assert (await asking)[1].step == 8
    assert "a newer snapshot replaced it meanwhile" in rooms.incidents.recent()[0].message


async def test_find_ends_when_every_snapshot_is_replaced_while_it_is_read(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that snapshots faster than memory is read must not keep an operator's restore in a loop."""
    real, steps = memory_module.snapshot_entry, itertools.count(8)

    def replaced_while_read(view: memoryview, name: str, algorithm: str) -> FileEntry:
        entry = real(view, name, algorithm)
        (older,) = rooms.memory.complete(RUN)
        older.failures = 1
        rooms.seal(next(steps), [b"newer"])
        list(rooms.memory.release(RUN))
        return entry

    rooms.seal(7, [b"first"])
    await rooms.look()
    monkeypatch.setattr(memory_module, "snapshot_entry", replaced_while_read)
    with pytest.raises(Transient, match="a newer snapshot replaced it meanwhile"):
        async with asyncio.timeout(30):
            await ask(rooms, tier="memory")


async def test_memory_given_back_during_a_find_is_a_typed_error(rooms: Rooms) -> None:
    found = rooms.seal(7, [bytes(32 << 20)])
    asking = asyncio.ensure_future(ask(rooms, tier="memory"))
    await asyncio.sleep(0)
    for event in (SlotEvent.PERSIST, SlotEvent.PERSISTED):
        found.move(event)
    rooms.memory.leave(RUN, Rank(0), now_s=0.0)
    assert rooms.memory.forget_departed(now_s=1e9, grace_s=0.0) == [RUN]
    with pytest.raises(TierdError):
        await asking


async def test_more_files_than_a_message_carries_is_unsupported(rooms: Rooms) -> None:
    rooms.seal(7, [b"x"] * wire.DESCRIPTORS_MAX)
    await rooms.look()
    with pytest.raises(TierdError, match="a message carries 252"):
        await ask(rooms, tier="memory")


async def test_restore_during_a_deletion_in_hot_takes_the_cold_replica_and_reports_no_damage(tmp_path: Path) -> None:
    lifecycle = LifecycleConfig(hot=TierPolicy(keep_last=1), cold=ColdPolicy(keep_last=5, keep_every=0))
    async with rooms_at(tmp_path, lifecycle=lifecycle) as rooms:
        for step in (100, 200):
            await rooms.commit("hot", "cold", step=step, sequence=step)
        await rooms.look()
        real_delete = rooms.hot_store.delete
        finding: list[asyncio.Task[OpenCheckpoint]] = []

        async def delete(keys: Sequence[str]) -> None:
            await real_delete(keys[:1])
            if finding or layout.MANIFEST in keys[0]:
                return await real_delete(keys[1:])
            # The manifest and one of two shards are gone.
            find = wire.Find(request=1, step=100, generation=None, milestone=None, tier="auto", exclude=[])
            finding.append(asyncio.ensure_future(restorer(rooms).find(RUN, find, lambda done, total: None)))
            await asyncio.wait(finding, timeout=0.5)
            await real_delete(keys[1:])

        rooms.hot_store.delete = delete  # type: ignore[method-assign]
        assert await Reaper(rooms.context).run_once()
        opened = await finding[0]
        assert opened.tier == "cold"
        close_all(opened.descriptors)
        assert rooms.count("tierd_verify_failures_total", tier="hot") in (None, 0)
        await rooms.look()
        assert rooms.catalog.unreadable() == {}
