"""How far training has come in files of documents: one cursor for each file, whoever read it. Pure.

A file belongs to one reader at a time, so cursors of all ranks and workers merge into one, and that one is shared out
among any number of readers: every document is read once in each pass.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping

import msgspec


class FileCursor(msgspec.Struct, frozen=True, array_like=True):
    """`passes` are behind it, and `documents` of the pass that has begun; the next one begins at byte `offset`.

    offset: 0 where the reader knows no bytes, and at the beginning of a pass. size_bytes: of the whole file.
    """

    size_bytes: int
    passes: int = 0
    documents: int = 0
    offset: int = 0

    def remaining_bytes(self, epoch: int) -> int:
        return self.size_bytes - self.offset if self.passes <= epoch else 0

    def finished(self, epoch: int) -> FileCursor:
        """Where the pass `epoch` ends, unless it is further already."""
        return FileCursor(self.size_bytes, epoch + 1) if self.passes <= epoch else self


Cursor = Mapping[str, FileCursor]
"""By path."""


def merge(cursors: Iterable[Cursor]) -> dict[str, FileCursor]:
    """All files of all cursors; of a file that several have, the furthest."""
    merged: dict[str, FileCursor] = {}
    for cursor in cursors:
        for path, at in cursor.items():
            known = merged.get(path, at)
            merged[path] = max(known, at, key=lambda one: (one.passes, one.documents))
    return merged


def share_out(cursor: Cursor, readers: int, *, epoch: int = 0) -> list[dict[str, FileCursor]]:
    """Every file to one reader. What remains in the pass `epoch` is spread evenly by bytes, then the finished files."""
    shares: list[dict[str, FileCursor]] = [{} for _ in range(readers)]
    unfinished = {path: at.remaining_bytes(epoch) for path, at in cursor.items() if at.remaining_bytes(epoch)}
    finished = {path: at.size_bytes for path, at in cursor.items() if path not in unfinished}
    for sizes in (unfinished, finished):
        held = [(sum(at.size_bytes for at in share.values()) if sizes is finished else 0) for share in shares]
        lightest = [(size, reader) for reader, size in enumerate(held)]
        heapq.heapify(lightest)
        for path in sorted(sizes, key=lambda path: (-sizes[path], path)):
            size, reader = lightest[0]
            shares[reader][path] = cursor[path]
            heapq.heapreplace(lightest, (size + sizes[path], reader))
    return shares
