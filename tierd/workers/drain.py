"""The end of a daemon: waits until every sealed snapshot is durable, in hot or in a cold tier."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from tierd.context import DaemonContext
from tierd.errors import Transient
from tierd.lifecycle.policy import HOT
from tierd.memory.snapshot_set import SnapshotSet
from tierd.workers.worker import Wake

log = logging.getLogger("tierd")

POLL_S = 1.0
SEAL_TIMEOUT_S = 20.0  # how long it waits for ranks to seal a snapshot that is being staged


async def drain(context: DaemonContext, persist: Callable[[], None], persist_ended: Wake) -> list[SnapshotSet]:
    """Wait until every sealed snapshot is durable, for `daemon.drain_timeout_s` at most, and for SEAL_TIMEOUT_S at most
    until ranks have sealed what they stage: a shutdown stops the trainers at the same time. Do not wait for a snapshot
    that hot has refused and that every cold tier has failed to take. Returns those that are not durable.

    `persist`: wakes the workers that write snapshots. `persist_ended`: is set after each attempt to write one to hot.
    """
    memory = context.memory
    context.throttle.hurry("drain")
    log.info("draining: %d snapshots are not durable yet", len(memory.pending()))
    deadline_s = time.monotonic() + context.config.daemon.drain_timeout_s
    seal_deadline_s = min(deadline_s, time.monotonic() + SEAL_TIMEOUT_S)
    for snapshot_set in memory.pending():
        snapshot_set.refused_by.clear()  # every tier is tried once more
    while (not _is_hopeless(context) and time.monotonic() < deadline_s) or (
        memory.unsealed() and time.monotonic() < seal_deadline_s
    ):
        persist()  # without backoff: there is little time left
        await persist_ended.take(POLL_S)
    return memory.pending()


def _is_hopeless(context: DaemonContext) -> bool:
    """Whether no tier may still take any of the snapshots. A hot disk that fails may recover; a full one does not."""
    tiers = context.tiers.keys()
    return all(pending.is_hot_full and pending.refused_by >= tiers for pending in context.memory.pending())


def drain_error(missing: Sequence[SnapshotSet], timeout_s: float) -> Transient:
    """The error of a daemon that ends although these snapshots are in its memory only."""
    names = ", ".join(str(snapshot_set.id) for snapshot_set in missing)
    hint = "a trainer that still runs will send it again to the next daemon"
    if any(HOT in snapshot_set.refused_by for snapshot_set in missing):
        refusing = ", ".join(sorted(set[str]().union(*(each.refused_by for each in missing)) - {HOT}))
        others = f", and {refusing} did not take it" if refusing else ""
        hint += "; free space in hot, or replace its disk: docs/RUNBOOK.md#disk-full"
        return Transient(f"drain: {names} did not become durable: hot did not take it{others}", hint=hint)
    return Transient(f"drain: {names} did not become durable within {timeout_s:.0f} s", hint=hint)
