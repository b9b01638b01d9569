"""Copies committed checkpoints from the hot tier to one cold tier. A pass is safe to repeat and to kill.

The plan comes from lifecycle. Every byte is checked against the manifest while it is copied, so a damaged hot replica
is never copied. Each cold tier has its own replicator, so a slow or dead tier does not delay the others.
"""

from __future__ import annotations

import logging
from collections import Counter

from tierd.context import DaemonContext
from tierd.decisions import pending
from tierd.errors import Corrupt, Full, NotFound, Retained, TierdError, Transient
from tierd.failpoints import failpoint
from tierd.format import layout, wire
from tierd.format.ids import CheckpointId
from tierd.tiers.tier import Tier, copy_checkpoint
from tierd.workers.reaper import Retentions
from tierd.workers.recovery import clear_uncommitted

log = logging.getLogger("tierd")

GRACE_S = 24 * 3600.0  # younger files and unfinished uploads may be those of another node's copy


class Replicator:
    name = "replicate"
    is_urgent = False

    def __init__(self, context: DaemonContext, cold: Tier) -> None:
        self.interval_s = context.config.limits.reconcile_interval_s
        self._context = context
        self._config = context.config
        self._catalog = context.catalog
        self._hot = context.hot
        self._cold = cold
        self._retentions = Retentions()
        self._swept_at_s = float("-inf")
        self._failures: Counter[CheckpointId] = Counter()
        self._done_at = -1  # the catalog's changes at the start of the last pass that left nothing to do

    async def run_once(self) -> bool:
        """Copy until nothing is pending. After an error of the tier the pass ends, and the checkpoint that failed comes
        last in the next one; after an error of a checkpoint the others are still copied."""
        began_at = self._catalog.changes
        if began_at == self._done_at:
            return True
        await self._clear_leftovers()
        await self._mark()
        tried: set[CheckpointId] = set()
        while untried := [c for c in pending(self._catalog, self._config, self._cold.name) if c not in tried]:
            checkpoint = min(untried, key=lambda checkpoint: self._failures[checkpoint])
            tried.add(checkpoint)
            try:
                await self._replicate(checkpoint)
                del self._failures[checkpoint]
            except NotFound:
                # It was deleted or evicted while it was copied. What was sent is removed later, as a leftover.
                self._catalog.drop(checkpoint, self._hot.name)
            except (Transient, Full):
                self._failures[checkpoint] += 1
                raise
            except TierdError as error:
                self._failures[checkpoint] += 1
                if isinstance(error, Corrupt):
                    self._context.metrics.verify_failures_total.labels(tier=self._hot.name).inc()
                self._context.incidents.record(self.name, error, checkpoint)
        self._failures = Counter({failed: self._failures[failed] for failed in tried & self._failures.keys()})
        if not self._failures:
            self._done_at = began_at
        return not self._failures

    async def _replicate(self, checkpoint: CheckpointId) -> None:
        entry = self._catalog.get(checkpoint)
        if entry is None:
            return
        failpoint("cold.copy")
        began_s = self._context.monotonic_s()
        with self._context.throttle.writing(self._cold.name) as count_written:
            await copy_checkpoint(
                entry.manifest,
                self._hot,
                self._cold,
                milestones=entry.all_milestones,
                is_healthy=entry.healthy,
                progress=count_written,
            )
        failpoint("cold.copied")
        self._catalog.add(entry.manifest, self._cold.name, entry.all_milestones)
        metrics = self._context.metrics
        metrics.replicate_seconds.labels(tier=self._cold.name).observe(self._context.monotonic_s() - began_s)
        metrics.bytes_total.labels(tier=self._cold.name, direction="write").inc(entry.manifest.size_bytes)
        self._context.notify.send(
            checkpoint.run,
            wire.Replicated(step=checkpoint.step, generation=checkpoint.generation, tier=self._cold.name),
        )
        self._context.notify.replicated()

    async def _clear_leftovers(self) -> None:
        """Delete what a killed copy left of checkpoints that will not be copied again, as often as the tier is listed.
        Only of runs in this hot tier, and only after a day: another node may be copying into a shared tier."""
        now_s = self._context.monotonic_s()
        if now_s - self._swept_at_s < self._config.limits.cold_list_interval_s:
            return
        self._retentions.forget_due(now_s=now_s)
        local_runs = {manifest.run for manifest in self._catalog.manifests_in(self._hot.name)}
        to_copy = set(pending(self._catalog, self._config, self._cold.name))

        def is_abandoned(checkpoint: CheckpointId) -> bool:
            is_ours = checkpoint.run in local_runs and not self._may_run_elsewhere(checkpoint)
            return is_ours and checkpoint not in to_copy

        for checkpoint in filter(is_abandoned, self._catalog.tiers[self._cold.name].partial):
            if self._retentions.holds(self._cold.name, checkpoint, now_s=now_s):
                continue
            try:
                written_before_s = self._context.now().timestamp() - GRACE_S
                await clear_uncommitted(self._cold, checkpoint, written_before_s=written_before_s)
            except Retained as error:
                self._retentions.add(self._cold.name, checkpoint, error, now_s=now_s)
                self._context.incidents.record(self.name, error, checkpoint)

        def is_abandoned_key(key: str) -> bool:
            checkpoint = layout.parse_key(key)
            return checkpoint is not None and is_abandoned(checkpoint)

        # S3 bills the parts of unfinished uploads too.
        removed = await self._cold.store.remove_unfinished(is_abandoned_key, grace_s=GRACE_S)
        self._swept_at_s = now_s
        if removed:
            log.info("removed %d unfinished uploads from %s", removed, self._cold.name)

    def _may_run_elsewhere(self, checkpoint: CheckpointId) -> bool:
        """Whether the checkpoint's generation may be running on another node. Only the newest one is not fenced."""
        here = self._context.memory.generation(checkpoint.run)
        is_newest = checkpoint.generation >= max(here, self._catalog.generation_max(checkpoint.run))
        return is_newest and checkpoint.generation != here

    async def _mark(self) -> None:
        """Copy the markers that this tier's replicas lack: a marker in one tier holds in all."""
        for entry in self._catalog.entries():
            if self._cold.name not in entry.tiers:
                continue
            for milestone in entry.all_milestones - entry.milestones.get(self._cold.name, frozenset()):
                await self._cold.mark_milestone(entry.id, milestone, self._context.timestamp())
                # If it was deleted there meanwhile, the catalog must not list it again.
                if self._cold.name in entry.tiers:
                    self._catalog.add(entry.manifest, self._cold.name, [milestone])
            if entry.healthy is not None and self._cold.name not in entry.diagnoses:
                diagnosis = await self._hot.diagnosis(entry.id, is_healthy=entry.healthy)
                await self._cold.mark_diagnosis(entry.id, diagnosis)
                self._catalog.diagnosed(entry.id, self._cold.name, is_healthy=diagnosis.healthy)
