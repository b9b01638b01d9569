"""A POSIX file system with a volatile cache: what operations have done, and what a loss of power may leave of it.

Promised is only what fsync(2) promises. The bytes and the size of a file are durable after fsync of the file, a name
after fsync of its folder. Until then any subset of the changes of names may be on the disk, in the order in which they
were made, and of a file any of its 4 KiB pages, with zeros in place of the others, or none, or only its size. A rename
is whole or absent. ext4, XFS and btrfs keep more than that: they never leave a later change without an earlier one of
the same journal.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product

from tests.support.power_loss.file_calls import ROOT, Enter, Mark, Move, Operation, Remove, Resize, Sync, Tree, Write

PAGE_BYTES = 4096
SUBSETS_OF_ALL_MAX = 5  # changes of names: all subsets of up to so many, else those named in `_subsets`
CONTENTS_MAX = 48  # combinations of the contents of files: more are reduced to one file at a time

Change = Enter | Remove | Move


class VolatileDisk:
    """`base`: what is durable at the start, by inode number: the names in a folder, or the bytes of a file."""

    def __init__(self, base: dict[int, dict[str, int] | bytes]) -> None:
        self._folders = {number: dict(names) for number, names in base.items() if isinstance(names, dict)}
        self._files = {number: content for number, content in base.items() if isinstance(content, bytes)}
        self._changes: list[Change] = []  # of names, not durable yet
        self._writes: dict[int, list[Write | Resize]] = {}  # by file, not durable yet
        self._contents: dict[int, list[bytes]] = {}  # by file: what a loss of power may leave; the newest is the last

    def apply(self, operation: Operation) -> None:
        match operation:
            case Enter(_, _, inode, is_folder):
                self._changes.append(operation)
                if is_folder:
                    self._folders.setdefault(inode, {})
                else:
                    self._files.setdefault(inode, b"")
            case Remove() | Move():
                self._changes.append(operation)
            case Write(inode) | Resize(inode):
                self._writes.setdefault(inode, []).append(operation)
                self._contents.pop(inode, None)
            case Sync(inode, is_failed):
                if not is_failed:
                    self._sync(inode)
                elif inode in self._files:
                    # Linux marks the pages of the file as clean, and a later fsync writes none of them.
                    self._writes.pop(inode, None)
                    self._contents.pop(inode, None)
            case Mark():
                pass

    def _sync(self, inode: int) -> None:
        if inode in self._folders:
            left: list[Change] = []
            for change in self._changes:
                if inode in _folders_of(change):
                    _change(self._folders, change)
                else:
                    left.append(change)
            self._changes = left
        elif inode in self._writes:
            self._files[inode] = self._possible(inode)[-1]
            del self._writes[inode], self._contents[inode]

    def durable(self) -> Tree:
        """What is left in any case."""
        return self._tree((), dict(self._files))

    def newest(self) -> Tree:
        """What the processes see. Not after an fsync that failed."""
        return self._tree(self._changes, self._files | {inode: self._possible(inode)[-1] for inode in self._writes})

    def states(self, newest: Operation | None = None) -> Iterator[Tree]:
        """Every tree that a loss of power may leave now; the same one may come several times. `newest`: only those that
        the newest operation makes possible."""
        if isinstance(newest, Sync | Mark):
            return
        for chosen in _subsets(self._changes):
            if isinstance(newest, Change) and newest not in chosen:
                continue
            folders = self._names(chosen)
            reachable = _reachable(folders) if self._writes else set[int]()
            if isinstance(newest, Write | Resize) and newest.inode not in reachable:
                continue
            unsynced = [inode for inode in self._writes if inode in reachable]
            for contents in _choices([self._possible(inode) for inode in unsynced]):
                yield self._paths(folders, self._files | dict(zip(unsynced, contents, strict=True)))

    def _tree(self, chosen: tuple[Change, ...] | list[Change], files: dict[int, bytes]) -> Tree:
        return self._paths(self._names(chosen), files)

    def _names(self, chosen: tuple[Change, ...] | list[Change]) -> dict[int, dict[str, int]]:
        folders = self._folders
        if chosen:
            touched = {folder for change in chosen for folder in _folders_of(change)}
            folders = folders | {folder: dict(folders[folder]) for folder in touched}
            for change in chosen:
                _change(folders, change)
        return folders

    def _paths(self, folders: dict[int, dict[str, int]], files: dict[int, bytes]) -> Tree:
        tree: Tree = {}
        pending = [("", ROOT)]
        while pending:
            prefix, folder = pending.pop()
            for name, inode in folders[folder].items():
                if inode in folders:
                    tree[prefix + name] = None
                    pending.append((f"{prefix}{name}/", inode))
                else:
                    tree[prefix + name] = files[inode]
        return tree

    def _possible(self, inode: int) -> list[bytes]:
        """The contents that a loss of power may leave of a file: the durable one first, the newest one last."""
        if inode in self._contents:
            return self._contents[inode]
        durable = self._files[inode]
        newest = bytearray(durable)
        sizes = {len(durable)}
        pages: set[int] = set()
        for write in self._writes[inode]:
            if isinstance(write, Resize):
                newest = newest[: write.size_bytes].ljust(write.size_bytes, b"\0")
            else:
                end = write.offset + len(write.content)
                newest = newest.ljust(end, b"\0")
                newest[write.offset : end] = write.content
                pages |= set(range(write.offset // PAGE_BYTES, -(-end // PAGE_BYTES)))
            sizes.add(len(newest))
        size = len(newest)
        possible = {durable: None}
        for lost in [
            pages,
            *({page} for page in sorted(pages)),
            *(pages - {page} for page in sorted(pages)),
            set[int](),
        ]:
            content = bytearray(newest)
            for page in lost:
                before = durable[page * PAGE_BYTES : (page + 1) * PAGE_BYTES].ljust(PAGE_BYTES, b"\0")
                content[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] = before
            possible[bytes(content[:size])] = None
        for other in sorted(sizes - {size}):
            possible[bytes(newest[:other].ljust(other, b"\0"))] = None
        last = bytes(newest)
        possible.pop(last, None)
        self._contents[inode] = [*possible, last]
        return self._contents[inode]


def _folders_of(change: Change) -> tuple[int, ...]:
    return (change.folder, change.to_folder) if isinstance(change, Move) else (change.folder,)


def _change(folders: dict[int, dict[str, int]], change: Change) -> None:
    match change:
        case Enter(folder, name, inode, _):
            folders[folder][name] = inode
        case Remove(folder, name):
            folders[folder].pop(name, None)
        case Move(folder, name, to_folder, to_name, inode):
            folders[folder].pop(name, None)
            folders[to_folder][to_name] = inode


def _reachable(folders: dict[int, dict[str, int]]) -> set[int]:
    inodes: set[int] = set()
    pending = [ROOT]
    while pending:
        for inode in folders[pending.pop()].values():
            inodes.add(inode)
            if inode in folders:
                pending.append(inode)
    return inodes


def _subsets(changes: list[Change]) -> Iterator[tuple[Change, ...]]:
    """All of few changes. Of more: none, all, each alone, each missing, each pair, each prefix."""
    count = len(changes)
    if count <= SUBSETS_OF_ALL_MAX:
        for size in range(count + 1):
            yield from combinations(changes, size)
        return
    for size in (0, 1, 2, count - 1, count):
        yield from combinations(changes, size)
    for end in range(3, count - 1):
        yield tuple(changes[:end])


def _choices(possible: list[list[bytes]]) -> Iterator[tuple[bytes, ...]]:
    """All combinations. Of many: all old, all new, and each other content of one file beside these."""
    count = 1
    for contents in possible:
        count *= len(contents)
    if count <= CONTENTS_MAX:
        yield from product(*possible)
        return
    for position in (0, -1):
        others = [contents[position] for contents in possible]
        for index, contents in enumerate(possible):
            for content in contents:
                yield (*others[:index], content, *others[index + 1 :])
