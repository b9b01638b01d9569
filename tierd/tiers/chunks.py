"""The chunk checksums of a file whose pieces arrive in any order, compared with those of its manifest entry.

Pieces need not fit the chunks: the checksum of a chunk is combined from those of its pieces, and a piece that spans
chunks is summed in parts. No byte is read twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import NamedTuple

from tierd.errors import Corrupt
from tierd.format import checksum, digest
from tierd.format.manifest import FileEntry, file_entry
from tierd.tiers.direct_io import page_aligned
from tierd.tiers.pool import for_each
from tierd.tiers.rate_limit import Bandwidth
from tierd.tiers.store import Progress, Source

READ_BYTES = 16 << 20  # a multiple of a digest's leaf
READS_IN_FLIGHT = 4


class ChunkSum(NamedTuple):
    """The checksums of one chunk. `digest` or `crc64nvme` is empty if it is not computed, but never both."""

    crc64nvme: str
    digest: str


class ChunkSums:
    """`add` each piece exactly once, from any thread; read the result when all are added.

    `algorithm`: of the digests to compute as well, for which each piece begins at a leaf of its chunk. `has_crc`: False
    to compute the digests alone, which show every difference that a CRC shows.
    """

    def __init__(self, size_bytes: int, chunk_bytes: int, algorithm: str = "", *, has_crc: bool = True) -> None:
        self._size_bytes = size_bytes
        self._chunk_bytes = chunk_bytes
        self._algorithm = algorithm
        self._has_crc = has_crc or not algorithm
        # offset → (checksum, length, hashes of the leaves); none spans two chunks
        self._parts: dict[int, tuple[int, int, bytes]] = {}

    def add(self, offset: int, piece: memoryview) -> None:
        done = 0
        while done < len(piece):
            part = piece[done : done + self._chunk_bytes - (offset + done) % self._chunk_bytes]
            hashes = digest.leaves(self._algorithm, part) if self._algorithm else b""
            crc = checksum.crc64nvme(part) if self._has_crc else 0
            self._parts[offset + done] = (crc, len(part), hashes)
            done += len(part)

    def pop_chunk(self, index: int) -> ChunkSum | None:
        """The sums of a chunk, which are then forgotten; None while a piece of it is missing."""
        begin = index * self._chunk_bytes
        end = min(begin + self._chunk_bytes, self._size_bytes)
        offsets: list[int] = []
        while begin < end and begin in self._parts:
            offsets.append(begin)
            begin += self._parts[begin][1]
        if begin != end:
            return None
        parts = [self._parts.pop(offset) for offset in offsets]
        crc = checksum.encode(checksum.combine([part[:2] for part in parts])) if self._has_crc else ""
        return ChunkSum(crc, digest.of_chunk(self._algorithm, (part[2] for part in parts)) if self._algorithm else "")

    def entry(self, name: str, expect: FileEntry | None = None, action: str = "") -> FileEntry:
        """The file's entry. Raises Corrupt when it differs from `expect`."""
        sums = self._chunks()
        entry = file_entry(
            name,
            self._size_bytes,
            self._chunk_bytes,
            [checksum.decode(each.crc64nvme) for each in sums],
            algorithm=self._algorithm,
            digests=[each.digest for each in sums],
        )
        if expect is not None and (problems := differences(expect, entry)):
            raise _corrupt(action, problems[0])
        return entry

    def check(self, expect: FileEntry, *, first: int, action: str) -> None:
        """Raises Corrupt when the pieces are not the whole chunks of `expect` from number `first` on."""
        for index, found in enumerate(self._chunks(), start=first):
            if problem := difference(expect, index, found):
                raise _corrupt(action, problem)

    def _chunks(self) -> list[ChunkSum]:
        sums = [self.pop_chunk(index) for index in range(-(-self._size_bytes // self._chunk_bytes))]
        return [found for found in sums if found is not None]


def pieces(size_bytes: int, chunk_bytes: int, piece_bytes: int) -> Iterator[tuple[int, int]]:
    """The (offset, length) of the pieces of a file: each within one chunk, or several whole chunks."""
    step = chunk_bytes if chunk_bytes > piece_bytes else piece_bytes // chunk_bytes * chunk_bytes
    for begin, length in checksum.chunk_ranges(size_bytes, step):
        for offset, size in checksum.chunk_ranges(length, piece_bytes):
            yield begin + offset, size


async def measure(
    source: Source,
    name: str,
    size_bytes: int,
    chunk_bytes: int,
    *,
    bandwidth: Bandwidth | None = None,
    progress: Progress | None = None,
    algorithm: str = "",
) -> FileEntry:
    """The entry of what a source holds, from reading all of it. `bandwidth`: limits the rate, and reads one piece at a
    time. `algorithm`: of the digests; empty: none."""
    sums = ChunkSums(size_bytes, chunk_bytes, algorithm)
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
    await for_each(in_flight, pieces(size_bytes, chunk_bytes, READ_BYTES), read)
    return sums.entry(name)


def differences(expect: FileEntry, actual: FileEntry) -> list[str]:
    """One sentence for each difference between two entries of a file."""
    if (expect.size_bytes, expect.chunk_bytes) != (actual.size_bytes, actual.chunk_bytes):
        return [
            f"{actual.size_bytes} bytes in chunks of {actual.chunk_bytes}, "
            f"expected {expect.size_bytes} in chunks of {expect.chunk_bytes}"
        ]
    sums = (ChunkSum(crc, actual.digest_of(index)) for index, crc in enumerate(actual.chunks))
    found = (difference(expect, index, each) for index, each in enumerate(sums))
    return [sentence for sentence in found if sentence]


def difference(expect: FileEntry, index: int, found: ChunkSum) -> str:
    """How a chunk differs from the manifest; empty if it does not. A digest counts where both sides have one, and the
    CRC may be missing only then."""
    where = f"chunk {index} of {len(expect.chunks)}"
    has_digests = found.digest and expect.algorithm
    if (found.crc64nvme or not has_digests) and found.crc64nvme != expect.chunks[index]:
        return f"{where}: crc64nvme {found.crc64nvme}, expected {expect.chunks[index]}"
    if has_digests and found.digest != expect.digest_of(index):
        return f"{where}: {expect.algorithm} {found.digest}, expected {expect.digest_of(index)}"
    return ""


def _corrupt(action: str, problem: str) -> Corrupt:
    hint = "these are not the bytes that were checkpointed; another replica may have them"
    return Corrupt(f"{action}: {problem}", hint=hint)
