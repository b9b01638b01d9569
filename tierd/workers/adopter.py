"""Copies a complete checkpoint of another program into the hot tier of this daemon and commits it, as `tierd adopt`.

The files are written to their final place, and the manifest last. An adoption that is killed leaves files without a
manifest, which `recover` deletes at the next start. The watcher decides which checkpoint is complete and gives its id.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tierd.catalog.listing import is_listed
from tierd.catalog.new_checkpoints import refresh_new
from tierd.context import DaemonContext
from tierd.errors import Corrupt, Full, LockHeld, TierdError
from tierd.failpoints import failpoint
from tierd.format.announced import Announced
from tierd.format.audit import EventKind
from tierd.format.digest import preferred
from tierd.format.ids import CheckpointId
from tierd.format.manifest import Manifest
from tierd.tiers.pool import ThreadPool
from tierd.tiers.run_lock import run_lock
from tierd.tiers.tree import FOLDER, closing_fd
from tierd.transfer.adoption import FolderAdoption, scan_settled
from tierd.transfer.source_tree import SourceTree, changed
from tierd.transfer.watched_folder import tree_key
from tierd.workers.hot_space import HotSpace, MakeRoom
from tierd.workers.recovery import clear_uncommitted

log = logging.getLogger("tierd")


def _shares_blocks(tree: SourceTree, hot: Path) -> bool:
    """Whether the copy can share the blocks of the source and takes no space. Blocks. Raises as
    `SourceTree.can_clone_into`."""
    try:
        with closing_fd(os.open(hot, FOLDER)) as folder:
            return tree.can_clone_into(folder)
    except FileNotFoundError:
        return False  # the first put creates the folder


class AnnouncedPart(NamedTuple):
    """A node's part of a checkpoint that several nodes adopt together. `announced`: the head that node 0 wrote."""

    announced: Announced
    node: int


class Adopter:
    """`pool`: for the calls to the file system of the source."""

    def __init__(self, context: DaemonContext, pool: ThreadPool, make_room: MakeRoom) -> None:
        self._context, self._pool = context, pool
        self._space = HotSpace(context.hot, make_room)

    async def adopt(self, path: Path, key: int, checkpoint: CheckpointId, part: AnnouncedPart | None = None) -> None:
        """`key`: the `tree_key` of the complete tree. `part`: set if several nodes adopt the checkpoint. Raises
        what `scan` and a put into hot raise, and Transient when the tree has changed. Leaves nothing in hot then."""
        context = self._context
        tree = await scan_settled(path, self._pool, context.now)
        if tree_key(tree) != key:
            raise changed(path, "something in it was written")
        if await is_listed(context.hot, checkpoint):
            raise Corrupt(
                f"adopt {path} as {checkpoint}: hot holds a manifest of it that is unreadable or was just written",
                hint="nothing was overwritten; see docs/RUNBOOK.md#unreadable-manifest",
            )
        is_free = await self._pool.query(_shares_blocks, tree, context.hot_store.root)
        if missing_bytes := await self._space.missing_bytes(0 if is_free else tree.size_bytes):
            await self._space.free(missing_bytes)
        try:
            manifest = await self._copy_and_commit(checkpoint, tree, part)
        except Full:
            # The free space does not show a quota or the overhead of the file system: make room for the whole copy.
            if not await self._space.free(tree.size_bytes):
                raise
            manifest = await self._copy_and_commit(checkpoint, tree, part)
        context.catalog.add(manifest, context.hot.name)
        reason = f"adopted from {path}"
        context.audit.record(EventKind.COMMITTED, checkpoint=checkpoint, tier=context.hot.name, reason=reason)
        context.metrics.bytes_total.labels(tier=context.hot.name, direction="write").inc(manifest.size_bytes)
        log.info("adopted %s as %s", path, checkpoint)
        context.notify.examined()

    async def _copy_and_commit(
        self, checkpoint: CheckpointId, tree: SourceTree, part: AnnouncedPart | None
    ) -> Manifest:
        context = self._context
        attempt = FolderAdoption(tree, pool=self._pool, node=None if part is None else part.node)
        algorithm = "" if context.keyring is None else preferred()
        try:
            with context.throttle.writing(context.hot.name) as count_written:
                await attempt.copy(checkpoint, context.hot_store, algorithm=algorithm, progress=count_written)
            # `tierd adopt` may have adopted other steps while this one was copied.
            folder, pool = context.hot_store.root / checkpoint.run, context.hot_store.pool
            async with run_lock(pool, folder):
                run, identities = checkpoint.run, context.identities
                await refresh_new(context.catalog, context.hot, run, identities, folder=folder, pool=pool)
                if context.catalog.get(checkpoint) is not None:
                    raise LockHeld(f"adopt {tree.path} as {checkpoint}: another process has just adopted that step")
                if part is None:
                    sequence = context.catalog.sequence_max(checkpoint.run) + 1
                    manifest = attempt.manifest(checkpoint, sequence=sequence)
                else:
                    manifest = attempt.part(part.announced)
                manifest = context.signed(manifest)
                failpoint("adopt.commit")
                await context.hot.commit(manifest)
                failpoint("adopt.committed")
        except BaseException:
            with suppress(TierdError):  # report the first error, not one of the clean-up
                await clear_uncommitted(context.hot, checkpoint)
            raise
        return manifest
