"""The folders and files below one root: opened, listed and deleted without following a link.

Every path is opened component by component with O_NOFOLLOW, and every call names its folder by a descriptor: no key,
and no link that another process puts in place meanwhile, leads out of the root. All calls block.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tierd.access import PRIVATE, Access, is_own_file
from tierd.errors import BadRequest, Full, NotFound, TierdError, TierUnreachable
from tierd.failpoints import failpoint
from tierd.format import layout
from tierd.tiers.store import check_key, is_key

NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Tree:
    """`create`: make the root when a file is first written, unless it existed before: a root that disappears is an
    unmounted disk, not an empty tier. `access`: of what is made. `url`: for messages. Methods raise OSError; see
    `translated`."""

    def __init__(self, root: Path, *, create: bool, access: Access = PRIVATE, url: str = "") -> None:
        self.root = root.absolute()
        self.url = url or f"file://{self.root}"
        self.access = access
        self._may_create = create
        self._is_root_durable = False

    def open_folder(self, key: str, *, create: bool) -> tuple[int, str]:
        """(descriptor of the key's folder, file name). `create`: make missing folders, durably."""
        *parents, name = key.split("/")
        folder = self._open_root(create=create)
        try:
            for parent in parents:
                if create:
                    _make_below(folder, parent, self.access)
                    failpoint("folder.sync")
                    os.fsync(folder)  # also an existing one: its maker may have been killed before its fsync
                below = os.open(parent, FOLDER | os.O_NOFOLLOW, dir_fd=folder)
                os.close(folder)
                folder = below
        except OSError:
            os.close(folder)
            raise
        return folder, name

    def open_file(self, key: str, flags: int = os.O_RDONLY) -> int:
        """A descriptor of an existing regular file. Raises BadRequest when it is something else."""
        folder, name = self.open_folder(key, create=False)
        with closing_fd(folder):
            # O_NONBLOCK: opening a FIFO without a writer would block forever.
            fd = os.open(name, flags | os.O_NONBLOCK | NO_LINK, dir_fd=folder)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise BadRequest(f"open {key} in {self.url}: not a regular file")
        return fd

    def make_file(self, folder: int, name: str, flags: int = os.O_RDWR) -> int:
        """A descriptor of a new file in this folder. Raises FileExistsError."""
        fd = os.open(name, flags | os.O_CREAT | os.O_EXCL | NO_LINK, self.access.file_mode, dir_fd=folder)
        try:
            self.access.share(fd)
        except OSError:
            os.close(fd)
            raise
        return fd

    def continue_file(self, folder: int, name: str) -> int:
        """A descriptor of the file that an earlier attempt of this user left under this name, or of a new one in its
        place: another user could change the content of a file of theirs after it was verified."""
        try:
            fd = os.open(name, os.O_RDWR | os.O_NONBLOCK | NO_LINK, dir_fd=folder)
        except FileNotFoundError:
            return self.make_file(folder, name)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EACCES, errno.EPERM):
                raise
        else:
            if is_own_file(fd):
                return fd
            os.close(fd)
        os.unlink(name, dir_fd=folder)
        return self.make_file(folder, name)

    def walk(self, start: str, prefix: str = "") -> Iterator[tuple[str, os.DirEntry[str], int]]:
        """(key, entry, descriptor of its folder) of every regular file below the folder `start`, partial files
        included. Folders whose name cannot be part of a key, or begins with other characters than `prefix`, are
        skipped."""
        try:
            folder, _ = self.open_folder(f"{check_key(start)}/-" if start else "-", create=False)
        except (FileNotFoundError, NotADirectoryError):
            return
        yield from self._walk(folder, start, prefix)

    def _walk(self, folder: int, above: str, prefix: str) -> Iterator[tuple[str, os.DirEntry[str], int]]:
        """As `walk`, for an open folder, which it closes."""
        names: list[str] = []
        with closing_fd(folder), os.scandir(folder) as entries:
            for entry in entries:
                key = f"{above}/{entry.name}" if above else entry.name
                if entry.is_file(follow_symlinks=False):
                    yield key, entry, folder
                elif key.startswith(prefix) and entry.is_dir(follow_symlinks=False) and is_key(key):
                    names.append(entry.name)
            for name in names:
                try:
                    below = os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=folder)
                except (FileNotFoundError, NotADirectoryError):
                    continue  # deleted, or replaced by a link, since its parent was read
                yield from self._walk(below, f"{above}/{name}" if above else name, prefix)

    def delete(self, keys: Sequence[str]) -> None:
        """Durable on return. The first key is gone from the disk before the others are deleted."""
        parents: set[str] = set()
        for position, key in enumerate(keys):
            try:
                folder, name = self.open_folder(key, create=False)
            except FileNotFoundError:
                continue
            with closing_fd(folder):
                failpoint("delete.unlink")
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)
                failpoint("delete.sync")
                if position == 0:
                    os.fsync(folder)
            parents.add(key.rpartition("/")[0])
        for parent in parents - {""}:
            self._sync_or_remove(parent)
        if "" in parents:
            with closing_fd(self._open_root(create=False)) as root:
                os.fsync(root)

    def remove_if_empty(self, key: str) -> None:
        """Removes the folder of this key unless something is in it, or it is the root."""
        with suppress(OSError):
            if parent := key.rpartition("/")[0]:
                above, name = self.open_folder(parent, create=False)
                with closing_fd(above):
                    os.rmdir(name, dir_fd=above)

    def sync_folders(self, keys: Sequence[str]) -> None:
        """Makes the names of these files durable. Files that are gone are ignored."""
        for parent in {key.rpartition("/")[0] for key in keys}:
            with suppress(FileNotFoundError):
                folder, _ = self.open_folder(f"{parent}/-" if parent else "-", create=False)
                with closing_fd(folder):
                    try:
                        os.fsync(folder)
                    except OSError as error:
                        if error.errno not in (errno.EINVAL, errno.EROFS, errno.EOPNOTSUPP):
                            raise  # else nothing can be written there, so nothing is unsynced

    def _sync_or_remove(self, parent: str) -> None:
        """Makes deletions in a folder durable, and removes the folder when it is empty."""
        with suppress(FileNotFoundError):
            above, name = self.open_folder(parent, create=False)
            with closing_fd(above):
                with closing_fd(os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=above)) as folder:
                    os.fsync(folder)
                    # Damaged copies that repairs kept are deleted with the last of the other files.
                    left = os.listdir(folder)
                    for damaged in left if all(map(layout.is_damaged_copy, left)) else ():
                        os.unlink(damaged, dir_fd=folder)
                failpoint("delete.folder")
                try:
                    os.rmdir(name, dir_fd=above)
                except OSError:
                    return  # not empty
                failpoint("delete.folder_sync")
                os.fsync(above)

    def _open_root(self, *, create: bool) -> int:
        may_create = self._may_create  # read before the open: another thread may be creating it
        try:
            folder = os.open(self.root, FOLDER)
        except FileNotFoundError as error:
            if not may_create:
                hint = "is the disk mounted, and is the path right?"
                raise TierUnreachable(f"open {self.url}: no such directory", hint=hint) from error
            if not create:
                raise
            make_folder(self.root, self.access)
            self._is_root_durable = True
            folder = os.open(self.root, FOLDER)
        self._may_create = False
        if create and not self._is_root_durable:
            try:
                _sync_parent(self.root)
            except OSError:
                os.close(folder)
                raise
            self._is_root_durable = True
        return folder


