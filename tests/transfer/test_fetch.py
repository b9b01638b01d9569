"""A fetch keeps what verifies, takes what is missing from whichever replica has it, and trusts nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.support.cli import make_manifest
from tests.support.store_contract import content
from tierd.errors import BadRequest, Corrupt, TierUnreachable
from tierd.format import checksum, layout
from tierd.format.ids import checkpoint_id
from tierd.format.manifest import FileEntry, file_entry
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.tier import Tier
from tierd.transfer.fetch import Fetch, partial_keys
from tierd.transfer.verify import verify_files

ID = checkpoint_id("run42", 100, 1)
CHUNK_BYTES = 64 << 10
SIZES = [10 * CHUNK_BYTES + 17, 0, 3 * CHUNK_BYTES]
WHOLE_BYTES = sum(SIZES)


class Watched(DirectoryStore):
    """A directory that counts what is read of shards, and may do something else instead of reading."""

    read_bytes = 0
    before: Callable[[str, int], None] = staticmethod(lambda key, offset: None)
    after: Callable[[int, memoryview], None] = staticmethod(lambda offset, buffer: None)

    async def read(self, key: str, offset: int, buffer: memoryview) -> None:
        self.before(key, offset)
        self.read_bytes += len(buffer)
        await super().read(key, offset, buffer)
        self.after(offset, buffer)


class Rooms:
    """Two replicas of one checkpoint, and the directory that it is fetched into."""

    def __init__(self, root: Path, chunk_bytes: int, sizes: list[int]) -> None:
        self.root = root
        self.manifest = make_manifest(ID, [entry(rank, size, chunk_bytes) for rank, size in enumerate(sizes)])
        self.here = DirectoryStore(root / "here")
        self.stores = {name: Watched(root / name) for name in ("near", "far")}
        self.near, self.far = (Tier(name, store) for name, store in self.stores.items())

    async def commit(self) -> None:
        for tier in (self.near, self.far):
            for one in self.manifest.files:
                await tier.store.put(
                    layout.file_key(ID, one.name),
                    memoryview(content(one.size_bytes)),
                    size_bytes=one.size_bytes,
                    chunk_bytes=one.chunk_bytes,
                )
            await tier.commit(self.manifest)

    def folder(self, name: str) -> Path:
        return self.root / name / ID.run / ID.name

    def arriving(self) -> Path:
        """The first file, as it lies here while it is on its way."""
        (path,) = self.folder("here").glob(f"{self.manifest.files[0].name}.*.partial")
        return path

    async def fetched(self, *tiers: Tier, wanted: dict[str, set[int]] | None = None) -> Fetch:
        fetch = Fetch(self.manifest, self.here, wanted=wanted)
        await fetch.begin()
        for tier in tiers:
            await fetch.take(tier)
        return fetch

    async def assert_whole(self, fetch: Fetch) -> None:
        assert fetch.missing_bytes == 0
        await fetch.finish()
        assert (await verify_files(Tier("here", self.here), self.manifest, is_deep=True)).sentences == []
        for one in self.manifest.files:
            assert (self.folder("here") / one.name).read_bytes() == content(one.size_bytes)
        assert len(list(self.folder("here").iterdir())) == len(self.manifest.files)


def entry(rank: int, size_bytes: int, chunk_bytes: int) -> FileEntry:
    shard = content(size_bytes)
    ranges = checksum.chunk_ranges(size_bytes, chunk_bytes)
    name = f"rank-{rank:05d}-of-00003.safetensors"
    return file_entry(
        name, size_bytes, chunk_bytes, [checksum.crc64nvme(shard[begin : begin + length]) for begin, length in ranges]
    )


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Callable[..., Rooms]]:
    async with AsyncExitStack() as stack:

        def make(chunk_bytes: int = CHUNK_BYTES, sizes: list[int] = SIZES) -> Rooms:
            rooms = Rooms(tmp_path, chunk_bytes, sizes)
            for store in (rooms.here, *rooms.stores.values()):
                stack.push_async_callback(store.close)
            return rooms

        yield make


@pytest.fixture
async def rooms(make: Callable[..., Rooms]) -> Rooms:
    rooms = make()
    await rooms.commit()
    return rooms


@pytest.mark.parametrize(
    "chunk_bytes", [4096, 5000, 1 << 20, 16 << 20, 20 << 20], ids=["page", "odd", "MiB", "piece", "more"]
)
async def test_bytes_are_the_same_whatever_the_chunks_are(make: Callable[..., Rooms], chunk_bytes: int) -> None:
    rooms = make(chunk_bytes, [(33 << 20) + 4097, 4096, 0, 1])
    await rooms.commit()
    told: list[int] = []
    fetch = await rooms.fetched()
    assert await fetch.take(rooms.near, told.append) is None
    await rooms.assert_whole(fetch)
    assert sum(told) == rooms.manifest.size_bytes == rooms.stores["near"].read_bytes


async def test_nothing_has_its_own_name_before_all_is_there(rooms: Rooms) -> None:
    fetch = await rooms.fetched()
    assert await rooms.here.list() == []
    with pytest.raises(BadRequest, match="chunks are missing"):
        await fetch.finish()
    assert {f"{ID.run}/{ID.name}/{one.name}" for one in rooms.folder("here").iterdir()} <= partial_keys(rooms.manifest)


async def test_next_attempt_fetches_only_what_had_not_arrived(rooms: Rooms) -> None:
    def goes_away(key: str, offset: int) -> None:
        if key.endswith(rooms.manifest.files[2].name):
            raise TierUnreachable("gone")

    rooms.stores["near"].before = goes_away
    rooms.here.pieces_in_flight = 1
    await rooms.fetched(rooms.near)
    again = await rooms.fetched()
    assert again.missing_bytes == SIZES[2]
    await again.take(rooms.far)
    assert rooms.stores["far"].read_bytes == SIZES[2]
    await rooms.assert_whole(again)


async def test_flipped_byte_in_what_arrived_is_found_and_only_its_chunk_fetched_again(rooms: Rooms) -> None:
    await rooms.fetched(rooms.near)
    flip(rooms.arriving(), 4 * CHUNK_BYTES + 5)
    again = await rooms.fetched()
    assert again.missing_bytes == CHUNK_BYTES
    assert await again.take(rooms.far) is None
    assert rooms.stores["far"].read_bytes == CHUNK_BYTES
    await rooms.assert_whole(again)


@pytest.mark.parametrize("left", [0, 1, CHUNK_BYTES, 5 * CHUNK_BYTES + 1])
async def test_file_that_was_cut_short_meanwhile_keeps_its_whole_chunks(rooms: Rooms, left: int) -> None:
    await rooms.fetched(rooms.near)
    path = rooms.arriving()
    path.write_bytes(path.read_bytes()[:left])
    again = await rooms.fetched()
    assert again.missing_bytes == SIZES[0] - left // CHUNK_BYTES * CHUNK_BYTES
    await again.take(rooms.far)
    await rooms.assert_whole(again)


async def test_chunks_that_are_bad_in_one_replica_come_from_the_other(rooms: Rooms) -> None:
    name = rooms.manifest.files[0].name
    flip(rooms.folder("near") / name, 0)
    flip(rooms.folder("near") / name, 7 * CHUNK_BYTES)
    flip(rooms.folder("far") / name, 5 * CHUNK_BYTES)
    (rooms.folder("near") / rooms.manifest.files[2].name).unlink()
    fetch = await rooms.fetched()
    problem = await fetch.take(rooms.near)
    assert isinstance(problem, Corrupt)
    assert rooms.manifest.files[2].name in problem.message
    assert "2 chunks" in problem.message
    assert await fetch.take(rooms.far) is None, "its own damage is elsewhere"
    assert rooms.stores["far"].read_bytes == 2 * CHUNK_BYTES + SIZES[2]
    await rooms.assert_whole(fetch)


async def test_chunk_that_is_bad_everywhere_is_told_and_the_rest_stays(rooms: Rooms) -> None:
    for name in ("near", "far"):
        flip(rooms.folder(name) / rooms.manifest.files[0].name, 3 * CHUNK_BYTES)
    fetch = await rooms.fetched()
    for tier in (rooms.near, rooms.far):
        problem = await fetch.take(tier)
        assert isinstance(problem, Corrupt)
        assert "chunk 3 of 11: crc64nvme" in problem.message
    assert fetch.missing_bytes == CHUNK_BYTES


async def test_replica_that_goes_away_in_the_middle_leaves_the_rest_to_the_next(make: Callable[..., Rooms]) -> None:
    rooms = make(1 << 20, [48 << 20])
    await rooms.commit()
    rooms.here.pieces_in_flight = 1

    def goes_away(key: str, offset: int) -> None:
        if offset >= 32 << 20:
            raise TierUnreachable("no connection")

    rooms.stores["near"].before = goes_away
    fetch = await rooms.fetched()
    problem = await fetch.take(rooms.near)
    assert isinstance(problem, TierUnreachable)
    assert await fetch.take(rooms.far) is None
    assert rooms.stores["far"].read_bytes == 16 << 20
    await rooms.assert_whole(fetch)


async def test_what_was_altered_on_its_way_is_read_once_more_before_it_counts_as_damage(rooms: Rooms) -> None:
    altered: list[int] = []

    def alter(offset: int, buffer: memoryview) -> None:
        if not altered:
            altered.append(offset)
            buffer[0] ^= 1

    rooms.stores["near"].after = alter
    fetch = await rooms.fetched()
    assert await fetch.take(rooms.near) is None
    await rooms.assert_whole(fetch)


async def test_damaged_file_under_its_own_name_is_mended_out_of_its_good_chunks(rooms: Rooms) -> None:
    await (await rooms.fetched(rooms.near)).finish()
    flip(rooms.folder("here") / rooms.manifest.files[0].name, 2 * CHUNK_BYTES)
    again = await rooms.fetched(rooms.far)
    assert rooms.stores["far"].read_bytes == CHUNK_BYTES
    await rooms.assert_whole(again)


async def test_what_is_whole_under_its_own_name_stays_the_same_file(rooms: Rooms) -> None:
    await (await rooms.fetched(rooms.near)).finish()
    path = rooms.folder("here") / rooms.manifest.files[0].name
    before = path.stat()
    await rooms.assert_whole(await rooms.fetched())
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


async def test_only_the_wanted_chunks_are_read(rooms: Rooms) -> None:
    name = rooms.manifest.files[0].name
    fetch = await rooms.fetched(rooms.near, wanted={name: {1, 10}})
    assert fetch.missing_bytes == 0
    assert rooms.stores["near"].read_bytes == CHUNK_BYTES + 17
    last = bytearray(17)
    await fetch.source(name).fill(10 * CHUNK_BYTES, memoryview(last))
    assert last == content(SIZES[0])[-17:]
    assert rooms.arriving().stat().st_blocks * 512 < SIZES[0] / 2, "no room is taken for the rest"
    with pytest.raises(BadRequest):
        await fetch.finish()


async def test_more_that_is_wanted_is_all_that_is_read_the_second_time(rooms: Rooms) -> None:
    names = [one.name for one in rooms.manifest.files]
    fetch = await rooms.fetched(rooms.near, wanted={name: {0} for name in names})
    fetch.want({names[0]: {0, 3, 99}, names[2]: {2}})
    assert (fetch.missing_bytes, fetch.wanted_bytes, fetch.is_whole) == (2 * CHUNK_BYTES, 4 * CHUNK_BYTES, False)
    await fetch.begin()
    assert await fetch.take(rooms.near) is None
    assert rooms.stores["near"].read_bytes == 4 * CHUNK_BYTES
    fetch.want(None)
    assert fetch.is_whole
    await fetch.begin()
    await fetch.take(rooms.far)
    assert rooms.stores["far"].read_bytes == WHOLE_BYTES - 4 * CHUNK_BYTES
    await rooms.assert_whole(fetch)


async def test_fault_of_the_directory_itself_is_raised_and_blamed_on_no_replica(rooms: Rooms) -> None:
    fetch = await rooms.fetched()
    rooms.arriving().unlink()
    with pytest.raises(TierUnreachable, match="here"):
        await fetch.take(rooms.near)


async def test_cancelled_fetch_leaves_what_has_arrived(make: Callable[..., Rooms]) -> None:
    rooms = make(1 << 20, [48 << 20])
    await rooms.commit()
    rooms.here.pieces_in_flight = 1
    fetch = Fetch(rooms.manifest, rooms.here)
    await fetch.begin()
    taking = asyncio.ensure_future(fetch.take(rooms.near))
    while fetch.missing_bytes == rooms.manifest.size_bytes:
        await asyncio.sleep(0)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    again = await rooms.fetched()
    assert again.missing_bytes < rooms.manifest.size_bytes
    await again.take(rooms.far)
    await rooms.assert_whole(again)


async def test_name_of_what_arrives_is_that_of_its_promise() -> None:
    one, other = entry(0, 10, 4096), entry(0, 11, 4096)
    names = [partial_keys(make_manifest(ID, [each])) for each in (one, other)]
    assert len(names[0] & names[1]) == 1, "only its own name"
    assert all(layout.is_partial_download(key.rpartition("/")[2]) for key in names[0] ^ names[1])
