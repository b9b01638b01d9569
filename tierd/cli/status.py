"""`tierd status`: what can be restored, from where, how old it is, and the command that restores it.

Without a daemon the tiers are listed directly, the answer has the same form, and the exit code is 13.
"""

from __future__ import annotations

import shlex

import typer
from msgspec import UNSET

from tierd import __version__
from tierd.cli import daemon_http, options
from tierd.cli.console import duration, now, print_report, print_result, size, table
from tierd.cli.opened_tiers import open_tiers
from tierd.cli.options import Settings, settings_of
from tierd.cli.roster_table import print_roster
from tierd.decisions import halted, to_reap
from tierd.errors import DaemonUnreachable
from tierd.format.node_file import ranks_text
from tierd.report import (
    NewestCheckpoint,
    NewestPart,
    QueueReport,
    RunReport,
    StatusReport,
    TierReport,
    WatchReport,
    foreign_sentences,
    free_bytes,
    run_report,
    tier_report,
)

_STATES = {"stopped": "stopped: start it again", "halted": "HALTED: a person must decide"}


async def status(context: typer.Context, json: options.Json = False) -> int:
    """Print what can be restored, from where, and what is stalled."""
    settings = settings_of(context)
    unreachable: DaemonUnreachable | None = None
    try:
        report = daemon_http.find(settings.config(), with_nodes=True).status
    except DaemonUnreachable as error:
        report, unreachable = await _list(settings), error
    print_report(report, as_json=json, text=lambda report: _print(report, settings))
    if unreachable is not None:
        raise unreachable
    return 0


async def _list(settings: Settings) -> StatusReport:
    async with open_tiers(settings) as opened:
        catalog = opened.catalog
        tiers: list[TierReport] = []
        left = to_reap(catalog, settings.config())
        for name, tier in opened.by_name.items():
            is_there = catalog.tiers[name].is_known and name not in opened.absent
            tier_free_bytes = await free_bytes(tier) if is_there else None
            tiers.append(tier_report(catalog, name, tier.store.url, tier_free_bytes, to_reap=left.get(name)))
            if name in opened.absent:
                tiers[-1].error = "no such directory"
        return StatusReport(
            version=__version__,
            node=settings.config().daemon.node,
            pid=None,
            uptime_s=None,
            is_ready=False,
            halted=[str(halt) for halt in halted(catalog)],
            foreign=foreign_sentences(catalog),
            runs=[run_report(catalog, run, now()) for run in catalog.runs()],
            tiers=tiers,
        )


def _print(report: StatusReport, settings: Settings) -> None:
    if report.pid is None:
        print_result("no daemon: no snapshots are taken here; the following was read from the tiers just now", "")
    else:
        up = f", up {duration(report.uptime_s)}" if report.uptime_s is not None else ""
        ready = "ready" if report.is_ready else "not ready yet"
        print_result(f"tierd {report.version} on {report.node}, pid {report.pid}{up}, {ready}", "")
    if not report.runs:
        print_result("no run is known")
    for run in report.runs:
        _print_run(run, settings)
    table(
        ["TIER", "CHECKPOINTS", "USED", "FREE", "WHERE"],
        [
            [
                tier.name,
                str(tier.checkpoints) if tier.parts is UNSET else f"{tier.checkpoints} ({tier.parts} parts)",
                "" if tier.used_bytes is None else size(tier.used_bytes),
                "" if tier.free_bytes is None else size(tier.free_bytes),
                tier.url + (f"  {'note' if tier.is_known else 'NOT REACHABLE'}: {tier.error}" if tier.error else ""),
            ]
            for tier in report.tiers
        ],
        right=("CHECKPOINTS", "USED", "FREE"),
    )
    for queue in report.queues:
        _print_queue(queue)
    for watch in report.watches:
        _print_watch(watch)
    for tier in report.tiers:
        if tier.to_reap:
            print_result(
                f"left to `tierd reap`: {tier.to_reap} checkpoints in {tier.name}, where this daemon deletes nothing"
            )
    if slots := [f"{count} {state}" for state, count in sorted(report.slots.items()) if count]:
        print_result("slots: " + ", ".join(slots))
    for lost in report.lost:
        print_result(f"LOST: {lost.id} disappeared from {lost.tier}: docs/RUNBOOK.md#checkpoints-lost")
    for reason in report.foreign:
        print_result(f"FOREIGN: {reason}: docs/RUNBOOK.md#foreign-checkpoints")
    for reason in report.halted:
        print_result(f"DELETION HALTED: {reason}")
    for failure in report.failures[:5]:
        where = f"{failure.at} {failure.stage} {failure.run or ''} {failure.step or ''}"
        print_result(f"failure {where}: {failure.message}")
        if failure.hint:
            print_result(f"  hint: {failure.hint}")


