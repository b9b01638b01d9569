"""Verifies every replica of one tier once per interval, and reads a random sample of them completely.

A damaged replica no longer counts as a replica, so no other copy is deleted because of it; it is reported, and repaired
from another tier that has the files undamaged. Nothing is stored on disk: after a restart a new round begins, in
another random order."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tierd.context import DaemonContext
from tierd.errors import Corrupt, Foreign, NewerFormat
from tierd.format.audit import EventKind
from tierd.format.ids import HOT, CheckpointId, Run
from tierd.tiers.rate_limit import Bandwidth
from tierd.tiers.tier import Tier
from tierd.transfer.repair import repair_replica
from tierd.transfer.verify import Verification, verify_replica

_HINT = "`tierd verify --deep --repair` says more; docs/RUNBOOK.md#damaged-replica"


@dataclass(slots=True)
class _Known:
    """An unreadable replica: when to verify it again, whether by reading all bytes, whether it was reported, and
    whether its repair was refused while the disk could not read it."""

    again_at_s: float
    is_deep: bool
    is_reported: bool = False
    is_refused: bool = False


class Scrubber:
    name = "scrub"
    is_urgent = False

    def __init__(self, context: DaemonContext, tier: Tier) -> None:
        self.interval_s = context.config.limits.reconcile_interval_s
        self._context = context
        self._catalog = context.catalog
        self._metrics = context.metrics
        self._tier = tier
        self._config = context.config.scrub
        self._retry_s = context.config.limits.retry_max_s
        self._now_s = context.monotonic_s
        self._bandwidth = Bandwidth(self._config.max_read_mib_s)
        self._remaining: list[CheckpointId] = []  # of this round, in random order
        self._count = 0  # of replicas in this round
        self._round_started_s = float("-inf")
        self._known: dict[CheckpointId, _Known] = {}  # unreadable replicas that could not be repaired

    async def run_once(self) -> bool:
        """Repair known damage, then verify what is due. The replicas are spread evenly over the interval."""
        knowledge = self._catalog.tiers[self._tier.name]
        if not knowledge.is_known:
            return True
        unreadable = knowledge.unreadable
        self._known = {checkpoint: known for checkpoint, known in self._known.items() if checkpoint in unreadable}
        # What this daemon has found damaged does not count here until this daemon has verified it again.
        own = {run for run in {each.run for each in unreadable} if self._is_own(run)}
        for checkpoint in [each for each in unreadable if each in knowledge.damaged or each.run in own]:
            known = self._known.get(checkpoint) or _Known(self._now_s(), is_deep=self._tier.store.is_local)
            if self._now_s() >= known.again_at_s:
                await self._verify(checkpoint, is_deep=known.is_deep)
        while checkpoint := self._due():
            if self._is_own(checkpoint.run):  # still
                await self._verify(checkpoint, is_deep=random.random() < self._config.deep_share)
        return True

    def _due(self) -> CheckpointId | None:
        since_s = self._now_s() - self._round_started_s
        if not self._remaining and since_s >= self._config.interval_s:
            own = {run for run in self._catalog.runs() if self._is_own(run)}
            self._remaining = [each for each in self._catalog.in_tier(self._tier.name) if each.run in own]
            if not self._remaining:
                return None
            random.shuffle(self._remaining)
            self._count, self._round_started_s, since_s = len(self._remaining), self._now_s(), 0.0
        done = self._count - len(self._remaining)
        is_due = self._remaining and since_s * self._count >= done * self._config.interval_s
        return self._remaining.pop() if is_due else None

    def _is_own(self, run: Run) -> bool:
        """In a cold tier the daemon of rank 0 verifies a run: every node would read all of it. A run that is on none of
        its nodes is verified by the daemons of rank 0 of the others."""
        context = self._context
        return self._tier.name == HOT or (context.is_home(run) and (run in context.runs_here or context.lists_cold))

    async def _verify(self, checkpoint: CheckpointId, *, is_deep: bool) -> None:
        former = self._known.get(checkpoint)
        # Retry soon, unless what follows shows that it cannot help.
        known = _Known(self._now_s() + self._retry_s, is_deep)
        if former is not None:
            known.is_reported, known.is_refused = former.is_reported, former.is_refused
        self._known[checkpoint] = known
        count_read = self._metrics.bytes_total.labels(tier=self._tier.name, direction="read").inc if is_deep else None
        try:
            verification = await verify_replica(
                self._tier, checkpoint, is_deep=is_deep, bandwidth=self._bandwidth, progress=count_read
            )
        except (NewerFormat, Foreign) as error:
            known.again_at_s = self._now_s() + self._config.interval_s
            if isinstance(error, Foreign):
                self._context.notify.relist(self._tier.name)  # then it does not count, and is reported
            return
        if verification is None:
            return
        self._metrics.scrubbed_checkpoints_total.labels(tier=self._tier.name, proof=verification.proof.value).inc()
        if verification.problems:
            await self._handle_damage(checkpoint, verification, known)
        elif checkpoint in self._catalog.tiers[self._tier.name].damaged:
            self._repaired(checkpoint)  # by someone else
        else:
            known.again_at_s = self._now_s() + self._config.interval_s

    async def _handle_damage(self, checkpoint: CheckpointId, verification: Verification, known: _Known) -> None:
        """Mark the replica as damaged, report it once, and repair it if the config allows."""
        if checkpoint not in self._catalog.tiers[self._tier.name].unreadable:
            self._catalog.damaged(checkpoint, self._tier.name, verification.sentences[0])
        if not known.is_reported:
            self._metrics.verify_failures_total.labels(tier=self._tier.name).inc(len(verification.problems))
            self._context.incidents.record(
                self.name, Corrupt("; ".join(verification.sentences[:3]), hint=_HINT), checkpoint
            )
            known.is_reported = True
        if not self._config.repair:
            known.again_at_s = self._now_s() + self._config.interval_s
            return
        repair = await repair_replica(self._tier, checkpoint, verification, list(self._context.tiers.values()))
        self._metrics.repaired_files_total.labels(tier=self._tier.name).inc(len(repair.repaired))
        if repair.repaired:
            reason = ", ".join(f"{name} from {source}" for name, source in sorted(repair.repaired.items()))
            self._context.audit.record(EventKind.REPAIRED, checkpoint=checkpoint, tier=self._tier.name, reason=reason)
        if not repair.refused:
            self._repaired(checkpoint)
            return
        if not known.is_refused:
            self._context.incidents.record(self.name, Corrupt("; ".join(repair.refused[:3]), hint=_HINT), checkpoint)
        # A disk that could not read may read again soon, and this may be the only replica.
        is_for_later = repair.is_for_later or verification.has_read_error
        known.is_refused = verification.has_read_error
        if not is_for_later:
            known.again_at_s = self._now_s() + self._config.interval_s

    def _repaired(self, checkpoint: CheckpointId) -> None:
        """It counts as a replica again after the next listing of the tier, which also shows its markers."""
        self._catalog.forget_damage(checkpoint, self._tier.name)
        self._known.pop(checkpoint, None)
        self._context.notify.relist(self._tier.name)
