"""Has every checkpoint examined once: are all its numbers finite, and has anything been trained since the last one?

The diagnosis goes into a marker beside the manifest. The look itself is another process at the lowest priority
(tierd/health/program.py), started when there is something to look at; it reads slots, else the hot tier's files.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Sequence

import msgspec

from tierd.catalog import Catalog
from tierd.errors import Corrupt, NotFound, TierdError, Transient
from tierd.format import layout
from tierd.format.health import Diagnosis, Examined
from tierd.format.ids import CheckpointId
from tierd.incidents import Incidents
from tierd.memory.tier import MemoryTier
from tierd.metrics import Metrics
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.tier import Tier
from tierd.transfer.verify import verify_files

log = logging.getLogger("tierd")

PROGRAM = "tierd.health.program"
LOOK_MIN_S, LOOK_MIN_BYTES_S = 120.0, 5 << 20  # a look at the lowest priority, beside a training that takes all cores
DIGESTS_KEPT = 64  # of the last checkpoints, of all runs together


class Examiner:
    name = "examine"
    is_urgent = True

    def __init__(
        self,
        memory: MemoryTier,
        catalog: Catalog,
        hot: Tier,
        hot_store: DirectoryStore,
        *,
        interval_s: float,
        metrics: Metrics,
        incidents: Incidents,
        now: Callable[[], str],
        on_judged: Callable[[], None],
    ) -> None:
        self.interval_s = interval_s
        self._memory = memory
        self._catalog = catalog
        self._hot = hot
        self._hot_store = hot_store
        self._metrics = metrics
        self._incidents = incidents
        self._now = now
        self._on_judged = on_judged
        self._looking = asyncio.Lock()
        self._done_at = -1  # the catalog's moment when the last pass that did all there was began
        self._hopeless: set[CheckpointId] = set()
        self._digests: dict[CheckpointId, str] = {}

    async def run_once(self) -> bool:
        """Everything that has no diagnosis yet, newest first. False when one is still to be had."""
        in_memory = [one.id for one in self._memory.complete() if one.diagnosis is None]
        began_at = self._catalog.moment()
        if began_at == self._done_at and not in_memory:
            return True
        entries = [entry for entry in self._catalog.entries() if self._hot.name in entry.tiers]
        unjudged = {*in_memory, *(entry.id for entry in entries)}
        is_well = True
        for checkpoint in sorted(unjudged, key=lambda one: one.recency, reverse=True):
            try:
                await self.judge(checkpoint)
                await self._mark(checkpoint)
            except TierdError as error:
                self._incidents.record(self.name, error, checkpoint)
                is_well = False
        if is_well:
            self._done_at = began_at  # unless something has changed since: then the next pass looks again
        return is_well

    def diagnosis(self, checkpoint: CheckpointId) -> bool | None:
        """Whether it is healthy, as far as is known: from its markers, or from a look at it in memory."""
        entry, held = self._catalog.get(checkpoint), self._memory.find(checkpoint)
        if entry is not None and entry.healthy is not None:
            return entry.healthy
        return held.diagnosis.healthy if held is not None and held.diagnosis is not None else None

    async def judge(self, checkpoint: CheckpointId) -> Diagnosis | None:
        """Look at it, unless that has been done, and never will be again. None when there is nothing new to say. Raises
        Transient when that went wrong."""
        async with self._looking:
            if self.diagnosis(checkpoint) is not None or checkpoint in self._hopeless:
                return None
            try:
                found = await self._look(checkpoint)
            except NotFound:
                return None  # it has gone meanwhile
            except TierdError as error:
                if isinstance(error, Transient):
                    raise
                self._hopeless.add(checkpoint)
                self._metrics.examinations_total.labels(run=checkpoint.run, verdict="failed").inc()
                self._incidents.record(self.name, error, checkpoint)
                return None
        diagnosis = Diagnosis(
            healthy=not found.tensors,
            examined_at=self._now(),
            tensors=found.tensors,
            not_finite=found.not_finite,
            digest="" if found.tensors else found.digest,  # NaN everywhere is the same weights, and no news
        )
        held = self._memory.find(checkpoint)
        if held is not None:
            held.diagnosis = diagnosis
        self._tell(checkpoint, diagnosis)
        await self._mark(checkpoint, diagnosis)
        self._on_judged()
        return diagnosis

    async def is_healthy(self, checkpoint: CheckpointId, wait_s: float) -> bool | None:
        """For a trainer that waits: looks now, and gives up after `wait_s`. None: not known."""
        try:
            async with asyncio.timeout(wait_s):
                await self.judge(checkpoint)
        except (TierdError, TimeoutError) as error:
            log.warning("restore %s unexamined: %s", checkpoint, error or f"no diagnosis within {wait_s:.0f} s")
        return self.diagnosis(checkpoint)

    # ── what is to be done ──

    async def _mark(self, checkpoint: CheckpointId, diagnosis: Diagnosis | None = None) -> None:
        """Beside the manifest, once there is one in the hot tier."""
        entry, held = self._catalog.get(checkpoint), self._memory.find(checkpoint)
        if entry is None or self._hot.name not in entry.tiers or self._hot.name in entry.diagnoses:
            return
        diagnosis = diagnosis or (held.diagnosis if held else None)
        if diagnosis is None and entry.healthy is not None:
            diagnosis = Diagnosis(healthy=entry.healthy)  # marked in a cold tier, and fetched from there
        if diagnosis is not None:
            await self._hot.mark_diagnosis(checkpoint, diagnosis)
            self._catalog.diagnosed(checkpoint, self._hot.name, is_healthy=diagnosis.healthy)

    def _tell(self, checkpoint: CheckpointId, diagnosis: Diagnosis) -> None:
        word = "healthy" if diagnosis.healthy else "unhealthy"
        self._metrics.examinations_total.labels(run=checkpoint.run, verdict=word).inc()
        if not diagnosis.healthy:
            error = Corrupt(
                f"{checkpoint} is unhealthy: {diagnosis}",
                hint="it is not restored unless asked for; docs/RUNBOOK.md#unhealthy-checkpoint",
            )
            self._incidents.record(self.name, error, checkpoint)
        self._check_stale(checkpoint, diagnosis.digest)

    def _check_stale(self, checkpoint: CheckpointId, digest: str) -> None:
        """Two steps with the same weights: the trainer stages something else than what it trains."""
        if not digest:
            return
        for other, known in self._digests.items():
            is_same_timeline = (other.run, other.generation) == (checkpoint.run, checkpoint.generation)
            if is_same_timeline and other.step != checkpoint.step and known == digest:
                older, newer = sorted((other.step, checkpoint.step))
                self._metrics.stale_snapshots_total.labels(run=checkpoint.run).inc()
                error = Corrupt(
                    f"{checkpoint.run}: steps {older} and {newer} have the same weights, bit for bit",
                    hint="does the state hold the model that is trained? docs/RUNBOOK.md#stale-snapshots",
                )
                self._incidents.record(self.name, error, checkpoint)
                break
        self._digests[checkpoint] = digest
        while len(self._digests) > DIGESTS_KEPT:
            del self._digests[next(iter(self._digests))]

    # ── the look ──

    async def _look(self, checkpoint: CheckpointId) -> Examined:
        held = self._memory.find(checkpoint)
        if held is not None:
            snapshots = [one for _, one in sorted(held.snapshots.items())]
            files = [(one.slot.fd, one.sealed.size_bytes) for one in snapshots]
            found = await _examine(checkpoint, files)
            if self._memory.find(checkpoint) is held:
                return found
            # Else a slot was given back while it was read: these may be the numbers of another snapshot.
        entry = self._catalog.get(checkpoint)
        if entry is None or self._hot.name not in entry.tiers:
            raise NotFound(f"examine {checkpoint}: it has just gone")
        with contextlib.ExitStack() as opened:
            files = []
            for file in entry.manifest.files:
                descriptor = self._hot_store.open_fd(layout.file_key(checkpoint, file.name))
                opened.callback(os.close, descriptor)
                files.append((descriptor, file.size_bytes))
            found = await _examine(checkpoint, files)
        if found.tensors and (damage := (await verify_files(self._hot, entry.manifest)).sentences):
            # The disk's NaN, not the training's.
            raise Corrupt(f"examine {checkpoint}: {damage[0]}", hint="docs/RUNBOOK.md#corrupt-chunk")
        return found


async def _examine(checkpoint: CheckpointId, files: Sequence[tuple[int, int]]) -> Examined:
    """`files`: (descriptor, size in bytes). Raises Transient when the look went wrong, Corrupt when it never can go
    right."""
    timeout_s = LOOK_MIN_S + sum(size_bytes for _, size_bytes in files) / LOOK_MIN_BYTES_S
    process = await asyncio.create_subprocess_exec(
        # -P: a folder that is called tierd where the daemon was started is none of ours.
        *(sys.executable, "-P", "-m", PROGRAM, *(f"{descriptor}:{size_bytes}" for descriptor, size_bytes in files)),
        pass_fds=[descriptor for descriptor, _ in files],
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the daemon, which drains
    )
    try:
        async with asyncio.timeout(timeout_s):
            answer, _ = await process.communicate()
    except TimeoutError:
        raise Transient(f"examine {checkpoint}: no answer within {timeout_s:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        found = msgspec.json.decode(answer, type=Examined)
    except msgspec.DecodeError:
        raise Transient(f"examine {checkpoint}: {PROGRAM} ended with code {process.returncode}") from None
    if found.trouble:
        raise Corrupt(f"examine {checkpoint}: {found.trouble}", hint="docs/RUNBOOK.md#corrupt-chunk")
    return found
