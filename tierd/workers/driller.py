"""Restores a random checkpoint of each tier on a schedule, and publishes how long it took.

Off unless asked for (`drill.interval_s`): out of a bucket each one is egress. After a start the first ones come soon,
at random, so that a daemon which is restarted now and then drills all the same.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping

from tierd.catalog import Catalog, Entry
from tierd.config import Config
from tierd.errors import Full, NotFound, TierdError, Transient
from tierd.format.ids import CheckpointId, Run
from tierd.incidents import Incidents
from tierd.metrics import Metrics
from tierd.tiers.drill import clear, drill
from tierd.tiers.tier import Tier
from tierd.workers.recovery import is_listed

log = logging.getLogger("tierd")

SOON = 0.1  # of an interval: the first drill after a start, and the next after one that went wrong


class Driller:
    name = "drill"
    is_urgent = False

    def __init__(
        self,
        catalog: Catalog,
        tiers: Mapping[str, Tier],
        config: Config,
        *,
        metrics: Metrics,
        incidents: Incidents,
        now_s: Callable[[], float],
        timestamp_s: Callable[[], float],
    ) -> None:
        """`now_s`: a clock that never goes back. `timestamp_s`: Unix time."""
        self.interval_s = config.limits.reconcile_interval_s
        self._catalog = catalog
        self._tiers = tiers
        self._every_s = config.drill.interval_s
        self._scratch = config.drill_path
        self._metrics = metrics
        self._incidents = incidents
        self._now_s = now_s
        self._timestamp_s = timestamp_s
        self._due_at_s: dict[str, float] = {}
        self._proven: dict[tuple[Run, str], CheckpointId] = {}  # the newest of each run in each tier

    async def run_once(self) -> bool:
        """Every tier whose time has come. One that fails holds up no other, and is tried again sooner."""
        for name, tier in self._tiers.items():
            if name not in self._due_at_s:
                self._due_at_s[name] = self._now_s() + random.uniform(0.0, SOON) * self._every_s
                await asyncio.to_thread(clear, name, self._scratch)
            if self._now_s() < self._due_at_s[name] or not self._catalog.tiers[name].is_known:
                continue
            entries = [one for one in self._catalog.entries() if name in one.tiers and one.healthy is not False]
            self._due_at_s[name] = self._now_s() + self._every_s
            if entries and not await self._drill(tier, random.choice(entries)):
                self._due_at_s[name] = self._now_s() + SOON * self._every_s
        return True

    async def _drill(self, tier: Tier, entry: Entry) -> bool:
        # Never at the cost of what trainers are about to hand over.
        spare_bytes = 2 * max((one.size_bytes for one in self._catalog.held("hot")), default=0)
        try:
            done = await drill(tier, entry.manifest, self._scratch, spare_bytes=spare_bytes, progress=self._read(tier))
        except TierdError as error:
            if isinstance(error, NotFound) and not await is_listed(tier, entry.id):
                return True  # deleted meanwhile
            if isinstance(error, Full):  # nothing that matters is short of room
                error = Transient(error.message, hint="drill.scratch may be on another disk")
            self._incidents.record(self.name, error, entry.id)
            return False
        self._metrics.drill_restore_seconds.labels(tier=tier.name).set(done.seconds)
        self._metrics.drill_last_success_timestamp_seconds.labels(tier=tier.name).set(self._timestamp_s())
        self._prove(entry.id, tier.name)
        log.info("drill: %s was restored from %s in %.2f s and verified", entry.id, tier.name, done.seconds)
        return True

    def _read(self, tier: Tier) -> Callable[[int], None]:
        return self._metrics.bytes_total.labels(tier=tier.name, direction="read").inc

    def _prove(self, checkpoint: CheckpointId, tier: str) -> None:
        former = self._proven.get((checkpoint.run, tier))
        if former is None or checkpoint.recency > former.recency:
            self._proven[checkpoint.run, tier] = checkpoint
        self._proven = {at: one for at, one in self._proven.items() if at[0] in self._catalog.runs()}
        self._metrics.drill_newest_step_proven.clear()
        for (run, name), one in self._proven.items():
            self._metrics.drill_newest_step_proven.labels(run=run, tier=name).set(one.step)
