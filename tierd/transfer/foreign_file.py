"""A regular file of another program that is read while it is imported, and whether it was written meanwhile."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from tierd.descriptors import read_all
from tierd.errors import BadConfig, Corrupt, NotFound, Transient
from tierd.format.text import time_text


class ForeignFile:
    """Open until `close`. Raises NotFound, and BadConfig where it is not a regular file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise NotFound(f"import {path}: {error.strerror}") from error
        self._before = os.fstat(self.fd)
        if not stat.S_ISREG(self._before.st_mode):
            self.close()
            raise BadConfig(f"import {path}: it is not a regular file")

    @property
    def size_bytes(self) -> int:
        return self._before.st_size

    @property
    def created_at(self) -> str:
        """When it was written, as in a manifest."""
        return time_text(self._before.st_mtime_ns)

    def read(self, length: int, offset: int) -> bytes:
        """Read at most `length` bytes."""
        return os.pread(self.fd, length, offset)

    def fill(self, offset: int, buffer: memoryview) -> None:
        """Raises Corrupt where the file ends before."""
        if missing := read_all(self.fd, offset, buffer):
            raise Corrupt(f"import {self.path}: it ends at byte {offset + len(buffer) - missing}")

    def check_unchanged(self) -> None:
        """Raises Transient if it was written, or replaced under its name, since it was opened."""
        try:
            named = os.stat(self.path)
        except OSError as error:
            raise Transient(f"import {self.path}: {error.strerror}", hint="import it when it is complete") from error
        if any(_version(after) != _version(self._before) for after in (os.fstat(self.fd), named)):
            raise Transient(f"import {self.path}: it was written meanwhile", hint="import it when it is complete")

    def close(self) -> None:
        os.close(self.fd)


def _version(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
