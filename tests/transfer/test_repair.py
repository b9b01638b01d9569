from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.bucket import Bucket
from tests.support.cli import assert_same_files, folder_of
from tests.support.damage import WAYS, flip, lose, rot
from tests.support.kill import kill_when_stalled
from tests.support.rooms import Rooms, rooms_at
from tests.support.s3 import BUCKET
from tests.support.s3_store import s3_store
from tierd.errors import TierUnreachable
from tierd.format import layout
from tierd.format.manifest import Manifest
from tierd.tiers.checkpoint_copy import copy_checkpoint
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.tier import Tier
from tierd.transfer.repair import Repair, repair_replica
from tierd.transfer.verify import verify_replica


@pytest.fixture
async def rooms(tmp_path: Path) -> AsyncIterator[Rooms]:
    async with rooms_at(tmp_path) as found:
        yield found


async def repaired(rooms: Rooms, tier: Tier, manifest: Manifest, *others: Tier) -> Repair:
    found = await verify_replica(tier, manifest.id)
    assert found is not None
    assert found.problems
    return await repair_replica(tier, manifest.id, found, [*rooms.tiers.values(), *others])


async def is_whole(tier: Tier, manifest: Manifest) -> bool:
    found = await verify_replica(tier, manifest.id)
    return found is not None and not found.problems


# ── directories ──


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("bad", "good"), [("hot", "cold"), ("cold", "hot")])
async def test_only_the_bad_file_is_replaced_from_the_other_tier(rooms: Rooms, bad: str, good: str, way: str) -> None:
    made = await rooms.commit("hot", "cold")
    damaged, untouched = (entry.name for entry in made.files)
    folder = rooms.folder(bad, made.id)
    before = (folder / untouched).stat()
    root = folder.parents[1]
    WAYS[way](root, made, damaged)

    found = await repaired(rooms, rooms.tiers[bad], made)

    assert (found.repaired, found.refused) == ({damaged: good}, [])
    assert await is_whole(rooms.tiers[bad], made)
    assert (folder / untouched).stat().st_ino == before.st_ino
    assert (folder / damaged).read_bytes() == (rooms.folder(good, made.id) / damaged).read_bytes()


async def test_newest_damaged_file_is_kept_unlisted_until_its_checkpoint_is_deleted(
    rooms: Rooms,
) -> None:
    made = await rooms.commit("hot", "cold")
    name = made.files[0].name
    path = rooms.folder("hot", made.id) / name
    before = await rooms.hot.listing()
    damaged = b""
    for offset in (0, 100):
        damaged = bytearray(path.read_bytes())
        damaged[offset] ^= 1
        path.write_bytes(damaged)
        await repaired(rooms, rooms.hot, made)
    aside = path.with_name(layout.damaged_copy_name(name))
    assert aside.read_bytes() == damaged
    assert await rooms.hot.listing() == before
    assert len(list(path.parent.iterdir())) == len(made.files) + 2  # the manifest and the damaged copy
    assert await rooms.hot_store.sweep_partials() == 0

    await rooms.hot.delete(made.id)
    assert not path.parent.exists()


async def test_two_replicas_with_different_bad_files_repair_each_other(rooms: Rooms, tmp_path: Path) -> None:
    made = await rooms.commit("hot", "cold")
    flip(tmp_path / "hot", made, made.files[0].name)
    flip(tmp_path / "cold", made, made.files[1].name)

    for name in ("hot", "cold"):
        assert (await repaired(rooms, rooms.tiers[name], made)).refused == []

    assert await is_whole(rooms.hot, made)
    assert await is_whole(rooms.cold["cold"], made)


async def test_file_that_is_bad_everywhere_stays_and_the_others_are_repaired(rooms: Rooms, tmp_path: Path) -> None:
    made = await rooms.commit("hot", "cold")
    everywhere, once = (entry.name for entry in made.files)
    for root in (tmp_path / "hot", tmp_path / "cold"):
        flip(root, made, everywhere)
    lose(tmp_path / "hot", made, once)
    damaged = (folder_of(tmp_path / "hot", made) / everywhere).read_bytes()

    found = await repaired(rooms, rooms.hot, made)

    assert found.repaired == {once: "cold"}
    assert "chunk 0 of 1" in found.refused[0]
    assert not found.is_for_later
    assert (folder_of(tmp_path / "hot", made) / everywhere).read_bytes() == damaged
    assert len(list(folder_of(tmp_path / "hot", made).iterdir())) == len(made.files) + 1  # no damaged copy


async def test_repair_with_an_unreachable_source_is_for_later(rooms: Rooms, tmp_path: Path) -> None:
    made = await rooms.commit("hot")
    flip(tmp_path / "hot", made, made.files[0].name)
    away = Tier("dr", DirectoryStore(tmp_path / "unmounted", create=False))
    found = await repaired(rooms, rooms.hot, made, away)
    assert found.is_for_later
    assert "dr: " in found.refused[0]
    await away.store.close()


# ── the manifest itself ──


@pytest.mark.parametrize("is_file_missing", [False, True])
async def test_unreadable_manifest_is_rebuilt_when_the_files_match_it(rooms: Rooms, is_file_missing: bool) -> None:
    made = await rooms.commit("hot", "cold")
    path = rooms.folder("hot", made.id) / layout.MANIFEST
    path.write_bytes(path.read_bytes()[:50])
    if is_file_missing:
        (path.parent / made.files[0].name).unlink()

    found = await repaired(rooms, rooms.hot, made)

    assert found.repaired[layout.MANIFEST] == "cold"
    assert found.refused == []
    assert_same_files(rooms.folder("cold", made.id), rooms.folder("hot", made.id))


