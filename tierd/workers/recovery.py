"""At start, clears what a crash left in the hot tier; afterwards lists each tier again from time to time."""

from __future__ import annotations

import asyncio
import logging

from tierd.catalog import Catalog
from tierd.errors import TierUnreachable
from tierd.format import layout
from tierd.format.ids import CheckpointId
from tierd.listing import enter, files_of, refresh
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.tier import Tier

log = logging.getLogger("tierd")

ARRIVING_KEPT_S = 86400.0  # a trainer that has not asked again after a day will not


async def recover(catalog: Catalog, hot: Tier, store: DirectoryStore, *, now_s: float) -> None:
    """Once, before the doors open: nothing half-written stays in the hot tier, and the catalog knows it.

    The directory is locked, so whatever has no manifest now is what a killed daemon was writing; the trainer
    still holds it and sends it again. What it was fetching stays for the trainer that asks again. `now_s`: Unix time.
    """

    await store.sweep_partials(is_given_up=lambda path, touched_s: touched_s < now_s - ARRIVING_KEPT_S)
    listing = await hot.listing()
    for checkpoint in listing.partial:
        await hot.delete(checkpoint)
        del listing.files[checkpoint]
        log.info("cleared %s from hot: it was being written when the daemon ended", checkpoint)
    await enter(catalog, hot, listing, catalog.moment())


async def clear_uncommitted(tier: Tier, checkpoint: CheckpointId) -> None:
    """Removes what a copy that went wrong has left, so that a full disk does not stay full of it."""
    files = await files_of(tier, checkpoint)
    if layout.MANIFEST not in files:
        await tier.store.delete([layout.file_key(checkpoint, name) for name in files])


async def is_listed(tier: Tier, checkpoint: CheckpointId) -> bool:
    """Whether a manifest lies there, readable or not."""
    return layout.MANIFEST in await files_of(tier, checkpoint)


class Lister:
    """Looks at one tier again from time to time, and when it is told that something changed."""

    name = "list"
    is_urgent = True

    def __init__(self, catalog: Catalog, tier: Tier, interval_s: float) -> None:
        self.interval_s = interval_s
        self._catalog = catalog
        self._tier = tier
        self.has_looked = asyncio.Event()

    async def run_once(self) -> bool:
        try:
            if not self.has_looked.is_set() and isinstance(self._tier.store, DirectoryStore):
                await self._tier.store.sweep_partials()  # what killed copies left; live writers hold a lock
            await refresh(self._catalog, self._tier)
        finally:
            self.has_looked.set()
        knowledge = self._catalog.tiers[self._tier.name]
        if not knowledge.is_known:
            raise TierUnreachable(knowledge.error)
        return True
