"""Drains a daemon that is about to end: waits until every sealed snapshot is durable, in hot or in a cold tier.

With `daemon.drain_cold_s`, it then waits until the cold tiers have what the policy keeps there, because the disk of the
hot tier may be lost with the job.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from tierd.catalog.decisions import waiting
from tierd.context import DaemonContext
from tierd.errors import Transient
from tierd.format.ids import HOT, CheckpointId
from tierd.format.layout import manifest_key
from tierd.format.node_file import NodeFile
from tierd.format.text import listed
from tierd.memory.snapshot_set import SnapshotSet
from tierd.workers.restorer import PART_AWAITED_S
from tierd.workers.worker import Wake

log = logging.getLogger("tierd")

POLL_S = 1.0
SEAL_TIMEOUT_S = 20.0  # the longest wait for ranks to seal a snapshot that they are staging


class Follower(Protocol):
    """A worker that copies files of other programs."""

    def unfinished(self, since_s: float) -> list[str]:
        """The files that were written before `since_s`, by the monotonic clock, and are not copied yet."""
        ...


async def drain(
    context: DaemonContext, persist: Callable[[], None], persist_ended: Wake, followers: Sequence[Follower] = ()
) -> list[SnapshotSet]:
    """Wait until every sealed snapshot is durable, at most `daemon.drain_timeout_s`. Returns those that are not.

    Wait at most SEAL_TIMEOUT_S for ranks that are staging a snapshot: a shutdown stops the trainers at the same time.
    Do not wait for snapshots that neither hot nor any cold tier has taken. Then wait for the followers and the cold
    tiers, at most `daemon.drain_cold_s`.

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
    await _drain_to_cold(context, followers)
    return memory.pending()


async def _drain_to_cold(context: DaemonContext, followers: Sequence[Follower]) -> None:
    started_s, wait_s = context.monotonic_s(), context.config.daemon.drain_cold_s
    shown = ""
    while wait_s and (missing := _missing(context, followers, started_s)):
        if missing != shown:
            shown = missing
            log.info("draining: %s", missing)
        if context.monotonic_s() - started_s >= wait_s:
            log.warning("daemon.drain_cold_s has passed: %s", missing)
            return
        await asyncio.sleep(POLL_S)


def _missing(context: DaemonContext, followers: Sequence[Follower], started_s: float) -> str:
    """In words, what the cold tiers lack and this daemon can still copy; empty if it is nothing."""
    catalog = context.catalog
    texts = [
        f"{tier} lacks {listed(left)}"
        for tier, checkpoints in waiting(catalog, context.config).items()
        if (left := [str(checkpoint) for checkpoint in checkpoints if _is_awaited(context, tier, checkpoint)])
    ]
    texts += [f"not copied yet: {listed(left)}" for follower in followers if (left := follower.unfinished(started_s))]
    return "; ".join(texts)


def _is_awaited(context: DaemonContext, tier: str, checkpoint: CheckpointId) -> bool:
    knowledge = context.catalog.tiers[tier]
    if checkpoint in knowledge.unreadable or manifest_key(checkpoint) in knowledge.foreign:
        return False  # a person must decide
    if not context.catalog.is_part_sent(tier, checkpoint):
        return True
    # This node's part was sent. The daemon of rank 0 waits for those of the other nodes, and commits the checkpoint.
    part = next((part for part in context.catalog.sent_parts(tier) if part.id == checkpoint), None)
    return part is not None and context.is_home(checkpoint.run) and not _is_overtaken(context, tier, part)


def _is_overtaken(context: DaemonContext, tier: str, part: NodeFile) -> bool:
    """Whether the parts of the other nodes are not worth a wait, because a newer checkpoint is whole."""
    newest = context.catalog.newest(part.id.run, tier)
    if newest is None or newest.id.recency <= part.id.recency or part.created is None:
        return False
    return (context.now() - part.created).total_seconds() >= PART_AWAITED_S


def _is_hopeless(context: DaemonContext) -> bool:
    """Whether no tier can still take any of the snapshots. A hot disk with errors may recover; a full one does not."""
    tiers = context.tiers.keys()
    return all(pending.is_hot_full and pending.refused_by >= tiers for pending in context.memory.pending())


def drain_error(missing: Sequence[SnapshotSet], timeout_s: float) -> Transient:
    """The error of a daemon that ends while these snapshots are only in its memory."""
    names = ", ".join(str(snapshot_set.id) for snapshot_set in missing)
    hint = "a trainer that still runs will send it again to the next daemon"
    if any(HOT in snapshot_set.refused_by for snapshot_set in missing):
        refusing = ", ".join(sorted(set[str]().union(*(each.refused_by for each in missing)) - {HOT}))
        others = f", and {refusing} did not take it" if refusing else ""
        hint += "; free space in hot, or replace its disk: docs/RUNBOOK.md#disk-full"
        return Transient(f"drain: {names} did not become durable: hot did not take it{others}", hint=hint)
    return Transient(f"drain: {names} did not become durable within {timeout_s:.0f} s", hint=hint)
