"""Deletes what nobody needs of uncommitted checkpoints in a cold tier: what a killed copy has left, and old tombstones.

Only of runs in this hot tier, and only after a day: another node may be copying into a shared tier.
"""

from __future__ import annotations

import logging

from tierd.catalog.decisions import pending
from tierd.context import DaemonContext
from tierd.errors import Retained, TierdError
from tierd.format import layout
from tierd.format.ids import CheckpointId, Run
from tierd.tiers.tier import Tier
from tierd.workers.recovery import clear_uncommitted, uncommitted_files
from tierd.workers.retentions import Retentions

log = logging.getLogger("tierd")

GRACE_S = 24 * 3600.0  # younger files and unfinished uploads may be those of another node's copy
SEND_AGAIN_S = 3600.0  # after a deletion in cold of what is needed there now: a milestone that was set later
CLEARED_MAX = 32  # in one call, each by several requests: copies wait for it


class Leftovers:
    """A sweep begins as often as the tier is listed. It goes on over several calls where there is much to delete."""

    def __init__(self, context: DaemonContext, cold: Tier) -> None:
        self._context = context
        self._catalog = context.catalog
        self._cold = cold
        self._retentions = Retentions()
        self._swept_at_s = float("-inf")
        self._left: list[CheckpointId] = []  # to be looked at in this sweep
        self._has_failed = False  # in this sweep
        self._to_copy: set[CheckpointId] = set()
        self._local_runs: set[Run] = set()

    @property
    def are_due(self) -> bool:
        return bool(self._left or self._catalog.tiers[self._cold.name].partial) and self._is_sweep_due()

    async def clear(self) -> None:
        """What cannot be deleted, for example because a credential may not, is reported once and waits for the next
        sweep: it delays no copy."""
        if not self._is_sweep_due():
            return
        now_s = self._context.monotonic_s()
        self._to_copy = set(pending(self._catalog, self._context.config, self._cold.name))
        self._local_runs = {manifest.id.run for manifest in self._catalog.manifests_in(self._context.hot.name)}
        if not self._left:
            self._retentions.forget_due(now_s=now_s)
            self._left = [*self._catalog.tiers[self._cold.name].partial] if self._cold.deletes else []
            self._has_failed = False
        cleared = 0
        while self._left and cleared < CLEARED_MAX:
            checkpoint = self._left.pop()
            try:
                cleared += await self._clear_if_abandoned(checkpoint, now_s=now_s)
            except TierdError as error:
                self._report(error, checkpoint)
                break
        if self._left:
            return

        def is_abandoned_key(key: str) -> bool:
            checkpoint = layout.parse_key(key)
            return checkpoint is not None and self._is_abandoned(checkpoint)

        # S3 bills the parts of unfinished uploads too. An abort deletes no object, so a tier without deletions has it.
        self._swept_at_s = now_s
        try:
            if removed := await self._cold.store.remove_unfinished(is_abandoned_key, grace_s=GRACE_S):
                log.info("removed %d unfinished uploads from %s", removed, self._cold.name)
        except TierdError as error:
            self._report(error)

    def _report(self, error: TierdError, checkpoint: CheckpointId | None = None) -> None:
        """Once in a sweep."""
        if not self._has_failed:
            self._has_failed = True
            self._context.incidents.record("replicate", error, checkpoint)

    def _is_sweep_due(self) -> bool:
        return self._context.monotonic_s() - self._swept_at_s >= self._context.config.limits.cold_list_interval_s

    async def _clear_if_abandoned(self, checkpoint: CheckpointId, *, now_s: float) -> bool:
        """False: no request was needed to see that it stays."""
        newest_s = self._catalog.tiers[self._cold.name].partial.get(checkpoint)
        grace_s = SEND_AGAIN_S if checkpoint in self._to_copy else GRACE_S
        written_before_s = self._context.now().timestamp() - grace_s
        if newest_s is None or newest_s > written_before_s or not self._is_abandoned(checkpoint):
            return False
        if self._retentions.holds(self._cold.name, checkpoint, now_s=now_s):
            return False
        try:
            await self._clear(checkpoint, written_before_s=written_before_s)
        except Retained as error:
            self._retentions.add(self._cold.name, checkpoint, error, now_s=now_s)
            self._context.incidents.record("replicate", error, checkpoint)
        return True

    async def _clear(self, checkpoint: CheckpointId, *, written_before_s: float) -> None:
        """Over several nodes with a tombstone first, and the files a day after it: the last part may come just now, and
        another node commit."""
        keys = await uncommitted_files(self._cold, checkpoint, written_before_s=written_before_s)
        has_part_here = any(entry.part is not None for entry in self._catalog.entries(checkpoint.run))
        if keys and (has_part_here or layout.node_files(key.rpartition("/")[2] for key in keys)):
            await self._cold.bury(checkpoint)
        await clear_uncommitted(self._cold, checkpoint, written_before_s=written_before_s)

    def _is_abandoned(self, checkpoint: CheckpointId) -> bool:
        if checkpoint.run not in self._local_runs or not self._context.is_home(checkpoint.run):
            return False
        is_continued = checkpoint in self._to_copy or self._may_run_elsewhere(checkpoint)
        is_gone = checkpoint in self._catalog.tiers[self._cold.name].gone
        return (is_gone or not is_continued) and not self._is_awaited(checkpoint)

    def _is_awaited(self, checkpoint: CheckpointId) -> bool:
        """Whether this node's part is in the tier and the others may come: not beneath a committed checkpoint, where
        nothing has come for a day."""
        newest = self._catalog.newest(checkpoint.run, self._cold.name)
        is_passed = newest is not None and checkpoint.recency < newest.id.recency
        return not is_passed and checkpoint in (part.id for part in self._catalog.sent_parts(self._cold.name))

    def _may_run_elsewhere(self, checkpoint: CheckpointId) -> bool:
        """Whether the checkpoint's generation may be running on another node. Only the newest one is not fenced."""
        here = self._context.memory.generation(checkpoint.run)
        is_newest = checkpoint.generation >= max(here, self._catalog.generation_max(checkpoint.run))
        return is_newest and checkpoint.generation != here
