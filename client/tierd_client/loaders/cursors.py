"""How far training has read each file of documents: one cursor per file, no matter which reader read it. Pure.

A file belongs to one reader at a time. The cursors of all ranks and workers merge into one, which is shared out among
any number of readers, so that every document is read once in each pass.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping

import msgspec


class FileCursor(msgspec.Struct, frozen=True, array_like=True):
    """The position in one file: `passes` are complete, and `documents` of the current pass were read.

    offset: byte at which the next document begins; 0 at the start of a pass, and for a reader without byte positions.
    size_bytes: of the whole file.
    """

    size_bytes: int
    passes: int = 0
    documents: int = 0
    offset: int = 0

    def remaining_bytes(self, epoch: int) -> int:
        return self.size_bytes - self.offset if self.passes <= epoch else 0

    def finished(self, epoch: int) -> FileCursor:
        """The end of the pass `epoch`, unless the cursor is past that."""
        return FileCursor(self.size_bytes, epoch + 1) if self.passes <= epoch else self


Cursor = Mapping[str, FileCursor]
"""File cursors by path."""


def merge(cursors: Iterable[Cursor]) -> dict[str, FileCursor]:
    """The files of all cursors. Where several have the same file, the furthest position."""
    merged: dict[str, FileCursor] = {}
    for cursor in cursors:
        for path, position in cursor.items():
            known = merged.get(path, position)
            merged[path] = max(known, position, key=lambda position: (position.passes, position.documents))
    return merged


def share_out(cursor: Cursor, readers: int, *, epoch: int = 0) -> list[dict[str, FileCursor]]:
    """Gives every file to one reader. Balances the bytes that remain in the pass `epoch`, then the finished files."""
    shares: list[dict[str, FileCursor]] = [{} for _ in range(readers)]
    remaining = {path: position.remaining_bytes(epoch) for path, position in cursor.items()}
    unfinished = {path: size_bytes for path, size_bytes in remaining.items() if size_bytes}
    finished = {path: position.size_bytes for path, position in cursor.items() if path not in unfinished}
    _assign(unfinished, cursor, shares, [0] * readers)
    _assign(finished, cursor, shares, [sum(file.size_bytes for file in share.values()) for share in shares])
    return shares


def _assign(
    sizes: Mapping[str, int], cursor: Cursor, shares: list[dict[str, FileCursor]], loads_bytes: list[int]
) -> None:
    """Adds each file, the largest first, to the share with the smallest load."""
    heap = [(load_bytes, reader) for reader, load_bytes in enumerate(loads_bytes)]
    heapq.heapify(heap)
    for path in sorted(sizes, key=lambda path: (-sizes[path], path)):
        load_bytes, reader = heap[0]
        shares[reader][path] = cursor[path]
        heapq.heapreplace(heap, (load_bytes + sizes[path], reader))
