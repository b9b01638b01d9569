"""Copies snapshots from memory to the cold tiers while the hot tier is full or its disk fails.

The newest snapshot is copied first, to all cold tiers at once. It is durable when the first one has committed it. The
others then get the same time once more, unless another snapshot waits, so that a slow tier does not occupy the slots.
`Replicated` is sent for each tier, and `Persisted` is not, because the checkpoint is not in hot. When hot has room for
the snapshot before a cold tier has committed it, the copies end and the persister tries hot again.
"""

from __future__ import annotations

import asyncio
import logging
import math

from tierd.catalog.entry import NOT_LISTED_YET
from tierd.catalog.listing import next_sequence
from tierd.context import DaemonContext
from tierd.errors import TierdError, TierUnreachable
from tierd.format import wire
from tierd.format.audit import EventKind
from tierd.format.ids import HOT, MEMORY, CheckpointId
from tierd.format.manifest import Manifest
from tierd.format.node_file import NodeFile
from tierd.memory.slot import SlotEvent, SlotState
from tierd.memory.snapshot_set import SnapshotSet
from tierd.memory.store import SnapshotStore
from tierd.tiers.checkpoint_copy import copy_checkpoint, copy_part
from tierd.tiers.readable_tier import ReadableTier
from tierd.tiers.tier import Tier
from tierd.workers.deferred_claim import confirm_claim
from tierd.workers.hot_space import HotSpace, no_room

log = logging.getLogger("tierd")

EXTRA_TIME_MIN_S = 30.0  # for the other tiers, after the first one has committed
POLL_S = 1.0  # how often it checks for a waiting snapshot, which ends the extra time, and for room in hot


