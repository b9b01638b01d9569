"""Deletes what nobody needs of uncommitted checkpoints in a cold tier: what a killed copy has left, and old tombstones.

Only of runs in this hot tier, and only after a day, because another node may be copying into a shared tier; after an
hour where a tombstone delays a copy that the tier should have.
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
SEND_AGAIN_S = 3600.0  # instead, for what was deleted in cold and is selected for it again, as a milestone set later
CLEARED_MAX = 32  # checkpoints in one call, each by several requests: copies wait for it


class Leftovers:
    """A sweep begins as often as the tier is listed. It goes on over several calls where there is much to delete."""

    def __init__(self, context: DaemonContext, cold: Tier) -> None:
        self._context = context
        self._catalog = context.catalog
        self._cold = cold
        self._retentions = Retentions()
        self._swept_at_s = float("-inf")
        self._to_check: list[CheckpointId] = []  # in this sweep
        self._has_failed = False  # in this sweep
        self._to_copy: set[CheckpointId] = set()
        self._local_runs: set[Run] = set()

    @property
    def are_due(self) -> bool:
        return bool(self._to_check or self._catalog.tiers[self._cold.name].partial) and self._is_sweep_due()

    async def clear(self) -> None:
        """What cannot be deleted, for example because a credential may not, is reported once and waits for the next
        sweep: it delays no copy."""
        if not self._is_sweep_due():
            return
        now_s = self._context.monotonic_s()
        self._to_copy = set(pending(self._catalog, self._context.config, self._cold.name))
        self._local_runs = {checkpoint.run for checkpoint in self._catalog.in_tier(self._context.hot.name)}
        if not self._to_check:
            self._retentions.forget_due(now_s=now_s)
            self._to_check = [*self._catalog.tiers[self._cold.name].partial] if self._cold.deletes else []
            self._has_failed = False
        cleared = 0
        while self._to_check and cleared < CLEARED_MAX:
            checkpoint = self._to_check.pop()
            try:
                cleared += await self._clear_if_abandoned(checkpoint, now_s=now_s)
            except TierdError as error:
                self._report(error, checkpoint)
                break
        if self._to_check:
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
        """Record the first failure of a sweep."""
        if not self._has_failed:
            self._has_failed = True
            self._context.incidents.record("replicate", error, checkpoint)

    def _is_sweep_due(self) -> bool:
        return self._context.monotonic_s() - self._swept_at_s >= self._context.config.limits.cold_list_interval_s

    async def _clear_if_abandoned(self, checkpoint: CheckpointId, *, now_s: float) -> bool:
        """Returns whether it made requests. None are needed to see that a checkpoint stays."""
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
        """Over several nodes, this writes a tombstone now and deletes the files a day later: the last part may arrive
        at this moment, and then another node commits."""
        keys = await uncommitted_files(self._cold, checkpoint, written_before_s=written_before_s)
        has_part_here = bool(self._catalog.parts(checkpoint.run))
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
        """Whether parts of other nodes may still come: this node's part is in the tier, and no newer checkpoint of the
        run is committed there."""
        newest = self._catalog.newest(checkpoint.run, self._cold.name)
        is_passed = newest is not None and checkpoint.recency < newest.id.recency
        return not is_passed and checkpoint in (part.id for part in self._catalog.sent_parts(self._cold.name))

    def _may_run_elsewhere(self, checkpoint: CheckpointId) -> bool:
        """Whether the checkpoint's generation may be running on another node: all but the newest one are fenced. What
        nodes adopt together is in a generation of node 0, which is this one."""
        if checkpoint.run in self._context.watched_nodes:
            return False
        here = self._context.memory.generation(checkpoint.run)
        is_newest = checkpoint.generation >= max(here, self._catalog.generation_max(checkpoint.run))
        return is_newest and checkpoint.generation != here
