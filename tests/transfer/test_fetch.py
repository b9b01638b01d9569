"""A fetch keeps the chunks that verify and reads the missing ones from any replica."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.support.cli import make_manifest
from tests.support.store_contract import BytesSource, content
from tierd.errors import BadRequest, Corrupt, TierUnreachable
from tierd.format import checksum, layout
from tierd.format.ids import checkpoint_id
from tierd.format.manifest import FileEntry, file_entry
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.tier import Tier
from tierd.transfer import fetch as fetch_module
from tierd.transfer.fetch import Fetch, partial_keys
from tierd.transfer.memory_file import MemoryFile
from tierd.transfer.partial_file import PartialFile
from tierd.transfer.verify import verify_files

ID = checkpoint_id("run42", 100, 1)
CHUNK_BYTES = 64 << 10
SIZES = [10 * CHUNK_BYTES + 17, 0, 3 * CHUNK_BYTES]
WHOLE_BYTES = sum(SIZES)


class Watched(DirectoryStore):
    """A directory that counts the shard bytes that are read, and calls `before` first."""

    read_bytes = 0
    before: Callable[[str, int], None] = staticmethod(lambda key, offset: None)
    after: Callable[[int, memoryview], None] = staticmethod(lambda offset, buffer: None)

    async def read(self, key: str, offset: int, buffer: memoryview) -> None:
        self.before(key, offset)
        self.read_bytes += len(buffer)
        await super().read(key, offset, buffer)
        self.after(offset, buffer)


class Rooms:
    """Two replicas of one checkpoint, and the target directory."""

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
                    BytesSource(content(one.size_bytes)),
                    size_bytes=one.size_bytes,
                    chunk_bytes=one.chunk_bytes,
                )
            await tier.commit(self.manifest)

    def folder(self, name: str) -> Path:
        return self.root / name / ID.run / ID.name

    def partial_file(self) -> Path:
        """The partial file of the first shard."""
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


async def test_no_file_has_its_final_name_before_all_are_whole(rooms: Rooms) -> None:
    fetch = await rooms.fetched()
    assert await rooms.here.list() == []
    with pytest.raises(BadRequest, match="chunks are missing"):
        await fetch.finish()
    assert {f"{ID.run}/{ID.name}/{one.name}" for one in rooms.folder("here").iterdir()} <= partial_keys(rooms.manifest)


async def test_next_attempt_fetches_only_missing_chunks(rooms: Rooms) -> None:
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


async def test_flipped_byte_in_a_partial_file_costs_one_chunk(rooms: Rooms) -> None:
    await rooms.fetched(rooms.near)
    flip(rooms.partial_file(), 4 * CHUNK_BYTES + 5)
    again = await rooms.fetched()
    assert again.missing_bytes == CHUNK_BYTES
    assert await again.take(rooms.far) is None
    assert rooms.stores["far"].read_bytes == CHUNK_BYTES
    await rooms.assert_whole(again)


@pytest.mark.parametrize("left", [0, 1, CHUNK_BYTES, 5 * CHUNK_BYTES + 1])
async def test_truncated_partial_file_keeps_its_whole_chunks(rooms: Rooms, left: int) -> None:
    await rooms.fetched(rooms.near)
    path = rooms.partial_file()
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
    assert await fetch.take(rooms.far) is None, "this replica is damaged elsewhere"
    assert rooms.stores["far"].read_bytes == 2 * CHUNK_BYTES + SIZES[2]
    await rooms.assert_whole(fetch)


async def test_chunk_that_is_bad_everywhere_is_reported_and_the_rest_stays(rooms: Rooms) -> None:
    for name in ("near", "far"):
        flip(rooms.folder(name) / rooms.manifest.files[0].name, 3 * CHUNK_BYTES)
    fetch = await rooms.fetched()
    for tier in (rooms.near, rooms.far):
        problem = await fetch.take(tier)
        assert isinstance(problem, Corrupt)
        assert "chunk 3 of 11: crc64nvme" in problem.message
    assert fetch.missing_bytes == CHUNK_BYTES


async def test_next_replica_gives_the_rest_when_one_becomes_unreachable(make: Callable[..., Rooms]) -> None:
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


class HungWrite:
    """The first write into a file of this class hangs after it has written, until `release`. `lost` makes a replica
    unreachable meanwhile, so that the fetch leaves the write behind."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, file_class: type[PartialFile] | type[MemoryFile]) -> None:
        self._hangs, self._is_released = threading.Event(), threading.Event()
        self.release = self._is_released.set
        write = file_class.write

        def hang(file: PartialFile | MemoryFile, offset: int, buffer: memoryview, length: int) -> None:
            write(file, offset, buffer, length)  # pyright: ignore[reportArgumentType]
            if not self._hangs.is_set():
                self._hangs.set()
                assert self._is_released.wait(30)

        monkeypatch.setattr(file_class, "write", hang)

    def lost(self, store: Watched) -> None:
        read = store.read

        async def read_only_the_first(key: str, offset: int, buffer: memoryview) -> None:
            if offset == 0:
                return await read(key, offset, buffer)
            while not self._hangs.is_set():
                await asyncio.sleep(0.01)
            raise TierUnreachable("no connection")

        store.read = read_only_the_first


