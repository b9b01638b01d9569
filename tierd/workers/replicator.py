"""Copies committed checkpoints from the hot tier to one cold tier. A pass is safe to repeat and to kill.

Decides nothing: the plan comes from lifecycle. Every byte is checked against the manifest on its way, so a
damaged hot replica is never copied. One slow or dead tier holds up no other: each has its own replicator.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tierd.catalog import Catalog
from tierd.config import Config
from tierd.errors import Corrupt, NotFound
from tierd.format import wire
from tierd.format.ids import CheckpointId, Run
from tierd.incidents import Incidents
from tierd.lifecycle.policy import Replicate, plan
from tierd.metrics import Metrics
from tierd.tiers.tier import Tier, copy_checkpoint


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
        self._tell = tell
        self._on_committed = on_committed
        self._now = now

    def pending(self) -> list[CheckpointId]:
        """What this tier should have and has not, most wanted first."""
        return pending(self._catalog, self._config, self._cold.name)

    async def run_once(self) -> bool:
        """Copy until nothing is pending. A checkpoint that is damaged does not hold up the others."""
        await self._mark_milestones()
        damaged: set[CheckpointId] = set()
        while todo := [checkpoint for checkpoint in self.pending() if checkpoint not in damaged]:
            checkpoint = todo[0]
            try:
                await self._replicate(checkpoint)
            except NotFound:
                self._catalog.drop(checkpoint, self._hot.name)  # deleted by hand; the next look agrees
            except Corrupt as error:
                damaged.add(checkpoint)
                self._metrics.verify_failures_total.labels(tier=self._hot.name).inc()
                self._incidents.record(self.name, error, checkpoint)
        return not damaged

    async def _replicate(self, checkpoint: CheckpointId) -> None:
        entry = self._catalog.get(checkpoint)
        if entry is None:
            return
        began = time.monotonic()
        await copy_checkpoint(entry.manifest, self._hot, self._cold, milestones=entry.all_milestones)
        self._catalog.add(entry.manifest, self._cold.name, entry.all_milestones)
        self._metrics.replicate_seconds.labels(tier=self._cold.name).observe(time.monotonic() - began)
        self._metrics.bytes_total.labels(tier=self._cold.name, direction="write").inc(entry.manifest.size_bytes)
        self._tell(
            checkpoint.run,
            wire.Replicated(step=checkpoint.step, generation=checkpoint.generation, tier=self._cold.name),
        )
        self._on_committed()

    async def _mark_milestones(self) -> None:
        """A milestone marked in one tier holds in all: copy the markers that this tier's replicas lack."""
        for entry in self._catalog.entries():
            if self._cold.name not in entry.tiers:
                continue
            for milestone in entry.all_milestones - entry.milestones.get(self._cold.name, frozenset()):
                await self._cold.mark_milestone(entry.manifest.id, milestone, self._now())
                self._catalog.add(entry.manifest, self._cold.name, [milestone])


def pending(catalog: Catalog, config: Config, tier: str) -> list[CheckpointId]:
    """The checkpoints that the lifecycle wants in `tier` and that are not there, most wanted first."""
    cold = {one.name: catalog.tiers[one.name].is_known for one in config.cold}
    actions = plan(catalog.views(), config.lifecycle, cold=cold, hot_known=True)
    return [one.checkpoint for one in actions if isinstance(one, Replicate) and one.tier == tier]
