"""The tests that every store must pass: the test file of a store subclasses StoreContract and has a fixture `store`."""

from __future__ import annotations

import asyncio
import random
from functools import cache

import pytest

from tierd.errors import BadRequest, Corrupt, NotFound
from tierd.format import checksum
from tierd.format.manifest import FileEntry, file_entry
from tierd.tiers.store import Source, Store

CHUNK_BYTES = 16 << 20
SIZES = [(0, 0), (0, 1), (0, 4095), (0, 4096), (1, 1), (4, 12345)]  # (chunks, bytes after them)
KEY = "run/000000000001-g0001/rank-00000-of-00001.safetensors"
HOSTILE_KEYS = [
    "",
    "/etc/passwd",
    "..",
    "../outside",
    "run/../../outside",
    "run//x",
    "run/",
    "./x",
    "run/.hidden",
    "run/x\0y",
    "run\\x",
    "run/x.partial",
    "run/x\n",
    "a" * 5000,
    "run/" + "a" * 300,
    "run/é",
]


@cache
def content(size_bytes: int) -> bytes:
    return random.Random(size_bytes).randbytes(size_bytes)


def entry_of(data: bytes, name: str = KEY.rpartition("/")[2], chunk_bytes: int = CHUNK_BYTES) -> FileEntry:
    """The entry, computed without a store."""
    ranges = checksum.chunk_ranges(len(data), chunk_bytes)
    chunks = [checksum.crc64nvme(data[offset : offset + length]) for offset, length in ranges]
    return file_entry(name, len(data), chunk_bytes, chunks)


