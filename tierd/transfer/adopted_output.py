"""Turns the restored files of an adopted checkpoint into the folder that was adopted: paths, bytes, modes and links.

The files are moved, not copied. It works in a private folder, where nobody else can put a link. All calls block.
"""

from __future__ import annotations

import os
from pathlib import Path

from tierd.format.adopted import AdoptedTree
from tierd.tiers.tree import FOLDER, NO_LINK, closing_fd, fsync_path

_WRITABLE = 0o700  # of a folder until all is in place


class AdoptedOutput:
    """`stored`: the folder with the files of the checkpoint. `built`: the folder to create, or the parent folder of a
    single file; it is durable when `build` returns."""

    def __init__(self, tree: AdoptedTree, stored: Path, built: Path) -> None:
        self._tree, self._stored, self._built = tree, stored, built
        self._folders = [entry for entry in tree.entries if entry.kind == "folder"]
        self._newest_ns = max((entry.modified_ns for entry in tree.files), default=0)
        self._narrow: list[tuple[str, int, os.stat_result]] = []  # path, mode, and which folder was built there

    def build(self) -> Path:
        """Returns `built`. Raises OSError."""
        os.mkdir(self._built, _WRITABLE)
        for entry in self._folders:  # a folder comes before what is in it
            os.mkdir(self._built / entry.path, _WRITABLE)
        for entry in self._tree.files:
            path = self._built / entry.path
            with closing_fd(os.open(self._stored / entry.stored_as, os.O_RDONLY | NO_LINK)) as fd:
                os.rename(self._stored / entry.stored_as, path)
                os.fchmod(fd, entry.mode)
                os.utime(fd, ns=(entry.modified_ns, entry.modified_ns))
                os.fsync(fd)
        for entry in self._tree.entries:
            if entry.kind == "link":  # last: nothing is written through one
                os.symlink(entry.target, self._built / entry.path)
        for entry in reversed(self._folders):
            self._widen(entry.path, entry.mode)
        if not self._tree.is_file:
            self._widen("", self._tree.mode)
        fsync_path(self._built)
        return self._built

    def _widen(self, path: str, mode: int) -> None:
        folder = self._built / path
        os.chmod(folder, mode | _WRITABLE)
        # Times of folders are not stored. A watch treats a folder that is newer than its files as one that lost some.
        os.utime(folder, ns=(self._newest_ns, self._newest_ns))
        fsync_path(folder)
        if mode | _WRITABLE != mode:
            self._narrow.append((path, mode, os.stat(folder)))

    def finish(self, published: Path) -> None:
        """Set the final modes of folders into which their owner may not write. With these modes they cannot be moved.

        Raises OSError if one is not the folder that was built: other users may be able to write where it is now."""
        for path, mode, built in self._narrow:
            with closing_fd(os.open(published / path, FOLDER)) as folder:
                if not os.path.samestat(os.fstat(folder), built):
                    raise OSError(f"another process has put a folder in place of {published / path}")
                os.fchmod(folder, mode)
