"""The bytes of an assembled file as a source for a store: its tensors are read piece by piece while it is written."""

from __future__ import annotations

from collections.abc import Callable

from tierd.errors import Corrupt
from tierd.format.whole import AssembledFile

ReadPiece = Callable[[str, int, memoryview], None]
"""(file, offset, buffer) → fills the whole buffer with that file's bytes."""


def fill_from(file: AssembledFile, read: ReadPiece) -> Callable[[int, memoryview], None]:
    """What fills a buffer with the file's bytes from an offset. Raises Corrupt where the tensors leave a hole."""

    def fill(offset: int, buffer: memoryview) -> None:
        header = file.header[offset : offset + len(buffer)]
        buffer[: len(header)] = header
        done = len(header)
        for piece in file.pieces(offset + done, offset + len(buffer)):
            read(piece.shard, piece.offset, buffer[piece.at - offset : piece.at - offset + piece.length])
            done += piece.length
        if done != len(buffer):
            raise Corrupt(f"assemble a whole file: some of its bytes {offset} to {offset + len(buffer)} are missing")

    return fill
