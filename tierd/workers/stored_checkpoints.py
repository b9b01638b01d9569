"""What a watched run has stored already, so that a watcher can tell what is new in its folder.

Where several nodes adopt one checkpoint together, it is what this node has stored.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from datetime import datetime, timedelta

from tierd.catalog.decisions import lost, waiting
from tierd.catalog.entry import Entry
from tierd.config.sections import WatchConfig
from tierd.context import DaemonContext
from tierd.errors import NotFound, TierdError, Transient
from tierd.format.adopted import AdoptedTree, merged, nodes_of
from tierd.format.ids import CheckpointId, check_run
from tierd.format.layout import parse_key
from tierd.format.manifest import Manifest
from tierd.transfer.adoption import is_same_tree, read_tree
from tierd.transfer.source_tree import SourceTree

TREES_MAX = 64  # that are kept in memory
CLOCKS_DIFFER = timedelta(hours=1)  # of the file server and this machine, at most


class StoredCheckpoints:
    """The stored checkpoints of one watched folder. `apart_s`: how much later than here their times may be, if they are
    of node 0."""

    def __init__(self, context: DaemonContext, watch: WatchConfig, *, apart_s: float = 0.0) -> None:
        self._context, self._run, self._path = context, check_run(watch.run), watch.path
        self._node = watch.node if watch.nodes > 1 else None
        self._apart = timedelta(seconds=apart_s)
        self._trees: dict[CheckpointId, tuple[Manifest, AdoptedTree]] = {}
        self._newest = -1, ""  # as of how many changes of the catalog
        self._settled: list[Entry] = []

    def settled(self) -> None:
        """Nothing in the folder is being written or has still to be adopted."""
        self._settled = self.entries()

    def entries(self) -> list[Entry]:
        return self._context.catalog.entries(self._run)

    def has_newer(self, tree: SourceTree) -> bool:
        """Whether something was stored that was written later, for certain."""
        newest = self._newest_created_at()
        if newest and self._apart:
            with suppress(ValueError, OverflowError):
                newest = (datetime.fromisoformat(newest) - self._apart).isoformat(timespec="microseconds")
        return tree.created_at < newest

    def generation_min(self, step: int, tree: SourceTree) -> int:
        """The lowest generation for this step. It is a new one if training has gone back: the newest generation has
        higher steps, and all of these were written before `tree`. What was stored since the folder was last settled
        does not count, because the files of a copied folder have the times of the copy. Node 0 decides for the others.
        """
        newest = max((entry.id.generation for entry in self._settled), default=0)
        higher = [entry for entry in self._settled if entry.id.generation == newest and entry.id.step > step]
        if self._node or not higher or any(entry.manifest.created_at >= tree.created_at for entry in higher):
            return 1
        return newest + 1

    def _newest_created_at(self) -> str:
        """A time in the future is wrong, and would keep everything from being adopted, so it does not count."""
        changes, newest = self._newest
        if changes != self._context.catalog.changes:  # a run may have many checkpoints, and the folder too
            future = (self._context.now() + CLOCKS_DIFFER).isoformat(timespec="microseconds")
            times = (entry.manifest.created_at for entry in self.entries())
            newest = max((time for time in times if time < future), default="")
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
        tier = next(tier for name, tier in self._context.tiers.items() if name in entry.tiers)
        manifest = entry.held(tier.name)
        known, tree = self._trees.get(entry.id, (None, None))
        if tree is None or known != manifest:  # the step may have been deleted, and adopted again
            try:
                tree = await read_tree(tier, manifest, self._node_of(entry))
            except NotFound as error:
                raise Transient(f"watch {self._path}: {error.message}", hint="it is read again") from error
            self._trees.pop(entry.id, None)
            if len(self._trees) >= TREES_MAX:
                del self._trees[next(iter(self._trees))]
            self._trees[entry.id] = manifest, tree
        return tree

    async def is_same(self, entry: Entry, tree: SourceTree) -> bool:
        """Whether the entry was adopted from this tree, or this is what `tierd restore` makes of the parts of all
        nodes. Raises as `tree`."""
        if is_same_tree(await self.tree(entry), entry.manifest, tree):
            return True
        nodes = nodes_of(entry.manifest) if entry.is_whole and self._node is not None else []
        if len(nodes) < 2:
            return False
        tier = next((tier for name, tier in self._context.tiers.items() if entry.is_whole_in(name)), None)
        if tier is None:
            return False  # only this node's part is left
        with suppress(TierdError):  # they may not fit together
            trees = {node: await read_tree(tier, entry.manifest, node) for node in nodes if node is not None}
            return is_same_tree(merged(trees, entry.manifest), entry.manifest, tree)
        return False

    def _node_of(self, entry: Entry) -> int | None:
        """Whose tree of the entry is that of this node."""
        if entry.part is not None:
            return entry.part.ranks[0]
        return self._node if entry.manifest.world_size > 1 else None

    def needed_steps(self, among: Collection[int]) -> set[int] | None:
        """The steps that a tier should still get, or has lost, or that are foreign; None while that is not known. Where
        several nodes adopt together also those `among` which no cold tier has a newer whole checkpoint."""
        context, catalog, config = self._context, self._context.catalog, self._context.config
        if catalog.unlisted() or self._run in {checkpoint.run for _, checkpoint in catalog.unreadable()}:
            return None
        steps = {checkpoint.step for each in waiting(catalog, config).values() for checkpoint in each}
        gone = [each for tier in context.tiers for each in lost(catalog, config, tier)]
        gone += [each for _, key in catalog.foreign() if (each := parse_key(key)) is not None]
        steps |= {each.step for each in gone if each.run == self._run}
        if self._node is not None:
            whole = [each.step for tier in context.cold if (each := catalog.newest(self._run, tier)) is not None]
            steps |= {step for step in among if step > max(whole, default=-1)}
        return set(steps)
