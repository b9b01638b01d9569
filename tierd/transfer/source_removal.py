"""Deletes adopted checkpoints from the folder of a framework, where the config says so (`source = "remove"`).

A checkpoint is renamed first, so that the framework, which may start at any time, never sees a part of it. Leftovers of
a killed deletion are deleted when the daemon starts again. All calls block.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from tierd.errors import Transient
from tierd.tiers.tree import FOLDER, closing_fd
from tierd.transfer.source_tree import SourceTree, changed, first_difference, scan

PREFIX = ".tierd-removes-"


def remove_source(tree: SourceTree) -> None:
    """Raises NotFound when the tree is gone, Transient when it has changed since its adoption or cannot be deleted."""
    path = tree.path
    if difference := first_difference(tree, scan(path)):
        raise changed(path, difference)
    try:
        with closing_fd(os.open(path.parent, FOLDER)) as folder:
            os.rename(path.name, PREFIX + path.name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError as error:
        raise Transient(f"remove {path}: {error.strerror}", hint="may the daemon's user write there?") from error
    moved = path.with_name(PREFIX + path.name)
    if not _is_same(tree, scan(moved)):  # it was written between the scan and the rename
        _put_back(moved, path)
        raise changed(path, "something in it was written")
    _delete(moved)


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
    """Delete what killed calls of `remove_source` left in this folder."""
    with suppress(OSError):
        for name in os.listdir(folder):
            if name.startswith(PREFIX):
                _delete(folder / name)


def _delete(path: Path) -> None:
    """Delete a file or a folder, without following links."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            os.unlink(path)
