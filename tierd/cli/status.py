"""`tierd status`: what is wrong and what to type next; what can be restored, from where, and what a loss now costs.

Without a daemon the tiers are listed directly, the answer has the same form, and the exit code is 13. With --check the
exit code is that of a monitoring check.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Iterable, Set
from typing import Annotated

import typer
from msgspec import UNSET

from tierd import __version__
from tierd.catalog.catalog import Catalog
from tierd.catalog.decisions import halted, to_reap
from tierd.catalog.entry import NOT_LISTED_YET
from tierd.cli import daemon_http, options
from tierd.cli.console import duration, now, print_note, print_report, print_result, size, table
from tierd.cli.opened_tiers import open_tiers
from tierd.cli.options import Settings, settings_of
from tierd.cli.status_lines import print_roster, print_sidecars, print_watch
from tierd.errors import BadConfig, DaemonUnreachable, TierdError
from tierd.format.ids import HOT, Run
from tierd.format.node_file import ranks_text
from tierd.format.run_state import RunState
from tierd.format.text import counted
from tierd.status.alarm_rules import DISAPPEARED, alarms
from tierd.status.disks import free_bytes, on_disk_of
from tierd.status.node_reports import NewestCheckpoint, NewestPart
from tierd.status.outlook import outlook
from tierd.status.report import (
    QueueReport,
    RunReport,
    Severity,
    StatusReport,
    TierReport,
    foreign_sentences,
    run_report,
    sources_of,
    tier_report,
)
from tierd.status.work_at_risk import RiskReport, work_at_risk

RUNBOOK = "docs/RUNBOOK.md"
UNKNOWN = 3
WATCH_S = 2.0
_CODES = {Severity.WARNING: 1, Severity.CRITICAL: 2}
_LISTED_FAILURES = 5
_PAUSE_SHOWN_S = 10.0
_LISTED_OLD_S = 60.0
_RETRIED = ("tier-unreachable", "cold-unreachable")  # sections of the runbook
Check = Annotated[
    bool,
    typer.Option(
        "--check", help="Print only what is wrong, and exit with 0 (ok), 1 (warning), 2 (critical) or 3 (unknown)."
    ),
]
Watch = Annotated[
    bool,
    typer.Option("--watch", help=f"Print it again every {WATCH_S:.0f} s, until Ctrl-C."),
]

_OF_TIER = ("transient", "tier_unreachable")  # kinds of failures
_STATES = {RunState.STOPPED: "stopped: start it again", RunState.HALTED: "HALTED: a person must decide"}


async def status(context: typer.Context, json: options.Json = False, check: Check = False, watch: Watch = False) -> int:
    """Print what can be restored, from where, what is at risk, and what stands still.

    Exits with 0 if the daemon answers, also while something is wrong, else with 13. With --check, as monitoring checks
    do: 0 ok, 1 warning, 2 critical, 3 unknown."""
    settings = settings_of(context)
    if watch and check:
        raise BadConfig("tierd status --watch --check: a check ends with one exit code", hint="give one of them")
    while watch:
        await _watch_once(settings, as_json=json)
        await asyncio.sleep(WATCH_S)
    try:
        return await _status(settings, as_json=json, is_check=check)
    except TierdError as error:
        if not check:
            raise
        print_report({"unknown": error.message}, as_json=json, text=f"UNKNOWN: {error.message}")
        return UNKNOWN


async def _watch_once(settings: Settings, *, as_json: bool) -> None:
    """The former status stays on the screen until there is a new one: a daemon that hangs is asked for seconds."""
    unreachable: TierdError | None = None
    report: StatusReport | None = None
    try:
        report, unreachable = await _read(settings)
    except BadConfig:
        raise  # it stays as it is until somebody edits the config
    except TierdError as error:
        unreachable = error
    if sys.stdout.isatty():
        typer.echo("\x1b[2J\x1b[H", nl=False)  # an empty screen
    if report is not None:
        print_report(report, as_json=as_json, text=lambda report: print_status(report, settings))
    if unreachable is not None:
        print_note(f"tierd: {unreachable.message}", *([f"  hint: {unreachable.hint}"] if unreachable.hint else []))


async def _read(settings: Settings) -> tuple[StatusReport, DaemonUnreachable | None]:
    """The daemon's report; without one, what the tiers say, and why the daemon did not answer."""
    try:
        return daemon_http.find(settings.config(), with_nodes=True).status, None
    except DaemonUnreachable as error:
        report = await _list(settings)
        report.silence = "" if daemon_http.is_absent(error) else error.message
        report.alarms = alarms(report, now())
        return report, error