class BytesSource(Source):
    """Bytes that arrive in pieces."""

    def __init__(self, data: bytes) -> None:
        super().__init__(self.read_piece)
        self._data = data

    async def read_piece(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = self._data[offset : offset + len(buffer)]


class FailingSource(BytesSource):
    """Ends early, as a truncated file does."""

    async def read_piece(self, offset: int, buffer: memoryview) -> None:
        if offset > 0:
            raise Corrupt("the source ends early")
        await super().read_piece(offset, buffer)


async def read_whole(store: Store, key: str, size_bytes: int) -> bytes:
    buffer = bytearray(size_bytes)
    await store.read(key, 0, memoryview(buffer))
    return bytes(buffer)


class StoreContract:
    """`is_atomic`: of several writers with `if_absent` at the same instant, exactly one wins.

    Chunks are as small as a part of S3 may be; the directory and one strict S3 server get them in the size of a piece.
    """

    is_atomic = False
    chunk_bytes = 5 << 20

    def size_bytes(self, size: tuple[int, int]) -> int:
        chunks, more = size
        return chunks * self.chunk_bytes + more

    def entry_of(self, data: bytes) -> FileEntry:
        return entry_of(data, chunk_bytes=self.chunk_bytes)

    @pytest.mark.parametrize("size", SIZES)
    async def test_bytes_are_read_back_as_they_were_written(self, store: Store, size: tuple[int, int]) -> None:
        size_bytes = self.size_bytes(size)
        data = content(size_bytes)
        written: list[int] = []
        entry = await store.put(
            KEY,
            BytesSource(data),
            size_bytes=size_bytes,
            chunk_bytes=self.chunk_bytes,
            progress=written.append,
        )
        assert entry == self.entry_of(data)
        assert sum(written) == size_bytes
        assert await read_whole(store, KEY, size_bytes) == data
        assert [(one.key, one.size_bytes) for one in await store.list()] == [(KEY, size_bytes)]

    async def test_chunks_of_any_size_are_accepted(self, store: Store) -> None:
        data = content(self.chunk_bytes + 1)
        odd = entry_of(data, chunk_bytes=self.chunk_bytes // 3 + 4097)
        assert await store.put(KEY, BytesSource(data), size_bytes=len(data), chunk_bytes=odd.chunk_bytes) == odd
        assert await read_whole(store, KEY, len(data)) == data

    async def test_put_twice_is_harmless(self, store: Store) -> None:
        data = content(self.chunk_bytes + 1)
        expect = self.entry_of(data)
        for _ in range(2):
            written: list[int] = []
            found = await store.put(
                KEY,
                BytesSource(data),
                size_bytes=len(data),
                chunk_bytes=self.chunk_bytes,
                expect=expect,
                progress=written.append,
            )
            assert found == expect
            assert sum(written) == len(data)
        assert await read_whole(store, KEY, len(data)) == data

    @pytest.mark.parametrize("size", [(0, 0), (0, 4096), (1, 1)])
    async def test_checksum_that_the_store_keeps_is_that_of_the_object(
        self, store: Store, size: tuple[int, int]
    ) -> None:
        size_bytes = self.size_bytes(size)
        data = content(size_bytes)
        await store.put(KEY, BytesSource(data), size_bytes=size_bytes, chunk_bytes=self.chunk_bytes)
        assert await store.stored_checksum(KEY) in (None, self.entry_of(data).crc64nvme)
        with pytest.raises(NotFound):
            await store.stored_checksum("run/absent")

    @pytest.mark.parametrize("size", [(0, 4096), (1, 1)])
    async def test_a_damaged_object_stays_until_a_whole_one_takes_its_place(
        self, store: Store, size: tuple[int, int]
    ) -> None:
        size_bytes = self.size_bytes(size)
        data = content(size_bytes)
        damaged = bytearray(data)
        damaged[-1] ^= 1
        await store.put(KEY, BytesSource(bytes(damaged)), size_bytes=size_bytes, chunk_bytes=self.chunk_bytes)
        expect = self.entry_of(data)
        with pytest.raises(Corrupt):
            await store.put(
                KEY,
                BytesSource(bytes(damaged)),
                size_bytes=size_bytes,
                chunk_bytes=self.chunk_bytes,
                expect=expect,
                replace=True,
            )
        assert await read_whole(store, KEY, size_bytes) == damaged
        await store.put(
            KEY, BytesSource(data), size_bytes=size_bytes, chunk_bytes=self.chunk_bytes, expect=expect, replace=True
        )
        assert await read_whole(store, KEY, size_bytes) == data
        assert [one.key for one in await store.list()] == [KEY]

    @pytest.mark.parametrize("size", [(0, 4096), (1, 1)])
    async def test_an_object_with_other_bytes_is_refused_and_stays(self, store: Store, size: tuple[int, int]) -> None:
        """Two writers of one name: the second must not destroy what the first has committed."""
        size_bytes = self.size_bytes(size)
        data = content(size_bytes)
        await store.put(KEY, BytesSource(data), size_bytes=size_bytes, chunk_bytes=self.chunk_bytes)
        for other in (data[:-1] + bytes([data[-1] ^ 1]), data[:-1]):
            with pytest.raises(Corrupt, match=KEY):
                await store.put(
                    KEY,
                    BytesSource(other),
                    size_bytes=len(other),
                    chunk_bytes=self.chunk_bytes,
                    expect=self.entry_of(other),
                )
            assert await read_whole(store, KEY, size_bytes) == data
        assert [one.key for one in await store.list()] == [KEY]

    @pytest.mark.parametrize("size", [(0, 1), (0, 4096), (1, 1)])
    async def test_a_flipped_bit_is_corrupt_and_leaves_no_object(self, store: Store, size: tuple[int, int]) -> None:
        size_bytes = self.size_bytes(size)
        data = content(size_bytes)
        damaged = bytearray(data)
        damaged[-1] ^= 1
        with pytest.raises(Corrupt, match=f"chunk {(size_bytes - 1) // self.chunk_bytes} of"):
            await store.put(
                KEY,
                BytesSource(bytes(damaged)),
                size_bytes=size_bytes,
                chunk_bytes=self.chunk_bytes,
                expect=self.entry_of(data),
            )
        assert await store.list() == []

    async def test_a_source_that_ends_early_leaves_nothing(self, store: Store) -> None:
        data = content(2 * self.chunk_bytes + 12345)
        with pytest.raises(Corrupt, match="ends early"):
            await store.put(KEY, FailingSource(data), size_bytes=len(data), chunk_bytes=self.chunk_bytes)
        assert await store.list() == []

    async def test_cancelled_put_leaves_nothing(self, store: Store) -> None:
        begun = asyncio.Event()

        async def wait(offset: int, buffer: memoryview) -> None:
            begun.set()
            await asyncio.Event().wait()

        size_bytes = 2 * self.chunk_bytes + 12345
        put = asyncio.ensure_future(store.put(KEY, Source(wait), size_bytes=size_bytes, chunk_bytes=self.chunk_bytes))
        await begun.wait()
        put.cancel()
        with pytest.raises(asyncio.CancelledError):
            await put
        assert await store.list() == []

    async def test_any_range_can_be_read(self, store: Store) -> None:
        data = content(self.chunk_bytes + 1)
        await store.put(KEY, BytesSource(data), size_bytes=len(data), chunk_bytes=self.chunk_bytes)
        for offset, length in [(0, 1), (1, 4096), (4095, 3), (len(data) - 1, 1), (7, 0), (5, len(data) - 5)]:
            buffer = bytearray(length)
            await store.read(KEY, offset, memoryview(buffer))
            assert buffer == data[offset : offset + length]

    @pytest.mark.parametrize(("offset", "length"), [(0, 11), (5, 6), (10, 1), (4096, 1)])
    async def test_reading_past_the_end_is_corrupt(self, store: Store, offset: int, length: int) -> None:
        await store.put_bytes("run/x", b"0123456789")
        with pytest.raises(Corrupt, match="ends"):
            await store.read("run/x", offset, memoryview(bytearray(length)))

    async def test_absent_objects_are_not_found(self, store: Store) -> None:
        with pytest.raises(NotFound):
            await store.get_bytes("run/absent", size_max=10)
        with pytest.raises(NotFound):
            await store.read("run/absent", 0, memoryview(bytearray(1)))
        with pytest.raises(NotFound):
            await store.read("run/absent", 0, memoryview(bytearray(0)))
        assert await store.list() == []
        assert await store.list("run/") == []
        assert await store.unfinished() == []

    async def test_small_objects_are_read_up_to_their_limit(self, store: Store) -> None:
        assert await store.put_bytes("run/x", b"0123456789")
        assert await store.get_bytes("run/x", size_max=10) == b"0123456789"
        with pytest.raises(Corrupt, match="more than 9"):
            await store.get_bytes("run/x", size_max=9)
        await store.put_bytes("run/empty", b"")
        assert await store.get_bytes("run/empty", size_max=0) == b""

    async def test_if_absent_leaves_an_existing_object_unchanged(self, store: Store) -> None:
        assert await store.put_bytes("run/x", b"first", if_absent=True)
        assert not await store.put_bytes("run/x", b"second", if_absent=True)
        assert await store.get_bytes("run/x", size_max=10) == b"first"

    async def test_exactly_one_of_many_writers_wins(self, store: Store) -> None:
        if not self.is_atomic:
            pytest.skip("this server does not decide between simultaneous writers")
        answers = await asyncio.gather(
            *(store.put_bytes("run/x", b"%d" % index, if_absent=True) for index in range(32))
        )
        assert answers.count(True) == 1
        assert await store.get_bytes("run/x", size_max=10) == b"%d" % answers.index(True)

    async def test_list_takes_any_prefix(self, store: Store) -> None:
        keys = ["run/a/x", "run/a/y", "run/ab/x", "run2/a/x", "top"]
        for key in keys:
            await store.put_bytes(key, key.encode())
        for prefix in ["", "r", "run", "run/", "run/a", "run/a/", "run/a/x", "t", "run/b", "run/a/x/"]:
            found = await store.list(prefix)
            assert sorted(one.key for one in found) == [key for key in keys if key.startswith(prefix)]
            assert all(one.size_bytes == len(one.key) for one in found)

    async def test_list_until_a_key_has_all_that_come_before_it(self, store: Store) -> None:
        keys = [f"run/a/{index}" for index in range(7)]
        for key in keys:
            await store.put_bytes(key, b"x")
        found = {stored.key for stored in await store.list("run/a/", until="run/a/3")}
        assert set(keys[:4]) <= found <= set(keys)

    async def test_deleted_objects_are_gone_and_absent_ones_are_ignored(self, store: Store) -> None:
        keys = [f"run/a/{index}" for index in range(5)]
        for key in keys:
            await store.put_bytes(key, b"x")
        await store.delete([keys[0], "run/a/absent", *keys[2:]])
        assert [one.key for one in await store.list()] == [keys[1]]
        await store.delete([keys[1]])
        await store.delete([keys[1], "other/absent"])
        await store.delete([])
        assert await store.list() == []

    @pytest.mark.parametrize("key", HOSTILE_KEYS)
    async def test_a_hostile_key_is_refused_by_every_operation(self, store: Store, key: str) -> None:
        for attempt in (
            store.put(key, BytesSource(b""), size_bytes=0, chunk_bytes=self.chunk_bytes),
            store.put_bytes(key, b""),
            store.get_bytes(key, size_max=10),
            store.read(key, 0, memoryview(bytearray(1))),
            store.delete(["run/fine", key]),
        ):
            with pytest.raises(BadRequest):
                await attempt
