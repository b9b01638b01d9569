from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.bucket import bucket_server
from tests.support.cli import folder_of
from tests.support.damage import cut, flip, lose, rot
from tests.support.rooms import Rooms, rooms_at
from tests.support.s3 import BUCKET
from tests.support.s3_store import s3_store
from tierd.errors import NewerFormat, TierUnreachable
from tierd.format import layout
from tierd.format.ids import checkpoint_id
from tierd.tiers.checkpoint_copy import copy_checkpoint
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.rate_limit import Bandwidth
from tierd.tiers.tier import Tier
from tierd.transfer.verify import Proof, verify_files, verify_replica


@pytest.fixture
async def rooms(tmp_path: Path) -> AsyncIterator[Rooms]:
    async with rooms_at(tmp_path) as found:
        yield found


async def test_every_wrong_file_and_chunk_is_named(rooms: Rooms, tmp_path: Path) -> None:
    made = await rooms.commit("hot")
    told: list[int] = []
    found = await verify_files(rooms.hot, made, progress=told.append)
    assert (found.sentences, found.proof, sum(told)) == ([], Proof.DEEP, made.size_bytes)

    first, second = (entry.name for entry in made.files)
    flip(tmp_path / "hot", made, first)
    lose(tmp_path / "hot", made, second)
    found = await verify_files(rooms.hot, made)
    damaged, missing = found.sentences
    assert damaged.startswith(f"{made.id}/{first} in hot: chunk 0 of 1: crc64nvme ")
    assert missing == f"{made.id}/{second} in hot: the file is missing"
    assert found.missing == {second}

    (folder_of(tmp_path / "hot", made) / second).write_bytes(bytes(20_001))
    assert (await verify_files(rooms.hot, made)).sentences[1].endswith("20001 bytes, expected 20000")
    assert list((await verify_files(rooms.hot, made, only=[second])).problems) == [second]


async def test_shallow_verification_of_a_directory_compares_sizes_only(rooms: Rooms, tmp_path: Path) -> None:
    made = await rooms.commit("hot")
    flip(tmp_path / "hot", made, made.files[0].name)
    found = await verify_files(rooms.hot, made, is_deep=False)
    assert (found.sentences, found.proof) == ([], Proof.SIZE)
    cut(tmp_path / "hot", made, made.files[0].name)
    assert "100 bytes, expected 20000" in (await verify_files(rooms.hot, made, is_deep=False)).sentences[0]


@pytest.mark.parametrize("keeps_checksums", [True, False])
async def test_shallow_verification_of_a_bucket_compares_checksums_without_reading(
    rooms: Rooms, keeps_checksums: bool
) -> None:
    with bucket_server(keeps_checksums=keeps_checksums) as served:
        cold = Tier("cold", s3_store(f"s3://{BUCKET}/deep", endpoint_url=served.url))
        made = await rooms.commit("hot")
        await copy_checkpoint(made, rooms.hot, cold)
        read_before = served.count("get_object")
        found = await verify_files(cold, made, is_deep=False)
        assert found.sentences == []
        assert found.proof is (Proof.CHECKSUM if keeps_checksums else Proof.SIZE)
        assert served.count("get_object") == read_before

        rot(served, "deep", made, made.files[1].name, is_noticed=True)
        seen = (await verify_files(cold, made, is_deep=False)).problems
        assert list(seen) == ([made.files[1].name] if keeps_checksums else [])
        assert list((await verify_files(cold, made)).problems) == [made.files[1].name]

        key = rot(served, "deep", made, made.files[0].name, is_noticed=False)
        assert made.files[0].name not in (await verify_files(cold, made, is_deep=False)).problems
        assert made.files[0].name in (await verify_files(cold, made)).problems

        del served.objects[key]
        found = await verify_files(cold, made, is_deep=False)
        assert found.missing == {made.files[0].name}
        await cold.store.close()


async def test_unreadable_manifest_is_reported_as_a_problem(rooms: Rooms) -> None:
    made = await rooms.commit("hot")
    path = rooms.folder("hot", made.id) / layout.MANIFEST
    path.write_bytes(path.read_bytes()[:50])
    found = await verify_replica(rooms.hot, made.id)
    assert found is not None
    assert (found.manifest, list(found.problems)) == (None, [layout.MANIFEST])
    path.write_bytes(b'{"format_version": 99}')
    with pytest.raises(NewerFormat):
        await verify_replica(rooms.hot, made.id)


async def test_replica_deleted_meanwhile_is_no_finding(rooms: Rooms) -> None:
    made = await rooms.commit("hot")
    assert await verify_replica(rooms.hot, checkpoint_id("run42", 7, 1)) is None

    def delete(_: int) -> None:
        for one in (layout.MANIFEST, made.files[1].name):
            (rooms.folder("hot", made.id) / one).unlink(missing_ok=True)

    assert await verify_replica(rooms.hot, made.id, progress=delete) is None


async def test_unreachable_tier_is_not_reported_as_damaged(rooms: Rooms, tmp_path: Path) -> None:
    made = await rooms.commit("hot")
    tier = Tier("cold", DirectoryStore(tmp_path / "absent", create=False))
    with pytest.raises(TierUnreachable):
        await verify_files(tier, made)
    await tier.store.close()


async def test_unreadable_sector_is_damage(tmp_path: Path, rooms: Rooms) -> None:
    made = await rooms.commit("hot")

    class Dying(DirectoryStore):
        async def read(self, key: str, offset: int, buffer: memoryview) -> None:
            if key.endswith(made.files[0].name):
                raise TierUnreachable(f"read {key}: Input/output error") from OSError(errno.EIO, "Input/output error")
            await super().read(key, offset, buffer)

    tier = Tier("hot", Dying(tmp_path / "hot"))
    assert list((await verify_files(tier, made)).problems) == [made.files[0].name]
    await tier.store.close()


async def test_read_with_a_bandwidth_limit_has_one_piece_in_flight(rooms: Rooms) -> None:
    made = await rooms.commit("hot", size_bytes=100)

    class Counting(Bandwidth):
        taken = 0

        async def take(self, size_bytes: int) -> None:
            self.taken += size_bytes
            await super().take(size_bytes)

    bandwidth = Counting(1 << 40)
    assert (await verify_files(rooms.hot, made, bandwidth=bandwidth)).sentences == []
    assert bandwidth.taken == made.size_bytes
