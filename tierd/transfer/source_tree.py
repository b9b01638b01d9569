"""Lists a folder or file of another program for its adoption, without following links, and detects later changes.

Changes nothing there. An entry that cannot be adopted raises an error that names it. The program may still be writing:
a file counts as unchanged while its inode, size, mode and time of modification are the same. All calls block.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tierd.descriptors import read_all
from tierd.errors import BadRequest, NotFound, TierdError, TierUnreachable, Transient, Unsupported
from tierd.format import adopted
from tierd.format.text import time_text
from tierd.tiers.direct_io import clone_file
from tierd.tiers.new_file import Uses
from tierd.tiers.tree import FOLDER, NO_LINK, Tree, closing_fd

# Two writes within one tick of the kernel's clock leave the same time of modification; a tick has 10 ms at most.
TICK_NS = 100_000_000
COARSE_TICK_NS = 2_000_000_000  # where a file system stores whole seconds, or every other one


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceEntry:
    """`path`: relative to the tree's root. `target`: where a link points. `changed_ns`: when a name in a folder last
    changed; it does not count in comparisons."""

    path: str
    kind: str
    mode: int
    device: int
    inode: int
    size_bytes: int = 0
    modified_ns: int = 0
    target: str = ""
    changed_ns: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTree:
    """`root`: the folder to which the paths of `entries` are relative; for a single file, its parent. `changed_ns`: as
    in an entry. `url`: the place in a bucket, for messages."""

    root: Path
    name: str
    is_file: bool
    mode: int
    entries: tuple[SourceEntry, ...]
    changed_ns: int = field(default=0, compare=False)
    url: str = field(default="", compare=False)

    @property
    def where(self) -> str:
        """For messages."""
        return self.url or str(self.path)

    @property
    def path(self) -> Path:
        return self.root / self.name if self.is_file else self.root

    @property
    def files(self) -> list[SourceEntry]:
        return [entry for entry in self.entries if entry.kind == "file"]

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.files)

    @property
    def modified_ns(self) -> int:
        """When the newest of its files was written, in Unix time."""
        return max((entry.modified_ns for entry in self.files), default=0)

    @property
    def created_at(self) -> str:
        """When the newest of its files was written, as in a manifest."""
        return time_text(self.modified_ns)

    @property
    def folders_changed_ns(self) -> int:
        """When a name in any of its folders last changed, in Unix time; 0 for a single file."""
        return max([self.changed_ns, *(entry.changed_ns for entry in self.entries)])

    def stored(self, node: int | None = None) -> adopted.AdoptedTree:
        """The tree as a tier stores it. `node`: the number of this node, if several adopt one checkpoint together."""
        names = {
            entry.path: adopted.stored_name(index, entry.path, node) for index, entry in enumerate(self.files, start=1)
        }
        return adopted.new_tree(
            name=self.name,
            is_file=self.is_file,
            mode=self.mode,
            entries=[
                adopted.TreeEntry(
                    path=entry.path,
                    kind=entry.kind,  # pyright: ignore[reportArgumentType]
                    mode=entry.mode & adopted.MODE_MASK if entry.kind != "link" else 0,
                    modified_ns=entry.modified_ns if entry.kind == "file" else 0,
                    stored_as=names.get(entry.path, ""),
                    target=entry.target,
                )
                for entry in self.entries
            ],
        )

    def unsettled_s(self, now_s: float) -> float:
        """Seconds until any further write changes a file's time of modification; 0 if it would now."""
        ticks = (COARSE_TICK_NS if entry.modified_ns % 1_000_000_000 == 0 else TICK_NS for entry in self.files)
        settled_ns = max((entry.modified_ns + tick for entry, tick in zip(self.files, ticks, strict=True)), default=0)
        return min(max(settled_ns / 1e9 - now_s, 0.0), COARSE_TICK_NS / 1e9)  # a clock may be ahead of this one

    def can_clone_into(self, folder: int) -> bool:
        """Whether files in the open folder can share blocks with the tree's files, so that they take no space."""
        with _named(self.path):
            try:
                target = os.open(".", os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600, dir_fd=folder)
            except OSError:  # a file system without unnamed files
                return False
            with closing_fd(target):
                file = OpenEntry(self, max(self.files, key=lambda entry: entry.size_bytes))
                try:
                    return file.clone(target)
                finally:
                    file.close()

    def check_unchanged(self) -> None:
        """Raises Transient when the tree has changed, NotFound when it is gone."""
        if difference := first_difference(self, scan(self.path)):
            raise changed(self.where, difference)


