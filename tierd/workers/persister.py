"""Writes whole snapshot sets from their slots to the hot tier, manifest last. Slot to hot: the first durable copy.

durable: `persisted` is said only after fsync of file and directory and rename. A set that cannot be written is
tried again until a newer one has made it needless; the trainer is told each time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from tierd.catalog import Catalog
from tierd.errors import Corrupt, TierdError
from tierd.format import checksum, layout, wire
from tierd.format.ids import CheckpointId, Run
from tierd.format.manifest import Manifest
from tierd.incidents import Incidents
from tierd.memory.slot_states import SlotEvent
from tierd.memory.tier import MemoryTier, Snapshot, SnapshotSet
from tierd.metrics import Metrics
from tierd.throttle import WriteThrottle
from tierd.tiers.pool import each
from tierd.tiers.store import Progress
from tierd.tiers.tier import Tier
from tierd.workers.recovery import clear_uncommitted, is_listed

SHARDS_IN_FLIGHT = 8  # ranks of one node; the store bounds the writes beneath


class Persister:
    name = "persist"
    interval_s = 3600.0  # it is woken by every seal
    is_urgent = True

    def __init__(
        self,
        memory: MemoryTier,
        hot: Tier,
        catalog: Catalog,
        *,
        metrics: Metrics,
        incidents: Incidents,
        neighbour: WriteThrottle,
        tell: Callable[[Run, wire.ToClient], None],
        on_settled: Callable[[Run], None],
    ) -> None:
        self._memory = memory
        self._hot = hot
        self._catalog = catalog
        self._metrics = metrics
        self._incidents = incidents
        self._neighbour = neighbour
        self._tell = tell
        self._on_settled = on_settled

    async def run_once(self) -> bool:
        """Every pending set once, those that have gone wrong before last. False when one is still to be written."""
        tried: set[CheckpointId] = set()
        is_well = True
        while untried := [one for one in self._memory.pending() if one.id not in tried]:
            one = untried[0]
            tried.add(one.id)
            try:
                await self._persist(one)
            except TierdError as error:
                is_well = False
                self._incidents.record(self.name, error, one.id)
                self._tell(one.id.run, _failed(one, error))
            else:
                seconds = time.monotonic() - one.sealed_at_s
                self._tell(one.id.run, wire.Persisted(step=one.id.step, generation=one.id.generation, seconds=seconds))
            self._on_settled(one.id.run)
        return is_well

    async def _persist(self, one: SnapshotSet) -> None:
        one.move(SlotEvent.PERSIST)
        try:
            one.manifest = await self._committed_before(one.id) or await self._write(one)
        except BaseException:
            one.failures += 1
            one.move(SlotEvent.PERSIST_FAILED)
            raise
        one.move(SlotEvent.PERSISTED)

    async def _committed_before(self, checkpoint: CheckpointId) -> Manifest | None:
        """A trainer sends again what a killed daemon did not acknowledge: it may have been committed, or even have
        gone on to a cold tier."""
        known = self._catalog.get(checkpoint)
        if known is None:
            return None
        if self._hot.name in known.tiers:
            # Whoever wrote it may have been killed before the last fsync, and committing again makes up for that.
            await self._hot.commit(known.manifest, raw=await self._hot.manifest_bytes(known.manifest))
        return known.manifest

    async def _write(self, one: SnapshotSet) -> Manifest:
        snapshots = list(one.snapshots.values())

        if await is_listed(self._hot, one.id):
            # Not by us, or we would know it: its shards have the names of ours.
            raise Corrupt(
                f"write {one.id} in {self._hot.name}: a manifest lies there that is not ours, or cannot be read",
                hint="nothing was overwritten; see docs/RUNBOOK.md#unreadable-manifest",
            )
        self._neighbour.sealed(one.id.run, sum(snapshot.sealed.size_bytes for snapshot in snapshots), one.sealed_at_s)
        try:
            with self._neighbour.writing(self._hot.name) as wrote:

                async def put(snapshot: Snapshot) -> None:
                    await self._put(one, snapshot, wrote)

                await each(SHARDS_IN_FLIGHT, snapshots, put)
            manifest = await self._commit(one)
        except TierdError:
            with contextlib.suppress(TierdError):  # what went wrong first is what must be told
                await clear_uncommitted(self._hot, one.id)
            raise
        self._metrics.bytes_total.labels(tier=self._hot.name, direction="write").inc(manifest.size_bytes)
        self._metrics.persist_seconds.observe(time.monotonic() - one.sealed_at_s)
        self._metrics.snapshots_total.labels(run=one.id.run, outcome="persisted").inc()
        return manifest

    async def _commit(self, one: SnapshotSet) -> Manifest:
        manifest = one.make_manifest(sequence=self._catalog.sequence_max(one.id.run) + 1)
        # The marker goes before the commit: a milestone that is committed is never without it.
        milestone = one.head.milestone
        if milestone is not None:
            await self._hot.mark_milestone(one.id, milestone, manifest.created_at)
        await self._hot.commit(manifest)
        self._catalog.add(manifest, self._hot.name, [milestone] if milestone else [])
        return manifest

    async def _put(self, one: SnapshotSet, snapshot: Snapshot, progress: Progress) -> None:
        name = layout.shard_name(snapshot.rank, one.world_size)
        snapshot.entry = await self._hot.store.put(
            layout.file_key(one.id, name),
            snapshot.slot.view,
            size_bytes=snapshot.sealed.size_bytes,
            chunk_bytes=checksum.CHUNK_BYTES,
            expect=snapshot.entry,
            progress=progress,
        )


def _failed(one: SnapshotSet, error: TierdError) -> wire.Failed:
    return wire.Failed(
        step=one.id.step,
        generation=one.id.generation,
        stage="persist",
        kind=error.kind,
        message=error.message,
        hint=error.hint,
        is_final=False,
    )
