"""Listing a tier into the catalog, and recovery at start. Damage is reported and never deleted."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from tests.support.rooms import RUN, Rooms, rooms_at
from tierd.catalog.decisions import HaltReason, halted
from tierd.catalog.listing import refresh
from tierd.errors import TierUnreachable
from tierd.format.claim import Claim
from tierd.format.ids import checkpoint_id
from tierd.tiers.store import StoredObject
from tierd.transfer.partial_file import partial_name
from tierd.workers.lister import Lister
from tierd.workers.recovery import clear_uncommitted, recover

NOW_S = datetime.now(UTC).timestamp()


@pytest.fixture
async def rooms(tmp_path: Path) -> AsyncIterator[Rooms]:
    async with rooms_at(tmp_path) as rooms:
        yield rooms


async def test_recovery_deletes_incomplete_checkpoints_and_keeps_committed_ones(rooms: Rooms) -> None:
    kept = await rooms.commit("hot", step=100)
    torn = await rooms.commit("hot", step=200)
    (rooms.folder("hot", torn.id) / "manifest.json").unlink()
    (rooms.folder("hot", kept.id) / "rank-00000-of-00002.safetensors.0a1b.partial").write_bytes(b"torn")
    await recover(rooms.catalog, rooms.hot, rooms.hot_store, now_s=NOW_S)
    assert not rooms.folder("hot", torn.id).exists()
    assert sorted(os.listdir(rooms.folder("hot", kept.id))) == [
        "manifest.json",
        "rank-00000-of-00002.safetensors",
        "rank-00001-of-00002.safetensors",
    ]
    assert [entry.id for entry in rooms.catalog.entries()] == [kept.id]


async def test_recovery_keeps_a_partial_download_for_a_day(rooms: Rooms) -> None:
    (entry, *_) = (await rooms.commit("cold", step=100)).files
    folder = rooms.folder("hot", checkpoint_id(RUN, 100, 1))
    folder.mkdir(parents=True)
    partial_download = folder / partial_name(entry)
    partial_download.write_bytes(b"half")
    await recover(rooms.catalog, rooms.hot, rooms.hot_store, now_s=NOW_S)
    assert partial_download.exists()
    assert rooms.catalog.entries() == [], "it is not a checkpoint"
    await recover(rooms.catalog, rooms.hot, rooms.hot_store, now_s=NOW_S + 90_000)
    assert not folder.exists()


async def test_a_listing_updates_checkpoints_milestones_generations_and_sizes(rooms: Rooms) -> None:
    manifest = await rooms.commit("hot", step=100, milestones=("best", "first"))
    await rooms.hot.claim_generation(manifest.id.run, 7, Claim())  # pyright: ignore[reportArgumentType]
    await rooms.look()
    entry = rooms.catalog.get(manifest.id)
    assert entry is not None
    assert (entry.manifest, entry.tiers, entry.all_milestones) == (manifest, {"hot"}, {"best", "first"})
    assert rooms.catalog.generation_max(manifest.id.run) == 7


async def test_a_checkpoint_that_was_deleted_by_hand_is_removed_by_the_next_listing(rooms: Rooms) -> None:
    manifest = await rooms.commit("hot", "cold")
    await rooms.look()
    shutil.rmtree(rooms.folder("hot", manifest.id))
    await rooms.look()
    entry = rooms.catalog.get(manifest.id)
    assert entry is not None
    assert entry.tiers == {"cold"}


def truncate(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes()[:-40])


def make_newer(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"format_version": 1', b'"format_version": 99'))


def lose_shard(folder: Path) -> None:
    (folder / "rank-00001-of-00002.safetensors").unlink()


def cut_shard(folder: Path) -> None:
    os.truncate(folder / "rank-00001-of-00002.safetensors", 17)


DAMAGE = [truncate, make_newer, lose_shard, cut_shard]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("is_known_before", [False, True])
async def test_damage_is_reported_and_not_deleted_even_if_it_happens_later(
    rooms: Rooms, damage: object, is_known_before: bool
) -> None:
    healthy = await rooms.commit("hot", step=100)
    damaged = await rooms.commit("hot", step=200)
    if is_known_before:
        await rooms.look()
    damage(rooms.folder("hot", damaged.id))  # type: ignore[operator]
    before = sorted(os.listdir(rooms.folder("hot", damaged.id)))
    await recover(rooms.catalog, rooms.hot, rooms.hot_store, now_s=NOW_S)
    assert [entry.id for entry in rooms.catalog.entries()] == [healthy.id]
    assert list(rooms.catalog.unreadable()) == [("hot", damaged.id)]
    assert any(halt.reason is HaltReason.UNREADABLE_MANIFEST for halt in halted(rooms.catalog))
    assert sorted(os.listdir(rooms.folder("hot", damaged.id))) == before


async def test_repaired_damage_is_no_longer_reported(rooms: Rooms) -> None:
    manifest = await rooms.commit("hot")
    path = rooms.folder("hot", manifest.id) / "manifest.json"
    original = path.read_bytes()
    path.write_bytes(original[:-40])
    await rooms.look()
    assert rooms.catalog.unreadable() != {}
    path.write_bytes(original)
    await rooms.look()
    assert rooms.catalog.unreadable() == {}
    assert rooms.catalog.newest(manifest.id.run, "hot") == manifest


async def test_the_manifest_in_cold_is_read_even_if_the_one_in_hot_is_known(rooms: Rooms) -> None:
    """Otherwise hot would be evicted because of a cold replica that cannot be restored."""
    manifest = await rooms.commit("hot", "cold")
    truncate(rooms.folder("cold", manifest.id))
    await rooms.look()
    entry = rooms.catalog.get(manifest.id)
    assert entry is not None
    assert entry.tiers == {"hot"}
    assert list(rooms.catalog.unreadable()) == [("cold", manifest.id)]


async def test_different_manifests_of_one_checkpoint_are_reported(rooms: Rooms) -> None:
    manifest = await rooms.commit("hot", "cold")
    path = rooms.folder("cold", manifest.id) / "manifest.json"
    path.write_bytes(msgspec.structs.replace(manifest, sequence=99).encode())
    await rooms.look()
    assert "the manifest differs, compared with hot" in rooms.catalog.unreadable()["cold", manifest.id]


async def test_known_manifests_are_not_read_again(rooms: Rooms) -> None:
    manifest = await rooms.commit("hot")
    await rooms.look()
    path = rooms.folder("hot", manifest.id) / "manifest.json"
    size_bytes = path.stat().st_size
    path.write_bytes(bytes(size_bytes))  # only a reader would notice
    await rooms.look()
    assert rooms.catalog.newest(manifest.id.run, "hot") == manifest


async def test_a_tier_that_cannot_be_listed_is_not_known_and_keeps_its_entries(rooms: Rooms) -> None:
    manifest = await rooms.commit("cold")
    await rooms.look()
    root = rooms.folder("cold", manifest.id).parents[1]
    root.rename(root.with_name("unmounted"))
    await rooms.look()
    assert not rooms.catalog.tiers["cold"].is_known
    assert rooms.catalog.newest(manifest.id.run, "cold") == manifest
    assert any(halt.reason is HaltReason.TIER_UNREACHABLE for halt in halted(rooms.catalog))
    lister = Lister(rooms.context, rooms.cold["cold"], 10.0)
    with pytest.raises(TierUnreachable):
        await lister.run_once()
    root.with_name("unmounted").rename(root)
    assert await lister.run_once()
    assert rooms.catalog.tiers["cold"].is_known


async def test_a_tier_is_not_known_after_an_unexpected_error(rooms: Rooms) -> None:
    manifest = await rooms.commit("cold")
    await rooms.look()

    async def list_badly(prefix: str = "", **options: str) -> list[StoredObject]:
        raise AttributeError("'NoneType' object has no attribute 'text'")

    rooms.cold["cold"].store.list = list_badly  # type: ignore[method-assign]
    lister = Lister(rooms.context, rooms.cold["cold"], 10.0)
    with pytest.raises(TierUnreachable, match="AttributeError: 'NoneType'"):
        await lister.run_once()
    assert not rooms.catalog.tiers["cold"].is_known
    assert rooms.catalog.newest(manifest.id.run, "cold") == manifest


async def test_other_files_and_folders_are_not_checkpoints_and_are_not_deleted(rooms: Rooms) -> None:
    manifest = await rooms.commit("hot")
    root = rooms.hot_store.root
    (root / "notes.txt").write_text("mine")
    (root / RUN / "latest").symlink_to(rooms.folder("hot", manifest.id))
    (root / RUN / "7").mkdir()
    (root / RUN / "7" / "manifest.json").write_text("{}")
    await recover(rooms.catalog, rooms.hot, rooms.hot_store, now_s=NOW_S)
    assert [entry.id for entry in rooms.catalog.entries()] == [manifest.id]
    assert (root / "notes.txt").exists()
    assert (root / RUN / "7" / "manifest.json").exists()


async def test_only_uncommitted_files_are_deleted(rooms: Rooms) -> None:
    manifest = await rooms.commit("hot")
    await clear_uncommitted(rooms.hot, manifest.id)
    assert rooms.steps("hot") == [100]
    (rooms.folder("hot", manifest.id) / "manifest.json").unlink()
    await clear_uncommitted(rooms.hot, manifest.id)
    assert not rooms.folder("hot", manifest.id).exists()
    await clear_uncommitted(rooms.hot, checkpoint_id("absent", 1, 1))


async def test_the_absence_of_the_manifest_is_durable_before_a_leftover_is_deleted(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon may have been killed between the deletion of the manifest and the fsync of its folder."""
    manifest = await rooms.commit("hot")
    (rooms.folder("hot", manifest.id) / "manifest.json").unlink()
    events: list[str] = []
    fsync, unlink = os.fsync, os.unlink
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append("fsync"), fsync(fd))[1])
    monkeypatch.setattr(os, "unlink", lambda name, *, dir_fd: (events.append(name), unlink(name, dir_fd=dir_fd))[1])
    await clear_uncommitted(rooms.hot, manifest.id)
    assert events[:2] == ["manifest.json", "fsync"]
    assert {file.name for file in manifest.files} <= set(events[2:])
    assert not rooms.folder("hot", manifest.id).exists()


