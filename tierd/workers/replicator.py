"""Copies committed checkpoints from the hot tier to one cold tier. A pass is safe to repeat and to kill.

The plan comes from lifecycle. Every byte is checked against the manifest while it is copied, so a damaged hot replica
is never copied. Each cold tier has its own replicator, so a slow or dead tier does not delay the others. What is being
copied stays in hot until it is committed, however slow the tier is: so the tier advances at the pace of its bandwidth.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

from tierd.catalog.decisions import pending
from tierd.catalog.entry import NOT_LISTED_YET, Entry, recency
from tierd.context import DaemonContext
from tierd.errors import Corrupt, Foreign, Full, NotFound, TierdError, Transient
from tierd.failpoints import failpoint
from tierd.format import layout, wire
from tierd.format.audit import EventKind
from tierd.format.health import Diagnosis
from tierd.format.ids import CheckpointId, Run
from tierd.format.node_file import NodeFile
from tierd.tiers.checkpoint_copy import copy_checkpoint, copy_part
from tierd.tiers.tier import Tier
from tierd.workers.deferred_claim import confirm_claim
from tierd.workers.leftovers import Leftovers

VERDICT_S = 60.0  # how long a part waits until it is examined
RETRIED_AFTER = 3  # copies; a checkpoint that failed waits for them, if others are pending
FORMER_COPY_S = 600.0  # assumed for a copy of a former daemon: how long it took is not known


@dataclass(slots=True)
class Copy:
    """A copy in progress, over all its attempts. `sent_bytes`: in this attempt; `sent_max`: the most in any. Times by
    the monotonic clock; `failing_since_s`: when an attempt first failed since there was progress."""

    checkpoint: CheckpointId
    started_s: float
    sent_bytes: int = 0
    sent_max: int = 0
    failing_since_s: float | None = None

    def sent(self, size_bytes: int) -> None:
        self.sent_bytes += size_bytes
        if self.sent_bytes > self.sent_max:  # an attempt counts again what an earlier one has sent
            self.sent_max, self.failing_since_s = self.sent_bytes, None

    def attempt_failed(self, now_s: float) -> None:
        if self.failing_since_s is None:
            self.failing_since_s = now_s

    def is_continued(self, now_s: float) -> bool:
        """Whether the next attempt is of this checkpoint again. Without progress, attempts go on for as long as the
        copy had taken until then: a longer wait costs more than a new copy, which is of a newer checkpoint."""
        failing_since_s = now_s if self.failing_since_s is None else self.failing_since_s
        return self.sent_max > 0 and now_s - failing_since_s <= failing_since_s - self.started_s


class Replicator:
    name = "replicate"
    is_urgent = False

    def __init__(self, context: DaemonContext, cold: Tier) -> None:
        self.interval_s = context.config.limits.reconcile_interval_s
        self._context = context
        self._catalog = context.catalog
        self._hot = context.hot
        self._cold = cold
        self._leftovers = Leftovers(context, cold)
        self._failures: Counter[CheckpointId] = Counter()
        self._copied_since_failure = 0
        self._copy: Copy | None = None
        self._unmarked: set[CheckpointId] = set()  # whose markers could not be written
        self._went_back: set[Run] = set()  # runs whose last copy was older than what the tier had already
        self._turns: dict[Run, int] = {}  # the number of the last copy of each run
        self._turn = count(1)
        self._unexamined: dict[CheckpointId, float] = {}  # parts: since when they could have been sent
        self._awaits_verdicts = False
        self._done_at = -1  # the catalog's changes at the start of the last pass that left nothing to do

    async def run_once(self) -> bool:
        """Copy until nothing is pending. After an error of the tier the pass ends, and the next one continues the same
        copy if that had progressed, else the checkpoint that failed waits for RETRIED_AFTER others. After an error of a
        checkpoint the others are still copied."""
        began_at = self._catalog.changes
        if began_at == self._done_at and not self._leftovers.are_due:
            return True
        self._drop_stalled_copy()
        await self._find_former_copy()
        if not self._catalog.tiers[self._cold.name].is_known:
            return True  # nothing is written where another place may be mounted
        await self._leftovers.clear()
        is_marked = await self._mark()
        tried: set[CheckpointId] = set()
        while untried := [c for c in self._pending() if c not in tried]:
            checkpoint = self._next(untried)
            tried.add(checkpoint)
            try:
                await self._replicate(checkpoint, self._begin(checkpoint))
                self._end_copy()
                self._copied_since_failure += 1
                if self._copied_since_failure >= RETRIED_AFTER:
                    self._failures.clear()
                del self._failures[checkpoint]
            except NotFound:
                # It was deleted or evicted while it was copied. What was sent is removed later, as a leftover.
                self._end_copy()
                self._catalog.drop(checkpoint, self._hot.name)
            except (Transient, Full):
                self._drop_stalled_copy()
                raise
            except TierdError as error:
                self._end_copy()
                self._count_failure(checkpoint)
                if isinstance(error, Corrupt):
                    self._context.metrics.verify_failures_total.labels(tier=self._hot.name).inc()
                self._context.incidents.record(self.name, error, checkpoint)
        self._failures = Counter({failed: self._failures[failed] for failed in tried & self._failures.keys()})
        if is_marked and not self._failures and self._copy is None and not self._awaits_verdicts:
            self._done_at = began_at
        return is_marked and not self._failures

    def _pending(self) -> list[CheckpointId]:
        """What is to be copied, in the order of the plan, without the parts that are still being examined, and what a
        daemon is deleting there: that is sent again after the tombstone was cleared."""
        gone = self._catalog.tiers[self._cold.name].gone
        checkpoints = [
            each for each in pending(self._catalog, self._context.config, self._cold.name) if each not in gone
        ]
        awaited = {checkpoint for checkpoint in checkpoints if self._awaits_verdict(checkpoint)}
        self._unexamined = {
            checkpoint: self._unexamined[checkpoint] for checkpoint in checkpoints if checkpoint in self._unexamined
        }
        self._awaits_verdicts = bool(awaited)
        return [checkpoint for checkpoint in checkpoints if checkpoint not in awaited]

    def _awaits_verdict(self, checkpoint: CheckpointId) -> bool:
        """A node file has the verdict on its part, and is never replaced: a part waits for it for a limited time."""
        entry = self._catalog.get(checkpoint)
        if not self._context.config.health.examine or entry is None or entry.part is None or entry.part.is_adopted:
            return False
        if self._hot.name in entry.diagnoses:
            return False
        now_s = self._context.monotonic_s()
        return now_s - self._unexamined.setdefault(checkpoint, now_s) < VERDICT_S

    # ── the copy in progress ──

    def _next(self, untried: list[CheckpointId]) -> CheckpointId:
        """The copy in progress, then those with the fewest failures. Runs take turns. After a copy of a checkpoint that
        was older than what the tier has of the run, a newer one is copied: the tier advances at least every second
        time, however many older ones wait. Otherwise in the order of the plan."""
        newest = {run: self._catalog.newest(run, self._cold.name) for run in self._went_back}
        least = {run: manifest.id.recency for run, manifest in newest.items() if manifest is not None}

        def urgency(checkpoint: CheckpointId) -> tuple[bool, int, int, bool]:
            is_begun = self._copy is not None and self._copy.checkpoint == checkpoint
            is_older = checkpoint.run in least and checkpoint.recency < least[checkpoint.run]
            return not is_begun, self._failures[checkpoint], self._turns.get(checkpoint.run, 0), is_older

        return min(untried, key=urgency)

    def _begin(self, checkpoint: CheckpointId) -> Copy:
        if self._copy is None or self._copy.checkpoint != checkpoint:
            self._copy = Copy(checkpoint, self._context.monotonic_s())
        self._copy.sent_bytes = 0
        self._catalog.set_copying(self._cold.name, checkpoint)
        return self._copy

    def _end_copy(self) -> None:
        self._copy = None
        self._catalog.set_copying(self._cold.name, None)

    def _drop_stalled_copy(self) -> None:
        """Between two attempts: a copy that fails without progress for long does not stay in hot, because its tier may
        be down for days."""
        if self._copy is None:
            return
        now_s = self._context.monotonic_s()
        self._copy.attempt_failed(now_s)
        if not self._copy.is_continued(now_s):
            self._count_failure(self._copy.checkpoint)
            self._end_copy()

    def _count_failure(self, checkpoint: CheckpointId) -> None:
        self._failures[checkpoint] += 1
        self._copied_since_failure = 0

    async def _find_former_copy(self) -> None:
        """After a start, once: the copy that a former daemon has begun is continued, the newest of several. The tier
        shows it by files without a manifest or by unfinished uploads. A tier that cannot be listed shows nothing."""
        knowledge = self._catalog.tiers[self._cold.name]
        if self._catalog.is_copying_known(self._cold.name) or knowledge.error == NOT_LISTED_YET:
            return
        begun = knowledge.partial.keys() - knowledge.gone
        with suppress(TierdError):
            begun |= {parsed for key in await self._cold.store.unfinished() if (parsed := layout.parse_key(key))}
        begun &= self._catalog.in_tier(self._hot.name).keys()
        if checkpoint := max(
            begun - self._catalog.in_tier(self._cold.name).keys(),
            key=lambda checkpoint: checkpoint.recency,
            default=None,
        ):
            self._copy = Copy(checkpoint, self._context.monotonic_s() - FORMER_COPY_S, sent_max=1)
        self._catalog.set_copying(self._cold.name, checkpoint)

    # ── one copy ──

    async def _replicate(self, checkpoint: CheckpointId, copy: Copy) -> None:
        entry = self._catalog.get(checkpoint)
        if entry is None:
            return
        await confirm_claim(self._context, self._cold, checkpoint)
        failpoint("cold.copy")
        context, run = self._context, checkpoint.run
        started_s = context.monotonic_s()
        if entry.part is not None:
            await self._send_part(entry, entry.part, copy)
            return
        milestones = entry.all_milestones  # of those set meanwhile, the copy has no marker: `_mark` writes it
        with context.throttle.writing(self._cold.name) as count_written:

            def progress(size_bytes: int) -> None:
                count_written(size_bytes)
                copy.sent(size_bytes)

            is_committed = await copy_checkpoint(
                entry.manifest,
                self._hot,
                self._cold,
                milestones=milestones,
                is_healthy=entry.healthy,
                progress=progress,
            )
        if not is_committed:
            deleted = await self._cold.buried([checkpoint])
            self._catalog.saw_gone(self._cold.name, checkpoint, deleted.get(checkpoint))
            return
        failpoint("cold.copied")
        newest = self._catalog.newest(run, self._cold.name)
        if newest is not None and checkpoint.recency < newest.id.recency:
            self._went_back.add(run)
        else:
            self._went_back.discard(run)
        self._turns[run] = next(self._turn)
        self._catalog.add(entry.manifest, self._cold.name, milestones)
        context.audit.record(EventKind.REPLICATED, checkpoint=checkpoint, tier=self._cold.name)
        seconds = context.monotonic_s() - started_s
        context.copies.committed(self._cold.name, seconds=seconds, at_s=context.now().timestamp())
        context.metrics.replicate_seconds.labels(tier=self._cold.name).observe(seconds)
        size_bytes = entry.manifest.size_bytes
        context.traces.record(
            "replicate", checkpoint, seconds, ended=context.now(), tier=self._cold.name, size_bytes=size_bytes
        )
        context.metrics.bytes_total.labels(tier=self._cold.name, direction="write").inc(size_bytes)
        message = wire.Replicated(step=checkpoint.step, generation=checkpoint.generation, tier=self._cold.name)
        context.notify.send(run, message)
        context.notify.replicated()

    async def _send_part(self, entry: Entry, part: NodeFile, copy: Copy) -> None:
        """This node's part of a checkpoint over several nodes; workers/committer.py commits it."""
        context = self._context
        with context.throttle.writing(self._cold.name) as count_written:

            def progress(size_bytes: int) -> None:
                count_written(size_bytes)
                copy.sent(size_bytes)

            def node_file() -> NodeFile:
                return context.node_file(part, is_healthy=entry.diagnoses.get(self._hot.name))

            await copy_part(part, self._hot, self._cold, node_file, progress=progress)
        failpoint("cold.part_sent")
        self._turns[entry.id.run] = next(self._turn)
        self._catalog.part_sent(self._cold.name, part)
        context.audit.record(EventKind.REPLICATED, checkpoint=entry.id, tier=self._cold.name, reason=part.name)
        context.metrics.bytes_total.labels(tier=self._cold.name, direction="write").inc(part.size_bytes)
        context.notify.part_sent(self._cold.name)

    # ── markers ──

    async def _mark(self) -> bool:
        """Copy the markers that this tier's replicas lack: a marker in one tier holds in all. One that cannot be
        written, because a foreign one has its name, is reported once and does not delay the others. False after another
        error: the next pass tries again, that one last."""
        lacking = [entry for entry in self._catalog.in_tier(self._cold.name).values() if self._lacks_marker(entry)]
        lacking.sort(key=recency, reverse=True)
        for entry in sorted(lacking, key=lambda entry: entry.id in self._unmarked):
            async with self._context.lock(entry.id):  # no marker is written after a deletion
                if not self._lacks_marker(entry):
                    continue
                try:
                    await self._copy_markers(entry)
                    self._unmarked.discard(entry.id)
                except (Foreign, Corrupt) as error:
                    if entry.id not in self._unmarked:
                        self._unmarked.add(entry.id)
                        self._context.incidents.record(self.name, error, entry.id)
                except TierdError as error:
                    self._unmarked.add(entry.id)
                    self._context.incidents.record(self.name, error, entry.id)
                    return False  # the tier may be down: then the copies fail too
        self._unmarked = {checkpoint for checkpoint in self._unmarked if self._catalog.get(checkpoint) is not None}
        return True

    def _lacks_marker(self, entry: Entry) -> bool:
        name = self._cold.name
        if name not in entry.tiers:
            return False  # also when the replica was deleted: the catalog has taken the tier out of the entry
        has_marks = any(entry.milestones.values())  # most have none
        is_unmarked = has_marks and bool(entry.counted_marks - entry.milestones.get(name, frozenset()))
        return is_unmarked or self._lacks_diagnosis(entry)

    def _lacks_diagnosis(self, entry: Entry) -> bool:
        return self._cold.name not in entry.diagnoses and entry.healthy is not None

    async def _copy_markers(self, entry: Entry) -> None:
        name = self._cold.name
        for mark in entry.counted_marks - entry.milestones.get(name, frozenset()):
            removed = layout.removed_by(mark)
            write = self._cold.mark_milestone if removed is None else self._cold.unmark_milestone
            await write(entry.id, removed or mark, self._context.timestamp())
            action = EventKind.MARKED if removed is None else EventKind.UNMARKED
            reason = f"milestone {removed or mark}"
            self._context.audit.record(action, checkpoint=entry.id, tier=name, reason=reason)
            # Another daemon may have deleted it meanwhile: then the catalog must not list it again.
            if name in entry.tiers:
                self._catalog.add(entry.manifest, name, [mark])
        if entry.healthy is not None and self._lacks_diagnosis(entry):
            if entry.part is not None and entry.examined is not entry.healthy:  # another node's part decided it
                diagnosis = Diagnosis(healthy=entry.healthy)
            else:
                diagnosis = await self._hot.diagnosis(entry.id, is_healthy=entry.healthy)
            await self._cold.mark_diagnosis(entry.id, diagnosis)
            self._catalog.diagnosed(entry.id, name, is_healthy=diagnosis.healthy)