def changed(where: str | Path, difference: str) -> Transient:
    return Transient(
        f"adopt {where}: {difference} while it was read",
        hint="the program is still writing, or deletes it; adopt it when it is complete",
    )


def first_difference(before: SourceTree, now: SourceTree) -> str:
    """The first change, in words; empty if there is none."""
    if before == now:
        return ""
    entries = {entry.path: entry for entry in now.entries}
    for entry in before.entries:
        if entry.path not in entries:
            return f"{entry.path} was deleted"
        if entry != entries.pop(entry.path):
            return f"{entry.path} was written"
    return f"{next(iter(entries))} was made" if entries else "the mode of the folder was changed"


def scan(path: Path, *, may_be_empty: bool = False) -> SourceTree:
    """Raises NotFound, BadRequest if this user may not read it, Unsupported if it is a link or has an entry that a
    checkpoint cannot hold, and Transient when it changes meanwhile. `may_be_empty`: also without a file."""
    with _named(path):
        stat_result = os.stat(path, follow_symlinks=False)
        if stat.S_ISREG(stat_result.st_mode):
            name = path.name
            entries = [_entry(path, name, stat_result, "")]
        else:
            with closing_fd(os.open(path, FOLDER | os.O_NOFOLLOW)) as folder:
                stat_result = os.fstat(folder)
            entries = sorted(_walk(path), key=lambda entry: entry.path.split("/"))
    if problem := adopted.path_problem(path.name):
        raise Unsupported(f"adopt {path}: its name {problem}")
    is_file = stat.S_ISREG(stat_result.st_mode)
    if not may_be_empty and not any(entry.kind == "file" for entry in entries):
        raise Unsupported(f"adopt {path}: there is no file in it", hint="is this the folder of a checkpoint?")
    return SourceTree(
        root=path.parent if is_file else path,
        name=path.name,
        is_file=is_file,
        mode=0 if is_file else stat.S_IMODE(stat_result.st_mode) & adopted.MODE_MASK,
        entries=tuple(entries),
        changed_ns=0 if is_file else stat_result.st_mtime_ns,
    )


def _walk(top: Path) -> Iterator[SourceEntry]:
    """The entries of a folder and of all below."""
    tree = Tree(top, create=False)
    count, waiting = 0, [""]
    while waiting:
        above = waiting.pop()
        folder, _ = tree.open_folder(f"{above}/-" if above else "-", create=False)
        with closing_fd(folder):
            for name in os.listdir(folder):
                count += 1
                if count > adopted.ENTRIES_MAX:
                    raise Unsupported(f"adopt {top}: it has more than {adopted.ENTRIES_MAX} entries")
                path = f"{above}/{name}" if above else name
                stat_result = os.stat(name, dir_fd=folder, follow_symlinks=False)
                target = os.readlink(name, dir_fd=folder) if stat.S_ISLNK(stat_result.st_mode) else ""
                entry = _entry(top, path, stat_result, target)
                yield entry
                if entry.kind == "folder":
                    waiting.append(path)