async def test_hundreds_of_manifests_are_read_in_batches(rooms: Rooms) -> None:
    manifest = await rooms.commit("hot", size_bytes=1)
    source = rooms.folder("hot", manifest.id)
    for step in range(1000, 1300):
        other = msgspec.structs.replace(manifest, step=step)
        folder = rooms.folder("hot", other.id)
        folder.mkdir()
        for shard in source.glob("rank-*"):
            os.link(shard, folder / shard.name)
        (folder / "manifest.json").write_bytes(other.encode())
    await refresh(rooms.catalog, rooms.hot)
    assert len(rooms.catalog.entries()) == 301
    assert rooms.catalog.unreadable() == {}


async def test_what_a_killed_daemon_may_not_have_synced_is_synced_once(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deletions follow from a listing. A command that only reads does not wait for the disk."""
    manifests = [await rooms.commit("cold", step=step) for step in (100, 200)]
    folders = {str(rooms.folder("cold", manifest.id)) for manifest in manifests}
    real, synced = os.fsync, list[str]()

    def fsync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    await refresh(rooms.catalog, rooms.cold["cold"], is_read_only=True)
    assert synced == []
    async with rooms_at(rooms.hot_store.root.parent) as restarted:
        for _ in range(2):
            await refresh(restarted.catalog, restarted.cold["cold"])
        assert sorted(synced) == sorted(folders)


async def test_folder_that_cannot_be_synced_makes_the_tier_unknown(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    """halt, not guess: nothing is deleted because of what may be lost."""
    await rooms.commit("cold")

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    await refresh(rooms.catalog, rooms.cold["cold"])
    assert not rooms.catalog.tiers["cold"].is_known
    assert "Input/output error" in rooms.catalog.tiers["cold"].error
