"""Deletes what the lifecycle gives up: evicts from one tier, expires from the last. Manifest first.

Decides nothing: the plan comes from lifecycle, run by run. halt, not guess: a run with an unreadable manifest in
a tier, or a tier that could not be listed, loses nothing there until a person or a later look has cleared it.
Also gives back the slots of runs whose trainers stay away.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from tierd.catalog import Catalog
from tierd.config import Config
from tierd.decisions import deletions
from tierd.errors import Retained, TierdError
from tierd.format.ids import Run
from tierd.incidents import Incidents
from tierd.lifecycle.policy import HOT, Action, Decision
from tierd.memory.tier import MemoryTier
from tierd.tiers.tier import Tier
from tierd.workers.recovery import is_listed
from tierd.workers.retention import Retentions

log = logging.getLogger("tierd")


class Reaper:
    """`on_freed` is told that a tier has more room; `on_lost`, of a tier that did not answer and must be listed again;
    `on_forgotten`, of a run whose slots were given back."""

    name = "reap"
    is_urgent = False

    def __init__(
        self,
        catalog: Catalog,
        memory: MemoryTier,
        tiers: Mapping[str, Tier],
        config: Config,
        *,
        incidents: Incidents,
        on_freed: Callable[[], None],
        on_lost: Callable[[str], None],
        on_forgotten: Callable[[Run], None],
    ) -> None:
        self.interval_s = config.limits.reconcile_interval_s
        self._catalog = catalog
        self._memory = memory
        self._tiers = tiers
        self._config = config
        self._incidents = incidents
        self._on_freed = on_freed
        self._on_lost = on_lost
        self._on_forgotten = on_forgotten
        self._done_at = -1  # the catalog's moment at the end of the last pass that did all there was
        self._retentions = Retentions()

    async def run_once(self) -> bool:
        grace_s = self._config.daemon.memory_grace_s
        for run in self._memory.forget_departed(now_s=time.monotonic(), grace_s=grace_s):
            self._on_forgotten(run)
            log.info("gave back the memory of %s: its trainers have been gone for %.0f s", run, grace_s)
        if self._catalog.moment() == self._done_at and time.monotonic() < self._retentions.due_s:
            return True
        self._retentions.forget_due(now_s=time.monotonic())
        failing: set[str] = set()
        while not await self._delete(failing):
            pass
        self._done_at = -1 if failing else self._catalog.moment()
        return not failing

    async def _delete(self, failing: set[str]) -> bool:
        """One plan carried out. False when something else changed meanwhile: what was decided may not hold any more.

        A tier that does not let us delete is added to `failing` and holds up no other; a checkpoint that its tier
        retains holds up nothing at all."""
        decided_at = self._catalog.moment()
        for action in deletions(self._catalog, self._config):
            held = (action.tier, action.checkpoint)
            if action.tier in failing or self._retentions.holds(*held, now_s=time.monotonic()):
                continue
            if self._catalog.moment() != decided_at:
                return False
            if action.tier == HOT and not await self._is_elsewhere(action, failing):
                continue
            try:
                await self._tiers[action.tier].delete(action.checkpoint)
            except Retained as error:
                self._retentions.add(*held, error, now_s=time.monotonic())
                self._incidents.record(self.name, error, action.checkpoint)
                continue
            except TierdError as error:
                failing.add(action.tier)
                self._incidents.record(self.name, error, action.checkpoint)
                continue
            is_alone = self._catalog.moment() == decided_at
            self._catalog.drop(action.checkpoint, action.tier)
            if is_alone:
                decided_at = self._catalog.moment()
            self._on_freed()
            verb = "evicted" if action.action is Action.EVICT else "expired"
            log.info("%s %s from %s: %s", verb, action.checkpoint, action.tier, action.reason)
        return self._catalog.moment() == decided_at

    async def _is_elsewhere(self, action: Decision, failing: set[str]) -> bool:
        """last_replica: what is known of a cold tier may be minutes old, so before a hot replica goes, each tier that
        is said to hold the checkpoint is asked. One that has lost it is sent it again."""
        entry = self._catalog.get(action.checkpoint)
        for name in (entry.tiers if entry else set[str]()) - {HOT}:
            if not self._catalog.tiers[name].is_known:
                continue  # the plan did not count on it
            try:
                if not await is_listed(self._tiers[name], action.checkpoint):
                    self._catalog.drop(action.checkpoint, name)
                    return False
            except TierdError as error:
                self._catalog.lost_tier(name, str(error))
                self._on_lost(name)
                failing.add(name)
                return False
        return True
