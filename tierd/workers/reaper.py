"""Deletes replicas that the lifecycle does not keep: evicts one of several, expires the last. Manifest first.

The plan comes from lifecycle, run by run. halt, not guess: while a manifest of a run is unreadable in a tier, or the
tier cannot be listed, nothing of the run is deleted there. Also frees the slots of runs whose trainers have left.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from functools import partial

from tierd.context import DaemonContext
from tierd.decisions import deletions
from tierd.errors import Corrupt, Retained, TierdError
from tierd.failpoints import failpoint
from tierd.format import layout
from tierd.format.ids import CheckpointId
from tierd.lifecycle.policy import HOT, Action, Decision
from tierd.listing import files_of, missing_file

log = logging.getLogger("tierd")

_HINT = "hot keeps its replica, and the scrub or `tierd verify --repair` repairs the other one"
RETENTION_S_MIN = 60.0
RETENTION_S_MAX = 24 * 3600.0  # someone may remove a lock early


class Reaper:
    name = "reap"
    is_urgent = False

    def __init__(self, context: DaemonContext) -> None:
        self.interval_s = context.config.limits.reconcile_interval_s
        self._context = context
        self._catalog = context.catalog
        self._done_at = -1  # the catalog's changes at the end of the last pass that left nothing to do
        self._retentions = Retentions()

    async def run_once(self) -> bool:
        grace_s = self._context.config.daemon.memory_grace_s
        for run in self._context.memory.forget_departed(now_s=self._context.monotonic_s(), grace_s=grace_s):
            self._context.notify.run_forgotten(run)
            log.info("gave back the memory of %s: its trainers left %.0f s ago", run, grace_s)
        if self._catalog.changes == self._done_at and self._context.monotonic_s() < self._retentions.due_s:
            return True
        self._retentions.forget_due(now_s=self._context.monotonic_s())
        failed_tiers: set[str] = set()
        while not await self._delete(failed_tiers):
            pass
        self._done_at = -1 if failed_tiers else self._catalog.changes
        return not failed_tiers

    async def _delete(self, failed_tiers: set[str]) -> bool:
        """Carry out one plan. False when the catalog changed meanwhile, so that the plan may be out of date.

        A tier where a deletion fails is added to `failed_tiers` and skipped; the others go on. Of a retained checkpoint
        only that one is skipped."""
        decided_at = self._catalog.changes
        for action in deletions(self._catalog, self._context.config):
            now_s = self._context.monotonic_s()
            if action.tier in failed_tiers or self._retentions.holds(action.tier, action.checkpoint, now_s=now_s):
                continue
            if self._catalog.changes != decided_at:
                return False
            if action.tier == HOT and not await self._is_elsewhere(action, failed_tiers):
                continue
            confirm = partial(self._is_still_decided, action, decided_at)
            failpoint("reap.delete")
            try:
                if not await self._context.tiers[action.tier].delete(action.checkpoint, confirm=confirm):
                    return False
            except TierdError as error:
                if isinstance(error, Retained):
                    self._retentions.add(action.tier, action.checkpoint, error, now_s=now_s)
                else:
                    failed_tiers.add(action.tier)
                self._context.incidents.record(self.name, error, action.checkpoint)
                continue
            failpoint("reap.deleted")
            is_unchanged = self._catalog.changes == decided_at
            self._catalog.drop(action.checkpoint, action.tier)
            if is_unchanged:
                decided_at = self._catalog.changes
            self._context.notify.space_freed()
            verb = "evicted" if action.action is Action.EVICT else "expired"
            log.info("%s %s from %s: %s", verb, action.checkpoint, action.tier, action.reason)
        return self._catalog.changes == decided_at

    def _is_still_decided(self, action: Decision, decided_at: int, names: Collection[str]) -> bool:
        """Whether the plan still has this deletion, after listings that may have taken minutes. `names`: of the
        checkpoint's files in the tier; a milestone that another machine has set there enters the catalog."""
        entry = self._catalog.get(action.checkpoint)
        milestones = {milestone for name in names if (milestone := layout.milestone_of(name)) is not None}
        if entry is not None and (unknown := milestones - entry.all_milestones):
            log.info("kept %s in %s: %s was set meanwhile", action.checkpoint, action.tier, ", ".join(sorted(unknown)))
            self._catalog.add(entry.manifest, action.tier, unknown)
            return False
        return self._catalog.changes == decided_at or action in deletions(self._catalog, self._context.config)

    async def _is_elsewhere(self, action: Decision, failed_tiers: set[str]) -> bool:
        """last_replica: the listing of a cold tier may be minutes old, so before a hot replica is deleted, each tier
        that has the checkpoint in the catalog is listed again, and must have every file with its size. A tier that has
        lost the checkpoint gets it again."""
        entry = self._catalog.get(action.checkpoint)
        if entry is None:
            return False
        elsewhere = entry.tiers - {HOT}
        marked = frozenset[str]().union(*(entry.milestones.get(name, ()) for name in elsewhere))
        if elsewhere and not entry.milestones.get(HOT, frozenset()) <= marked:
            return False  # without the marker, which the replicator copies, the cold tier would expire the checkpoint
        for name in elsewhere:
            if not self._catalog.tiers[name].is_known:
                continue  # the plan did not count this replica
            try:
                files = await files_of(self._context.tiers[name], action.checkpoint)
            except TierdError as error:
                self._catalog.listing_failed(name, str(error))
                self._context.notify.relist(name)
                failed_tiers.add(name)
                return False
            if layout.MANIFEST not in files:
                self._catalog.drop(action.checkpoint, name)
                return False
            if why := missing_file(entry.manifest, files):
                error = Corrupt(f"evict {action.checkpoint} from {HOT}: in {name}, {why}", hint=_HINT)
                self._context.incidents.record(self.name, error, action.checkpoint)
                self._context.notify.relist(name)  # then it counts as unreadable, until it is repaired
                return False
        return True


class Retentions:
    """Replicas that a store refuses to delete for some time (S3's Object Lock), and when to try again."""

    def __init__(self) -> None:
        self._until_s: dict[tuple[str, CheckpointId], float] = {}

    def add(self, tier: str, checkpoint: CheckpointId, error: Retained, *, now_s: float) -> None:
        pause_s = min(max(error.remaining_s, RETENTION_S_MIN), RETENTION_S_MAX)
        self._until_s[tier, checkpoint] = now_s + pause_s

    def holds(self, tier: str, checkpoint: CheckpointId, *, now_s: float) -> bool:
        return self._until_s.get((tier, checkpoint), -math.inf) > now_s

    def forget_due(self, *, now_s: float) -> None:
        """Before a pass: also forgets replicas that nobody will try to delete again."""
        self._until_s = {replica: until_s for replica, until_s in self._until_s.items() if until_s > now_s}

    @property
    def due_s(self) -> float:
        """When the first deletion may be tried again; inf when there is none."""
        return min(self._until_s.values(), default=math.inf)
