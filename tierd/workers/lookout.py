"""Looks at one manifest of a cold tier every half minute, and has the tier listed when it is not there or not readable.

A listing costs a request per 1000 keys, so a tier is listed every ten minutes; until then nobody would know that its
server is down or that somebody emptied it. A look is one HEAD. It decides nothing: the listing that follows finds the
tier unreachable or the checkpoints lost, as always.
"""

from __future__ import annotations

from tierd.context import DaemonContext
from tierd.errors import TierdError
from tierd.format import layout
from tierd.format.ids import CheckpointId
from tierd.tiers.tier import Tier


class Lookout:
    """At the newest manifest of each run in turn: the policy of no daemon deletes it."""

    name = "list"
    is_urgent = False

    def __init__(self, context: DaemonContext, tier: Tier) -> None:
        self.interval_s = context.config.limits.cold_look_interval_s
        self._context = context
        self._tier = tier
        self._turn = 0
        self._doubted: set[CheckpointId] = set()  # a look has failed or not found it, and the tier was listed since

    async def run_once(self) -> bool:
        catalog, name = self._context.catalog, self._tier.name
        if not catalog.tiers[name].is_known:
            self._doubted.clear()  # the look was right
            return True  # the lister tries again by itself
        newest = [manifest.id for run in catalog.runs() if (manifest := catalog.newest(run, name)) is not None]
        self._doubted.intersection_update(newest)
        if not newest:
            return True
        checkpoint = newest[self._turn % len(newest)]
        self._turn += 1
        try:
            await self._tier.store.stored_checksum(layout.manifest_key(checkpoint))
        except TierdError:
            # A server that lists what it does not find, or that refuses a HEAD, is not listed each time.
            if checkpoint not in self._doubted:
                self._doubted.add(checkpoint)
                self._context.notify.relist(name)
        else:
            self._doubted.discard(checkpoint)
        return True
