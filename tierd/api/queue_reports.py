"""What waits to become durable or to be copied, for how long, and how fast each copy is."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

from tierd.catalog.decisions import waiting
from tierd.context import DaemonContext
from tierd.format.ids import HOT
from tierd.status.node_reports import age_s
from tierd.status.report import QueueReport


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
