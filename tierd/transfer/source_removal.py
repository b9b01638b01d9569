"""Deletes adopted checkpoints from the folder of a framework, where the config says so (`source = "remove"`).

A checkpoint is renamed first, so that the framework, which may start at any time, never sees a part of it. Then it is
compared with what was adopted, renamed again, and deleted. When the daemon starts again, what a killed call has left is
deleted if it was compared, and otherwise gets its name back. All calls block.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from tierd.errors import TierdError, Transient
from tierd.tiers.tree import FOLDER, closing_fd
from tierd.transfer.source_tree import SourceTree, changed, first_difference, scan

UNCOMPARED, PREFIX = ".tierd-compares-", ".tierd-removes-"


def remove_source(tree: SourceTree) -> None:
    """Raises NotFound when the tree is gone, Transient when it has changed since its adoption or cannot be deleted."""
    path = tree.path
    if difference := first_difference(tree, scan(path)):
        raise changed(path, difference)
    moved = _renamed(path, UNCOMPARED + path.name)
    try:
        is_same = _is_same(tree, scan(moved))
    except TierdError:  # it has something now that a checkpoint cannot hold, or that this user may not read
        is_same = False
    if not is_same:  # it was written between the scan and the rename
        _put_back(moved, path)
        raise changed(path, "something in it was written")
    _delete(_renamed(moved, PREFIX + path.name))


def _renamed(path: Path, name: str) -> Path:
    try:
        with closing_fd(os.open(path.parent, FOLDER)) as folder:
            os.rename(path.name, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError as error:
        raise Transient(f"remove {path}: {error.strerror}", hint="may the daemon's user write there?") from error
    return path.with_name(name)


def _is_same(tree: SourceTree, moved: SourceTree) -> bool:
    """Whether the renamed tree is what was adopted."""
    entries = [replace(entry, path="") for entry in moved.entries] if moved.is_file else [*moved.entries]
    before = [replace(entry, path="") for entry in tree.entries] if tree.is_file else [*tree.entries]
    return (moved.mode, entries) == (tree.mode, before)


def _put_back(moved: Path, path: Path) -> None:
    """Rename it back, unless the program has created another one meanwhile."""
    with suppress(OSError):
        if moved.is_file():
            os.link(moved, path)
            os.unlink(moved)
        elif not path.exists():
            os.rename(moved, path)


def remove_leftovers(folder: Path) -> None:
    """Delete what killed calls of `remove_source` left in this folder, or give it its name back."""
    with suppress(OSError):
        for name in os.listdir(folder):
            if name.startswith(PREFIX):
                _delete(folder / name)
            elif name.startswith(UNCOMPARED):
                _put_back(folder / name, folder / name.removeprefix(UNCOMPARED))


def _delete(path: Path) -> None:
    """Delete a file or a folder, without following links."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            os.unlink(path)
