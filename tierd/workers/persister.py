"""Writes complete snapshots from their slots to the hot tier, manifest last: the first durable copy.

durable: `Persisted` is sent only after fsync of file and directory and rename. A snapshot that cannot be written is
tried again until a newer one replaces it; the trainer gets a message about each failure.
"""

from __future__ import annotations

import contextlib

from tierd.context import DaemonContext
from tierd.errors import Corrupt, TierdError
from tierd.failpoints import failpoint
from tierd.format import checksum, layout, wire
from tierd.format.ids import CheckpointId
from tierd.format.manifest import Manifest
from tierd.listing import next_sequence
from tierd.memory.slot import SlotEvent
from tierd.memory.snapshot_set import Snapshot, SnapshotSet
from tierd.tiers.pool import for_each
from tierd.workers.recovery import clear_uncommitted, is_listed

SHARDS_IN_FLIGHT = 8  # ranks of one node; the store bounds the writes beneath


class Persister:
    name = "persist"
    interval_s = 3600.0  # every sealed snapshot wakes it
    is_urgent = True

    def __init__(self, context: DaemonContext) -> None:
        self._context = context
        self._hot = context.hot
        self._catalog = context.catalog
        self._metrics = context.metrics

    async def run_once(self) -> bool:
        """Try every pending snapshot once, those that failed before last. False when one could not be written."""
        context = self._context
        tried: set[CheckpointId] = set()
        is_complete = True
        while untried := [pending for pending in context.memory.pending() if pending.id not in tried]:
            snapshot_set = untried[0]
            checkpoint = snapshot_set.id
            tried.add(checkpoint)
            try:
                await self._persist(snapshot_set)
            except TierdError as error:
                is_complete = False
                context.incidents.record(self.name, error, checkpoint)
                message: wire.ToClient = wire.Failed(
                    step=checkpoint.step,
                    generation=checkpoint.generation,
                    stage="persist",
                    kind=error.kind,
                    message=error.message,
                    hint=error.hint,
                    is_final=False,
                )
            else:
                failpoint("persist.answer")
                seconds = context.monotonic_s() - snapshot_set.sealed_at_s
                message = wire.Persisted(step=checkpoint.step, generation=checkpoint.generation, seconds=seconds)
            context.notify.send(checkpoint.run, message)
            self._send_replicated(snapshot_set)
            context.notify.persist_ended(checkpoint.run)
        return is_complete

    async def _persist(self, snapshot_set: SnapshotSet) -> None:
        failpoint("persist.begin")
        snapshot_set.move(SlotEvent.PERSIST)
        entry = self._catalog.get(snapshot_set.id)
        try:
            if entry is None:
                snapshot_set.manifest = await self._write(snapshot_set)
            else:
                await self._check_same(snapshot_set, entry.manifest)
                snapshot_set.manifest = entry.manifest
                if self._hot.name in entry.tiers:
                    failpoint("persist.repeat")
                    # It may have been killed before its last fsync. Committing again repeats it.
                    await self._hot.commit(entry.manifest, raw=await self._hot.manifest_bytes(entry.manifest))
        except BaseException:
            snapshot_set.failures += 1
            snapshot_set.move(SlotEvent.PERSIST_FAILED)
            raise
        snapshot_set.move(SlotEvent.PERSISTED)

    async def _check_same(self, snapshot_set: SnapshotSet, committed: Manifest) -> None:
        """Raises Corrupt unless the committed checkpoint with this id is this snapshot: an earlier daemon committed it
        and was killed before it answered, so the trainer has sent it again; or an earlier attempt did and then failed.
        """
        if snapshot_set.manifest == committed:
            return
        is_same = all(snapshot.sealed.resent for snapshot in snapshot_set.snapshots.values())
        if is_same:
            await self._context.memory.compute_checksums(snapshot_set)
            is_same = snapshot_set.make_manifest(sequence=committed.sequence).files == committed.files
        if not is_same:
            raise Corrupt(
                f"write {snapshot_set.id} in {self._hot.name}: another checkpoint with the same id is committed",
                hint="do two jobs write one run? Rename one of them; nothing was overwritten",
            )

    def _send_replicated(self, snapshot_set: SnapshotSet) -> None:
        """A resent snapshot may be in cold tiers already."""
        entry = None if snapshot_set.is_pending else self._catalog.get(snapshot_set.id)
        for tier in sorted(entry.tiers - {self._hot.name}) if entry else ():
            step, generation = snapshot_set.id.step, snapshot_set.id.generation
            self._context.notify.send(snapshot_set.id.run, wire.Replicated(step=step, generation=generation, tier=tier))

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
        size_bytes = sum(snapshot.sealed.size_bytes for snapshot in snapshots)
        throttle.sealed(checkpoint.run, size_bytes, snapshot_set.sealed_at_s)
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
                    )

                await for_each(SHARDS_IN_FLIGHT, snapshots, put)
            sequence = await next_sequence(self._catalog, self._context.cold.values(), checkpoint.run)
            manifest = snapshot_set.make_manifest(sequence=sequence)
            snapshot_set.manifest = manifest  # the next attempt recognizes it if this one fails after the commit
            milestones = [snapshot_set.head.milestone] if snapshot_set.head.milestone else []
            failpoint("persist.commit")
            await self._hot.commit(manifest, milestones=milestones)
            failpoint("persist.committed")
        except TierdError:
            with contextlib.suppress(TierdError):  # report the first error, not one of the clean-up
                await clear_uncommitted(self._hot, checkpoint)
            raise
        self._catalog.add(manifest, self._hot.name, milestones)
        self._metrics.bytes_total.labels(tier=self._hot.name, direction="write").inc(manifest.size_bytes)
        self._metrics.persist_seconds.observe(self._context.monotonic_s() - snapshot_set.sealed_at_s)
        self._metrics.snapshots_total.labels(run=checkpoint.run, outcome="persisted").inc()
        return manifest