async def settled(store: DirectoryStore) -> None:
    async with asyncio.timeout(30):
        while True:
            try:
                return store.pool.check_settled()
            except TierUnreachable:
                await asyncio.sleep(0.01)


async def test_fetch_does_not_continue_while_an_earlier_write_may_take_effect(
    make: Callable[..., Rooms], monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms = make(1 << 20, [48 << 20])
    await rooms.commit()
    hung = HungWrite(monkeypatch, PartialFile)
    hung.lost(rooms.stores["near"])
    rooms.here.pool.timeout_s = 0.3
    fetch = await rooms.fetched()
    assert isinstance(await fetch.take(rooms.near), TierUnreachable)
    with pytest.raises(TierUnreachable, match="may still take effect"):
        await fetch.take(rooms.far)
    hung.release()
    await settled(rooms.here)
    assert await fetch.take(rooms.far) is None
    await rooms.assert_whole(fetch)


async def test_sums_of_an_earlier_write_do_not_count_for_the_next_replica(
    make: Callable[..., Rooms], monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms = make(CHUNK_BYTES, [CHUNK_BYTES])
    await rooms.commit()
    monkeypatch.setattr(fetch_module, "PIECE_BYTES", CHUNK_BYTES // 2)  # two pieces of one chunk
    hung = HungWrite(monkeypatch, MemoryFile)
    hung.lost(rooms.stores["near"])
    rooms.here.pool.timeout_s = 0.3
    fetch = Fetch(rooms.manifest, rooms.here, in_memory=True)
    await fetch.begin()
    assert isinstance(await fetch.take(rooms.near), TierUnreachable)
    read = rooms.stores["far"].read

    async def read_damaged_and_late(key: str, offset: int, buffer: memoryview) -> None:
        hung.release()
        await settled(rooms.here)
        await read(key, offset, buffer)
        if offset == 0:
            buffer[0] ^= 1
            await asyncio.sleep(0.3)  # until the other piece has been summed

    rooms.stores["far"].read = read_damaged_and_late
    rooms.here.pool.timeout_s = 30.0
    assert isinstance(await fetch.take(rooms.far), Corrupt)
    assert fetch.missing_bytes == CHUNK_BYTES


async def test_own_read_that_is_left_behind_never_writes_into_a_buffer_that_is_used_again(
    make: Callable[..., Rooms], monkeypatch: pytest.MonkeyPatch
) -> None:
    size_bytes = fetch_module.PIECE_BYTES  # buffers of this size are used again
    rooms = make(1 << 20, [size_bytes])
    await rooms.commit()
    assert (await rooms.fetched(rooms.near)).missing_bytes == 0  # the partial file is whole and good
    flip(rooms.folder("near") / rooms.manifest.files[0].name, 5)
    is_released, has_landed = threading.Event(), threading.Event()
    read, write = PartialFile._read, PartialFile.write

    def hang(file: PartialFile, offset: int, buffer: memoryview) -> None:
        content = bytearray(len(buffer))
        read(file, offset, memoryview(content))
        assert is_released.wait(30)
        buffer[:] = content
        has_landed.set()

    def write_then_release(file: PartialFile, offset: int, buffer: memoryview, length: int) -> None:
        write(file, offset, buffer, length)
        is_released.set()  # between the write and the sum of the damaged piece
        assert has_landed.wait(30)

    rooms.here.pool.timeout_s = 0.3
    with monkeypatch.context() as patched:
        patched.setattr(PartialFile, "_read", hang)
        fetch = await rooms.fetched()
    assert fetch.missing_bytes == size_bytes  # nobody knows what is there
    rooms.here.pool.timeout_s = 30.0
    with monkeypatch.context() as patched:
        patched.setattr(PartialFile, "write", write_then_release)
        assert isinstance(await fetch.take(rooms.near), Corrupt)
    assert await fetch.take(rooms.far) is None
    await rooms.assert_whole(fetch)


async def test_chunk_altered_on_the_way_is_read_twice_before_it_counts_as_damaged(rooms: Rooms) -> None:
    altered: list[int] = []

    def alter(offset: int, buffer: memoryview) -> None:
        if not altered:
            altered.append(offset)
            buffer[0] ^= 1

    rooms.stores["near"].after = alter
    fetch = await rooms.fetched()
    assert await fetch.take(rooms.near) is None
    await rooms.assert_whole(fetch)


async def test_damaged_final_file_is_rebuilt_from_its_good_chunks(rooms: Rooms) -> None:
    await (await rooms.fetched(rooms.near)).finish()
    flip(rooms.folder("here") / rooms.manifest.files[0].name, 2 * CHUNK_BYTES)
    again = await rooms.fetched(rooms.far)
    assert rooms.stores["far"].read_bytes == CHUNK_BYTES
    await rooms.assert_whole(again)


async def test_whole_final_file_is_not_rewritten(rooms: Rooms) -> None:
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
    assert rooms.partial_file().stat().st_blocks * 512 < SIZES[0] / 2, "no disk space is reserved for the rest"
    with pytest.raises(BadRequest):
        await fetch.finish()


async def test_chunks_wanted_later_are_the_only_ones_read_then(rooms: Rooms) -> None:
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


async def test_error_of_the_directory_is_raised_and_not_attributed_to_a_replica(rooms: Rooms) -> None:
    fetch = await rooms.fetched()
    rooms.partial_file().unlink()
    with pytest.raises(TierUnreachable, match="here"):
        await fetch.take(rooms.near)


async def test_file_whose_fsync_failed_is_fetched_again(rooms: Rooms, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux then counts its bytes as written. They can be read, and a second fsync succeeds, but a loss of power takes
    them."""
    real, has_failed = os.fsync, False

    def fsync(fd: int) -> None:
        nonlocal has_failed
        if not has_failed and "rank-00000" in os.readlink(f"/proc/self/fd/{fd}"):
            has_failed = True
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd)

    fetch = await rooms.fetched(rooms.near)
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(TierUnreachable, match="Input/output error"):
        await fetch.finish()
    again = await rooms.fetched()
    assert 0 < again.missing_bytes < WHOLE_BYTES
    await again.take(rooms.far)
    await rooms.assert_whole(again)


async def test_cancelled_fetch_keeps_the_arrived_chunks(make: Callable[..., Rooms]) -> None:
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


async def test_partial_name_depends_on_the_expected_content() -> None:
    one, other = entry(0, 10, 4096), entry(0, 11, 4096)
    names = [partial_keys(make_manifest(ID, [each])) for each in (one, other)]
    assert len(names[0] & names[1]) == 1, "only the final name is the same"
    assert all(layout.is_partial_download(key.rpartition("/")[2]) for key in names[0] ^ names[1])
