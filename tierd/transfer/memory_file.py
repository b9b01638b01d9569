"""A file that is fetched into memory piece by piece, where no directory takes it.

It lives as long as this object and each descriptor of it.
"""

from __future__ import annotations

import os
import weakref
from functools import partial

from tierd.descriptors import read_all, reopen_read_only
from tierd.errors import Corrupt, Full
from tierd.format.manifest import FileEntry
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.store import Source


class MemoryFile:
    """As PartialFile, in a memfd, which has memory only for what was written. `source`: the bytes that have arrived."""

    def __init__(self, store: DirectoryStore, key: str, entry: FileEntry) -> None:
        self.key = key
        self._pool = store.pool
        self._size_bytes = entry.size_bytes
        self._fd = -1

    @property
    def source(self) -> Source:
        # An attribute would be a cycle of references, and the memory would live on until Python looks for cycles.
        return Source(partial(self._pool.query, self._read), self._read)

    def begin(self, is_whole: bool) -> bool:
        """Makes the file, in its full size, unless this object has made it; returns whether it had. Raises Full."""
        if self._fd >= 0:
            return True
        try:
            fd = os.memfd_create("tierd-fetch", os.MFD_CLOEXEC)
            weakref.finalize(self, os.close, fd)
            os.ftruncate(fd, self._size_bytes)
        except OSError as error:
            raise Full(f"fetch {self.key} into memory: {error.strerror}") from error
        self._fd = fd
        return False

    def exists(self) -> bool:
        return self._fd >= 0

    def _read(self, offset: int, buffer: memoryview) -> None:
        if read_all(self._fd, offset, buffer):
            raise Corrupt(f"read {self.key} in memory: it ends before byte {offset + len(buffer)}")

    def write(self, offset: int, buffer: memoryview, length: int) -> None:
        """Writes the first `length` bytes of `buffer`. Raises Full."""
        view = buffer[:length]
        try:
            while view:
                count = os.pwrite(self._fd, view, offset)
                view, offset = view[count:], offset + count
        except OSError as error:
            raise Full(f"fetch {self.key} into memory: {error.strerror}") from error

    def open_fd(self) -> int:
        """A read-only descriptor, which the caller closes."""
        return reopen_read_only(self._fd)
