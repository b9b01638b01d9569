"""A file that arrives in a directory piece by piece, over several lives, under a name that is no key.

The name is made of what the file will hold, so the next attempt finds it and may keep what verifies. Opened anew for
each piece: thousands of files may be on their way. Blocking: it runs in the store's pool.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager

from tierd.errors import BadRequest, NotFound, TierUnreachable
from tierd.format import checksum, layout
from tierd.format.manifest import FileEntry
from tierd.tiers.direct_io import ALIGN_BYTES, reserve, round_up, set_direct
from tierd.tiers.directory import DirectoryStore, translated


def arriving_name(entry: FileEntry) -> str:
    promise = f"{entry.name} {entry.size_bytes} {entry.chunk_bytes} {entry.crc64nvme}"
    return layout.arriving_name(entry.name, checksum.crc64nvme(promise.encode()))


class PartialFile:
    def __init__(self, store: DirectoryStore, key: str, entry: FileEntry) -> None:
        self._store = store
        self._key = key
        self._size_bytes = entry.size_bytes
        self._name = arriving_name(entry)
        # A piece that ends within a block would be rounded up into the next one.
        self._is_direct = entry.chunk_bytes % ALIGN_BYTES == 0
        self._doing = f"write {key} in {store.url}"

    def begin(self, *, is_whole: bool) -> bool:
        """Makes the file, of its full size, where there is none; False if so. `is_whole`: all of it will come, and room
        is reserved."""
        with self._opened(os.O_RDWR | os.O_CREAT, create=True) as fd:
            found_bytes = os.fstat(fd).st_size
            if is_whole and self._size_bytes:
                reserve(fd, self._size_bytes)
            elif found_bytes < self._size_bytes:
                os.ftruncate(fd, self._size_bytes)
        return found_bytes > 0

    def exists(self) -> bool:
        try:
            with self._opened(os.O_RDONLY, missing=NotFound) as fd:
                return os.fstat(fd).st_size > 0
        except NotFound:
            return False

    def read(self, offset: int, view: memoryview) -> bool:
        """False when the file ends before that."""
        with self._opened(os.O_RDONLY) as fd:
            while view:
                count = os.preadv(fd, [view], offset)
                if count == 0:
                    return False
                view, offset = view[count:], offset + count
        return True

    def write(self, offset: int, buffer: memoryview, length: int) -> None:
        """Writes the first `length` bytes of `buffer`, and at the end of the file what fills its last block."""
        with self._opened(os.O_WRONLY) as fd:
            view = buffer[:length]
            is_direct = self._is_direct and set_direct(fd)
            if is_direct:
                view = buffer[: round_up(length)]
            while view:
                try:
                    count = os.pwrite(fd, view, offset)
                except OSError as error:
                    if error.errno != errno.EINVAL or not is_direct:
                        raise
                    is_direct = set_direct(fd, wanted=False)
                    continue
                view, offset = view[count:], offset + count

    def make_durable(self) -> None:
        with self._opened(os.O_RDWR) as fd:
            os.ftruncate(fd, self._size_bytes)
            os.fsync(fd)

    def publish(self) -> None:
        """Gives the file its own name. Durable once the folder is."""
        with translated(self._doing, missing=TierUnreachable):
            folder, name = self._store.open_folder(self._key, create=False)
            try:
                os.rename(self._name, name, src_dir_fd=folder, dst_dir_fd=folder)
                os.fsync(folder)
            finally:
                os.close(folder)

    def open_fd(self) -> int:
        """A read-only descriptor, which the caller closes."""
        with self._opened(os.O_RDONLY) as fd:
            return os.dup(fd)

    @contextmanager
    def _opened(
        self, flags: int, *, create: bool = False, missing: type[NotFound | TierUnreachable] = TierUnreachable
    ) -> Generator[int]:
        with translated(self._doing, missing=missing):
            folder, _ = self._store.open_folder(self._key, create=create)
            try:
                fd = os.open(self._name, flags | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=folder)
            finally:
                os.close(folder)
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise BadRequest(f"{self._doing}: {self._name} is no regular file")
                yield fd
            finally:
                os.close(fd)
