"""`tierd reap`: deletes in cold tiers what no policy keeps, for daemons that may not (`deletes = false` of a tier).

Runs the daemon's reaper once, over the cold tiers alone, with the credential of this process. It cannot see the hot
tiers of the nodes. So what the policy of hot selects stays too, unless another cold tier has it. Claims and unfinished
uploads are left to the daemons.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import msgspec
import typer

from tierd.audit import AuditTrail
from tierd.catalog.catalog import Catalog
from tierd.catalog.decisions import decisions, deletions, halted
from tierd.catalog.identity import Identities
from tierd.catalog.listing import refresh
from tierd.cli import options
from tierd.cli.console import print_note, print_report, print_result, table, timestamp
from tierd.cli.log import check_key, command_trail
from tierd.cli.opened_tiers import PARTIAL, OpenedTiers, exit_code
from tierd.cli.options import check_tier, settings_of
from tierd.cold_tier import open_cold_tier
from tierd.config.sections import Config
from tierd.context import DaemonContext
from tierd.errors import BadConfig, Retained, TierdError
from tierd.format import audit, layout, wire
from tierd.format.ids import HOT, CheckpointId, Run, check_run
from tierd.keys.key_file import keyring_of
from tierd.lifecycle.policy import Action, Decision
from tierd.memory.tier import MemoryTier
from tierd.metrics import Metrics
from tierd.status.incidents import Incidents
from tierd.status.lifecycle_report import PlannedAction, planned_action
from tierd.throttle import WriteThrottle
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.tier import Tier
from tierd.workers.leftovers import GRACE_S
from tierd.workers.reaper import Reaper
from tierd.workers.recovery import clear_uncommitted

# Longer than the grace of the daemons, a day: one that was down for days continues its copies when it is back. The
# lifecycle rule that the guide names aborts unfinished uploads after the same time.
LEFTOVER_GRACE_S = 7 * 24 * 3600.0
CLEARED = "a copy that never ended: no manifest, no open upload, a newer generation for 7 days"
CLEARED_GONE = "what is left of a deletion a day ago, with its tombstone"


class ReapReport(msgspec.Struct, kw_only=True):
    """`halted`: where nothing is deleted, and why. `is_dry_run`: nothing was deleted at all. `deletions`: what was
    deleted, or would be. `errors`: what could not be deleted or written, and why. `retained`: what Object Lock keeps
    for now, which is not a failure."""

    is_dry_run: bool
    halted: list[str]
    deletions: list[PlannedAction]
    errors: list[str]
    retained: list[str]


async def reap(
    context: typer.Context,
    tier: Annotated[str | None, typer.Option("--tier", metavar="TIER", help="Delete only in this cold tier.")] = None,
    run: Annotated[str | None, typer.Option("--run", metavar="RUN", help="Delete only of this run.")] = None,
    trail: options.TrailFolder = None,
    dry_run: options.DryRun = False,
    json: options.Json = False,
) -> int:
    """Delete in the cold tiers what no policy keeps. For a cron job, where the daemons have `deletes = false`."""
    config = settings_of(context).config()
    check_tier(tier, config)
    if tier == HOT or not config.cold:
        message = f"reap {tier or 'the cold tiers'}: it deletes in cold tiers only"
        raise BadConfig(message, hint="the daemon deletes in hot; name a tier of a section [[cold]]")
    only_run = None if run is None else check_run(run)
    check_key(config)
    keyring_of(config.security.key_file, to_sign=not dry_run)
    if trail is not None and not trail.is_dir():
        raise BadConfig(
            f"write the audit trail in {trail}: there is no such folder", hint="make it, for this user alone"
        )
    async with AsyncExitStack() as stack:
        has_event = asyncio.Event()
        events = command_trail(config, None if dry_run else trail, has_event.set)
        reaping = await _open(_with_deletions(config, tier), stack, events, has_event)
        code = OpenedTiers(dict(reaping.context.cold), reaping.context.catalog, set()).check_reachable()
        done, _ = await asyncio.gather(reaping.run(only_run, is_dry_run=dry_run), reaping.write_events())
        await events.flush()
        halts = [str(halt) for halt in halted(reaping.context.catalog)]  # also of a tier that has failed meanwhile
    retained = [error for error in reaping.errors.recorded if isinstance(error, Retained)]
    wrong = [error for error in reaping.errors.recorded if not isinstance(error, Retained)]
    report = ReapReport(
        is_dry_run=dry_run,
        halted=halts,
        deletions=done,
        errors=list(map(str, wrong)),
        retained=list(map(str, retained)),
    )
    print_report(report, as_json=json, text=_print)
    failed = exit_code(wrong, of=len(done) + len(wrong)) if wrong else 0
    return failed or code or (PARTIAL if halts else 0)


def _print(report: ReapReport) -> None:
    for halt in report.halted:
        print_note(f"tierd: deletion is halted: {halt}")
    for message in (*report.errors, *report.retained):
        print_note(f"tierd: {message}")
    if not report.deletions:
        print_result("nothing to delete" if not report.errors else "nothing was deleted")
        return
    rows = [
        [deletion.action, deletion.tier, deletion.run, str(deletion.step), str(deletion.generation), deletion.reason]
        for deletion in report.deletions
    ]
    table(["ACTION", "TIER", "RUN", "STEP", "GEN", "WHY"], rows, right=("STEP", "GEN"))
    if report.is_dry_run:
        print_note("this is a plan only: --dry-run deletes nothing")


def _with_deletions(config: Config, only_tier: str | None) -> Config:
    """The config of this process: it deletes in the tiers that were named, whatever `deletes` says of the daemon."""
    replace = msgspec.structs.replace
    return replace(config, cold=[replace(cold, deletes=only_tier in (None, cold.name)) for cold in config.cold])


async def _open(config: Config, stack: AsyncExitStack, trail: AuditTrail, has_event: asyncio.Event) -> _Reaping:
    """The cold tiers, listed, beside a hot tier that is known and empty."""
    hot_store = DirectoryStore(Path(stack.enter_context(TemporaryDirectory(prefix="tierd-reap-"))))
    keyring = keyring_of(config.security.key_file)
    names = [HOT, *(cold.name for cold in config.cold)]
    catalog, metrics = Catalog(names), Metrics(tiers=names)
    errors = _Errors(metrics)
    hot = Tier(HOT, hot_store, limits=config.limits, keyring=keyring)
    cold = {
        each.name: open_cold_tier(each, config.limits, access=config.access, keyring=keyring) for each in config.cold
    }
    for tier in (hot, *cold.values()):
        stack.push_async_callback(tier.store.close)
    throttle = WriteThrottle(names, config.daemon, metrics=metrics, on_limit=lambda tier: None, now_s=time.monotonic)
    context = DaemonContext(
        config=config,
        catalog=catalog,
        memory=MemoryTier(),
        hot=hot,
        hot_store=hot_store,
        cold=cold,
        identities=Identities(config),
        metrics=metrics,
        incidents=errors,
        throttle=throttle,
        notify=_SilentNotifier(),
        keyring=keyring,
        audit=trail,
    )
    catalog.enter_listing(HOT, {}, {}, since=catalog.changes)
    for tier in cold.values():
        await _list(context, tier)
    # No claim was made through this hot tier. Without a key, a checkpoint of a generation that nobody has claimed in
    # any cold tier must still not push out others.
    catalog.claims.count_everywhere()
    return _Reaping(context, errors, has_event)


async def _list(context: DaemonContext, tier: Tier) -> None:
    try:
        if not await tier.store.exists():  # it may be a disk that is not mounted
            context.catalog.listing_failed(tier.name, f"{tier.store.url} does not exist")
            return
    except TierdError as error:
        context.catalog.listing_failed(tier.name, str(error))
        return
    await refresh(context.catalog, tier, context.identities)


class _Errors(Incidents):
    """Errors of the worker, kept for the report instead of being logged."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__(metrics, timestamp)
        self.recorded: list[TierdError] = []

    def record(self, stage: str, error: Exception, checkpoint: CheckpointId | None = None) -> None:
        """Raises an error that is not a TierdError: it is a bug."""
        if not isinstance(error, TierdError):
            raise error
        self.recorded.append(error)