async def _status(settings: Settings, *, as_json: bool, is_check: bool) -> int:
    report, unreachable = await _read(settings)
    if is_check and not as_json:
        _print_check(report)
    else:
        print_report(report, as_json=as_json, text=lambda report: print_status(report, settings))
    if is_check:
        return max((_CODES[alarm.severity] for alarm in report.alarms), default=0)
    if unreachable is not None:
        raise unreachable
    return 0


def _print_check(report: StatusReport) -> None:
    """What is wrong, a line for each; the first is what a monitoring system shows."""
    for alarm in report.alarms:
        print_result(f"{alarm.severity.upper()}: {alarm.message} ({RUNBOOK}#{alarm.runbook})")
    if not report.alarms:
        print_result(f"OK: {counted(len(report.runs), 'run')}, {counted(len(report.tiers), 'tier')}")


async def _list(settings: Settings) -> StatusReport:
    async with open_tiers(settings) as opened:
        catalog = opened.catalog
        tiers: list[TierReport] = []
        left = to_reap(catalog, settings.config())
        on_hot_disk = await on_disk_of(
            opened.by_name[HOT], (opened.by_name[name] for name in opened.by_name if name != HOT)
        )
        for name, tier in opened.by_name.items():
            is_there = catalog.tiers[name].is_known and name not in opened.absent
            tier_free_bytes = await free_bytes(tier) if is_there else None
            tiers.append(tier_report(catalog, name, tier.store.url, tier_free_bytes, to_reap=left.get(name)))
            tiers[-1].is_on_hot_disk = name in on_hot_disk
            if name in opened.absent:  # it may be a disk that is not mounted
                tiers[-1].error = "no such directory"
                tiers[-1].checkpoints = tiers[-1].used_bytes = None
        return StatusReport(
            version=__version__,
            node=settings.config().daemon.node,
            pid=None,
            uptime_s=None,
            is_ready=False,
            holder=daemon_http.holder(settings.config()),
            halted=[str(halt) for halt in halted(catalog)],
            foreign=foreign_sentences(catalog),
            runs=[_run_report(catalog, run, on_hot_disk) for run in catalog.runs()],
            tiers=tiers,
        )


def _run_report(catalog: Catalog, run: Run, on_hot_disk: Set[str]) -> RunReport:
    report = run_report(catalog, run, now())
    sources = sources_of(report)
    report.at_risk = work_at_risk(sources, world_size=1, is_running=False, on_hot_disk=on_hot_disk)
    return report


def print_status(report: StatusReport, settings: Settings) -> None:
    if report.pid is None and report.holder is not None:
        print_result(f"the daemon, pid {report.holder.pid}, does not answer; the tiers were read just now", "")
    elif report.pid is None and report.silence:
        print_result("no daemon answers; the tiers were read just now", "")
    elif report.pid is None:
        print_result("no daemon: no snapshots are taken here; the following was read from the tiers just now", "")
    else:
        up = f", up {duration(report.uptime_s)}" if report.uptime_s is not None else ""
        ready = "ready" if report.is_ready else "not ready yet"
        print_result(f"tierd {report.version} on {report.node}, pid {report.pid}{up}, {ready}", "")
    _print_alarms(report, settings)
    if not report.runs:
        print_result("no run is known")
    for run in report.runs:
        _print_run(run, settings, report.tiers)
    table(
        ["TIER", "CHECKPOINTS", "USED", "FREE", "WHERE"],
        [
            [
                tier.name,
                _count(tier),
                "" if tier.used_bytes is None else size(tier.used_bytes),
                "" if tier.free_bytes is None else size(tier.free_bytes),
                tier.url
                + ("  on hot's disk" if tier.is_on_hot_disk else "")
                + _listed(tier.listed_age_s or 0.0)
                + (f"  {_place_problem(tier, tier.error)}" if tier.error else ""),
            ]
            for tier in report.tiers
        ],
        right=("CHECKPOINTS", "USED", "FREE"),
    )
    for queue in report.queues:
        _print_queue(queue)
    for line in outlook(report):
        print_result(line)
    for watch in report.watches:
        print_watch(watch)
    if report.sidecars is not None:
        print_sidecars(report.sidecars)
    for tier in report.tiers:
        if tier.to_reap:
            left = counted(tier.to_reap, "checkpoint")
            print_result(f"left to `tierd reap`: {left} in {tier.name}, where this daemon deletes nothing")
    if slots := [f"{count} {state}" for state, count in sorted(report.slots.items()) if count]:
        print_result("slots: " + ", ".join(slots))
    problems = [problem for watch in report.watches for problem in watch.problems]
    named = " ".join([*(alarm.message for alarm in report.alarms), *problems])
    silent = [tier.url for tier in report.tiers if tier.error and not tier.is_known]
    for failure in [
        each
        for each in report.failures
        # Other failures of a tier that does not answer add nothing.
        if each.message not in named
        and not (report.lost and DISAPPEARED in each.message)
        and not (each.kind in _OF_TIER and any(url in each.message for url in silent))
    ][:_LISTED_FAILURES]:
        times = f" ({failure.count} times since {failure.first_at})" if failure.count > 1 else ""
        where = f"{failure.at} {failure.stage}"
        where += f" {failure.run} step {failure.step}" if failure.run else ""
        print_result(f"failure {where}: {failure.message}{times}")
        if failure.hint:
            print_result(f"  hint: {failure.hint}")


