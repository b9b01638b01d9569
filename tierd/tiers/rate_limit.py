"""Limits on how fast a store is written: bytes per second, and parts in flight that adapt to a bucket's throttling."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

MIB = 1 << 20


class Bandwidth:
    """A cap in MiB per second: a piece waits until the time of the pieces before it has passed. 0: no cap."""

    def __init__(self, mib_s: float) -> None:
        self._bytes_per_s = mib_s * MIB
        self._requested = 0.0  # bytes of all pieces so far
        self._allowed = 0.0  # of these, the bytes whose time has passed
        self._updated_s = 0.0
        self._changed = asyncio.Event()

    def limit(self, mib_s: float) -> None:
        """Change the cap, also for pieces that are waiting."""
        self._update()
        self._bytes_per_s = mib_s * MIB
        self._changed.set()
        self._changed = asyncio.Event()

    async def take(self, size_bytes: int) -> None:
        """Wait until a piece of `size_bytes` may begin."""
        self._update()
        begin = self._requested
        self._requested += size_bytes
        while self._bytes_per_s > 0 and begin - self._allowed >= 1:  # less than a byte is a rounding error
            with suppress(TimeoutError):
                async with asyncio.timeout((begin - self._allowed) / self._bytes_per_s):
                    await self._changed.wait()
            self._update()

    def _update(self) -> None:
        now_s = asyncio.get_running_loop().time()
        allowed = self._allowed + (now_s - self._updated_s) * self._bytes_per_s
        self._allowed = min(self._requested, allowed) if self._bytes_per_s > 0 else self._requested
        self._updated_s = now_s


class UploadWindow:
    """The number of parts in flight over all uploads: halved when the server throttles, and one more after each round
    that succeeded. Additive increase, multiplicative decrease, as in TCP (RFC 5681)."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._limit = float(count_max)
        self._in_flight = 0
        self._changed = asyncio.Event()
        self._sent_before_halving = 0  # parts still in flight, whose throttling says nothing about the new limit

    @property
    def limit(self) -> int:
        return int(self._limit)

    @asynccontextmanager
    async def part(self) -> AsyncGenerator[None, None]:
        """Wait for a place in the window, and hold it within the block."""
        while self._in_flight >= self.limit:
            await self._changed.wait()
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1
            self._sent_before_halving = max(0, self._sent_before_halving - 1)
            self._changed.set()
            self._changed = asyncio.Event()

    def grow(self) -> None:
        """A part succeeded."""
        self._limit = min(float(self._count_max), self._limit + 1 / self._limit)
        self._changed.set()
        self._changed = asyncio.Event()

    def shrink(self) -> None:
        """The server throttled a part."""
        if self._sent_before_halving == 0:
            self._limit = max(1.0, self._limit / 2)
            self._sent_before_halving = self._in_flight