def _entry(top: Path, path: str, stat_result: os.stat_result, target: str) -> SourceEntry:
    shown = ascii(path)[1:-1]
    if problem := adopted.path_problem(path):
        raise Unsupported(f"adopt {top}: the path of {shown} {problem}", hint="rename it, or adopt a copy")
    if stat.S_ISLNK(stat_result.st_mode) and adopted.leads_out(path, target):
        raise Unsupported(
            f"adopt {top}: the link {shown} leads out of it, to {ascii(target)[1:-1]}",
            hint="what is outside would not be in the checkpoint: replace the link by the file",
        )
    kinds = ((stat.S_ISREG, "file"), (stat.S_ISDIR, "folder"), (stat.S_ISLNK, "link"))
    kind = next((kind for is_kind, kind in kinds if is_kind(stat_result.st_mode)), "")
    if not kind:
        raise Unsupported(f"adopt {top}: {shown} is neither a file nor a folder nor a link")
    is_file = kind == "file"
    return SourceEntry(
        path=path,
        kind=kind,
        mode=stat.S_IMODE(stat_result.st_mode),
        device=stat_result.st_dev,
        inode=stat_result.st_ino,
        size_bytes=stat_result.st_size if is_file else 0,
        modified_ns=min(max(stat_result.st_mtime_ns, 0), adopted.MODIFIED_NS_MAX) if is_file else 0,
        target=target,
        changed_ns=stat_result.st_mtime_ns if kind == "folder" else 0,
    )


class OpenEntry:
    """One open file of a tree. `close` may be called while other threads read: the last reader closes the descriptor,
    because its number may belong to another file afterwards."""

    def __init__(self, tree: SourceTree, entry: SourceEntry) -> None:
        """Raises what `scan` raises, and Transient when the file is not the one that was listed."""
        self._tree, self._entry = tree, entry
        self.is_cloned = False
        with _named(tree.root / entry.path):
            self._fd = Tree(tree.root, create=False).open_file(entry.path, os.O_RDONLY | NO_LINK)
        self._uses = Uses(lambda: os.close(self._fd))
        try:
            self.check_unchanged()
        except BaseException:
            os.close(self._fd)
            raise

    def read(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer. Raises Transient when the file ends before."""
        with self._uses, _named(self._tree.root / self._entry.path):
            if read_all(self._fd, offset, buffer):
                raise changed(self._tree.where, f"{self._entry.path} was cut")

    def clone(self, target: int) -> bool:
        """Make an empty file share the blocks of this one. False where the file system cannot."""
        with self._uses:
            self.is_cloned = clone_file(self._fd, target)
            if self.is_cloned and os.fstat(target).st_size != self._entry.size_bytes:
                raise changed(self._tree.where, f"{self._entry.path} was written")
            return self.is_cloned

    def check_unchanged(self) -> None:
        with self._uses:
            now = os.fstat(self._fd)
        if _entry(self._tree.path, self._entry.path, now, "") != self._entry:
            raise changed(self._tree.where, f"{self._entry.path} was written")

    def close(self) -> None:
        with self._uses:
            self._uses.is_over = True


@contextmanager
def _named(path: Path) -> Generator[None]:
    """Translate an OSError into the error that says what the caller can do."""
    try:
        yield
    except (FileNotFoundError, TierUnreachable) as error:  # the latter where `Tree` finds no root
        hint = "is the path right, or was it deleted?"
        raise NotFound(f"adopt {path}: No such file or directory", hint=hint) from error
    except PermissionError as error:
        named = f" ({os.fsdecode(error.filename)})" if isinstance(error.filename, (str, bytes)) else ""
        hint = f"user {os.geteuid()}, who adopts, must be able to read it"
        raise BadRequest(f"adopt {path}: {error.strerror}{named}", hint=hint) from error
    except NotADirectoryError as error:
        hint = "give the folder or the file itself"
        raise Unsupported(f"adopt {path}: it is a link, or neither a file nor a folder", hint=hint) from error
    except TierdError:
        raise
    except OSError as error:
        raise Transient(f"adopt {path}: {error.strerror or error}", hint="check the disk: dmesg, mount, df") from error