@contextmanager
def closing_fd(fd: int) -> Generator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


def fsync_path(path: Path) -> None:
    """Fsyncs a file or folder, which must not be a link."""
    with closing_fd(os.open(path, os.O_RDONLY | NO_LINK)) as fd:
        os.fsync(fd)


def make_folder(path: Path, access: Access = PRIVATE) -> None:
    """Makes a folder and its missing parents, durably."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    existing = missing[-1].parent if missing else path
    _sync_parent(existing)
    if not missing:
        return
    folder = os.open(existing, FOLDER)
    try:
        for each in reversed(missing):
            _make_below(folder, each.name, access)
            failpoint("root.create")
            os.fsync(folder)
            below = os.open(each.name, FOLDER | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = below
    finally:
        os.close(folder)


def _make_below(folder: int, name: str, access: Access) -> None:
    """Makes a folder in an open one, unless it exists."""
    try:
        os.mkdir(name, access.folder_mode, dir_fd=folder)
    except FileExistsError:
        return
    if access.group is not None:
        with closing_fd(os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=folder)) as made:
            access.share(made)


def _sync_parent(folder: Path) -> None:
    """Makes the name of a folder durable that exists: its maker may have been killed before this fsync."""
    with suppress(PermissionError):  # the parent may be another user's, and not readable
        fsync_path(folder.resolve().parent)


@contextmanager
def translated(action: str, *, missing: type[TierdError] = NotFound) -> Generator[None]:
    """Raises each OSError as the TierdError that says what the caller can do. `missing`: for ENOENT."""
    try:
        yield
    except OSError as error:
        message = f"{action}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "free space there, or keep fewer checkpoints; see docs/RUNBOOK.md#disk-full"
            raise Full(message, hint=hint) from error
        if error.errno == errno.ENOENT:
            raise missing(message) from error
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            hint = "a tier and its folders must be directories; links below a tier's root are not followed"
            raise BadRequest(message, hint=hint) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            hint = "the daemon's user must own the directory, and it must be mounted for writing"
            raise TierUnreachable(message, hint=hint) from error
        raise TierUnreachable(message, hint="check the disk: dmesg, mount, df") from error