async def test_unreadable_manifest_beside_other_files_is_left_alone(rooms: Rooms, tmp_path: Path) -> None:
    made = await rooms.commit("hot", "cold")
    path = rooms.folder("hot", made.id) / layout.MANIFEST
    path.write_bytes(b"{")
    flip(tmp_path / "hot", made, made.files[1].name)
    found = await repaired(rooms, rooms.hot, made)
    assert found.repaired == {}
    assert "has other bytes" in found.refused[0]
    assert path.read_bytes() == b"{"


# ── buckets ──


def bucket(served: Bucket) -> Tier:
    return Tier("s3", s3_store(f"s3://{BUCKET}/deep", endpoint_url=served.url, part_bytes_min=4096, name="s3"))


@pytest.mark.parametrize("served", [{}, {"keeps_checksums": False}], indirect=True, ids=["checksums", "no checksums"])
@pytest.mark.parametrize("is_noticed", [True, False])
async def test_damaged_object_is_sent_again_although_the_bucket_reports_the_right_checksum(
    rooms: Rooms, served: Bucket, is_noticed: bool
) -> None:
    cold = bucket(served)
    made = await rooms.commit("hot")
    await copy_checkpoint(made, rooms.hot, cold)
    keys = set(served.objects)
    key = rot(served, "deep", made, made.files[0].name, is_noticed=is_noticed)

    found = await repaired(rooms, cold, made)

    assert (found.repaired, found.refused) == ({made.files[0].name: "hot"}, [])
    path = rooms.folder("hot", made.id) / made.files[0].name
    assert served.objects[key].content == path.read_bytes()
    assert set(served.objects) == keys
    assert await is_whole(cold, made)
    await cold.store.close()


async def test_hot_is_repaired_from_a_bucket_unless_its_object_is_bad_too(
    rooms: Rooms, served: Bucket, tmp_path: Path
) -> None:
    cold = bucket(served)
    made = await rooms.commit("hot")
    await copy_checkpoint(made, rooms.hot, cold)
    bad_in_both, bad_in_hot = (entry.name for entry in made.files)
    flip(tmp_path / "hot", made, bad_in_both)
    lose(tmp_path / "hot", made, bad_in_hot)
    rot(served, "deep", made, bad_in_both, is_noticed=False)
    found = await repaired(rooms, rooms.hot, made, cold)
    assert found.repaired == {bad_in_hot: "s3"}
    assert len(found.refused) == 1
    await cold.store.close()


async def test_bucket_that_becomes_unreachable_during_a_repair_keeps_its_object(rooms: Rooms, served: Bucket) -> None:
    cold = bucket(served)
    made = await rooms.commit("hot")
    await copy_checkpoint(made, rooms.hot, cold)
    key = rot(served, "deep", made, made.files[0].name, is_noticed=True)
    before = served.objects[key]
    served.script = lambda operation, key: "AccessDenied" if operation.startswith("put") else ""
    found = await repaired(rooms, cold, made)
    assert found.is_for_later
    assert served.objects[key] == before
    served.script = lambda operation, key: "AccessDenied"
    with pytest.raises(TierUnreachable):
        await verify_replica(cold, made.id)
    await cold.store.close()


# ── killed ──

REPAIR = """
import asyncio, sys
from pathlib import Path
from tierd.format.ids import checkpoint_id
from tierd.tiers import new_file
from tierd.tiers.directory import DirectoryStore
from tierd.transfer.repair import repair_replica
from tierd.tiers.tier import Tier
from tierd.transfer.verify import verify_replica

def stall(*_, **__):
    print("stalled", flush=True)
    while True:
        pass

class Source(DirectoryStore):
    async def read(self, key, offset, buffer):
        if sys.argv[3] == "while it reads":
            stall()
        await super().read(key, offset, buffer)

async def main():
    if sys.argv[3] == "before the commit":
        new_file.NewFile.commit = stall
    hot, cold = Tier("hot", DirectoryStore(Path(sys.argv[1]))), Tier("cold", Source(Path(sys.argv[2])))
    checkpoint = checkpoint_id("run42", 100, 1)
    found = await verify_replica(hot, checkpoint)
    await repair_replica(hot, checkpoint, found, [cold])

asyncio.run(main())
"""


@pytest.mark.parametrize("instant", ["while it reads", "before the commit"])
async def test_killed_repair_changes_nothing_and_the_next_one_succeeds(
    rooms: Rooms, tmp_path: Path, instant: str
) -> None:
    made = await rooms.commit("hot", "cold")
    name = made.files[0].name
    flip(tmp_path / "hot", made, name)
    damaged = (rooms.folder("hot", made.id) / name).read_bytes()
    before = await rooms.hot.listing()

    await asyncio.to_thread(kill_when_stalled, REPAIR, str(tmp_path / "hot"), str(tmp_path / "cold"), instant)

    assert (rooms.folder("hot", made.id) / name).read_bytes() == damaged
    assert await rooms.hot.listing() == before
    assert (await repaired(rooms, rooms.hot, made)).refused == []
    assert await is_whole(rooms.hot, made)
    assert await rooms.hot_store.sweep_partials() == 1