class WriteThrough:
    name = "replicate"
    interval_s = 3600.0  # the persister wakes it when hot refuses a snapshot
    is_urgent = True

    def __init__(self, context: DaemonContext) -> None:
        self._context = context
        self._memory = context.memory
        self._catalog = context.catalog
        self._space = HotSpace(context.hot, no_room)

    async def run_once(self) -> bool:
        """Try once every snapshot that hot has refused. False when one has reached no cold tier."""
        tried: set[CheckpointId] = set()
        is_complete = True
        while self._context.cold and (snapshot_set := self._newest(tried)) is not None:
            tried.add(snapshot_set.id)
            is_complete &= await self._write(snapshot_set, tried)
            self._context.notify.persist_ended(snapshot_set.id.run)
        return is_complete

    def _newest(self, tried: set[CheckpointId]) -> SnapshotSet | None:
        refused = [
            pending
            for pending in self._memory.pending()
            if HOT in pending.refused_by and pending.is_in(SlotState.SEALED) and pending.id not in tried
        ]
        return max(refused, key=lambda snapshot_set: snapshot_set.sealed_at_s, default=None)

    async def _write(self, snapshot_set: SnapshotSet, tried: set[CheckpointId]) -> bool:
        """Whether the snapshot is durable in a cold tier now."""
        snapshot_set.move(SlotEvent.PERSIST)  # its slots stay as they are
        is_durable = False
        try:
            is_durable = await self._write_to_all(snapshot_set, tried)
        finally:
            snapshot_set.failures += not is_durable
            snapshot_set.move(SlotEvent.PERSISTED if is_durable else SlotEvent.PERSIST_FAILED)
        if not is_durable and HOT not in snapshot_set.refused_by:
            self._context.notify.space_freed()
        if is_durable:
            self._context.metrics.snapshots_total.labels(run=snapshot_set.id.run, outcome="written_through").inc()
            log.info("wrote %s from memory to cold: hot did not take it", snapshot_set.id)
        return is_durable

    async def _write_to_all(self, snapshot_set: SnapshotSet, tried: set[CheckpointId]) -> bool:
        await self._memory.compute_checksums(snapshot_set)
        context = self._context
        sequence = await next_sequence(
            self._catalog,
            context.cold.values(),
            snapshot_set.id.run,
            context.identities,
            in_memory=self._memory.sequence_max,
        )
        entry = self._catalog.get(snapshot_set.id)
        if entry is not None and entry.manifest != snapshot_set.manifest:
            snapshot_set.refused_by.discard(HOT)  # an earlier daemon has committed it: the persister compares the two
            return False
        # An earlier attempt may have left its manifest in hot, and a checkpoint has only one manifest.
        manifest = snapshot_set.manifest = snapshot_set.manifest or context.make_manifest(
            snapshot_set, sequence=sequence
        )
        source = ReadableTier(MEMORY, SnapshotStore(snapshot_set, manifest))
        # Under a quota, hot can be full while its disk has free space; then the free space says nothing.
        size_bytes = snapshot_set.size_bytes
        is_waiting_for_room = snapshot_set.is_hot_full and await self._space.missing_bytes(size_bytes) > 0
        clock = asyncio.get_running_loop().time
        started_s, deadline_s, is_durable = clock(), math.inf, False
        writing = {
            asyncio.create_task(self._write_to(cold, source, manifest, snapshot_set)) for cold in context.cold.values()
        }
        try:
            while writing and not (is_durable and (clock() >= deadline_s or self._newest(tried) is not None)):
                has_room = is_waiting_for_room and not is_durable and await self._space.has_room(size_bytes)
                if has_room and not any(task.done() for task in writing):  # one may just have committed
                    log.info("hot has room for %s again", snapshot_set.id)
                    snapshot_set.refused_by.discard(HOT)
                    break
                done, writing = await asyncio.wait(writing, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
                commits = [task.result() for task in done]
                if any(commits) and not is_durable:
                    is_durable = True
                    deadline_s = clock() + max(EXTRA_TIME_MIN_S, clock() - started_s)
        finally:
            for task in writing:
                task.cancel()
            await asyncio.gather(*writing, return_exceptions=True)
        return is_durable

    async def _write_to(self, cold: Tier, source: ReadableTier, manifest: Manifest, snapshot_set: SnapshotSet) -> bool:
        """Whether the tier has committed the checkpoint."""
        knowledge = self._catalog.tiers[cold.name]
        if not knowledge.is_known:
            if knowledge.error != NOT_LISTED_YET:
                snapshot_set.refused_by.add(cold.name)  # else a drain would wait for it in vain
            return False  # nothing is written where another place may be mounted
        milestones = [snapshot_set.head.milestone] if snapshot_set.head.milestone else []
        is_healthy = snapshot_set.is_healthy
        try:
            await confirm_claim(self._context, cold, manifest.id)
            with self._context.throttle.writing(cold.name) as count_written:
                if isinstance(manifest, NodeFile):

                    def node_file() -> NodeFile:  # the verdict may come during the copy
                        return self._context.node_file(manifest, is_healthy=snapshot_set.is_healthy)

                    await copy_part(manifest, source, cold, node_file, progress=count_written)
                    self._catalog.part_sent(cold.name, manifest)
                    self._context.notify.part_sent(cold.name)
                    return True
                if not await copy_checkpoint(
                    manifest, source, cold, milestones=milestones, is_healthy=is_healthy, progress=count_written
                ):
                    raise TierUnreachable(f"write {manifest.id} to {cold.name}: a daemon has deleted it there")
            if is_healthy is None and (diagnosis := snapshot_set.diagnosis) is not None:
                # It came during the copy. The slots may be released next, and then nobody writes it.
                is_healthy = diagnosis.healthy
                await cold.mark_diagnosis(manifest.id, diagnosis)
        except TierdError as error:
            snapshot_set.refused_by.add(cold.name)
            self._context.incidents.record(self.name, error, manifest.id)
            return False
        self._catalog.add(manifest, cold.name, milestones)
        reason = ", ".join(["from memory", *(f"milestone {milestone}" for milestone in milestones)])
        self._context.audit.record(EventKind.COMMITTED, checkpoint=manifest.id, tier=cold.name, reason=reason)
        if is_healthy is not None:
            self._catalog.diagnosed(manifest.id, cold.name, is_healthy=is_healthy)
        self._context.metrics.bytes_total.labels(tier=cold.name, direction="write").inc(manifest.size_bytes)
        message = wire.Replicated(step=manifest.step, generation=manifest.generation, tier=cold.name)
        self._context.notify.send(snapshot_set.id.run, message)
        self._context.notify.replicated()
        return True