class _SilentNotifier:
    """The Notifier of a process without trainers and other workers."""

    def send(self, run: Run, message: wire.ToClient) -> None: ...
    def snapshot_sealed(self) -> None: ...
    def persist_ended(self, run: Run) -> None: ...
    def replicated(self) -> None: ...
    def part_sent(self, tier: str) -> None: ...
    def examined(self) -> None: ...
    def hot_refused(self) -> None: ...
    def space_freed(self) -> None: ...
    def relist(self, tier: str, *, is_wrong: bool = True) -> None: ...
    def run_forgotten(self, run: Run) -> None: ...


@dataclass(frozen=True, slots=True)
class _Reaping:
    """One pass."""

    context: DaemonContext
    errors: _Errors
    has_event: asyncio.Event  # for the audit trail
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, only_run: Run | None, *, is_dry_run: bool) -> list[PlannedAction]:
        try:
            done = self.planned(only_run) if is_dry_run else await self.delete(only_run)
            return done + await self.clear_leftovers(only_run, is_dry_run=is_dry_run)
        finally:
            self.has_ended.set()
            self.has_event.set()

    def planned(self, only_run: Run | None) -> list[PlannedAction]:
        plan = deletions(decisions(self.context.catalog, self.context.config), self.context.config)
        return [planned_action(decision) for decision in plan if only_run in (None, decision.checkpoint.run)]

    async def delete(self, only_run: Run | None) -> list[PlannedAction]:
        """Carry out the plan. Returns what was deleted."""
        done: list[PlannedAction] = []

        def note(decision: Decision) -> None:
            done.append(planned_action(decision))

        await Reaper(self.context, only_run=only_run, lists_again=True, on_deletion=note).run_once()
        return done

    async def write_events(self) -> None:
        """Write the events to the audit trail, until the pass has ended. An error is in the report once."""
        while not self.has_ended.is_set():
            await self.has_event.wait()
            self.has_event.clear()
            try:
                await self.context.audit.run_once()
            except TierdError as error:
                self.errors.record("audit", error)

    async def clear_leftovers(self, only_run: Run | None, *, is_dry_run: bool) -> list[PlannedAction]:
        """Delete the files of copies that were begun and never ended, where no daemon continues them: a newer
        generation was claimed LEFTOVER_GRACE_S ago, no file is younger, and no upload of the checkpoint is open. Of
        what has a tombstone after GRACE_S: no daemon continues that, and one may wait for it to send it again."""
        cleared: list[PlannedAction] = []
        for name, tier in self.context.cold.items():
            knowledge = self.context.catalog.tiers[name]
            if not tier.deletes or not knowledge.is_known:
                continue
            newest_claimed: dict[Run, int] = {}
            for checkpoint in sorted(knowledge.partial, key=str):
                is_gone, now_s = checkpoint in knowledge.gone, self.context.now().timestamp()
                before_s = now_s - (GRACE_S if is_gone else LEFTOVER_GRACE_S)
                if only_run not in (None, checkpoint.run) or knowledge.partial[checkpoint] > before_s:
                    continue
                try:
                    if not is_gone and checkpoint.run not in newest_claimed:
                        newest_claimed[checkpoint.run] = await self._newest_claimed(tier, checkpoint.run, before_s)
                    if not is_gone and checkpoint.generation >= newest_claimed[checkpoint.run]:
                        continue
                    # A daemon may have continued the copy since the tier was listed.
                    if checkpoint in map(layout.parse_key, await tier.store.unfinished()):
                        continue
                    if await clear_uncommitted(tier, checkpoint, written_before_s=before_s, is_dry_run=is_dry_run):
                        why = CLEARED_GONE if is_gone else CLEARED
                        if not is_dry_run:
                            self.context.audit.record(
                                audit.EventKind.EXPIRED, checkpoint=checkpoint, tier=name, reason=why
                            )
                        cleared.append(planned_action(Decision(checkpoint, name, Action.EXPIRE, why)))
                except TierdError as error:
                    self.errors.record("reap", error, checkpoint)
                    if not isinstance(error, Retained):
                        break
        return cleared

    async def _newest_claimed(self, tier: Tier, run: Run, before_s: float) -> int:
        """The newest generation of the run that was claimed in the tier before this Unix time; 0 if there is none."""
        highest = self.context.catalog.generation_max(run)  # a claim that exceeds it is forged
        listing = await tier.listing(f"{run}/")
        claims = [claim for claim in listing.claims.get(run, ()) if claim <= highest]
        claimed_at_s = {claim: listing.markers[layout.generation_key(run, claim)][2] for claim in claims}
        return max((claim for claim in claims if claimed_at_s[claim] <= before_s), default=0)