def _print_alarms(report: StatusReport, settings: Settings) -> None:
    hints = {failure.message: failure.hint for failure in report.failures if failure.hint}
    for alarm in report.alarms:
        message, _, own_hint = alarm.message.removesuffix(")").partition(" (hint: ")
        print_result(f"{alarm.severity.upper()}: {message if own_hint else alarm.message}")
        if hint := own_hint or next((hint for message, hint in hints.items() if message in alarm.message), ""):
            print_result(f"  hint: {hint}")
        print_result(f"  next: {_with_config(alarm.command, settings)}   {RUNBOOK}#{alarm.runbook}")
    if report.pid is not None and any(alarm.runbook in _RETRIED for alarm in report.alarms):
        print_result(f"a tier that fails is tried again within minutes; at once after: kill -HUP {report.pid}")
    if report.alarms:
        print_result("")


def _listed(age_s: float) -> str:
    return f"  as listed {duration(age_s)} ago" if age_s > _LISTED_OLD_S else ""


def _place_problem(tier: TierReport, error: str) -> str:
    """The problem of the tier, without the hint that its alarm prints."""
    return (
        f"note: {error}"
        if tier.is_known or error == NOT_LISTED_YET
        else f"NOT REACHABLE: {error.partition(' (hint: ')[0]}"
    )


def _with_config(command: str, settings: Settings) -> str:
    """A command of tierd for the config in use, ready to paste."""
    if not settings.config_file or not command.startswith("tierd "):
        return command
    return command.replace("tierd ", f"tierd --config {shlex.quote(settings.config_file)} ", 1)


def _count(tier: TierReport) -> str:
    if tier.checkpoints is None:
        return "unknown"
    return str(tier.checkpoints) if tier.parts is UNSET else f"{tier.checkpoints} ({tier.parts} parts)"


def _print_queue(queue: QueueReport) -> None:
    if queue.checkpoints:
        parts = [f"waiting for {queue.tier}: {queue.checkpoints}, the oldest for {duration(queue.oldest_age_s)}"]
        parts += [f"{queue.copying} is being copied"] if queue.copying else []
        parts += [] if queue.last_copy_age_s is None else [f"last copy {duration(queue.last_copy_age_s)} ago"]
        print_result("; ".join(parts))
    if replaced := queue.given_up.get("replaced"):
        takes = "" if queue.copy_s is None else f", a copy takes {duration(queue.copy_s)}"
        which = counted(replaced, "checkpoint was", "checkpoints were")
        print_result(f"{which} replaced by newer ones before a copy to {queue.tier}{takes}")
    if no_space := queue.given_up.get("no_space"):
        which = counted(no_space, "checkpoint was", "checkpoints were")
        print_result(f"GIVEN UP: {which} deleted before a copy to {queue.tier}: hot had no room")


