"""Deletes what the lifecycle gives up: evicts from one tier, expires from the last. Manifest first.

Decides nothing: the plan comes from lifecycle, run by run. halt, not guess: a run with an unreadable manifest in
a tier, or a tier that could not be listed, loses nothing there until a person or a later look has cleared it.
Also gives back the slots of runs whose trainers stay away.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from tierd.catalog import Catalog
from tierd.config import Config
from tierd.lifecycle.policy import HOT, Action, Evict, Expire, plan
from tierd.memory import MemoryTier
from tierd.tiers.tier import Tier

log = logging.getLogger("tierd")


class Reaper:
    name = "reap"
    is_urgent = False

    def __init__(self, catalog: Catalog, memory: MemoryTier, tiers: Mapping[str, Tier], config: Config) -> None:
        self.interval_s = config.limits.reconcile_interval_s
        self._catalog = catalog
        self._memory = memory
        self._tiers = tiers
        self._config = config

    async def run_once(self) -> bool:
        grace_s = self._config.daemon.memory_grace_s
        for run in self._memory.forget_departed(now_s=time.monotonic(), grace_s=grace_s):
            log.info("gave back the memory of %s: its trainers have been gone for %.0f s", run, grace_s)
        for action in deletions(self._catalog, self._config):
            await self._tiers[action.tier].delete(action.checkpoint)
            self._catalog.drop(action.checkpoint, action.tier)
            verb = "evicted" if isinstance(action, Evict) else "expired"
            log.info("%s %s from %s: %s", verb, action.checkpoint, action.tier, action.reason)
        return True


def decide(catalog: Catalog, config: Config) -> list[Action]:
    """All that the lifecycle would do now, each run judged only by what is known for sure."""
    unreadable = {(tier, checkpoint.run) for tier, checkpoint in catalog.unreadable()}
    views = catalog.views()
    actions: list[Action] = []
    for run in catalog.runs():
        is_known = {name: known.is_known and (name, run) not in unreadable for name, known in catalog.tiers.items()}
        actions += plan(
            [view for view in views if view.id.run == run],
            config.lifecycle,
            cold={one.name: is_known[one.name] for one in config.cold},
            hot_known=is_known[HOT],
        )
    return actions


def deletions(catalog: Catalog, config: Config) -> list[Evict | Expire]:
    return [action for action in decide(catalog, config) if isinstance(action, Evict | Expire)]


def halted(catalog: Catalog) -> list[str]:
    """Why deletion stands still somewhere, in sentences; empty when it does not."""
    reasons = [f"unreadable_manifest: {why}" for why in catalog.unreadable().values()]
    reasons += [f"tier_unreachable: {known.error}" for known in catalog.tiers.values() if not known.is_known]
    return reasons
