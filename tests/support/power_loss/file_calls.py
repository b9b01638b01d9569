"""The system calls that change or read files below a folder: each is recorded, and each can fail.

The functions are replaced in `os` while a FileCalls is open. An operation names folders and files by the number of
their inode, because names change. Calls on files outside of the folder are neither recorded nor counted.
"""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from tierd.tiers import direct_io


class Enter(NamedTuple):
    """A name was given to an inode: a file or folder was created, or a file was linked."""

    folder: int
    name: str
    inode: int
    is_folder: bool


class Remove(NamedTuple):
    """unlink or rmdir."""

    folder: int
    name: str


class Move(NamedTuple):
    folder: int
    name: str
    to_folder: int
    to_name: str
    inode: int


class Write(NamedTuple):
    inode: int
    offset: int
    content: bytes


class Resize(NamedTuple):
    """ftruncate, or an fallocate that made the file longer."""

    inode: int
    size_bytes: int


class Sync(NamedTuple):
    """fsync. `is_failed`: it returned an error."""

    inode: int
    is_failed: bool = False


class Mark(NamedTuple):
    """Not an operation: what a test wants to know the place of, as that a trainer was told something."""

    kind: str
    subject: Any


Operation = Enter | Remove | Move | Write | Resize | Sync | Mark

Tree = dict[str, bytes | None]
"""Files by path below the folder, with their content; None: a folder."""

ROOT = 0  # the inode number of the folder itself
CHANGES = frozenset(
    {
        "create",
        "mkdir",
        "unlink",
        "rmdir",
        "rename",
        "link",
        "pwrite",
        "ftruncate",
        "fallocate",
        "fsync",
        "fsync folder",
    }
)


class Call(NamedTuple):
    """A call that is about to be made. `name`: one of CHANGES, or of a call that reads. `path`: of the file below the
    folder, or of the new name. `number`: counts calls of CHANGES from 0; of a call that reads, the next one's."""

    name: str
    path: str
    number: int


