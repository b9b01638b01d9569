"""Lists one tier at an interval, when it may have changed, and when someone asks; reports replicas that disappeared.

A replica is lost when it was there, the tier's policy keeps it, and a listing does not show it any more. What the
policy gave up may have been deleted by another daemon, and is not reported, nor is what this daemon is deleting. A
deletion begins with the manifest, and puts it back if a milestone was set meanwhile. The replicators send lost replicas
again.

On a node that is home of no run a listing of a cold tier is rare: instead the lister looks at the checkpoints that this
node holds, or that home is to delete.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection
from heapq import nsmallest

from tierd.catalog.decisions import decisions, deleted_elsewhere, lost
from tierd.catalog.held import look_at
from tierd.catalog.listing import refresh
from tierd.context import DaemonContext
from tierd.errors import Foreign, Lost, TierdError, TierUnreachable
from tierd.format import layout
from tierd.format.audit import EventKind
from tierd.format.ids import HOT, CheckpointId, Run
from tierd.format.text import listed
from tierd.lifecycle.policy import CheckpointView, deletions
from tierd.tiers.tier import Tier
from tierd.workers.leftovers import GRACE_S

DELETION_S = 600.0  # what lacks only its manifest for less long may be in the middle of another daemon's deletion
# How seldom a cold tier is listed on a node that is home of no run, at most. Before tombstones are cleared: what a
# listing lacks without one is a loss.
WHOLE_S = GRACE_S - 4 * 3600.0
WAITING_MAX = 32  # that a look includes: the bucket may retain thousands for a month, and home may be down


class Lister:
    """`listed_s`: when the last listing or look that succeeded began, by the context's monotonic clock; None: never.
    `must_list`: whether the next pass lists the tier on any node."""

    name = "list"
    is_urgent = True

    def __init__(self, context: DaemonContext, tier: Tier, interval_s: float) -> None:
        self.interval_s = interval_s
        self.listed_s: float | None = None
        self.must_list = True
        self._list_at_s = 0.0  # on a node that is home of no run
        self._context = context
        self._catalog = context.catalog
        self._tier = tier
        self._reported: dict[CheckpointId, CheckpointView] = {}  # lost replicas, as the catalog has them
        self._no_manifest_s: dict[CheckpointId, float] = {}  # since when; of the missing replicas with other files
        self._waiters: list[asyncio.Future[None]] = []
        self._foreign: set[str] = set()  # keys that were reported
        self._newer: dict[Run, int] = {}  # runs that were reported

    async def run_once(self) -> bool:
        waiters, self._waiters = self._waiters, []
        try:
            if waiters or not await self._look_at_held():
                await self._list()
            if self._new_losses():
                # A listing is not of one instant: another daemon may have deleted these because of newer checkpoints
                # that were committed after their folder was listed. A listing that begins now shows those.
                await self._list()
            self._report_losses()
        finally:
            for answer in waiters:
                if not answer.done():  # its caller has stopped waiting
                    answer.set_result(None)
        return True

    async def _list(self) -> None:
        """Raises TierUnreachable."""
        started_s, self.must_list = self._context.monotonic_s(), False
        await refresh(self._catalog, self._tier, self._context.identities)
        knowledge = self._catalog.tiers[self._tier.name]
        if not knowledge.is_known:
            self.must_list = True
            raise TierUnreachable(knowledge.error)
        self.listed_s = started_s
        self._list_at_s = started_s + random.uniform(0.5, 1.0) * WHOLE_S
        # Only this daemon deletes in its hot tier.
        no_manifest = knowledge.partial.keys() & knowledge.missing.keys() if self._tier.name != HOT else ()
        self._no_manifest_s = {each: self._no_manifest_s.get(each, started_s) for each in no_manifest}
        self._report_foreign()
        self._report_newer_generations()

    async def _look_at_held(self) -> bool:
        """Whether a look at what this node holds was enough. Raises TierUnreachable."""
        started_s = self._context.monotonic_s()
        if self.must_list or self._tier.name == HOT or started_s >= self._list_at_s or self._context.lists_cold:
            return False
        runs = self._context.runs_here
        try:
            is_enough = await look_at(
                self._catalog, self._tier, self._context.identities, runs=runs, held=self._held(runs)
            )
        except TierdError as error:
            self._catalog.listing_failed(self._tier.name, str(error))
            raise TierUnreachable(str(error)) from error
        self.listed_s = started_s if is_enough else self.listed_s
        return is_enough

    def _held(self, runs: Collection[Run]) -> list[CheckpointId]:
        """What hot has, the newest in this tier of each of these runs, the oldest of them that are lost or cannot be
        read there, because a person may put it right, and the oldest that home is to delete in this tier."""
        catalog, name = self._catalog, self._tier.name
        wrong = {*catalog.tiers[name].unreadable, *catalog.tiers[name].missing}
        newest = [catalog.newest(run, name) for run in runs]
        held = {*catalog.in_tier(HOT), *(each.id for each in newest if each is not None)}
        planned = deletions(decisions(catalog, self._context.config, with_kept=False))
        deleted = {deletion.checkpoint for deletion in planned if deletion.tier == name}
        for waiting in (deleted, {each for each in wrong if each.run in runs}):
            held |= {*nsmallest(WAITING_MAX, waiting - held, key=lambda each: each.recency)}
        return sorted(held, key=lambda each: each.recency)

    async def look(self) -> None:
        """List the tier now. Returns when a listing that began after this call has ended, with or without success."""
        answer = asyncio.get_running_loop().create_future()
        self._waiters = [*(waiter for waiter in self._waiters if not waiter.done()), answer]
        self._context.notify.relist(self._tier.name)
        await answer

    @property
    def lost(self) -> list[CheckpointId]:
        """The replicas that were reported as lost and are not there again."""
        missing = self._catalog.tiers[self._tier.name].missing
        return [checkpoint for checkpoint, view in self._reported.items() if missing.get(checkpoint) is view]

    def _report_foreign(self) -> None:
        name = self._tier.name
        shared = {
            layout.manifest_key(c): why for (tier, c), why in self._catalog.shared_generations().items() if tier == name
        }
        foreign = shared | {key: why for (tier, key), why in self._catalog.foreign().items() if tier == name}
        new = [key for key in foreign if key not in self._foreign]
        self._foreign = set(foreign)
        if new:
            more = f"; and {len(new) - 1} more" if len(new) > 1 else ""
            checkpoint, reason = layout.parse_key(new[0]), f"{foreign[new[0]]}{more}"
            run = new[0].partition("/")[0]
            error = Foreign(f"list {name}: {reason}", hint="docs/RUNBOOK.md#foreign-checkpoints")
            self._context.incidents.record(self.name, error, checkpoint)
            self._context.audit.record(EventKind.FOREIGN_SEEN, checkpoint=checkpoint, run=run, tier=name, reason=reason)

    def _report_newer_generations(self) -> None:
        """Report a generation that another daemon has begun while this one's trainers are attached. Only hot's lister
        does, so that each is reported once."""
        if self._tier.name != HOT:
            return
        newer = self._context.newer_generations()
        for run in sorted(newer.keys() - self._newer.keys()):
            here = self._context.memory.generation(run)
            reason = f"the trainers here have generation {here}"
            self._context.audit.record(EventKind.GENERATION_UNKNOWN, run=run, generation=newer[run], reason=reason)
        self._newer = newer

    def _new_losses(self) -> list[CheckpointId]:
        now_lost = lost(self._catalog, self._context.config, self._tier.name)
        now_s = self._context.monotonic_s()
        in_deletion = {each for each, since_s in self._no_manifest_s.items() if now_s - since_s < DELETION_S}
        known = {*self._tier.deleting, *self.lost, *in_deletion}
        return [checkpoint for checkpoint in now_lost if checkpoint not in known]

    def _report_losses(self) -> None:
        name, new = self._tier.name, self._new_losses()
        now_lost = lost(self._catalog, self._context.config, name)
        deleted = deleted_elsewhere(self._catalog, self._context.config, name)
        self._catalog.forget_missing(name, {*now_lost, *deleted})
        missing = self._catalog.tiers[name].missing
        self._reported = {checkpoint: missing[checkpoint] for checkpoint in (*new, *self.lost)}
        if not new:
            return
        self._context.metrics.lost_checkpoints_total.labels(tier=name).inc(len(new))
        error = Lost(
            f"{listed(new)} disappeared from {name}; this daemon has not deleted them",
            hint="what hot still has is sent again; docs/RUNBOOK.md#checkpoints-lost",
        )
        self._context.incidents.record(self.name, error, new[0])
