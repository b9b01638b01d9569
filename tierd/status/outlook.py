"""Sentences about the near future, from a status report: for `tierd status` and the first status page.

There is none for a tier that has enough space and bandwidth, or whose problem an alarm reports already.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from tierd.format.text import duration, size
from tierd.status.report import QueueReport, StatusReport, TierReport


def outlook(status: StatusReport) -> list[str]:
    named = {alarm.runbook for alarm in status.alarms}
    return [
        *_writes(status),
        *(line for tier in status.tiers if "disk-full" not in named for line in _disk(tier)),
        *(line for queue in status.queues for line in _bandwidth(queue)),
    ]


def _writes(status: StatusReport) -> Iterator[str]:
    rates = [f"{size(tier.write_bytes_per_s)}/s to {tier.name}" for tier in status.tiers if tier.write_bytes_per_s]
    if rates:
        yield f"written in the last minute: {', '.join(rates)}"


def _disk(tier: TierReport) -> Iterator[str]:
    if tier.disk is None or tier.disk.verdict == "fits":
        return
    if tier.disk.full_at is None or tier.disk.full_in_s is None:
        yield f"{tier.name}: full at an unknown time, while not every run has two checkpoints that show its pace"
        return
    at = datetime.fromisoformat(tier.disk.full_at).strftime("%Y-%m-%d %H:%M")
    late = f", with what waits for {' and '.join(tier.disk.waits_for)}" if tier.disk.waits_for else ""
    when = f"{tier.name} FULL at {at} UTC, in {duration(tier.disk.full_in_s)}"
    yield f"{when}, at this pace{late}; docs/RUNBOOK.md#disk-full"


def _bandwidth(queue: QueueReport) -> Iterator[str]:
    if queue.copy_s is None or queue.due_every_s is None or queue.copy_s <= queue.due_every_s:
        return
    if not queue.given_up.get("replaced"):  # else the queue says it
        what = f"{queue.tier} CANNOT KEEP UP: a copy takes {duration(queue.copy_s)}"
        yield f"{what}, and one is due every {duration(queue.due_every_s)}; docs/RUNBOOK.md#cold-too-slow"
