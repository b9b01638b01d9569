"""How fast a store is written: a cap on bytes per second; and a bucket with as many parts at once as it takes without
complaint."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress


class Bandwidth:
    """A cap on bytes per second: each part waits until the ones before it have had their time. 0: no cap."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._promised = 0.0  # bytes of all parts so far
        self._passed = 0.0  # bytes that there was time for
        self._looked_at = 0.0
        self._changed = asyncio.Event()

    def limit(self, bytes_per_s: float) -> None:
        """From now on, for parts that wait already too."""
        self._look()
        self._bytes_per_s = bytes_per_s
        self._changed.set()
        self._changed = asyncio.Event()

    async def take(self, size_bytes: int) -> None:
        self._look()
        begin = self._promised
        self._promised += size_bytes
        while self._bytes_per_s > 0 and self._passed < begin:
            with suppress(TimeoutError):
                async with asyncio.timeout((begin - self._passed) / self._bytes_per_s):
                    await self._changed.wait()
            self._look()

    def _look(self) -> None:
        now = asyncio.get_running_loop().time()
        passed = self._passed + (now - self._looked_at) * self._bytes_per_s
        self._passed = min(self._promised, passed) if self._bytes_per_s > 0 else self._promised
        self._looked_at = now


class Window:
    """Parts in flight over all uploads: half as many when the server asks to slow down, and one more again for each
    round that went well. Additive increase, multiplicative decrease, as in TCP (RFC 5681)."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._limit = float(count_max)
        self._in_flight = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._unpunished = 0  # parts begun before the last halving, whose complaints are about the old rate

    @property
    def limit(self) -> int:
        return int(self._limit)

    @asynccontextmanager
    async def part(self) -> AsyncGenerator[None, None]:
        while self._in_flight >= self.limit:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            finally:
                if turn in self._waiting:
                    self._waiting.remove(turn)
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1
            self._unpunished = max(0, self._unpunished - 1)
            self._call()

    def went_well(self) -> None:
        self._limit = min(float(self._count_max), self._limit + 1 / self._limit)
        self._call()

    def slow_down(self) -> None:
        if self._unpunished == 0:
            self._limit = max(1.0, self._limit / 2)
            self._unpunished = self._in_flight

    def _call(self) -> None:
        for turn in self._waiting:
            if not turn.done():
                turn.set_result(None)