def _print_watch(watch: WatchReport) -> None:
    parts = [f"watch {watch.path} ({watch.preset}) for {watch.run}: {watch.adopted} adopted since the daemon's start"]
    parts += [] if watch.newest_step is None else [f"the newest of step {watch.newest_step}"]
    parts += [f"{watch.pending} complete and not adopted yet"] if watch.pending else []
    parts += [f"polled: {watch.polled_because}"] if watch.is_there and watch.polled_because else []
    parts += [f"{watch.holder} adopts from it"] if watch.holder else []
    print_result("; ".join(parts))
    for problem in watch.problems:
        print_result(f"  NOT ADOPTED: {problem}")
    for line in (*watch.waiting, *watch.notes):
        print_result(f"  {line}")


def _print_queue(queue: QueueReport) -> None:
    if queue.checkpoints:
        parts = [f"waiting for {queue.tier}: {queue.checkpoints}, the oldest for {duration(queue.oldest_age_s)}"]
        parts += [f"{queue.copying} is being copied"] if queue.copying else []
        parts += [] if queue.last_copy_age_s is None else [f"last copy {duration(queue.last_copy_age_s)} ago"]
        print_result("; ".join(parts))
    if replaced := queue.given_up.get("replaced"):
        takes = "" if queue.copy_s is None else f", a copy takes {duration(queue.copy_s)}"
        print_result(f"{queue.tier} DOES NOT KEEP UP: {replaced} checkpoints were replaced before their copy{takes}")
    if no_space := queue.given_up.get("no_space"):
        print_result(f"GIVEN UP: {no_space} checkpoints were deleted before {queue.tier} had them: hot had no room")


def _print_run(run: RunReport, settings: Settings) -> None:
    nodes = None if run.nodes is UNSET else run.nodes
    expected = run.world_size and (len(nodes.ranks) if nodes else run.world_size)
    count = f"{run.ranks_attached} of {expected}" if expected else "no"
    here = " of this node" if nodes else ""
    ranks = "" if run.ranks_attached is None else f", {count} ranks{here} attached"
    state = f", {_STATES.get(run.state, run.state)}" if run.state else ""
    reason = f" ({run.reason})" if run.reason else ""
    print_result(f"{run.run}  generation {run.generation}{ranks}{state}{reason}")
    if run.cadence is not None:
        print_result(f"  saves every {duration(run.cadence.every_s)} (auto): {'; '.join(run.cadence.reasons)}")
    newest = {tier: checkpoint for tier, checkpoint in run.tiers.items() if checkpoint}
    if nodes:
        print_result(f"  this node  {nodes}")
        if nodes.everywhere:
            print_result(f"  all nodes  {_newest(nodes.everywhere)}, persisted on every node")
        for tier, part in nodes.parts.items():
            print_result(f"  {tier:<10} {_newest(part)}, {part}")
        for tier, awaited in nodes.awaited.items():
            of = f"step {awaited.step} waits for the parts of ranks {ranks_text(awaited.ranks)}"
            print_result(f"  {tier:<10} {of} of {awaited.world_size}, of other nodes")
        if nodes.copied:
            print_result(f"  copy       {_newest(nodes.copied)}, {nodes.copied}, of another node")
        if nodes.roster is not UNSET and nodes.roster:
            print_roster(nodes.roster)
    for tier, checkpoint in newest.items():
        print_result(f"  {tier:<10} {_newest(checkpoint)}")
    if run.unhealthy_steps:
        print_result(f"  UNHEALTHY: step {', '.join(map(str, run.unhealthy_steps))}: numbers that are not finite")
    nothing = "no tier here has a whole checkpoint; a restart of the run reads the parts of all nodes"
    nothing = f"  {nothing}" if nodes and nodes.parts else "  nothing restorable"
    print_result(f"  get it back:  {_restore_command(run, settings)}" if newest else nothing)
    print_result("")


def _newest(checkpoint: NewestCheckpoint | NewestPart) -> str:
    age = "" if checkpoint.age_s is None else f"{duration(checkpoint.age_s)} ago"
    return f"step {checkpoint.step:<10} generation {checkpoint.generation:<6} {age}"


def _restore_command(run: RunReport, settings: Settings) -> str:
    """The command that restores the newest checkpoint of the run, ready to paste."""
    newest = max((one for one in run.tiers.values() if one), key=lambda one: (one.generation, one.step))
    config = ["--config", settings.config_file] if settings.config_file else []
    which = ["--run", run.run, "--step", str(newest.step), "--generation", str(newest.generation)]
    return shlex.join(["tierd", *config, "restore", *which, "--to", f"./restored-{run.run}-{newest.step}"])
