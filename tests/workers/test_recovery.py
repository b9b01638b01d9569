"""What a look at a tier tells the catalog, and what a start clears away. Damage is reported and left alone."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from tests.support.rooms import RUN, Rooms, rooms_at
from tierd.decisions import HaltReason, halted
from tierd.errors import TierUnreachable
from tierd.format.ids import checkpoint_id
from tierd.listing import refresh
from tierd.transfer.partial_file import arriving_name
from tierd.workers.recovery import Lister, clear_uncommitted, recover

NOW_S = datetime.now(UTC).timestamp()


@pytest.fixture
async def rooms(tmp_path: Path) -> AsyncIterator[Rooms]:
    async with rooms_at(tmp_path) as found:
        yield found


async def test_start_clears_what_was_being_written_and_keeps_what_was_committed(rooms: Rooms) -> None:
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


async def test_start_keeps_what_was_being_fetched_for_a_day(rooms: Rooms) -> None:
    (entry, *_) = (await rooms.commit("cold", step=100)).files
    folder = rooms.folder("hot", checkpoint_id(RUN, 100, 1))
    folder.mkdir(parents=True)
    arriving = folder / arriving_name(entry)
    arriving.write_bytes(b"half")
    await recover(rooms.catalog, rooms.hot, rooms.hot_store, now_s=NOW_S)
    assert arriving.exists()
    assert rooms.catalog.entries() == [], "it is no checkpoint"
    await recover(rooms.catalog, rooms.hot, rooms.hot_store, now_s=NOW_S + 90_000)
    assert not folder.exists()


async def test_look_tells_checkpoints_milestones_generations_and_sizes(rooms: Rooms) -> None:
    one = await rooms.commit("hot", step=100, milestones=("best", "first"))
    await rooms.hot.claim_generation(one.id.run, 7, {})  # pyright: ignore[reportArgumentType]
    await rooms.look()
    entry = rooms.catalog.get(one.id)
    assert entry is not None
    assert (entry.manifest, entry.tiers, entry.all_milestones) == (one, {"hot"}, {"best", "first"})
    assert rooms.catalog.generation_max(one.id.run) == 7


async def test_checkpoint_removed_by_hand_is_gone_at_the_next_look(rooms: Rooms) -> None:
    one = await rooms.commit("hot", "cold")
    await rooms.look()
    shutil.rmtree(rooms.folder("hot", one.id))
    await rooms.look()
    entry = rooms.catalog.get(one.id)
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
async def test_damage_is_reported_and_left_alone_even_when_it_happens_later(
    rooms: Rooms, damage: object, is_known_before: bool
) -> None:
    healthy = await rooms.commit("hot", step=100)
    hurt = await rooms.commit("hot", step=200)
    if is_known_before:
        await rooms.look()
    damage(rooms.folder("hot", hurt.id))  # type: ignore[operator]
    before = sorted(os.listdir(rooms.folder("hot", hurt.id)))
    await recover(rooms.catalog, rooms.hot, rooms.hot_store, now_s=NOW_S)
    assert [entry.id for entry in rooms.catalog.entries()] == [healthy.id]
    assert list(rooms.catalog.unreadable()) == [("hot", hurt.id)]
    assert any(halt.reason is HaltReason.UNREADABLE_MANIFEST for halt in halted(rooms.catalog))
    assert sorted(os.listdir(rooms.folder("hot", hurt.id))) == before


async def test_damage_that_was_mended_is_forgotten(rooms: Rooms) -> None:
    one = await rooms.commit("hot")
    path = rooms.folder("hot", one.id) / "manifest.json"
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    await rooms.look()
    assert rooms.catalog.unreadable() != {}
    path.write_bytes(whole)
    await rooms.look()
    assert rooms.catalog.unreadable() == {}
    assert rooms.catalog.newest(one.id.run, "hot") == one


async def test_readable_manifest_in_hot_proves_nothing_about_the_one_in_cold(rooms: Rooms) -> None:
    """Else hot would be evicted because of a cold replica that nobody can restore."""
    one = await rooms.commit("hot", "cold")
    truncate(rooms.folder("cold", one.id))
    await rooms.look()
    entry = rooms.catalog.get(one.id)
    assert entry is not None
    assert entry.tiers == {"hot"}
    assert list(rooms.catalog.unreadable()) == [("cold", one.id)]


async def test_two_tiers_that_say_different_things_of_one_checkpoint_are_reported(rooms: Rooms) -> None:
    one = await rooms.commit("hot", "cold")
    path = rooms.folder("cold", one.id) / "manifest.json"
    path.write_bytes(msgspec.structs.replace(one, sequence=99).encode())
    await rooms.look()
    assert "says something else than the one in hot" in rooms.catalog.unreadable()["cold", one.id]


async def test_known_manifests_are_not_read_again(rooms: Rooms) -> None:
    one = await rooms.commit("hot")
    await rooms.look()
    path = rooms.folder("hot", one.id) / "manifest.json"
    size_bytes = path.stat().st_size
    path.write_bytes(bytes(size_bytes))  # nobody would notice but who reads it
    await rooms.look()
    assert rooms.catalog.newest(one.id.run, "hot") == one


async def test_tier_that_cannot_be_listed_is_not_known_and_keeps_what_was_known(rooms: Rooms) -> None:
    one = await rooms.commit("cold")
    await rooms.look()
    root = rooms.folder("cold", one.id).parents[1]
    root.rename(root.with_name("unmounted"))
    await rooms.look()
    assert not rooms.catalog.tiers["cold"].is_known
    assert rooms.catalog.newest(one.id.run, "cold") == one
    assert any(halt.reason is HaltReason.TIER_UNREACHABLE for halt in halted(rooms.catalog))
    lister = Lister(rooms.catalog, rooms.cold["cold"], 10.0)
    with pytest.raises(TierUnreachable):
        await lister.run_once()
    assert lister.has_looked.is_set(), "who waits for a first look must not wait for a dead tier"
    root.with_name("unmounted").rename(root)
    assert await lister.run_once()
    assert rooms.catalog.tiers["cold"].is_known


async def test_foreign_files_and_folders_are_nobodys_checkpoint(rooms: Rooms) -> None:
    one = await rooms.commit("hot")
    root = rooms.hot_store.root
    (root / "notes.txt").write_text("mine")
    (root / RUN / "latest").symlink_to(rooms.folder("hot", one.id))
    (root / RUN / "7").mkdir()
    (root / RUN / "7" / "manifest.json").write_text("{}")
    await recover(rooms.catalog, rooms.hot, rooms.hot_store, now_s=NOW_S)
    assert [entry.id for entry in rooms.catalog.entries()] == [one.id]
    assert (root / "notes.txt").exists()
    assert (root / RUN / "7" / "manifest.json").exists()


async def test_only_uncommitted_files_are_cleared(rooms: Rooms) -> None:
    one = await rooms.commit("hot")
    await clear_uncommitted(rooms.hot, one.id)
    assert rooms.steps("hot") == [100]
    (rooms.folder("hot", one.id) / "manifest.json").unlink()
    await clear_uncommitted(rooms.hot, one.id)
    assert not rooms.folder("hot", one.id).exists()
    await clear_uncommitted(rooms.hot, checkpoint_id("absent", 1, 1))


async def test_hundreds_of_checkpoints_are_looked_at_in_batches(rooms: Rooms) -> None:
    one = await rooms.commit("hot", size_bytes=1)
    source = rooms.folder("hot", one.id)
    for step in range(1000, 1300):
        other = msgspec.structs.replace(one, step=step)
        folder = rooms.folder("hot", other.id)
        folder.mkdir()
        for shard in source.glob("rank-*"):
            os.link(shard, folder / shard.name)
        (folder / "manifest.json").write_bytes(other.encode())
    await refresh(rooms.catalog, rooms.hot)
    assert len(rooms.catalog.entries()) == 301
    assert rooms.catalog.unreadable() == {}


async def test_first_look_at_a_cold_directory_sweeps_what_killed_writers_left(rooms: Rooms) -> None:
    await rooms.commit("cold")
    left = rooms.folder("cold", checkpoint_id(RUN, 100, 1)) / "shard.0badcafe.partial"
    left.write_bytes(b"half")
    assert await Lister(rooms.catalog, rooms.cold["cold"], 1.0).run_once()
    assert not left.exists()
