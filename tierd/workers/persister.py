"""Writes complete snapshots from their slots to the hot tier, manifest last: the first durable copy.

durable: `Persisted` is sent only after fsync of file and directory and rename. A snapshot that cannot be written is
tried again until a newer one replaces it; the trainer gets a message about each failure. When hot is full, the reaper
makes room; if it cannot, or if the disk has failed twice, the snapshot is left to workers/write_through.py.
"""

from __future__ import annotations

import contextlib

from tierd.catalog.listing import is_listed, next_sequence
from tierd.context import DaemonContext
from tierd.errors import Corrupt, Full, TierdError, Transient
from tierd.failpoints import failpoint
from tierd.format import checksum, layout, wire
from tierd.format.audit import EventKind
from tierd.format.ids import CheckpointId
from tierd.format.manifest import Manifest
from tierd.memory.slot import SlotEvent, SlotState
from tierd.memory.snapshot_set import Snapshot, SnapshotSet
from tierd.tiers.pool import for_each
from tierd.workers.hot_space import HotSpace, MakeRoom
from tierd.workers.recovery import clear_uncommitted

SHARDS_IN_FLIGHT = 8  # ranks of one node; the store bounds the writes beneath


class Persister:
    name = "persist"
    interval_s = 3600.0  # every sealed snapshot wakes it
    is_urgent = True

    def __init__(self, context: DaemonContext, make_room: MakeRoom) -> None:
        self._context = context
        self._space = HotSpace(context.hot, make_room)
        self._hot = context.hot
        self._catalog = context.catalog
        self._metrics = context.metrics

    async def run_once(self) -> bool:
        """Try every pending snapshot once, those that failed before last. False when one could not be written."""
        context = self._context
        tried: set[CheckpointId] = set()
        is_complete = True
        while untried := [
            pending
            for pending in context.memory.pending()
            if pending.id not in tried and pending.is_in(SlotState.SEALED)  # else it is being written to cold
        ]:
            snapshot_set = untried[0]
            checkpoint = snapshot_set.id
            tried.add(checkpoint)
            try:
                await self._persist(snapshot_set)
            except TierdError as error:
                is_complete = False
                context.incidents.record(self.name, error, checkpoint)
                if self._hot.name in snapshot_set.refused_by:
                    context.notify.hot_refused()
                failed = wire.Failed(
                    step=checkpoint.step,
                    generation=checkpoint.generation,
                    stage="persist",
                    kind=error.kind,
                    message=error.message,
                    hint=error.hint,
                    is_final=False,
                )
                context.notify.send(checkpoint.run, failed)
            else:
                self._send_persisted(snapshot_set)
            context.notify.persist_ended(checkpoint.run)
        return is_complete

    async def _persist(self, snapshot_set: SnapshotSet) -> None:
        failpoint("persist.begin")
        snapshot_set.move(SlotEvent.PERSIST)
        entry = self._catalog.get(snapshot_set.id)
        try:
            if entry is None:
                snapshot_set.manifest = await self._write_with_room(snapshot_set)
            else:
                await self._check_same(snapshot_set, entry.manifest)
                held = snapshot_set.manifest = entry.held(self._hot.name)
                async with self._context.lock(snapshot_set.id):  # no manifest is written after a deletion
                    if self._hot.name in entry.tiers:
                        failpoint("persist.repeat")
                        # It may have been killed before its last fsync. Committing again repeats it.
                        await self._hot.commit(held, raw=await self._hot.manifest_bytes(held))
        except BaseException as error:
            snapshot_set.failures += 1
            if isinstance(error, TierdError):  # an attempt that is cancelled, at the end of a drain, shows nothing
                snapshot_set.is_hot_full = isinstance(error, Full)
                # An error of the disk may be gone at the next attempt; one that stays does not stop durability.
                if snapshot_set.is_hot_full or (isinstance(error, Transient) and snapshot_set.failures > 1):
                    snapshot_set.refused_by.add(self._hot.name)
                else:
                    snapshot_set.refused_by.discard(self._hot.name)
            snapshot_set.move(SlotEvent.PERSIST_FAILED)
            raise
        snapshot_set.move(SlotEvent.PERSISTED)

    async def _write_with_room(self, snapshot_set: SnapshotSet) -> Manifest:
        """Write the snapshot, after making room if needed. Raises Full when hot has no space and can make none."""
        size_bytes = snapshot_set.size_bytes
        missing_bytes = await self._space.missing_bytes(size_bytes)
        if missing_bytes:
            await self._space.free(missing_bytes)
        try:
            return await self._write(snapshot_set)
        except Full:
            # There may be a quota, or an overhead, that the free space does not show: then room for all of it.
            missing_bytes = await self._space.missing_bytes(size_bytes)
            if not await self._space.free(missing_bytes or size_bytes):
                raise
            return await self._write(snapshot_set)

    async def _check_same(self, snapshot_set: SnapshotSet, committed: Manifest) -> None:
        """Raises Corrupt unless the committed checkpoint with this id is this snapshot: an earlier daemon committed it
        and was killed before it answered, so the trainer has sent it again; or an earlier attempt did and then failed.
        """
        if snapshot_set.manifest == committed:
            return
        is_same = all(snapshot.sealed.resent for snapshot in snapshot_set.snapshots.values())
        if is_same:
            await self._context.memory.compute_checksums(snapshot_set)
            files = snapshot_set.make_manifest(sequence=committed.sequence).files
            is_same = all(file in committed.files for file in files)
        if not is_same:
            raise self._hot.conflict(snapshot_set.id)
        self._catalog.claims.wrote(snapshot_set.id)

    def _send_persisted(self, snapshot_set: SnapshotSet) -> None:
        """Tell the trainers which tiers have it. A resent snapshot may be in cold tiers already, or only there."""
        checkpoint = snapshot_set.id
        entry = self._catalog.get(checkpoint)
        failpoint("persist.answer")
        for tier in sorted(entry.tiers, key=lambda tier: (tier != self._hot.name, tier)) if entry else ():
            step, generation = checkpoint.step, checkpoint.generation
            message: wire.ToClient = wire.Replicated(step=step, generation=generation, tier=tier)
            if tier == self._hot.name:
                seconds = self._context.monotonic_s() - snapshot_set.sealed_at_s
                every_s = self._context.cadences.every_s(checkpoint.run, self._context.monotonic_s())
                message = self._context.persisted(checkpoint, seconds=seconds, every_s=every_s)
            self._context.notify.send(checkpoint.run, message)

    async def _write(self, snapshot_set: SnapshotSet) -> Manifest:
        checkpoint = snapshot_set.id
        snapshots = list(snapshot_set.snapshots.values())

        if await is_listed(self._hot, checkpoint):
            # The catalog does not have it, so it is not ours; its shards have the same names as ours.
            raise Corrupt(
                f"write {checkpoint} in {self._hot.name}: it holds a manifest that is unreadable or not of this daemon",
                hint="nothing was overwritten; see docs/RUNBOOK.md#unreadable-manifest",
            )
        throttle = self._context.throttle
        throttle.sealed(checkpoint.run, snapshot_set.size_bytes, snapshot_set.sealed_at_s)
        try:
            with throttle.writing(self._hot.name) as count_written:

                async def put(snapshot: Snapshot) -> None:
                    name = layout.shard_name(snapshot.rank, snapshot_set.world_size)
                    snapshot.entry = await self._context.hot_store.put(
                        layout.file_key(checkpoint, name),
                        snapshot.slot.view,
                        size_bytes=snapshot.sealed.size_bytes,
                        chunk_bytes=checksum.CHUNK_BYTES,
                        expect=snapshot.entry,
                        progress=count_written,
                        algorithm=self._context.memory.algorithm,
                    )

                await for_each(SHARDS_IN_FLIGHT, snapshots, put)
            context = self._context
            sequence = 0  # all nodes number the checkpoint alike
            if snapshot_set.node is None:
                sequence = await next_sequence(
                    self._catalog,
                    context.cold.values(),
                    checkpoint.run,
                    context.identities,
                    in_memory=context.memory.sequence_max,
                )
            if (entry := self._catalog.get(checkpoint)) is not None:  # a listing of a cold tier has just found it
                await self._check_same(snapshot_set, entry.manifest)
                snapshot_set.manifest = entry.held(self._hot.name)
            # A former attempt may have committed its manifest here or in cold: one checkpoint has one manifest.
            manifest = snapshot_set.manifest = snapshot_set.manifest or context.make_manifest(
                snapshot_set, sequence=sequence
            )
            milestones = [snapshot_set.head.milestone] if snapshot_set.head.milestone else []
            failpoint("persist.commit")
            await self._hot.commit(manifest, milestones=milestones)
            failpoint("persist.committed")
            if (other := self._catalog.get(checkpoint)) is not None and other.contradiction(manifest):
                raise self._hot.conflict(checkpoint)  # a listing of a cold tier found it during the commit
        except TierdError:
            with contextlib.suppress(TierdError):  # report the first error, not one of the clean-up
                await clear_uncommitted(self._hot, checkpoint)
            raise
        self._catalog.add(manifest, self._hot.name, milestones)
        context.audit.record(EventKind.COMMITTED, checkpoint=checkpoint, tier=self._hot.name)
        for milestone in milestones:
            reason = f"milestone {milestone}"
            context.audit.record(EventKind.MARKED, checkpoint=checkpoint, tier=self._hot.name, reason=reason)
        self._metrics.bytes_total.labels(tier=self._hot.name, direction="write").inc(manifest.size_bytes)
        persist_s = self._context.monotonic_s() - snapshot_set.sealed_at_s
        self._metrics.persist_seconds.observe(persist_s)
        size_bytes = manifest.size_bytes
        context.traces.record(
            "persist", checkpoint, persist_s, ended=context.now(), tier=self._hot.name, size_bytes=size_bytes
        )
        context.cadences.persisted(checkpoint.run, persist_s)
        self._metrics.snapshots_total.labels(run=checkpoint.run, outcome="persisted").inc()
        return manifest
