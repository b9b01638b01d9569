"""What waits to become durable or to be copied, for how long, and how fast each copy and each tier is."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from tierd.catalog.decisions import waiting
from tierd.context import DaemonContext
from tierd.format.ids import HOT
from tierd.status.node_reports import age_s
from tierd.status.report import QueueReport

SAMPLE_S = 5.0
WINDOW_S = 60.0


def queue_reports(context: DaemonContext, due_every_s: Mapping[str, float]) -> list[QueueReport]:
    """For hot: the snapshots that are not durable yet; for each cold tier: the checkpoints that it should have and
    lacks, as last known.
    `due_every_s`: by cold tier."""
    memory, catalog, now = context.memory, context.catalog, context.now()
    ages = [time.monotonic() - snapshot_set.sealed_at_s for snapshot_set in memory.pending()]
    queues = [_queue(HOT, ages)]
    since_s = min(map(memory.unsaved_since_s, memory.runs()), default=math.inf)
    queues[0].oldest_age_s = round(max(0.0, context.monotonic_s() - since_s), 1)
    for tier, checkpoints in waiting(catalog, context.config).items():
        # A tier that cannot be listed now counts as empty in the policy. Of what it had before, nothing waits.
        there = catalog.in_tier(tier)
        entries = [entry for each in checkpoints if each not in there and (entry := catalog.get(each))]
        queue = _queue(tier, [age_s(entry.manifest.created_at, now) for entry in entries])
        record, copying = context.copies[tier], catalog.copying(tier)
        queue.copying = str(copying) if copying else None
        queue.copy_s, queue.due_every_s = record.copy_s, due_every_s.get(tier)
        if record.committed_at_s is not None:
            queue.last_copy_age_s = round(max(0.0, now.timestamp() - record.committed_at_s), 1)
        queue.given_up = {str(reason): count for reason, count in record.given_up.items()}
        queue.given_up_age_s = {
            str(reason): round(max(0.0, now.timestamp() - at_s), 1) for reason, at_s in record.given_up_at_s.items()
        }
        queues.append(queue)
    return queues


def _queue(tier: str, ages_s: Sequence[float | None]) -> QueueReport:
    oldest_s = max((age for age in ages_s if age is not None), default=0.0)
    return QueueReport(tier=tier, checkpoints=len(ages_s), oldest_age_s=round(oldest_s, 1))


class WriteRates:
    """The bytes per second written to each tier, as samples of the write throttle's counters. `written_bytes`: by tier,
    since the daemon's start."""

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
