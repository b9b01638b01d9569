"""The bytes of an assembled file as a source for a store: its tensors are read piece by piece while it is written."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

from tierd.errors import Corrupt
from tierd.format.whole import AssembledFile
from tierd.tiers.store import Source

ReadPiece = Callable[[str, int, memoryview], None]
"""(file, offset, buffer) → fills the whole buffer with that file's bytes."""

ReadPieceAsync = Callable[[str, int, memoryview], Awaitable[None]]
"""The same, where only the event loop can read."""


def fill_from(file: AssembledFile, read: ReadPiece) -> Callable[[int, memoryview], None]:
    """What fills a buffer with the file's bytes from an offset. Raises Corrupt where the tensors leave a hole."""

    def fill(offset: int, buffer: memoryview) -> None:
        for piece in _pieces(file, offset, buffer):
            read(*piece)

    return fill


def source_of(file: AssembledFile, read: ReadPieceAsync) -> Source:
    """The file's bytes as a source. Its fill raises Corrupt where the tensors leave a hole, and as `read`."""

    async def fill(offset: int, buffer: memoryview) -> None:
        for piece in _pieces(file, offset, buffer):
            await read(*piece)

    return Source(fill)


def _pieces(file: AssembledFile, offset: int, buffer: memoryview) -> Iterator[tuple[str, int, memoryview]]:
    """Puts what belongs there of the header into the buffer, then yields what is to be read into the rest."""
    header = file.header[offset : offset + len(buffer)]
    buffer[: len(header)] = header
    done = len(header)
    for piece in file.pieces(offset + done, offset + len(buffer)):
        yield piece.shard, piece.offset, buffer[piece.at - offset : piece.at - offset + piece.length]
        done += piece.length
    if done != len(buffer):
        raise Corrupt(f"assemble a whole file: some of its bytes {offset} to {offset + len(buffer)} are missing")
