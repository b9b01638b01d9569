"""Asks the stores of the tiers about their disks, for the status: free space, and which tiers are lost with hot's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from tierd.errors import TierdError
from tierd.tiers.tier import Tier


async def free_bytes(tier: Tier) -> int | None:
    """None if the tier has no limit or does not answer."""
    try:
        return await tier.store.free_bytes()
    except TierdError:
        return None


async def on_disk_of(hot: Tier, colds: Iterable[Tier]) -> set[str]:
    """The names of the cold tiers on the disk of hot. A tier that does not answer counts as one on another disk."""

    async def disk(tier: Tier) -> int | None:
        try:
            return await tier.store.disk()
        except TierdError:
            return None

    others = list(colds)
    of_hot, *found = await asyncio.gather(*map(disk, [hot, *others]))
    return {tier.name for tier, of_tier in zip(others, found, strict=True) if of_tier is not None and of_tier == of_hot}
