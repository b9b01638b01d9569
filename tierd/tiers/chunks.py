"""The chunk checksums of a file whose pieces arrive in any order, compared with those of its manifest entry.

Pieces need not fit the chunks: the checksum of a chunk is combined from those of its pieces, and a piece that spans
chunks is summed in parts. No byte is read twice.
"""

from __future__ import annotations

import asyncio

from tierd.errors import Corrupt
from tierd.format import checksum
from tierd.format.manifest import FileEntry, file_entry
from tierd.tiers.direct_io import page_aligned
from tierd.tiers.pool import for_each
from tierd.tiers.rate_limit import Bandwidth
from tierd.tiers.store import Progress, Source

READ_BYTES = 16 << 20
READS_IN_FLIGHT = 4


class ChunkSums:
    """`add` each piece exactly once, from any thread; read the result when all are added."""

    def __init__(self, size_bytes: int, chunk_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._chunk_bytes = chunk_bytes
        self._parts: dict[int, tuple[int, int]] = {}  # offset → (checksum, length); none spans two chunks

    def add(self, offset: int, piece: memoryview) -> None:
        done = 0
        while done < len(piece):
            part = piece[done : done + self._chunk_bytes - (offset + done) % self._chunk_bytes]
            self._parts[offset + done] = (checksum.crc64nvme(part), len(part))
            done += len(part)

    def pop_chunk(self, index: int) -> str | None:
        """The checksum of a chunk, which is then forgotten; None while a piece of it is missing."""
        begin = index * self._chunk_bytes
        end = min(begin + self._chunk_bytes, self._size_bytes)
        offsets: list[int] = []
        while begin < end and begin in self._parts:
            offsets.append(begin)
            begin += self._parts[begin][1]
        if begin != end:
            return None
        return checksum.encode(checksum.combine([self._parts.pop(offset) for offset in offsets]))

    def entry(self, name: str, expect: FileEntry | None = None, action: str = "") -> FileEntry:
        """The file's entry. Raises Corrupt when it differs from `expect`."""
        chunks = [checksum.decode(crc) for crc in self._chunks()]
        entry = file_entry(name, self._size_bytes, self._chunk_bytes, chunks)
        if expect is not None and (problems := differences(expect, entry)):
            raise _corrupt(action, problems[0])
        return entry

    def check(self, expect: FileEntry, *, first: int, action: str) -> None:
        """Raises Corrupt when the pieces are not the whole chunks of `expect` from number `first` on."""
        for index, crc in enumerate(self._chunks(), start=first):
            if crc != expect.chunks[index]:
                raise _corrupt(action, difference(expect, index, crc))

    def _chunks(self) -> list[str]:
        crcs = [self.pop_chunk(index) for index in range(-(-self._size_bytes // self._chunk_bytes))]
        return [crc for crc in crcs if crc is not None]


async def measure(
    source: Source,
    name: str,
    size_bytes: int,
    chunk_bytes: int,
    *,
    bandwidth: Bandwidth | None = None,
    progress: Progress | None = None,
) -> FileEntry:
    """The entry of what a source holds, from reading all of it. `bandwidth`: limits the rate, and reads one piece at a
    time."""
    sums = ChunkSums(size_bytes, chunk_bytes)
    buffers: list[memoryview] = []

    async def read(piece: tuple[int, int]) -> None:
        offset, length = piece
        if bandwidth is not None:
            await bandwidth.take(length)
        buffer = buffers.pop() if buffers else page_aligned(min(READ_BYTES, size_bytes))
        await source.fill(offset, buffer[:length])
        await asyncio.to_thread(sums.add, offset, buffer[:length])
        buffers.append(buffer)
        if progress is not None:
            progress(length)

    in_flight = READS_IN_FLIGHT if bandwidth is None else 1
    await for_each(in_flight, checksum.chunk_ranges(size_bytes, READ_BYTES), read)
    return sums.entry(name)


def differences(expect: FileEntry, actual: FileEntry) -> list[str]:
    """One sentence for each difference between two entries of a file."""
    if (expect.size_bytes, expect.chunk_bytes) != (actual.size_bytes, actual.chunk_bytes):
        return [
            f"{actual.size_bytes} bytes in chunks of {actual.chunk_bytes}, "
            f"expected {expect.size_bytes} in chunks of {expect.chunk_bytes}"
        ]
    return [
        difference(expect, index, crc)
        for index, (promised, crc) in enumerate(zip(expect.chunks, actual.chunks, strict=True))
        if promised != crc
    ]


def difference(expect: FileEntry, index: int, crc: str) -> str:
    return f"chunk {index} of {len(expect.chunks)}: crc64nvme {crc}, expected {expect.chunks[index]}"


def _corrupt(action: str, problem: str) -> Corrupt:
    hint = "these are not the bytes that were checkpointed; another replica may have them"
    return Corrupt(f"{action}: {problem}", hint=hint)
