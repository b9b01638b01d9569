"""Reads a history of checkpoints of another program: from a folder, here, or from a bucket, in `bucket_history.py`.

Each name in the history is listed as a `SourceTree`. Nothing in the source is changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from tierd.errors import Unsupported
from tierd.lifecycle.watched import Listed, Preset
from tierd.tiers.pool import ThreadPool
from tierd.transfer.adoption import Adoption, FolderAdoption
from tierd.transfer.source_tree import SourceTree
from tierd.transfer.watched_folder import NAMES_MAX, listed, names, read_beside, scan_entry


class HistorySource(Protocol):
    """`name`: for messages. `links`: the entries that are links, which are not followed; known after `names`."""

    name: str
    links: list[str]

    async def names(self) -> Mapping[str, bool]:
        """Whether each entry is a folder, by name."""
        ...

    async def tree(self, name: str) -> SourceTree | None:
        """The tree, or None if it was just deleted. Raises Unsupported for entries that a checkpoint cannot hold."""
        ...

    async def listed(self, tree: SourceTree, preset: Preset, *, unchanged_s: float) -> Listed: ...

    async def beside(self, name: str) -> tuple[bytes, float]:
        """The content of a small file beside the checkpoints and when it was written; `(b"", 0.0)` if there is none."""
        ...

    def adoption(self, tree: SourceTree) -> Adoption: ...


class FolderHistory:
    """A history in a folder. `pool`: for the calls to its file system."""

    def __init__(self, folder: Path, pool: ThreadPool) -> None:
        self.name, self.links = str(folder), list[str]()
        self._folder, self._pool = folder, pool

    async def names(self) -> Mapping[str, bool]:
        found = await self._pool.query(names, self._folder)
        if found.is_cut:
            raise Unsupported(
                f"adopt {self.name}: it has more than {NAMES_MAX} entries",
                hint="move a part of them into a folder of its own, and adopt one after the other, oldest first",
            )
        self.links = found.links
        return found.folders

    async def tree(self, name: str) -> SourceTree | None:
        return await self._pool.query(scan_entry, self._folder / name)

    async def listed(self, tree: SourceTree, preset: Preset, *, unchanged_s: float) -> Listed:
        return await self._pool.query(lambda: listed(tree, preset, unchanged_s=unchanged_s))

    async def beside(self, name: str) -> tuple[bytes, float]:
        return await self._pool.query(read_beside, self._folder, name)

    def adoption(self, tree: SourceTree) -> Adoption:
        return FolderAdoption(tree, pool=self._pool)
