"""Deletes replicas that the lifecycle does not keep: evicts one of several, expires the last. Manifest first.

The plan comes from lifecycle, run by run. halt, not guess: while a manifest of a run is unreadable in a tier, or the
tier cannot be listed, nothing of the run is deleted there. While hot has no room, it also evicts what every cold tier
holds, beyond the policy, and then gives up copies that wait there, one by one, and reports each. Also frees the
slots of runs whose trainers have left. In a cold tier with `deletes = false` it deletes nothing: `tierd reap` runs this
worker elsewhere, without a hot tier.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import cache, partial

from tierd.catalog.decisions import (
    decisions,
    deletions,
    deletions_for_space,
    missing_room_bytes,
    pending,
    to_give_up,
)
from tierd.catalog.entry import Entry
from tierd.catalog.listing import files_of, refresh_run
from tierd.catalog.part_decisions import rests_on_cold
from tierd.context import DaemonContext
from tierd.copies import Reason
from tierd.errors import GivenUp, NotFound, Retained, TierdError
from tierd.failpoints import failpoint
from tierd.format import audit, layout
from tierd.format.ids import HOT, CheckpointId, Run
from tierd.lifecycle.policy import Action, Decision
from tierd.tiers.tier import Tier
from tierd.workers.fresh_replica import is_newest_there, whole_files
from tierd.workers.hot_space import MakeRoom, no_room
from tierd.workers.left_runs import LeftRuns
from tierd.workers.recovery import clear_uncommitted
from tierd.workers.retentions import Retentions

log = logging.getLogger("tierd")

_GIVEN_UP_HINT = "copies are slower than the checkpoints that are kept; see docs/RUNBOOK.md#copies-given-up"


class Reaper:
    name = "reap"
    is_urgent = False

    def __init__(
        self,
        context: DaemonContext,
        *,
        only_run: Run | None = None,
        lists_again: bool = False,
        on_deletion: Callable[[Decision], None] = lambda action: None,
        more_room: MakeRoom = no_room,
    ) -> None:
        """`only_run`: nothing of another run is deleted by the plan. `lists_again`: list a run again in every cold tier
        before its first deletion in a pass, where no worker lists the tiers meanwhile. `on_deletion`: called after
        each deletion. `more_room`: frees files that are not in the catalog, before anything else."""
        self._only_run = only_run
        self._lists_again = lists_again
        self._listed: set[Run] = set()  # again, in this pass
        self._on_deletion = on_deletion
        self._more_room = more_room
        self.interval_s = context.config.limits.reconcile_interval_s
        self._context = context
        self._catalog = context.catalog
        self._done_at = -1  # the catalog's changes at the end of the last pass that left nothing to do
        self._retentions = Retentions()
        self._left_runs = LeftRuns(context)
        self._selected: dict[CheckpointId, set[str]] = {}  # of each in hot: the tiers that should get it

    async def run_once(self) -> bool:
        """Free the slots of departed trainers, carry out the plan, and give up copies if hot is full. False when a
        deletion failed."""
        grace_s = self._context.config.daemon.memory_grace_s
        for run in self._context.memory.forget_departed(now_s=self._context.monotonic_s(), grace_s=grace_s):
            self._context.notify.run_forgotten(run)
            log.info("gave back the memory of %s: its trainers left %.0f s ago", run, grace_s)
        failed_tiers: set[str] = set()
        await self._left_runs.look()
        if self._catalog.changes != self._done_at or self._context.monotonic_s() >= self._retentions.due_s:
            self._retentions.forget_due(now_s=self._context.monotonic_s())
            self._listed.clear()
            while not await self._delete(self._plan, failed_tiers, on_deleted=self._count_replaced):
                pass
            self._done_at = -1 if failed_tiers else self._catalog.changes
        await self._end_failed_deletions(failed_tiers)
        await self._give_up_copies()
        return not failed_tiers

    async def make_room(self, need_bytes: int) -> int:
        """Free `need_bytes` in hot, or as much as may be freed: evict what every cold tier holds, oldest first, beyond
        what the policy keeps. Returns the freed bytes."""
        freed_bytes = await self._more_room(need_bytes)
        failed_tiers: set[str] = set()
        skipped: set[CheckpointId] = set()

        def plan() -> list[Decision]:
            missing_bytes = need_bytes - freed_bytes
            return deletions_for_space(self._catalog, self._context.config, missing_bytes, without=skipped)

        def count(action: Decision, entry: Entry) -> None:
            nonlocal freed_bytes
            freed_bytes += entry.held(HOT).size_bytes
            if action.action is Action.EVICT:
                self._context.metrics.pressure_evictions_total.inc()

        while HOT not in failed_tiers and (planned := plan()):
            while not await self._delete(plan, failed_tiers, on_deleted=count, is_patient=False):
                pass
            skipped |= {action.checkpoint for action in planned}  # what is left of them could not be deleted
        return freed_bytes

    async def _delete(
        self,
        plan: Callable[[], list[Decision]],
        failed_tiers: set[str],
        *,
        on_deleted: Callable[[Decision, Entry], None],
        is_patient: bool = True,
    ) -> bool:
        """Carry out one plan. False when the catalog changed meanwhile, so that the plan may be out of date.

        A tier where a deletion fails is added to `failed_tiers` and skipped; the others go on. Of a retained checkpoint
        only that one is skipped. `is_patient`: wait for another deletion of the same checkpoint, instead of skipping
        it."""
        decided_at = self._catalog.changes
        skipped: set[CheckpointId] = set()  # one replica waits for a change of another
        for action in plan():
            now_s = self._context.monotonic_s()
            lock, entry = self._context.lock(action.checkpoint), self._catalog.get(action.checkpoint)
            if action.tier in failed_tiers or self._retentions.holds(action.tier, action.checkpoint, now_s=now_s):
                continue
            if entry is None or (lock.locked() and not is_patient):
                continue
            if self._lists_again and action.checkpoint.run not in self._listed:
                await self._list_again(action.checkpoint.run, failed_tiers)
            async with lock:
                if self._catalog.changes != decided_at:
                    return False
                rests_on_others = action.tier == HOT or action.action is Action.EVICT
                if self._has_only_verdict(action) or (
                    rests_on_others and not await self._is_elsewhere(action, failed_tiers)
                ):
                    skipped.add(action.checkpoint)
                    continue
                confirm = partial(self._is_still_decided, action, plan, decided_at)
                failpoint("reap.delete")
                try:
                    if not await self._context.tiers[action.tier].delete(action.checkpoint, confirm=confirm):
                        return False
                except NotFound:
                    self._catalog.disappeared(action.checkpoint, action.tier)  # another process has just deleted it
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
                self._drop(action)
                # After a skipped replica's other one is deleted, only a new plan can delete the skipped one.
                if is_unchanged and action.checkpoint not in skipped:
                    decided_at = self._catalog.changes
            on_deleted(action, entry)
        return self._catalog.changes == decided_at

    async def _end_failed_deletions(self, failed_tiers: set[str]) -> None:
        """Give up deletions that failed and that the plan does not have any more. If the manifest is gone and a
        milestone was set since, put it back; if none was set, the replica counts as deleted by this daemon. From then
        on, a replica that disappears counts as lost again."""
        tiers = [
            tier
            for name, tier in self._context.tiers.items()
            if tier.deleting and name not in failed_tiers and self._catalog.tiers[name].is_known
        ]
        planned = {(action.tier, action.checkpoint) for action in self._plan()} if tiers else set()
        for tier in tiers:
            for checkpoint in [each for each in tier.deleting if (tier.name, each) not in planned]:
                async with self._context.lock(checkpoint):
                    try:
                        if checkpoint in tier.deleting and await tier.keep_marked(checkpoint):
                            self._context.notify.relist(tier.name)
                        elif checkpoint in tier.deleting and not await self._drop_if_begun(tier, checkpoint):
                            continue
                        tier.deleting.pop(checkpoint, None)
                    except TierdError as error:
                        failed_tiers.add(tier.name)
                        self._context.incidents.record(self.name, error, checkpoint)
                        break

    async def _drop_if_begun(self, tier: Tier, checkpoint: CheckpointId) -> bool:
        """A deletion that failed after the manifest was gone has deleted the replica, also where the plan does not have
        it any more: hot evicts what its policy keeps while it has no room. Only files without a manifest are left. In
        hot nobody else deletes those before the next start. In cold they get the tombstone, without which they could be
        those of a copy that goes on elsewhere. False if they stay as they are for now."""
        names, deletion = await files_of(tier, checkpoint), tier.deleting.get(checkpoint)
        if deletion is None or layout.MANIFEST in names or (tier.name == HOT and layout.node_files(names)):
            return True  # it was committed again, or nothing was deleted
        if tier.name == HOT:
            if self._context.memory.find(checkpoint) is not None:
                return False  # the persister may be writing the same files
            await clear_uncommitted(tier, checkpoint)
        elif names and checkpoint not in pending(self._catalog, self._context.config, tier.name):
            await tier.bury(checkpoint, deletion.save, deletion.token)
        entry = self._catalog.get(checkpoint)
        is_last = entry is None or not entry.tiers - {tier.name}
        done = audit.EventKind.EXPIRED if is_last else audit.EventKind.EVICTED
        self._catalog.drop(checkpoint, tier.name)
        self._context.notify.space_freed()
        reason = "its deletion failed after the manifest was deleted"
        self._context.audit.record(done, checkpoint=checkpoint, tier=tier.name, reason=reason)
        return True

    async def _list_again(self, run: Run, failed_tiers: set[str]) -> None:
        """List the run in every cold tier. The first listings may be hours old, if there is much to delete."""
        self._listed.add(run)
        for name, tier in self._context.cold.items():
            if self._catalog.tiers[name].is_known:
                try:
                    await refresh_run(self._catalog, tier, run, self._context.identities)
                except TierdError as error:
                    self._catalog.listing_failed(name, str(error))
                    failed_tiers.add(name)

    def _drop(self, action: Decision) -> None:
        self._catalog.drop(action.checkpoint, action.tier)
        self._context.notify.space_freed()
        deletion = audit.EventKind.EVICTED if action.action is Action.EVICT else audit.EventKind.EXPIRED
        self._context.audit.record(deletion, checkpoint=action.checkpoint, tier=action.tier, reason=action.reason)
        self._on_deletion(action)

    def _plan(self) -> list[Decision]:
        """The lifecycle's deletions that are this daemon's. Also notes which cold tiers should get what is in hot, to
        tell later which of them did not."""
        decided = decisions(self._catalog, self._context.config, with_kept=False)
        for decision in decided:
            if decision.action in (Action.REPLICATE, Action.WAIT):
                self._selected.setdefault(decision.checkpoint, set()).add(decision.tier)
        entries = [entry for checkpoint in self._selected if (entry := self._catalog.get(checkpoint))]
        self._selected = {entry.id: self._selected[entry.id] - entry.tiers for entry in entries if HOT in entry.tiers}
        is_home = cache(self._context.is_home)  # it goes through the checkpoints of the run
        own = [
            deletion
            for deletion in deletions(decided, self._context.config)
            if deletion.tier == HOT
            or (self._catalog.tiers[deletion.tier].is_whole and is_home(deletion.checkpoint.run))
        ]
        return [deletion for deletion in own if self._only_run in (None, deletion.checkpoint.run)]

    def _count_replaced(self, action: Decision, entry: Entry) -> None:
        if action.tier == HOT and entry.healthy is not False:
            self._record_given_up(entry, Reason.REPLACED)

    async def _give_up_copies(self) -> None:
        """Give up copies that wait in hot, while hot has no room for the next checkpoints. What every cold tier holds
        is evicted first: nothing is lost with it."""
        catalog, config = self._catalog, self._context.config
        try:
            free_bytes = await self._context.hot_store.free_bytes()
            if to_give_up(catalog, config, free_bytes):
                await self.make_room(missing_room_bytes(catalog, free_bytes))
                free_bytes = await self._context.hot_store.free_bytes()
        except TierdError:
            return
        for action in to_give_up(catalog, config, free_bytes):
            async with self._context.lock(action.checkpoint):
                entry = catalog.get(action.checkpoint)
                if entry is not None and entry.healthy is False and self._has_only_verdict(action):
                    continue
                if not await self._is_elsewhere(action, set()):
                    continue
                confirm = partial(self._is_still_given_up, action, free_bytes)
                try:
                    if not await self._context.hot.delete(action.checkpoint, confirm=confirm):
                        return
                except TierdError as error:
                    self._context.incidents.record(self.name, error, action.checkpoint)
                    return
                if (entry := catalog.get(action.checkpoint)) is not None:
                    tiers = ", ".join(self._record_given_up(entry, Reason.NO_SPACE))
                    error = GivenUp(f"copy {action.checkpoint} to {tiers}: {action.reason}", hint=_GIVEN_UP_HINT)
                    self._context.incidents.record(self.name, error, action.checkpoint)
                self._drop(action)

    def _is_still_given_up(self, action: Decision, free_bytes: int | None, names: Collection[str]) -> bool:
        """As `_is_still_decided`."""
        given_up = to_give_up(self._catalog, self._context.config, free_bytes)
        entry = self._catalog.get(action.checkpoint)
        known = entry.all_marks if entry is not None else frozenset[str]()
        return not layout.counted(known | layout.marks_of(names)) and action.checkpoint in (
            decision.checkpoint for decision in given_up
        )

    def _record_given_up(self, entry: Entry, reason: Reason) -> list[str]:
        """Count that hot loses a checkpoint. Returns the cold tiers that should get it and have not."""
        tiers = sorted(self._selected.get(entry.id, set()) - entry.tiers)
        for tier in tiers:
            self._context.copies.gave_up(tier, reason, at_s=self._context.now().timestamp())
            self._context.metrics.copies_given_up_total.labels(tier=tier, reason=reason).inc()
        return tiers

    def _is_still_decided(
        self, action: Decision, plan: Callable[[], list[Decision]], decided_at: int, names: Collection[str]
    ) -> bool:
        """Whether the plan still has this deletion, after listings that may have taken minutes. `names`: of the
        checkpoint's files in the tier; a marker that another machine has written there enters the catalog."""
        self._left_runs.forget_present()
        entry = self._catalog.get(action.checkpoint)
        is_committed = layout.MANIFEST in names and layout.GONE not in names
        is_there = is_committed or (action.tier == HOT and layout.node_files(names))
        if not is_there and action.checkpoint not in self._context.tiers[action.tier].deleting:
            self._catalog.disappeared(action.checkpoint, action.tier)  # another process has deleted it
            return False
        if entry is not None and (unknown := layout.marks_of(names) - entry.all_marks):
            log.info(
                "kept %s in %s: its milestones have changed meanwhile: %s",
                action.checkpoint,
                action.tier,
                ", ".join(sorted(unknown)),
            )
            self._catalog.add(entry.held(action.tier), action.tier, unknown)
            return False
        is_healthy = layout.diagnosis_of(names)
        if entry is not None and is_healthy is not None and is_healthy != entry.diagnoses.get(action.tier):
            self._catalog.diagnosed(action.checkpoint, action.tier, is_healthy=is_healthy)
            return False
        return self._catalog.changes == decided_at or action in plan()

    def _has_only_verdict(self, action: Decision) -> bool:
        """Whether this replica has the health marker of the checkpoint and no other replica has it yet. The replicator
        copies it. Without it, an unhealthy checkpoint would count as one that may be healthy. Other
        replicas include one in a tier that is not known now, and one whose copy began before the verdict."""
        entry = self._catalog.get(action.checkpoint)
        if entry is None or action.tier not in entry.diagnoses:
            return False
        if entry.is_part_in(action.tier) and entry.diagnoses[action.tier]:
            return False  # the other parts decide, too: nobody copies it
        others = (entry.tiers | self._catalog.copied_to(action.checkpoint)) - {action.tier}
        if entry.healthy is False:
            others |= self._catalog.unlisted().keys()
        else:  # a foreign marker has the place of the verdict there: whoever can write there must not fill hot
            key = layout.diagnosis_key(action.checkpoint, is_healthy=True)
            others = {name for name in others if key not in self._catalog.tiers[name].foreign}
        return bool(others) and not others & entry.diagnoses.keys()

    async def _is_elsewhere(self, action: Decision, failed_tiers: set[str]) -> bool:
        """last_replica: the listing of a tier may be minutes old, so before a replica is deleted, each other tier that
        has the checkpoint in the catalog is listed again, and must have every file with its size. A cold tier that has
        lost the checkpoint gets it again from hot. So is a newer checkpoint because of which a part goes."""
        entry = self._catalog.get(action.checkpoint)
        if entry is None:
            return False
        marked: set[str] = set()
        is_listed = False
        for name in entry.tiers - {action.tier}:
            if entry.is_part_in(name):
                continue  # the plan did not count a part
            if not self._catalog.tiers[name].is_known:
                continue  # nor a replica in a tier that is not known
            on_behalf = f"evict {action.checkpoint} from {action.tier}"
            files = await whole_files(self._context, entry, name, failed_tiers, action=on_behalf, worker=self.name)
            if files is None:
                return False
            marked |= layout.marks_of(files)
            is_listed = True
        # Without the marker, which the replicator copies, the other tier would expire the checkpoint.
        if is_listed and not entry.counted_marks & entry.milestones.get(action.tier, frozenset()) <= marked:
            return False
        if action.tier != HOT or not rests_on_cold(self._catalog, action.checkpoint):
            return True
        rests_on = f"delete the part of {action.checkpoint} in hot"
        of_run = self._context, action.checkpoint.run, action.checkpoint
        return await is_newest_there(*of_run, failed_tiers, action=rests_on, worker=self.name)
