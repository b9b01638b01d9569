"""What a watched run has stored already, so that a watcher can tell what is new in its folder."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

from tierd.catalog.entry import Entry
from tierd.context import DaemonContext
from tierd.errors import NotFound, TierdError, Transient
from tierd.format.adopted import AdoptedTree
from tierd.format.ids import CheckpointId, Run
from tierd.transfer.adoption import read_tree

TREES_MAX = 64  # that are kept in memory
CLOCKS_DIFFER = timedelta(hours=1)  # of the file server and this machine, at most


class StoredCheckpoints:
    """`path`: the watched folder, for errors."""

    def __init__(self, context: DaemonContext, run: Run, path: str) -> None:
        self._context, self._run, self._path = context, run, path
        self._trees: dict[CheckpointId, AdoptedTree] = {}
        self._newest = -1, ""  # as of how many changes of the catalog

    def entries(self) -> list[Entry]:
        return self._context.catalog.entries(self._run)

    def newest_created_at(self) -> str:
        """A time in the future is wrong, and would keep everything from being adopted, so it does not count."""
        changes, newest = self._newest
        if changes != self._context.catalog.changes:  # a run may have many checkpoints, and the folder too
            future = (self._context.now() + CLOCKS_DIFFER).isoformat(timespec="microseconds")
            times = (entry.manifest.created_at for entry in self.entries())
            newest = max((each for each in times if each < future), default="")
            self._newest = self._context.catalog.changes, newest
        return newest

    async def newest_files(self) -> list[str]:
        """The paths in the checkpoint that was adopted last, as far as they can be read."""
        entries = [entry for entry in self.entries() if entry.manifest.is_adopted]
        with suppress(TierdError):
            return [file.path for file in (await self.tree(entries[0])).files] if entries else []
        return []

    async def tree(self, entry: Entry) -> AdoptedTree:
        """Raises as `read_tree`, but Transient where the entry has just been deleted."""
        if entry.id not in self._trees:
            tier = next(tier for name, tier in self._context.tiers.items() if name in entry.tiers)
            try:
                tree = await read_tree(tier, entry.manifest)
            except NotFound as error:
                raise Transient(f"watch {self._path}: {error.message}", hint="it is read again") from error
            if len(self._trees) >= TREES_MAX:
                del self._trees[next(iter(self._trees))]
            self._trees[entry.id] = tree
        return self._trees[entry.id]
