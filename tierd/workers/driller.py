"""Restores a random checkpoint of each tier into scratch space once per interval, and publishes how long it took.

Off by default (`drill.interval_s`): from a bucket each drill is egress. The first drills after a start come soon, at a
random time, so that a daemon which is restarted often also drills.
"""

from __future__ import annotations

import asyncio
import logging
import random

from tierd.catalog.decisions import room_bytes
from tierd.catalog.entry import Entry
from tierd.catalog.listing import is_listed
from tierd.context import DaemonContext
from tierd.errors import Full, NotFound, TierdError, Transient
from tierd.format.ids import CheckpointId, Run
from tierd.tiers.tier import Tier
from tierd.transfer.drill import clear, drill

log = logging.getLogger("tierd")

SOON = 0.1  # of an interval: until the first drill after a start, and the next one after a failed drill


class Driller:
    name = "drill"
    is_urgent = False

    def __init__(self, context: DaemonContext) -> None:
        self.interval_s = context.config.limits.reconcile_interval_s
        self._context = context
        self._catalog = context.catalog
        self._metrics = context.metrics
        self._every_s = context.config.drill.interval_s
        self._scratch = context.config.drill_path
        self._now_s = context.monotonic_s
        self._due_at_s: dict[str, float] = {}
        # By run and tier: the newest checkpoint that a drill has restored.
        self._proven: dict[tuple[Run, str], CheckpointId] = {}

    async def run_once(self) -> bool:
        """Drill every tier that is due. A tier that fails is tried again sooner and does not delay the others."""
        for name, tier in self._context.tiers.items():
            if name not in self._due_at_s:
                self._due_at_s[name] = self._now_s() + random.uniform(0.0, SOON) * self._every_s
                await asyncio.to_thread(clear, name, self._scratch)
            if self._now_s() < self._due_at_s[name] or not self._catalog.tiers[name].is_known:
                continue
            # One node's part restores nothing by itself.
            whole = (entry for entry in self._catalog.in_tier(name).values() if entry.is_whole_in(name))
            entries = [entry for entry in whole if entry.view.healthy is not False]
            self._due_at_s[name] = self._now_s() + self._every_s
            if entries and not await self._drill(tier, random.choice(entries)):
                self._due_at_s[name] = self._now_s() + SOON * self._every_s
        return True

    async def _drill(self, tier: Tier, entry: Entry) -> bool:
        count_read = self._metrics.bytes_total.labels(tier=tier.name, direction="read").inc
        try:
            seconds = await drill(
                tier, entry.manifest, self._scratch, spare_bytes=room_bytes(self._catalog), progress=count_read
            )
        except TierdError as error:
            if isinstance(error, NotFound) and not await is_listed(tier, entry.id):
                return True  # it was deleted meanwhile
            if isinstance(error, Full):  # only the drill lacks space, not the hot tier
                error = Transient(error.message, hint="drill.scratch may be on another disk")
            self._context.incidents.record(self.name, error, entry.id)
            return False
        self._metrics.drill_restore_seconds.labels(tier=tier.name).set(seconds)
        self._metrics.drill_last_success_timestamp_seconds.labels(tier=tier.name).set(self._context.now().timestamp())
        self._prove(entry.id, tier.name)
        log.info("drill: %s was restored from %s in %.2f s and verified", entry.id, tier.name, seconds)
        return True

    def _prove(self, checkpoint: CheckpointId, tier: str) -> None:
        former = self._proven.get((checkpoint.run, tier))
        if former is None or checkpoint.recency > former.recency:
            self._proven[checkpoint.run, tier] = checkpoint
        self._proven = {at: checkpoint for at, checkpoint in self._proven.items() if at[0] in self._catalog.runs()}
        self._metrics.drill_newest_step_proven.clear()
        for (run, name), newest in self._proven.items():
            self._metrics.drill_newest_step_proven.labels(run=run, tier=name).set(newest.step)