class FileCalls:
    """`log`: the operations since `restart`. `fails`: where it is set, asked before each call; returns the errno with
    which the call fails, or 0."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.log: list[Operation] = []
        self.base: dict[int, dict[str, int] | bytes] = {}
        self.fails: Callable[[Call], int] | None = None
        self.number = 0
        self.is_dead = False
        self._inodes: dict[tuple[int, int], int] = {}
        self._next = ROOT

    # ── the record ──

    def restart(self, tree: Tree | None = None) -> None:
        """What is in the folder now is durable, and the log begins. `tree`: what is in the folder, if it is known."""
        self.log, self.base, self._inodes, self._next, self.number = [], {}, {}, ROOT, 0
        tree = read_tree(self.root) if tree is None else tree
        numbers = {"": self._new(_key(_real["stat"](self.root)))}
        self.base[ROOT] = {}
        for path in sorted(tree):
            above, _, name = path.rpartition("/")
            about = _real["stat"](f"{self.root}/{path}", follow_symlinks=False)
            known = self._number(about) if about.st_nlink > 1 and tree[path] is not None else None
            numbers[path] = number = self._new(_key(about)) if known is None else known
            content = tree[path]
            self.base[number] = {} if content is None else content
            folder = self.base[numbers[above]]
            assert isinstance(folder, dict)
            folder[name] = number

    def mark(self, kind: str, subject: Any) -> None:
        if not self.is_dead:
            self.log.append(Mark(kind, subject))

    def kill(self) -> None:
        """The process is dead: no call of it has an effect any more, and no mark is made."""
        self.is_dead = True

    def revive(self) -> None:
        """A new process goes on with what is in the folder. Nothing becomes durable by that."""
        self.is_dead = False

    def _new(self, key: tuple[int, int]) -> int:
        number = self._inodes[key] = self._next
        self._next += 1
        return number

    def _number(self, about: os.stat_result) -> int | None:
        return self._inodes.get(_key(about))

    def _of_fd(self, fd: int) -> int | None:
        return self._number(_real["fstat"](fd))

    def _place(self, path: Any, dir_fd: int | None) -> tuple[int | None, str, str]:
        """(number of the folder, name, path of the folder). None: outside."""
        if isinstance(path, int):
            return None, "", ""
        text = os.fspath(path)
        if dir_fd is not None and not os.path.isabs(text):
            assert "/" not in text, text
            number = self._of_fd(dir_fd)
            return number, text, "" if number is None else self._path_of(dir_fd)
        above, name = os.path.split(os.path.abspath(text))
        try:
            return self._number(_real["stat"](above)), name, above
        except OSError:
            return None, name, above

    def _before(self, name: str, above: str, entry: str = "") -> None:
        """Counts a call on a file or on an entry of the folder `above`. Raises OSError if it fails."""
        is_change = name in CHANGES
        code = 0
        if self.fails is not None:
            code = self.fails(Call(name, os.path.relpath(os.path.join(above, entry), self.root), self.number))
        if is_change:
            self.number += 1
        if self.is_dead and is_change:
            code = errno.EIO
        if code:
            raise OSError(code, os.strerror(code))

    def _path_of(self, fd: int) -> str:
        """Empty where nobody asks."""
        return "" if self.fails is None else os.readlink(f"/proc/self/fd/{fd}")

    # ── the calls ──

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        folder, name, above = self._place(path, dir_fd)
        if folder is None:
            return _real["open"](path, flags, mode, dir_fd=dir_fd)
        is_new = bool(flags & os.O_CREAT) and not _exists(path, dir_fd)
        self._before("create" if is_new else "open", above, name)
        fd = _real["open"](path, flags, mode, dir_fd=dir_fd)
        if is_new:
            self.log.append(Enter(folder, name, self._new(_key(_real["fstat"](fd))), is_folder=False))
        assert not flags & os.O_TRUNC or is_new, "O_TRUNC is not modelled"
        return fd

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        folder, name, above = self._place(path, dir_fd)
        if folder is None:
            return _real["mkdir"](path, mode, dir_fd=dir_fd)
        if not _exists(path, dir_fd):
            self._before("mkdir", above, name)
        _real["mkdir"](path, mode, dir_fd=dir_fd)
        self.log.append(Enter(folder, name, self._new(_key(_real["stat"](path, dir_fd=dir_fd))), is_folder=True))
        return None

    def _remove(self, name: str, path: Any, dir_fd: int | None) -> None:
        folder, entry, above = self._place(path, dir_fd)
        if folder is not None and _exists(path, dir_fd):
            self._before(name, above, entry)
        _real[name](path, dir_fd=dir_fd)
        if folder is not None:
            self.log.append(Remove(folder, entry))

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._remove("unlink", path, dir_fd)

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._remove("rmdir", path, dir_fd)

    def rename(self, old: Any, new: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        folder, name, _ = self._place(old, src_dir_fd)
        to_folder, to_name, above = self._place(new, dst_dir_fd)
        if folder is not None:
            self._before("rename", above, to_name)
        _real["rename"](old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        assert (folder is None) == (to_folder is None), "a rename across the border of the folder"
        if folder is not None and to_folder is not None:
            number = self._number(_real["stat"](new, dir_fd=dst_dir_fd, follow_symlinks=False))
            assert number is not None
            self.log.append(Move(folder, name, to_folder, to_name, number))

    def link(
        self,
        old: Any,
        new: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
        follow_symlinks: bool = True,
    ) -> None:
        folder, name, above = self._place(new, dst_dir_fd)
        if folder is not None:
            self._before("link", above, name)
        _real["link"](old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, follow_symlinks=follow_symlinks)
        if folder is not None:
            number = self._number(_real["stat"](new, dir_fd=dst_dir_fd, follow_symlinks=False))
            assert number is not None
            self.log.append(Enter(folder, name, number, is_folder=False))

    def pwrite(self, fd: int, content: Any, offset: int) -> int:
        inode = self._of_fd(fd)
        if inode is None:
            return _real["pwrite"](fd, content, offset)
        self._before("pwrite", self._path_of(fd))
        count = _real["pwrite"](fd, content, offset)
        self.log.append(Write(inode, offset, bytes(memoryview(content)[:count])))
        return count

    def ftruncate(self, fd: int, size_bytes: int) -> None:
        inode = self._of_fd(fd)
        if inode is not None:
            self._before("ftruncate", self._path_of(fd))
        _real["ftruncate"](fd, size_bytes)
        if inode is not None:
            self.log.append(Resize(inode, size_bytes))

    def fallocate(self, fd: int, size_bytes: int) -> None:
        inode = self._of_fd(fd)
        if inode is not None:
            self._before("fallocate", self._path_of(fd))
        before = _real["fstat"](fd).st_size
        _real_fallocate(fd, size_bytes)
        if inode is not None and size_bytes > before:
            self.log.append(Resize(inode, size_bytes))

    def fsync(self, fd: int) -> None:
        inode = self._of_fd(fd)
        if inode is not None:
            is_folder = os.path.isdir(f"/proc/self/fd/{fd}")
            try:
                self._before("fsync folder" if is_folder else "fsync", self._path_of(fd))
            except OSError:
                if not self.is_dead:
                    self.log.append(Sync(inode, is_failed=True))
                raise
        _real["fsync"](fd)
        if inode is not None:
            self.record_sync(inode)

    def record_sync(self, inode: int) -> None:
        self.log.append(Sync(inode))

    def preadv(self, fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if self._of_fd(fd) is not None:
            self._before("preadv", self._path_of(fd))
        return _real["preadv"](fd, buffers, offset, flags)

    def read(self, fd: int, size_bytes: int) -> bytes:
        if self._of_fd(fd) is not None:
            self._before("read", self._path_of(fd))
        return _real["read"](fd, size_bytes)

    def scandir(self, path: Any = ".") -> Any:
        if isinstance(path, int):
            if self._of_fd(path) is not None:
                self._before("scandir", self._path_of(path))
        elif self._place(path, None)[0] is not None:
            self._before("scandir", os.path.abspath(path))
        return _real["scandir"](path)

    def close_all(self) -> None:
        """Closes the descriptors of files below the folder: those of a process that was killed."""
        gc.collect()  # before: an object of that process must not close a number that has a new owner
        for fd in os.listdir("/proc/self/fd"):
            try:
                if self._of_fd(int(fd)) is not None:
                    os.close(int(fd))
            except OSError:
                continue  # listdir's own descriptor


_WRAPPED = (
    *("open", "mkdir", "unlink", "rmdir", "rename", "link", "pwrite", "ftruncate", "fsync"),
    *("preadv", "read", "scandir"),
)
_UNSUPPORTED = ("write", "writev", "pwritev", "truncate", "replace", "renames", "remove", "symlink", "fdatasync")
"""Functions that tierd does not use on files: their effects would be missing in the log."""
_real: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in (*_WRAPPED, "stat", "fstat")}
_real_fallocate = direct_io.fallocate


def _key(about: os.stat_result) -> tuple[int, int]:
    return about.st_dev, about.st_ino


def _exists(path: Any, dir_fd: int | None) -> bool:
    try:
        _real["stat"](path, dir_fd=dir_fd, follow_symlinks=False)
    except OSError:
        return False
    return True


@contextmanager
def watching(root: Path) -> Iterator[FileCalls]:
    """The calls of this process on files below `root`."""
    calls = FileCalls(root)

    def refuse(name: str) -> Callable[..., Any]:
        call = getattr(os, name)

        def refused(target: Any, *arguments: Any, **options: Any) -> Any:
            is_inside = calls._of_fd(target) if isinstance(target, int) else calls._place(target, None)[0]
            assert is_inside is None, f"os.{name} is not modelled"
            return call(target, *arguments, **options)

        return refused

    with ExitStack() as patches:
        for name in _WRAPPED:
            patches.enter_context(patch.object(os, name, getattr(calls, name)))
        for name in _UNSUPPORTED:
            patches.enter_context(patch.object(os, name, refuse(name)))
        patches.enter_context(patch.object(direct_io, "fallocate", calls.fallocate))
        calls.restart()
        yield calls


def read_tree(root: str) -> Tree:
    """What is below a folder now, without the recorded calls."""
    tree: Tree = {}
    pending = [""]
    while pending:
        below = pending.pop()
        with _real["scandir"](f"{root}/{below}") as entries:
            for entry in entries:
                path = f"{below}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    tree[path] = None
                    pending.append(f"{path}/")
                else:
                    with open(entry.path, "rb") as file:
                        tree[path] = file.read()
    return tree
