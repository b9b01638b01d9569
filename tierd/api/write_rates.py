"""Measures the bytes per second written to each tier, for the status: samples the counters of the write throttle."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping

SAMPLE_S = 5.0
WINDOW_S = 60.0


class WriteRates:
    """`written_bytes`: by tier, since the daemon's start."""

    def __init__(self, written_bytes: Callable[[], Mapping[str, int]], now_s: Callable[[], float]) -> None:
        self._written_bytes, self._now_s = written_bytes, now_s
        self._samples = deque([(now_s(), written_bytes())], maxlen=int(WINDOW_S / SAMPLE_S) + 1)

    async def run(self) -> None:
        """Take samples until cancelled."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            self.sample()

    def sample(self) -> None:
        self._samples.append((self._now_s(), self._written_bytes()))

    def rates(self) -> dict[str, float]:
        """Bytes per second by tier, over the last minute or since the daemon's start."""
        started_s, began = self._samples[0]
        elapsed_s = self._now_s() - started_s
        if elapsed_s <= 0:
            return {}
        return {tier: (written - began.get(tier, 0)) / elapsed_s for tier, written in self._written_bytes().items()}
