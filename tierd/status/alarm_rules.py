"""What is wrong now, from a status report: a pure function. `tierd status`, its --check and the page show it.

Each rule has the name and severity of an alert in grafana/alerts.yml. An alert waits, so that nobody is woken in vain;
here the same condition is named as soon as it is seen.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator
from datetime import datetime

from msgspec import UNSET

from tierd.catalog.entry import NOT_LISTED_YET
from tierd.format.ids import HOT, MEMORY
from tierd.format.node_file import ranks_text
from tierd.format.run_state import BROKE_OFF, ENDED_BADLY, RunState
from tierd.format.text import counted, duration, listed, size
from tierd.memory.outcomes import ENDED_RECENT_S
from tierd.status.folder_reports import SidecarReport, WatchReport
from tierd.status.node_reports import NodeReport, age_s
from tierd.status.report import (
    Alarm,
    FailureReport,
    HolderReport,
    QueueReport,
    RunReport,
    Severity,
    StatusReport,
    TierReport,
)

CRITICAL, WARNING = Severity.CRITICAL, Severity.WARNING

RECENT_S = 600.0  # a failure is named for so long after its last repetition
GIVEN_UP_RECENT_S = 3600.0
NOT_DURABLE_S = 300.0  # as of the alert; sooner where persisting fails or is slower than usual
PERSIST_SLOW_S = 45.0
NO_CHECKPOINT_S = 4 * 3600.0
COLD_LATE_S = 3600.0
SIDECAR_LATE_S = 600.0
COMMIT_STALLED_S = 1800.0
PEER_LATE_S = 900.0
FIRST_LISTING_S = 600.0  # of a large bucket, after the start of the daemon
_PASSING = ("transient", "tier_unreachable")
LISTED_LOST = 3
DISAPPEARED = " disappeared from "  # of checkpoints, not of the marker of a tier
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.:_-]*")
PIDS_MAX = 8  # in a sentence: the ranks of a node

_HALTS = {  # by the reason: the alert, and the runbook's section
    "unreadable_manifest": ("TierdHalted", WARNING, "unreadable-manifest"),
    "damaged_replica": ("TierdDamagedReplica", CRITICAL, "damaged-replica"),
    "shared_generation": ("TierdHalted", WARNING, "shared-generation"),
}
_STATES = {
    "T": "it is stopped, by SIGSTOP or a debugger",
    "t": "it is stopped by a debugger",
    "D": "it waits for a disk",
    "R": "it runs, and has just started or is busy",
    "S": "it sleeps, and has just started or waits for something",
}
_FAILURES = {  # by the stage or the kind: the alert, its severity, the runbook's section, and the command
    "loop": ("TierdLoopStuck", WARNING, "loop-stuck", "dmesg | tail"),
    "drill": ("TierdDrillFailed", WARNING, "restore-drill", "tierd drill"),
    "full": ("TierdDiskFull", CRITICAL, "disk-full", "df -h"),
    "given_up": ("TierdCopiesGivenUp", CRITICAL, "copies-given-up", "tierd lifecycle --explain"),
    "corrupt": ("TierdVerifyFailed", CRITICAL, "corrupt-chunk", "tierd verify --deep"),
    "lost": ("TierdCheckpointsLost", CRITICAL, "checkpoints-lost", "tierd log --audit --since 1h"),
    "stale": ("TierdFenced", WARNING, "fenced", "tierd log --audit --since 1h"),
    "bug": ("TierdBug", WARNING, "bug", "tierd version"),
}

_UNHEALTHY = "TierdUnhealthy", CRITICAL, "unhealthy-checkpoint", "tierd ls"
_STALE = "TierdStaleSnapshots", CRITICAL, "stale-snapshots", "tierd ls"


def alarms(status: StatusReport, now: datetime) -> list[Alarm]:
    """Critical ones first."""
    recent = [
        failure for failure in status.failures if _age_s(failure, now) < RECENT_S and not _is_over(failure, status, now)
    ]
    unreachable = {tier.name for tier in status.tiers if not tier.is_known}
    found = [
        *_of_daemon(status),
        *_of_failures(status, recent),
        *_of_hot(status, recent),
        *(alarm for tier in status.tiers for alarm in _of_tier(tier, status.uptime_s or 0.0)),
        *(
            alarm
            for queue in status.queues
            for alarm in _of_queue(queue, [] if queue.tier in unreachable else recent, now)  # else the tier says it
        ),
        *(alarm for watch in status.watches for alarm in _of_watch(watch)),
        *(_of_sidecars(status.sidecars) if status.sidecars is not None else ()),
        *_of_halts(status),
        *(alarm for run in status.runs for alarm in _of_run(run)),
    ]
    return sorted(found, key=lambda alarm: alarm.severity is not CRITICAL)


def _age_s(failure: FailureReport, now: datetime) -> float:
    return age_s(failure.at, now) or 0.0


def _is_over(failure: FailureReport, status: StatusReport, now: datetime) -> bool:
    """Hot had no space, and has taken this snapshot or a later one since."""
    if failure.stage not in ("persist", "audit") or failure.kind != "full":
        return False
    if any(_has_in_hot(run, failure) for run in status.runs):
        return True
    parts = [run.nodes.parts.get(HOT) for run in status.runs if run.nodes is not UNSET]
    newest = [run.tiers.get(HOT) for run in status.runs]
    ages_s = [report.age_s for report in (*newest, *parts) if report is not None and report.age_s is not None]
    return min(ages_s, default=math.inf) < _age_s(failure, now)


def _has_in_hot(run: RunReport, failure: FailureReport) -> bool:
    """Whether hot has a checkpoint of the newest generation that is not before the step of the failure."""
    nodes = None if run.nodes is UNSET else run.nodes
    newest = [run.tiers.get(HOT), nodes and nodes.parts.get(HOT)]
    return run.run == failure.run and any(
        each.generation == run.generation and each.step >= failure.step
        for each in newest
        if each is not None and failure.step is not None
    )


def _alarm(alert: str, severity: Severity, message: str, runbook: str, command: str) -> Alarm:
    return Alarm(alert=alert, severity=severity, message=message, runbook=runbook, command=command)


def _of_daemon(status: StatusReport) -> Iterator[Alarm]:
    holder = status.holder
    if status.pid is None and holder is not None:
        state = _STATES.get(holder.state, f"its state is {holder.state}")
        what = f"the daemon, pid {holder.pid}, holds the lock of hot and does not answer: {state}"
        what += f"; {status.silence}" if status.silence and not holder.is_stopped else ""
        command = f"kill -CONT {holder.pid}" if holder.is_stopped else f"ps -o pid,stat,wchan,etime -p {holder.pid}"
        yield _alarm("TierdDown", CRITICAL, what, "daemon-unreachable", command)
    elif status.pid is None and status.silence:
        what = f"it is not known whether a daemon takes snapshots here: {status.silence}"
        yield _alarm("TierdDown", CRITICAL, what, "daemon-unreachable", "tierd doctor")
    elif status.pid is None:
        what = "no daemon runs here: no snapshots are taken, and nothing is adopted"
        yield _alarm("TierdDown", CRITICAL, what, "daemon-unreachable", "tierd serve")


def _rule_of(failure: FailureReport) -> tuple[str, Severity, str, str] | None:
    if failure.stage == "examine" and failure.kind == "corrupt":  # of numbers, not of bytes
        return _STALE if failure.hint.endswith(_STALE[2]) else _UNHEALTHY
    return _FAILURES.get(failure.stage) or _FAILURES.get(failure.kind)


def _of_failures(status: StatusReport, recent: list[FailureReport]) -> Iterator[Alarm]:
    seen = {"TierdCheckpointsLost"} if status.lost else set[str]()
    for failure in recent:
        alert, severity, runbook, command = _rule_of(failure) or ("",) * 4
        if alert == "TierdUnhealthy" and any(run.run == failure.run and _is_unhealthy(run) for run in status.runs):
            continue  # the run says it
        is_pinning = failure.kind == "full" and failure.stage == "stage"  # memory could not be page-locked
        if alert and not is_pinning and alert not in seen:
            seen.add(alert)
            if command == "df -h":
                command = _df(status, failure)
            what = f"{failure.stage}: {failure.message}"
            if alert == "TierdCheckpointsLost":
                what = f"LOST: {failure.message}{'. None is missing now' if DISAPPEARED in failure.message else ''}"
            yield _alarm(alert, Severity(severity), what, runbook, command)
    for run, tier in dict.fromkeys((lost.run, lost.tier) for lost in status.lost):
        ids = [str(lost.id) for lost in status.lost if (lost.run, lost.tier) == (run, tier)]
        what = f"LOST: {listed(ids, LISTED_LOST)} disappeared from {tier}, and tierd has not deleted them"
        yield _alarm("TierdCheckpointsLost", CRITICAL, what, "checkpoints-lost", f"tierd ls --run {run}")
    for sentence in status.foreign:
        command = "tierd log --audit --since 24h"
        yield _alarm("TierdForeignCheckpoints", CRITICAL, f"FOREIGN: {sentence}", "foreign-checkpoints", command)


def _df(status: StatusReport, failure: FailureReport) -> str:
    """The command `df`, of the tier that is full if the failure names it."""
    paths = [str(tier.directory) for tier in status.tiers if tier.directory is not None]
    named = [path for path in paths if path in failure.message]
    return f"df -h {shlex.quote(named[0])}" if named else "df -h"


def _of_hot(status: StatusReport, recent: list[FailureReport]) -> Iterator[Alarm]:
    hot = next((tier for tier in status.tiers if tier.name == HOT), None)
    queue = next((each for each in status.queues if each.tier == HOT), None)
    if hot is None:
        return
    path = shlex.quote(str(hot.directory))
    if queue is not None and queue.oldest_age_s > 0:
        usual_s = status.costs.persist.mean_s if status.costs.persist is not None else 0.0
        fails = any(failure.stage == "persist" for failure in recent)
        limit_s = 0.0 if fails else min(NOT_DURABLE_S, max(PERSIST_SLOW_S, 3 * usual_s))
        if queue.oldest_age_s > limit_s:
            what = f"nothing sealed in the last {duration(queue.oldest_age_s)} is durable: it is in memory only"
            yield _alarm("TierdNotDurable", CRITICAL, what, "not-durable", f"df -h {path}; dmesg | tail")
    if hot.free_bytes is not None and hot.room_bytes is not None and hot.free_bytes < hot.room_bytes:
        what = f"hot has {size(hot.free_bytes)} free; two checkpoints, of {size(hot.room_bytes)} together, must fit"
        yield _alarm("TierdDiskAlmostFull", WARNING, what, "disk-full", "tierd lifecycle --explain")


def _of_tier(tier: TierReport, uptime_s: float) -> Iterator[Alarm]:
    if tier.error == NOT_LISTED_YET and uptime_s < FIRST_LISTING_S:
        return
    if tier.error and not tier.is_known:
        what = f"{tier.name} is NOT REACHABLE, so nothing that depends on it is deleted: {tier.error}"
        if tier.name == HOT or not tier.url.startswith("s3://"):
            yield _alarm("TierdHalted", WARNING, what, "tier-unreachable", f"tierd doctor --tier {tier.name}")
        else:
            yield _alarm("TierdColdRequestsFail", WARNING, what, "cold-unreachable", f"tierd doctor --tier {tier.name}")


def _of_queue(queue: QueueReport, recent: list[FailureReport], now: datetime) -> Iterator[Alarm]:
    if queue.tier == HOT:
        return
    replaced_s = queue.given_up_age_s.get("replaced", math.inf)
    if replaced_s < GIVEN_UP_RECENT_S and queue.checkpoints:  # else it has caught up
        takes = "" if queue.copy_s is None else f"; a copy takes {duration(queue.copy_s)}"
        which = counted(queue.given_up["replaced"], "checkpoint was", "checkpoints were")
        what = f"{queue.tier} DOES NOT KEEP UP: {which} replaced before a copy"
        yield _alarm("TierdColdTooSlow", WARNING, what + takes, "cold-too-slow", "tierd status --json")
    if not queue.checkpoints:
        return
    copied_s = math.inf if queue.last_copy_age_s is None else queue.last_copy_age_s
    passing = [failure for failure in recent if failure.stage == "replicate" and failure.kind in _PASSING]
    if fails := [failure for failure in passing if _age_s(failure, now) < copied_s]:
        what = f"copies to {queue.tier} fail: {fails[0].message}"
        command = f"tierd doctor --tier {queue.tier}"
        yield _alarm("TierdColdRequestsFail", WARNING, what, "cold-unreachable", command)
    waiting = f"{queue.checkpoints} wait for {queue.tier}"
    command = f"tierd doctor --tier {queue.tier}"
    if queue.oldest_age_s > COLD_LATE_S:
        what = f"{waiting}, the oldest for {duration(queue.oldest_age_s)}"
        yield _alarm("TierdColdBehind", WARNING, what, "cold-behind", command)
    elif queue.last_copy_age_s is not None and queue.last_copy_age_s > COLD_LATE_S:
        what = f"{waiting}, and none has arrived for {duration(queue.last_copy_age_s)}"
        yield _alarm("TierdColdStalled", WARNING, what, "cold-behind", command)


def _of_watch(watch: WatchReport) -> Iterator[Alarm]:
    if watch.problems:
        count = f", {len(watch.problems)} problems" if len(watch.problems) > 1 else ""
        what = f"checkpoints for {watch.run} are NOT ADOPTED{count}: {watch.problems[0]}"
        yield _alarm("TierdWatchProblem", WARNING, what, "watched-folder", "tierd status --json")


def _of_sidecars(sidecars: SidecarReport) -> Iterator[Alarm]:
    show = "tierd status --json"
    if sidecars.rewritten:
        names = ", ".join(sidecars.rewritten)
        what = (
            f"the past of {names} of {sidecars.run} CHANGED, or another daemon copies another file of that name; each "
            "content is kept as a version"
        )
        yield _alarm("TierdSidecarRewritten", WARNING, what, "sidecar-file-changed", "tierd sidecars")
    if sidecars.problems or sidecars.behind_s > SIDECAR_LATE_S:
        why = f": {sidecars.problems[0]}" if sidecars.problems else ""
        what = f"sidecar files of {sidecars.run} are NOT COPIED for {duration(sidecars.behind_s)}{why}"
        yield _alarm("TierdSidecarLag", WARNING, what, "sidecar-files-behind", show)


def _of_halts(status: StatusReport) -> Iterator[Alarm]:
    for sentence in status.halted:
        reason, _, _ = sentence.partition(": ")
        if reason != "tier_unreachable":  # the tier says it
            alert, severity, runbook = _HALTS[reason]
            yield _alarm(alert, severity, f"DELETION HALTED: {sentence}", runbook, "tierd verify --deep")


def _of_run(run: RunReport) -> Iterator[Alarm]:
    name = run.run
    if run.state in ENDED_BADLY and (run.ended_age_s or 0.0) < ENDED_RECENT_S:
        reason = f": {run.reason}" if run.reason else ""
        what = f"{name} does not train: its trainers are {run.state}{reason}{_restart(run)}"
        command = "dmesg -T | grep -i oom-kill" if run.state == RunState.LOST else f"tierd ls --run {name}"
        yield _alarm("TierdRunEnded", WARNING, what, "run-ended", command)
    if run.state == RunState.RUNNING and run.reason:
        what = f"{name} trains without all of its ranks: {run.reason}. The others are attached, and may wait for it"
        yield _alarm("TierdRunEnded", WARNING, what, "run-ended", f"tierd stop --run {name} --force")
    if run.pause is not None and run.pause.is_too_long:
        what = f"{name} is silent: its trainers are attached and gave no sign for {duration(run.pause.seconds)}"
        why, command = _why_silent(run.processes)
        yield _alarm("TierdRunSilent", WARNING, what + why, "run-silent", command)
    if run.state == RunState.RUNNING and (nothing_s := _without_commit_s(run)) > NO_CHECKPOINT_S:
        what = f"{name} trains and has committed nothing for {duration(nothing_s)}"
        yield _alarm("TierdNoNewCheckpoint", WARNING, what, "no-new-checkpoint", f"tierd snapshot --run {name}")
    if run.newer_generation is not None:
        what = f"{name} trains here as generation {run.generation}, and {run.newer_generation} was begun elsewhere"
        yield _alarm("TierdNewerGeneration", CRITICAL, what, "newer-generation", f"tierd log --audit --run {name}")
    if _is_unhealthy(run):
        step = run.unhealthy_steps[-1]
        what = f"{name} has numbers that are not finite, or a bad loss, since step {step} or before"
        command = f"tierd stop --run {name}" if run.state == RunState.RUNNING else f"tierd show {name} {step}"
        yield _alarm("TierdUnhealthy", CRITICAL, what, "unhealthy-checkpoint", command)
    if run.nodes is not UNSET:
        yield from _of_nodes(run)


def _without_commit_s(run: RunReport) -> float:
    """How long the trainers that are attached have trained without a commit in hot, or on all nodes; 0 if it is not
    known."""
    nodes = None if run.nodes is UNSET else run.nodes
    newest = [each for each in (run.tiers.get(HOT), nodes and nodes.everywhere) if each is not None]
    durable = [tier for tier, each in run.tiers.items() if each is not None and tier != MEMORY]
    if not newest and (durable or (nodes is not None and nodes.parts)):
        return 0.0
    commit_s = min((report.age_s for report in newest if report.age_s is not None), default=None)
    return min((each for each in (commit_s, run.attached_s) if each is not None), default=0.0)


def _is_unhealthy(run: RunReport) -> bool:
    """Whether no healthy checkpoint is newer than the newest unhealthy one, and no newer start of the trainers runs:
    that one began at a healthy checkpoint, as after a rollback."""
    if not run.unhealthy_steps:
        return False
    generation = run.unhealthy_generation
    if generation is not None and run.state == RunState.RUNNING and run.generation > generation:
        return False
    nodes = None if run.nodes is UNSET else run.nodes
    newest = [*run.tiers.values(), *(nodes.parts.values() if nodes else ()), nodes and nodes.everywhere]
    # The steps of a newer generation may be lower. A daemon of an older version does not tell the generation.
    healthy = [(0 if generation is None else each.generation, each.step) for each in newest if each is not None]
    return (generation or 0, run.unhealthy_steps[-1]) > max(healthy, default=(0, -1))


def _of_nodes(run: RunReport) -> Iterator[Alarm]:
    nodes = run.nodes
    assert nodes is not UNSET
    roster = nodes.roster or []
    for tier, awaited in nodes.awaited.items():
        if awaited.age_s is not None and awaited.age_s > COMMIT_STALLED_S:
            missing = f"step {awaited.step} waits for the parts of {awaited.whose}"
            what = f"{run.run} commits nothing in {tier}: {missing}"
            late = next((node for node in roster if not set(node.ranks).isdisjoint(awaited.ranks)), None)
            command = _on_node(late, f"tierd doctor --tier {tier}")
            yield _alarm("TierdCommitStalled", WARNING, what, "commit-stalled", command)
    # A node without an address is not asked: its config has no peers.listen.
    silent = [node for node in roster if node.problem and node.address]
    if silent and run.state in (RunState.RUNNING, *BROKE_OFF):
        ranks = ranks_text(sorted(rank for node in silent for rank in node.ranks))
        what = f"{len(silent)} of {len(roster)} nodes of {run.run} do not answer (ranks {ranks})"
        what += f": {silent[0].address}: {silent[0].problem}"
        yield _alarm("TierdDown", CRITICAL, what, "node-lost", _on_node(silent[0], "tierd status"))
    last = max(roster, key=lambda node: node.copy_lag_s or 0.0, default=None)
    if last is not None and last.copy_lag_s is not None and last.copy_lag_s > PEER_LATE_S:
        whose = f"the node of ranks {ranks_text(last.ranks)} of {run.run}"
        what = f"{whose} has had no copy of its partner's part for {duration(last.copy_lag_s)}"
        yield _alarm("TierdPeerBehind", WARNING, what, "peers", _on_node(last, "tierd doctor"))


def _on_node(node: NodeReport | None, command: str) -> str:
    """The command as it is typed on this node. Without an address, the person has to find the node by its ranks."""
    host = "" if node is None or node.is_here else node.address.rpartition(":")[0].strip("[]")
    # The address comes from another node. ssh takes a name that begins with "-" as an option.
    return f"ssh {host} {command}" if _HOST.fullmatch(host) else command


def _restart(run: RunReport) -> str:
    """The point where a restart would continue. After a halt, a person decides first."""
    begins = next((risk for risk in run.at_risk if risk.lost == "trainers" and risk.tier is not None), None)
    if begins is None or run.state == RunState.HALTED:
        return ""
    return f". The same command continues at step {begins.step}, from {begins.tier}"


def _why_silent(processes: list[HolderReport]) -> tuple[str, str]:
    """What its processes wait for, if that is known, and the command."""
    stopped = [process.pid for process in processes if process.is_stopped]
    waiting = [process.pid for process in processes if process.state == "D"]
    shown = " ".join(map(str, (stopped or waiting)[:PIDS_MAX]))
    if stopped:
        return f"; process {shown} is stopped, by SIGSTOP or a debugger", f"kill -CONT {shown}"
    if waiting:
        return f"; process {shown} waits for a disk or a driver", f"ps -o stat,wchan -p {shown.replace(' ', ',')}"
    return "", f"py-spy dump --pid {processes[0].pid if processes else 'PID'}"
