"""The checksums of a file whose pieces come in any order: combined to its chunks, and compared with the promise.

Pieces need not fit the chunks: a piece that spans chunks is summed in parts, a chunk of several pieces is
combined from theirs. Nothing is read twice.
"""

from __future__ import annotations

from tierd.errors import Corrupt
from tierd.format import checksum
from tierd.format.manifest import FileEntry, file_entry


class ChunkSums:
    """Fed by several threads at once, each piece exactly once; read when all are in."""

    def __init__(self, size_bytes: int, chunk_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._chunk_bytes = chunk_bytes
        self._parts: dict[int, tuple[int, int]] = {}  # offset → (checksum, length); none spans two chunks

    def add(self, offset: int, piece: memoryview) -> int:
        """Takes the checksum of the piece at `offset` and returns it."""
        parts: list[tuple[int, int]] = []
        done = 0
        while done < len(piece):
            room = self._chunk_bytes - (offset + done) % self._chunk_bytes
            part = piece[done : done + room]
            parts.append((checksum.crc64nvme(part), len(part)))
            self._parts[offset + done] = parts[-1]
            done += len(part)
        return checksum.combine(parts)

    def take(self, index: int) -> str | None:
        """The checksum of chunk number `index`, which is forgotten with that; None while a piece of it is not in."""
        begin = index * self._chunk_bytes
        end = min(begin + self._chunk_bytes, self._size_bytes)
        offsets: list[int] = []
        while begin < end and begin in self._parts:
            offsets.append(begin)
            begin += self._parts[begin][1]
        return checksum.encode(checksum.combine([self._parts.pop(one) for one in offsets])) if begin == end else None

    def entry(self, name: str, expect: FileEntry | None, doing: str) -> FileEntry:
        """The file's entry. Raises Corrupt when it is not what `expect` promises."""
        chunks = self._chunks()
        found = file_entry(name, self._size_bytes, self._chunk_bytes, chunks)
        if expect is not None:
            problems = differences(expect, found)
            if problems:
                raise _corrupt(doing, problems[0])
        return found

    def check(self, expect: FileEntry, *, first: int, doing: str) -> None:
        """Raises Corrupt when these pieces are not whole chunks of `expect`, from number `first` on."""
        for index, found in enumerate(self._chunks(), start=first):
            if checksum.encode(found) != expect.chunks[index]:
                raise _corrupt(doing, difference(expect, index, checksum.encode(found)))

    def _chunks(self) -> list[int]:
        chunks: list[int] = []
        parts: list[tuple[int, int]] = []
        for offset in sorted(self._parts):
            if offset % self._chunk_bytes == 0 and parts:
                chunks.append(checksum.combine(parts))
                parts = []
            parts.append(self._parts[offset])
        return [*chunks, checksum.combine(parts)] if parts else chunks


def differences(expect: FileEntry, found: FileEntry) -> list[str]:
    """What differs between what was promised and what was found, one sentence each."""
    if (expect.size_bytes, expect.chunk_bytes) != (found.size_bytes, found.chunk_bytes):
        return [
            f"{found.size_bytes} bytes in chunks of {found.chunk_bytes}, "
            f"expected {expect.size_bytes} in chunks of {expect.chunk_bytes}"
        ]
    return [
        difference(expect, index, got)
        for index, (promised, got) in enumerate(zip(expect.chunks, found.chunks, strict=True))
        if promised != got
    ]


def difference(expect: FileEntry, index: int, got: str) -> str:
    return f"chunk {index} of {len(expect.chunks)}: crc64nvme {got}, expected {expect.chunks[index]}"


def _corrupt(doing: str, problem: str) -> Corrupt:
    hint = "these are not the bytes that were checkpointed; another replica may have them"
    return Corrupt(f"{doing}: {problem}", hint=hint)
