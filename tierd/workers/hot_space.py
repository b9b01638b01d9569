"""Space in hot for a checkpoint: how much is missing, and making room for it within a bounded time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from tierd.status.disks import free_bytes
from tierd.tiers.tier import Tier

log = logging.getLogger("tierd")

MARGIN_BYTES = 1 << 20  # of free space beside the shards: for the manifest, the markers and the folder
ROOM_TIMEOUT_S = 60.0  # to make room takes listings of cold tiers, which must not stop the snapshots of other runs

MakeRoom = Callable[[int], Awaitable[int]]
"""Frees so many bytes in hot, or as much as it can, and returns how many."""


async def no_room(need_bytes: int) -> int:
    return 0


class HotSpace:
    def __init__(self, hot: Tier, make_room: MakeRoom) -> None:
        self._hot = hot
        self._make_room = make_room

    async def missing_bytes(self, size_bytes: int) -> int:
        """How much more free space a checkpoint of this size needs; 0 where the free space is not known."""
        free = await free_bytes(self._hot)
        return 0 if free is None else max(0, size_bytes + MARGIN_BYTES - free)

    async def has_room(self, size_bytes: int) -> bool:
        """Whether the free space is known and enough for a checkpoint of this size."""
        free = await free_bytes(self._hot)
        return free is not None and free >= size_bytes + MARGIN_BYTES

    async def free(self, need_bytes: int) -> int:
        """The bytes that were freed; 0 also when it took too long."""
        try:
            async with asyncio.timeout(ROOM_TIMEOUT_S):
                return await self._make_room(need_bytes)
        except TimeoutError:
            log.warning("make room in hot: no answer from the cold tiers within %.0f s", ROOM_TIMEOUT_S)
            return 0
