"""A file that is fetched into a directory piece by piece, over several attempts, under a temporary name.

The temporary name depends on the final content, so the next attempt finds the file and keeps what verifies. The file is
opened for each piece, because thousands may be fetched at once. All calls block.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial

from tierd.descriptors import read_all
from tierd.errors import Corrupt, NotFound, TierdError, TierUnreachable
from tierd.failpoints import failpoint
from tierd.format import checksum, layout
from tierd.format.manifest import FileEntry
from tierd.format.shard import ALIGN_BYTES, round_up
from tierd.tiers.direct_io import reserve, set_direct, write_all
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.store import Source
from tierd.tiers.tree import closing_fd, translated


def partial_name(entry: FileEntry) -> str:
    """The name of a file while it is fetched: by its final content, so that the next attempt continues it."""
    content = f"{entry.name} {entry.size_bytes} {entry.chunk_bytes} {entry.crc64nvme}"
    return layout.partial_name(entry.name, f"{checksum.crc64nvme(content.encode()):016x}")


class PartialFile:
    """The file that becomes `key` of the store. `source`: the bytes that have arrived."""

    def __init__(self, store: DirectoryStore, key: str, entry: FileEntry) -> None:
        self._store = store
        self.key = key
        self._size_bytes = entry.size_bytes
        self.sync_timeout_s = store.sync_timeout_s(entry.size_bytes)
        self._name = partial_name(entry)
        # A piece that ends within a block would be rounded up into the next piece.
        self._is_aligned = entry.chunk_bytes % ALIGN_BYTES == 0
        self._action = f"write {key} in {store.url}"
        self._inode: tuple[int, int] | None = None  # once it has begun
        self.source = Source(partial(store.pool.query, self._read), self._read)

    def begin(self, is_whole: bool) -> bool:
        """Makes the file, in its full size, unless it exists and is this user's; returns whether it existed.
        `is_whole`: all of it will be written, so disk space is reserved."""
        tree = self._store.tree
        with translated(self._action, missing=TierUnreachable):
            folder, _ = tree.open_folder(self.key, create=True)
            with closing_fd(folder), closing_fd(tree.continue_file(folder, self._name)) as fd:
                failpoint("fetch.begin")
                stat_result = os.fstat(fd)
                self._inode = stat_result.st_dev, stat_result.st_ino
                if is_whole and self._size_bytes:
                    reserve(fd, self._size_bytes)
                elif stat_result.st_size < self._size_bytes:
                    os.ftruncate(fd, self._size_bytes)
        return stat_result.st_size > 0

    def exists(self) -> bool:
        try:
            with self._opened(os.O_RDONLY, missing=NotFound) as fd:
                return os.fstat(fd).st_size > 0
        except NotFound:
            return False

    def _read(self, offset: int, buffer: memoryview) -> None:
        with self._opened(os.O_RDONLY) as fd:
            if read_all(fd, offset, buffer):
                raise Corrupt(f"read {self._name} in {self._store.url}: it ends before byte {offset + len(buffer)}")

    def write(self, offset: int, buffer: memoryview, length: int) -> None:
        """Writes the first `length` bytes of `buffer`; at the end of the file also what fills the last block."""
        with self._opened(os.O_WRONLY) as fd:
            failpoint("fetch.write")
            is_direct = self._is_aligned and set_direct(fd)
            write_all(fd, offset, buffer[: round_up(length) if is_direct else length], is_direct=is_direct)

    def make_durable(self) -> None:
        """Fsyncs the file, and deletes it if that fails: Linux then counts bytes as written that are not on the disk.
        The next attempt would read and verify them, and its fsync would succeed."""
        with self._opened(os.O_RDWR) as fd:
            failpoint("fetch.sync")
            try:
                os.ftruncate(fd, self._size_bytes)
                os.fsync(fd)
            except OSError:
                folder, _ = self._store.tree.open_folder(self.key, create=False)
                with closing_fd(folder):
                    os.unlink(self._name, dir_fd=folder)
                raise

    def publish(self) -> None:
        """Gives the file its final name, durably."""
        with translated(self._action, missing=TierUnreachable):
            folder, name = self._store.tree.open_folder(self.key, create=False)
            with closing_fd(folder):
                self._check_same(os.stat(self._name, dir_fd=folder, follow_symlinks=False))
                failpoint("fetch.rename")
                os.rename(self._name, name, src_dir_fd=folder, dst_dir_fd=folder)
                failpoint("fetch.sync_folder")
                os.fsync(folder)

    def open_fd(self) -> int:
        """A read-only descriptor, which the caller closes."""
        with self._opened(os.O_RDONLY) as fd:
            return os.dup(fd)

    @contextmanager
    def _opened(self, flags: int, *, missing: type[TierdError] = TierUnreachable) -> Generator[int]:
        key = f"{self.key.rpartition('/')[0]}/{self._name}"
        with translated(self._action, missing=missing), closing_fd(self._store.tree.open_file(key, flags)) as fd:
            self._check_same(os.fstat(fd))
            yield fd

    def _check_same(self, stat_result: os.stat_result) -> None:
        if self._inode not in (None, (stat_result.st_dev, stat_result.st_ino)):
            raise TierUnreachable(
                f"{self._action}: another process has put a file in place of {self._name}",
                hint="can other users write in this directory? Take that right away",
            )