def _print_run(run: RunReport, settings: Settings, tiers: list[TierReport]) -> None:
    nodes = None if run.nodes is UNSET else run.nodes
    expected = run.world_size and (len(nodes.ranks) if nodes else run.world_size)
    count = f"{run.ranks_attached} of {expected}" if expected else "no"
    here = " of this node" if nodes else ""
    ranks = "" if run.ranks_attached is None else f", {count} ranks{here} attached"
    state = f", {_STATES.get(run.state, run.state)}" if run.state else ""
    reason = f" ({run.reason})" if run.reason else ""
    print_result(f"{run.run}  generation {run.generation}{ranks}{state}{reason}")
    if run.pause is not None and run.pause.seconds >= _PAUSE_SHOWN_S:
        print_result(f"  its trainers gave no sign for {duration(run.pause.seconds)}")
    if run.cadence is not None:
        auto = "auto, unless the script sets an interval"
        print_result(f"  saves every {duration(run.cadence.every_s)} ({auto}): {'; '.join(run.cadence.reasons)}")
    newest = {tier: checkpoint for tier, checkpoint in run.tiers.items() if checkpoint}
    if nodes:
        print_result(f"  this node  {nodes}")
        if nodes.everywhere:
            print_result(f"  all nodes  {_newest(nodes.everywhere)}, persisted on every node")
        for tier, part in nodes.parts.items():
            print_result(f"  {tier:<10} {_newest(part)}, {part}")
        for tier, awaited in nodes.awaited.items():
            print_result(f"  {tier:<10} step {awaited.step} {_awaited(awaited)}")
        if nodes.copied:
            print_result(f"  copy       {_newest(nodes.copied)}, {nodes.copied}, of another node")
        if nodes.roster is not UNSET and nodes.roster:
            print_roster(nodes.roster)
    for tier, checkpoint in newest.items():
        print_result(f"  {tier:<10} {_newest(checkpoint)}")
    for risk in run.at_risk:
        if run.state == RunState.RUNNING or risk.tier is None or risk.steps or risk.seconds:
            whose = "the trainers are" if risk.lost == "trainers" else f"the {risk.lost} is"
            print_result(f"  if {whose} lost now: {_risk(risk, tiers)}")
    if run.unhealthy_steps:
        steps = ", ".join(map(str, dict.fromkeys(run.unhealthy_steps)))  # a step may be of several generations
        print_result(f"  UNHEALTHY: step {steps}: numbers that are not finite, or a bad loss")
    command = _restore_command(run, newest.values(), settings)
    nothing = "no tier here has a whole checkpoint; a restart of the run reads the parts of all nodes"
    nothing = f"  {nothing}" if nodes and nodes.parts and nodes.is_adopted is not True else "  nothing restorable"
    print_result(f"  get it back:  {command}" if command else nothing, "")


def _risk(risk: RiskReport, tiers: list[TierReport]) -> str:
    if risk.tier is None:
        which = "second cold tier" if risk.lost == "region" else "cold tier"
        which += " off hot's disk" if any(tier.is_on_hot_disk for tier in tiers) else ""
        unknown = [tier.name for tier in tiers if not tier.is_known and tier.name != HOT]
        known = f" that is known; NOT KNOWN: {', '.join(unknown)}" if unknown else ""
        return f"all work is lost: no {which} has a checkpoint{known}"
    work = [f"{risk.steps} step{'' if risk.steps == 1 else 's'}"] if risk.steps is not None else []
    work += [] if risk.seconds is None else [duration(risk.seconds)]
    work += [] if not risk.gpu_seconds else [f"{duration(risk.gpu_seconds)} of GPU time"]
    restore = "" if risk.restore_s is None else f"; a restore takes {duration(risk.restore_s)}"
    is_known = all(tier.is_known for tier in tiers if tier.name == risk.tier)
    place = risk.tier if is_known else f"{risk.tier}, WHICH IS NOT REACHABLE"
    return f"{', '.join(work)}; back to step {risk.step} from {place}{restore}"


def _newest(checkpoint: NewestCheckpoint | NewestPart) -> str:
    age = "" if checkpoint.age_s is None else f"{duration(checkpoint.age_s)} ago"
    return f"step {checkpoint.step:<10} generation {checkpoint.generation:<6} {age}"


def _awaited(awaited: NewestPart) -> str:
    if awaited.is_adopted is True:
        there, count = awaited.world_size - len(awaited.ranks), awaited.world_size
        return f"has the parts of {there} of {count} nodes; missing: {ranks_text(awaited.ranks)}"
    return f"waits for the parts of {awaited.whose}, of other nodes"


def _restore_command(run: RunReport, whole: Iterable[NewestCheckpoint], settings: Settings) -> str:
    """The command that restores the newest checkpoint of the run, ready to paste; empty if nothing can be restored."""
    newest = max(whole, key=lambda checkpoint: checkpoint.recency, default=None)
    everywhere = run.nodes.everywhere if run.nodes is not UNSET and run.nodes.roster else None
    which, name = [], run.run  # without a step, `tierd restore` reads the parts of all nodes
    if everywhere is None or (newest is not None and newest.recency >= everywhere.recency):
        if newest is None:
            return ""
        which = ["--step", str(newest.step), "--generation", str(newest.generation)]
        name = f"{run.run}-{newest.step}"
    config = ["--config", settings.config_file] if settings.config_file else []
    return shlex.join(["tierd", *config, "restore", "--run", run.run, *which, "--to", f"./restored-{name}"])
