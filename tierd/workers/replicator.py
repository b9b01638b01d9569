"""Copies committed checkpoints from the hot tier to one cold tier. A pass is safe to repeat and to kill.

Decides nothing: the plan comes from lifecycle. Every byte is checked against the manifest on its way, so a
damaged hot replica is never copied. One slow or dead tier holds up no other: each has its own replicator.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from tierd.catalog import Catalog
from tierd.config import Config
from tierd.decisions import pending
from tierd.errors import Corrupt, Full, NotFound, Retained, TierdError, Transient
from tierd.format import layout, wire
from tierd.format.ids import CheckpointId, Run
from tierd.incidents import Incidents
from tierd.metrics import Metrics
from tierd.throttle import WriteThrottle
from tierd.tiers.tier import Tier, copy_checkpoint
from tierd.workers.recovery import clear_uncommitted
from tierd.workers.retention import Retentions

log = logging.getLogger("tierd")

UPLOAD_GRACE_S = 24 * 3600.0  # another node may be at work on an upload that we know nothing of


class Replicator:
    name = "replicate"
    is_urgent = False

    def __init__(
        self,
        catalog: Catalog,
        hot: Tier,
        cold: Tier,
        config: Config,
        *,
        metrics: Metrics,
        incidents: Incidents,
        neighbour: WriteThrottle,
        tell: Callable[[Run, wire.ToClient], None],
        on_committed: Callable[[], None],
        now: Callable[[], str],
    ) -> None:
        self.interval_s = config.limits.reconcile_interval_s
        self._catalog = catalog
        self._hot = hot
        self._cold = cold
        self._config = config
        self._metrics = metrics
        self._incidents = incidents
        self._neighbour = neighbour
        self._tell = tell
        self._on_committed = on_committed
        self._now = now
        self._retentions = Retentions()
        self._swept_at_s = float("-inf")
        self._failures: Counter[CheckpointId] = Counter()
        self._done_at = -1  # the catalog's moment when the last pass that did all there was began

    def pending(self) -> list[CheckpointId]:
        """What this tier should have and has not, most wanted first."""
        return pending(self._catalog, self._config, self._cold.name)

    async def run_once(self) -> bool:
        """Copy until nothing is pending. A checkpoint that goes wrong does not hold up the others: it is passed by,
        or, when it looks like the tier's fault, comes last in the next pass."""
        began_at = self._catalog.moment()
        if began_at == self._done_at:
            return True
        await self._clear_leftovers()
        await self._abort_uploads()
        await self._mark()
        tried: set[CheckpointId] = set()
        while todo := [checkpoint for checkpoint in self.pending() if checkpoint not in tried]:
            checkpoint = min(todo, key=lambda one: self._failures[one])
            tried.add(checkpoint)
            try:
                await self._replicate(checkpoint)
                del self._failures[checkpoint]
            except NotFound:
                # Deleted by hand, or evicted because newer ones came meanwhile: what was sent of it is no use.
                self._catalog.drop(checkpoint, self._hot.name)
                await clear_uncommitted(self._cold, checkpoint)
            except (Transient, Full):
                self._failures[checkpoint] += 1
                raise
            except TierdError as error:
                self._failures[checkpoint] += 1
                if isinstance(error, Corrupt):
                    self._metrics.verify_failures_total.labels(tier=self._hot.name).inc()
                self._incidents.record(self.name, error, checkpoint)
        self._failures = Counter({one: self._failures[one] for one in tried if self._failures[one]})
        if not self._failures:
            self._done_at = began_at  # unless something has changed since: then the next pass looks again
        return not self._failures

    async def _replicate(self, checkpoint: CheckpointId) -> None:
        entry = self._catalog.get(checkpoint)
        if entry is None:
            return
        began = time.monotonic()
        with self._neighbour.writing(self._cold.name) as wrote:
            await copy_checkpoint(
                entry.manifest,
                self._hot,
                self._cold,
                milestones=entry.all_milestones,
                is_healthy=entry.healthy,
                progress=wrote,
            )
        self._catalog.add(entry.manifest, self._cold.name, entry.all_milestones)
        self._metrics.replicate_seconds.labels(tier=self._cold.name).observe(time.monotonic() - began)
        self._metrics.bytes_total.labels(tier=self._cold.name, direction="write").inc(entry.manifest.size_bytes)
        self._tell(
            checkpoint.run,
            wire.Replicated(step=checkpoint.step, generation=checkpoint.generation, tier=self._cold.name),
        )
        self._on_committed()

    async def _clear_leftovers(self) -> None:
        """What a killed copy left of a checkpoint that will not be copied again: only of runs that live here, since
        a shared tier may hold what another node is just copying."""
        self._retentions.forget_due(now_s=time.monotonic())
        begun = self._catalog.tiers[self._cold.name].partial
        here = {manifest.run for manifest in self._catalog.held(self._hot.name)}
        for checkpoint in begun - set(self.pending()):
            held = (self._cold.name, checkpoint)
            if checkpoint.run not in here or self._retentions.holds(*held, now_s=time.monotonic()):
                continue
            try:
                await clear_uncommitted(self._cold, checkpoint)
            except Retained as error:
                self._retentions.add(*held, error, now_s=time.monotonic())
                self._incidents.record(self.name, error, checkpoint)

    async def _abort_uploads(self) -> None:
        """Parts of an upload that nobody goes on with are billed for ever. As often as the tier is listed."""
        if time.monotonic() - self._swept_at_s < self._config.limits.cold_list_interval_s:
            return
        here = {manifest.run for manifest in self._catalog.held(self._hot.name)}
        wanted = set(self.pending())

        def is_abandoned(key: str) -> bool:
            parsed = layout.parse_key(key)
            return parsed is not None and parsed[0].run in here and parsed[0] not in wanted

        aborted = await self._cold.store.abort_uploads(is_abandoned, grace_s=UPLOAD_GRACE_S)
        self._swept_at_s = time.monotonic()
        if aborted:
            log.info("aborted %d uploads in %s that nobody goes on with", aborted, self._cold.name)

    async def _mark(self) -> None:
        """What is marked in one tier holds in all: copy the markers that this tier's replicas lack."""
        for entry in self._catalog.entries():
            if self._cold.name not in entry.tiers:
                continue
            for milestone in entry.all_milestones - entry.milestones.get(self._cold.name, frozenset()):
                await self._cold.mark_milestone(entry.id, milestone, self._now())
                # Else it was deleted there meanwhile, and must not come back by this.
                if self._cold.name in entry.tiers:
                    self._catalog.add(entry.manifest, self._cold.name, [milestone])
            if entry.healthy is not None and self._cold.name not in entry.diagnoses:
                diagnosis = await self._hot.diagnosis(entry.id, is_healthy=entry.healthy)
                await self._cold.mark_diagnosis(entry.id, diagnosis)
                self._catalog.diagnosed(entry.id, self._cold.name, is_healthy=diagnosis.healthy)
