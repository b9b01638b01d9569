"""Examines every checkpoint once: are all its numbers finite, and did the weights change since the last one?

The diagnosis is a marker beside the manifest. A process of the lowest priority (tierd/health/finiteness.py) reads the
slots, or else the files in the hot tier; it is started for each checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence

import msgspec

from tierd.context import DaemonContext
from tierd.descriptors import close_all
from tierd.errors import UNDECODABLE, Corrupt, NotFound, TierdError, Transient, text_of
from tierd.format import layout, wire
from tierd.format.audit import EventKind
from tierd.format.health import Diagnosis
from tierd.format.ids import CheckpointId
from tierd.memory.snapshot_set import SnapshotSet
from tierd.transfer.verify import verify_files

log = logging.getLogger("tierd")

PROGRAM = "tierd.health.finiteness"
# The timeout of one examination: it has the lowest priority, beside a training that uses all cores.
TIMEOUT_MIN_S, RATE_MIN_BYTES_S = 120.0, 5 << 20
DIGESTS_KEPT = 64  # weight digests of the last checkpoints of all runs


class Examiner:
    name = "examine"
    is_urgent = True

    def __init__(self, context: DaemonContext) -> None:
        self.interval_s = context.config.limits.reconcile_interval_s
        self._context = context
        self._memory = context.memory
        self._catalog = context.catalog
        self._hot = context.hot
        self._examining = asyncio.Lock()
        self._done_at = -1  # the catalog's changes at the start of the last pass that left nothing to do
        self._failed: set[CheckpointId] = set()
        self._unmarked: dict[CheckpointId, Diagnosis] = {}  # of checkpoints whose marker may not be written yet
        self._digests: dict[CheckpointId, str] = {}

    async def run_once(self) -> bool:
        """Examine every checkpoint without a diagnosis, newest first. False when one could not be examined."""
        self._unmarked = {c: diagnosis for c, diagnosis in self._unmarked.items() if self._may_lack_marker(c)}
        in_memory = [snapshots.id for snapshots in self._memory.complete() if self._lacks_marker(snapshots)]
        began_at = self._catalog.changes
        if began_at == self._done_at and not in_memory:
            return True
        in_hot = self._catalog.in_tier(self._hot.name).values()
        entries = [entry for entry in in_hot if not entry.manifest.is_adopted]  # of that, the numbers are not known
        candidates = {*in_memory, *(entry.id for entry in entries)}
        is_complete = True
        for checkpoint in sorted(candidates, key=lambda checkpoint: checkpoint.recency, reverse=True):
            try:
                await self.examine(checkpoint)
                await self._mark(checkpoint)
            except TierdError as error:
                self._context.incidents.record(self.name, error, checkpoint)
                is_complete = False
        if is_complete:
            self._done_at = began_at
        return is_complete

    def diagnosis(self, checkpoint: CheckpointId) -> bool | None:
        """Whether it is healthy, by its markers or by an examination without a marker yet; None: not examined."""
        entry, snapshot_set = self._catalog.get(checkpoint), self._memory.find(checkpoint)
        if entry is not None and entry.examined is not None:
            return entry.examined
        diagnosis = self._unmarked.get(checkpoint) or (snapshot_set.diagnosis if snapshot_set is not None else None)
        return diagnosis.healthy if diagnosis is not None else None

    async def examine(self, checkpoint: CheckpointId) -> Diagnosis | None:
        """Examine it, unless it was examined or can never be. Returns the new diagnosis; None when there is no new one.

        Raises Transient when the examination failed and may be tried again, and the error of the tier when the marker
        could not be written; then the diagnosis stays, and the next pass writes the marker."""
        async with self._examining:
            if self.diagnosis(checkpoint) is not None or checkpoint in self._failed:
                return None
            try:
                diagnosis = await self._examine(checkpoint)
            except NotFound:
                return None  # it was deleted meanwhile
            except TierdError as error:
                if isinstance(error, Transient):
                    raise
                self._failed.add(checkpoint)
                self._context.metrics.examinations_total.labels(run=checkpoint.run, verdict="failed").inc()
                self._context.incidents.record(self.name, error, checkpoint)
                return None
            diagnosis = msgspec.structs.replace(diagnosis, examined_at=self._context.timestamp())
            # Before the lock is released: the next caller must see that it was examined, and the marker takes a while.
            self._unmarked[checkpoint] = diagnosis
            if (snapshot_set := self._memory.find(checkpoint)) is not None:
                snapshot_set.diagnosis = diagnosis
            self._report(checkpoint, diagnosis)
            self._tell_trainers(checkpoint, diagnosis)
        await self._mark(checkpoint)
        self._context.notify.examined()
        return diagnosis

    async def judge(self, checkpoint: CheckpointId) -> bool | None:
        """For a trainer that waits to restore it: examine it now, for `restore_wait_s` at most. None when it is not
        known whether it is healthy."""
        health = self._context.config.health
        if not health.examine:
            snapshot_set = self._memory.find(checkpoint)
            return False if snapshot_set is not None and snapshot_set.is_reported_unhealthy else None
        return await self.is_healthy(checkpoint, health.restore_wait_s)

    async def is_healthy(self, checkpoint: CheckpointId, wait_s: float) -> bool | None:
        try:
            async with asyncio.timeout(wait_s):
                await self.examine(checkpoint)
        except (TierdError, TimeoutError) as error:
            log.warning("restore %s, which was not examined: %s", checkpoint, text_of(error))
        return self.diagnosis(checkpoint)

    def _lacks_marker(self, snapshot_set: SnapshotSet) -> bool:
        entry = self._catalog.get(snapshot_set.id)
        return snapshot_set.diagnosis is None or (entry is not None and not entry.diagnoses)

    def _may_lack_marker(self, checkpoint: CheckpointId) -> bool:
        entry = self._catalog.get(checkpoint)
        return entry.examined is None if entry is not None else self._memory.find(checkpoint) is not None

    async def _mark(self, checkpoint: CheckpointId) -> None:
        """Write the marker beside the manifest in the hot tier, if the manifest is there and the marker is not. In the
        cold tiers instead, if hot had no space for the checkpoint: then the replicator has no marker to copy."""
        snapshot_set = self._memory.find(checkpoint)
        diagnosis = self._unmarked.get(checkpoint) or (snapshot_set.diagnosis if snapshot_set else None)
        async with self._context.lock(checkpoint):  # no marker is written after a deletion
            entry = self._catalog.get(checkpoint)
            if entry is None:
                return
            if self._hot.name in entry.tiers:
                if diagnosis is None and entry.healthy is not None:
                    diagnosis = Diagnosis(healthy=entry.healthy)  # known from the marker of a cold tier
                tiers = [self._hot]
            else:
                tiers = [self._context.cold[name] for name in sorted(entry.tiers)] if snapshot_set is not None else []
            is_of_part = snapshot_set is not None and snapshot_set.node is not None
            if is_of_part and self._hot.name not in entry.tiers and diagnosis is not None and diagnosis.healthy:
                return  # the other parts may be unhealthy
            for tier in tiers:
                if diagnosis is not None and tier.name not in entry.diagnoses:
                    await tier.mark_diagnosis(checkpoint, diagnosis)
                    self._catalog.diagnosed(checkpoint, tier.name, is_healthy=diagnosis.healthy)
                    verdict = "healthy" if diagnosis.healthy else "unhealthy"
                    self._context.audit.record(
                        EventKind.DIAGNOSED, checkpoint=checkpoint, tier=tier.name, reason=verdict
                    )

    def _report(self, checkpoint: CheckpointId, diagnosis: Diagnosis) -> None:
        verdict = "healthy" if diagnosis.healthy else "unhealthy"
        self._context.metrics.examinations_total.labels(run=checkpoint.run, verdict=verdict).inc()
        if not diagnosis.healthy:
            error = Corrupt(
                f"{checkpoint} is unhealthy: {diagnosis}",
                hint="it is not restored unless asked for; docs/RUNBOOK.md#unhealthy-checkpoint",
            )
            self._context.incidents.record(self.name, error, checkpoint)
        self._check_stale(checkpoint, diagnosis.digest)

    def _tell_trainers(self, checkpoint: CheckpointId, diagnosis: Diagnosis) -> None:
        """Of a run over several nodes, which let older steps go only when no part of a newer one is unhealthy. Of what
        is not in hot yet, the persister tells it."""
        entry = self._catalog.get(checkpoint)
        if entry is not None and entry.part is not None:
            step, generation = checkpoint.step, checkpoint.generation
            message = wire.Persisted(step=step, generation=generation, seconds=0.0, is_healthy=diagnosis.healthy)
            self._context.notify.send(checkpoint.run, message)

    def _check_stale(self, checkpoint: CheckpointId, digest: str) -> None:
        """Report two steps with the same weights: the trainer snapshots other tensors than those that it trains."""
        if not digest:
            return
        for other, known in self._digests.items():
            is_same_timeline = (other.run, other.generation) == (checkpoint.run, checkpoint.generation)
            if is_same_timeline and other.step != checkpoint.step and known == digest:
                older, newer = sorted((other.step, checkpoint.step))
                self._context.metrics.stale_snapshots_total.labels(run=checkpoint.run).inc()
                error = Corrupt(
                    f"{checkpoint.run}: steps {older} and {newer} have the same weights, bit for bit",
                    hint="does the state hold the model that is trained? docs/RUNBOOK.md#stale-snapshots",
                )
                self._context.incidents.record(self.name, error, checkpoint)
                break
        self._digests[checkpoint] = digest
        while len(self._digests) > DIGESTS_KEPT:
            del self._digests[next(iter(self._digests))]

    async def _examine(self, checkpoint: CheckpointId) -> Diagnosis:
        snapshot_set = self._memory.find(checkpoint)
        if snapshot_set is not None and snapshot_set.is_reported_unhealthy:
            return Diagnosis(healthy=False)
        if snapshot_set is not None:
            snapshots = [snapshot for _, snapshot in sorted(snapshot_set.snapshots.items())]
            files = [(snapshot.slot.fd, snapshot.sealed.size_bytes) for snapshot in snapshots]
            diagnosis = await examine_files(checkpoint, files)
            if self._memory.find(checkpoint) is snapshot_set:
                return diagnosis
            # A slot was released while it was read: the program may have read another snapshot.
        entry = self._catalog.get(checkpoint)
        if entry is None or self._hot.name not in entry.tiers:
            raise NotFound(f"examine {checkpoint}: it was just deleted")
        manifest = entry.held(self._hot.name)
        keys = [layout.file_key(checkpoint, file.name) for file in manifest.files]
        descriptors = await self._context.hot_store.open_files(keys)
        try:
            sizes = [file.size_bytes for file in manifest.files]
            diagnosis = await examine_files(checkpoint, list(zip(descriptors, sizes, strict=True)))
        finally:
            close_all(descriptors)
        if not diagnosis.healthy and (damage := (await verify_files(self._hot, manifest)).sentences):
            # The disk made the NaN, not the training.
            raise Corrupt(f"examine {checkpoint}: {damage[0]}", hint="docs/RUNBOOK.md#corrupt-chunk")
        return diagnosis


async def examine_files(checkpoint: CheckpointId, files: Sequence[tuple[int, int]]) -> Diagnosis:
    """`files`: (descriptor, size in bytes) of a checkpoint's shards. Raises Transient when the program failed, Corrupt
    when it can never read them."""
    timeout_s = TIMEOUT_MIN_S + sum(size_bytes for _, size_bytes in files) / RATE_MIN_BYTES_S
    try:
        process = await asyncio.create_subprocess_exec(
            # -P: do not import a folder named tierd from the working directory.
            *(sys.executable, "-P", "-m", PROGRAM, *(f"{descriptor}:{size_bytes}" for descriptor, size_bytes in files)),
            pass_fds=[descriptor for descriptor, _ in files],
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C must not end it before the daemon has drained
        )
    except OSError as error:
        raise Transient(
            f"examine {checkpoint}: start {sys.executable}: {error.strerror}",
            hint=f"let user {os.geteuid()}, who runs the daemon, read and run it; or set examine = false in [health]",
        ) from error
    try:
        async with asyncio.timeout(timeout_s):
            raw, _ = await process.communicate()
    except TimeoutError:
        raise Transient(f"examine {checkpoint}: no answer within {timeout_s:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        answer: Diagnosis | str = msgspec.json.decode(raw, type=Diagnosis | str)
    except UNDECODABLE:
        raise Transient(f"examine {checkpoint}: {PROGRAM} ended with code {process.returncode}") from None
    if isinstance(answer, str):
        raise Corrupt(f"examine {checkpoint}: {answer}", hint="docs/RUNBOOK.md#corrupt-chunk")
    return answer
