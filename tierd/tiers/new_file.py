"""A file that a put writes: under a temporary name until `commit`, absent after `close` without a commit.

Written with O_DIRECT where the filesystem allows, fsynced, linked to its name, and its folder fsynced. All calls block.
`close` may be called while others still run, because their callers no longer wait for them: the last one to end closes
the file, so no write reaches a descriptor that belongs to another file meanwhile.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import secrets
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Concatenate, ParamSpec, TypeVar

from tierd.descriptors import read_all
from tierd.failpoints import failpoint
from tierd.format import layout
from tierd.format.shard import ALIGN_BYTES, round_up
from tierd.tiers.direct_io import page_aligned, reserve, set_direct, write_all
from tierd.tiers.tree import NO_LINK, Tree, closing_fd

P = ParamSpec("P")
T = TypeVar("T")


class Uses(AbstractContextManager["Uses"]):
    """The calls that use a file now. Once `is_over`, the last one to end calls `release`."""

    def __init__(self, release: Callable[[], None]) -> None:
        self.is_over = False
        self._count = 0
        self._lock = threading.Lock()
        self._release = release

    def __enter__(self) -> Uses:
        with self._lock:
            self._count += 1
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._count -= 1
            is_last = self.is_over and self._count == 0
        if is_last:
            self._release()


def _counted(call: Callable[Concatenate[NewFile, P], T]) -> Callable[Concatenate[NewFile, P], T]:
    @functools.wraps(call)
    def counted(file: NewFile, *arguments: P.args, **options: P.kwargs) -> T:
        with file.uses:
            return call(file, *arguments, **options)

    return counted


class NewFile:
    def __init__(self, tree: Tree, key: str, size_bytes: int, *, is_small: bool = False) -> None:
        self._tree = tree
        self._key = key
        self._size_bytes = size_bytes
        self._is_direct = not is_small
        self._folder = -1
        self._fd = -1
        self._name = ""
        self._temporary_name = ""
        self.uses = Uses(self._release)

    @_counted
    def begin(self, clone: Callable[[int], bool] | None = None) -> bool:
        """Makes the temporary file. `clone`: called with its descriptor, makes it share the blocks of another file and
        returns True, or changes nothing. Returns what it returned: then the file has its bytes, and `read` reads them.
        """
        self._folder, self._name = self._tree.open_folder(self._key, create=True)
        # Random, because two writers of one key must not write into one file.
        temporary_name = layout.partial_name(self._name, secrets.token_hex(4))
        self._fd = self._tree.make_file(self._folder, temporary_name, os.O_WRONLY if clone is None else os.O_RDWR)
        self._temporary_name = temporary_name
        failpoint("file.created")
        with suppress(OSError):  # no locks on this filesystem: a sweep may remove the file, and the put fails
            fcntl.flock(self._fd, fcntl.LOCK_EX)
        if clone is not None and clone(self._fd):
            return True
        if self._is_direct and self._size_bytes:
            reserve(self._fd, self._size_bytes)
            self._is_direct = set_direct(self._fd)
        return False

    @_counted
    def read(self, offset: int, piece: memoryview) -> int:
        """Fills `piece` with bytes of the clone. Returns how many were missing because it ended."""
        return read_all(self._fd, offset, piece)

    @_counted
    def write(self, offset: int, piece: memoryview, length: int) -> None:
        """Writes `length` bytes of `piece`; may also write the rest of it, up to a multiple of 4096."""
        failpoint("file.write")
        views = [piece[:length]]
        if self._is_direct:
            aligned = min(round_up(length), len(piece) // ALIGN_BYTES * ALIGN_BYTES)
            views = [piece[:aligned]]
            if aligned < length:
                views.append(page_aligned(ALIGN_BYTES))
                views[1][: length - aligned] = piece[aligned:length]
        for view in views:
            if not write_all(self._fd, offset, view, is_direct=self._is_direct):
                self._is_direct = False
            offset += len(view)

    @_counted
    def keep_damaged(self) -> None:
        """Gives the file that `commit` will replace a second name, which no listing shows, as evidence."""
        failpoint("repair.keep")
        kept = layout.damaged_copy_name(self._name)
        with suppress(OSError):  # it is missing, or there are no hard links: the repair matters more
            with suppress(FileNotFoundError):
                os.unlink(kept, dir_fd=self._folder)  # only the newest is kept
            os.link(self._name, kept, src_dir_fd=self._folder, dst_dir_fd=self._folder, follow_symlinks=False)

    @_counted
    def commit(self, *, if_absent: bool = False) -> bool:
        """Makes the file visible and durable. `if_absent`: returns False and changes nothing where the name exists."""
        failpoint("file.sync")
        os.ftruncate(self._fd, self._size_bytes)
        os.fsync(self._fd)
        if if_absent and not self._link():
            # Whoever made it may have been killed before its own fsync, and the caller relies on it from now on.
            failpoint("file.exists")
            os.fsync(self._folder)
            return False
        if self._temporary_name:
            failpoint("file.rename")
            os.rename(self._temporary_name, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        self._temporary_name = ""
        failpoint("file.sync_folder")
        # fsync the directory too: without it the new name itself may be lost on power failure.
        os.fsync(self._folder)
        failpoint("file.done")
        return True

    @_counted
    def close(self) -> None:
        self.uses.is_over = True

    def _release(self) -> None:
        try:
            if self._temporary_name:
                failpoint("file.abandon")
                with suppress(FileNotFoundError):
                    os.unlink(self._temporary_name, dir_fd=self._folder)
                self._temporary_name = ""
        finally:  # a disk that returns errors must not use up the descriptors
            for fd in (self._fd, self._folder):
                if fd >= 0:
                    os.close(fd)
            self._fd = self._folder = -1

    def _link(self) -> bool:
        """Takes the final name unless it exists. link(2) refuses an existing name, where rename(2) would replace it."""
        failpoint("file.link")
        try:
            os.link(self._temporary_name, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            # No hard links (exFAT, some FUSE): check, then rename. The tier's lock keeps other daemons away.
            return not os.access(self._name, os.F_OK, dir_fd=self._folder)
        failpoint("file.linked")
        os.unlink(self._temporary_name, dir_fd=self._folder)
        self._temporary_name = ""
        return True


def is_abandoned(name: str, folder: int) -> bool:
    """Whether no process holds the writer's lock on a partial file. True on a filesystem without locks. False for the
    file of a user who owns neither this process nor the folder."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | NO_LINK, dir_fd=folder)
    except (FileNotFoundError, PermissionError):
        return False
    with closing_fd(fd):
        if os.fstat(fd).st_uid not in (os.geteuid(), os.fstat(folder).st_uid):
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True
