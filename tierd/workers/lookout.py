"""Requests one manifest of a cold tier every half minute, and has the tier listed at once when that fails.

A tier is listed only every ten minutes, because a listing costs a request per 1000 keys. Until then nobody would know
that its server is down or that somebody emptied it. This costs one HEAD, and decides nothing: the listing that follows
finds the tier unreachable or the checkpoints lost.
"""

from __future__ import annotations

from tierd.context import DaemonContext
from tierd.errors import NotFound, TierdError
from tierd.format import layout
from tierd.format.ids import CheckpointId
from tierd.tiers.tier import Tier


class Lookout:
    """Requests the newest manifest of each run in turn: no policy deletes the newest checkpoint."""

    name = "list"  # its failures count as those of listings
    is_urgent = False

    def __init__(self, context: DaemonContext, tier: Tier) -> None:
        self.interval_s = context.config.limits.cold_look_interval_s
        self._context = context
        self._tier = tier
        self._turn = 0
        self._not_found: set[CheckpointId] = set()  # by their last request

    async def run_once(self) -> bool:
        catalog, name = self._context.catalog, self._tier.name
        if not catalog.tiers[name].is_known:
            return True  # the lister tries again by itself
        newest = [manifest.id for run in catalog.runs() if (manifest := catalog.newest(run, name)) is not None]
        self._not_found.intersection_update(newest)
        if not newest:
            return True
        checkpoint = newest[self._turn % len(newest)]
        self._turn += 1
        try:
            await self._tier.store.stored_checksum(layout.manifest_key(checkpoint))
        except NotFound:
            if checkpoint not in self._not_found:  # once: some servers list what they do not find
                self._not_found.add(checkpoint)
                self._context.notify.relist(name)
        except TierdError:
            self._context.notify.relist(name)
        else:
            self._not_found.discard(checkpoint)
        return True
