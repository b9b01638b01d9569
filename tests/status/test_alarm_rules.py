"""What `tierd status` calls wrong: each rule agrees with an alert, and is silent when nothing is wrong."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from tests.test_grafana import rules
from tierd.catalog.entry import NOT_LISTED_YET
from tierd.memory.progress import Pause
from tierd.status.alarm_rules import alarms
from tierd.status.folder_reports import SidecarReport, WatchReport
from tierd.status.node_reports import NewestCheckpoint, NewestPart, NodeReport, NodesReport
from tierd.status.report import (
    Alarm,
    FailureReport,
    HolderReport,
    LostReplica,
    QueueReport,
    RunReport,
    Severity,
    StatusReport,
    TierReport,
)
from tierd.status.work_at_risk import RiskReport

NOW = datetime(2025, 1, 1, 12, tzinfo=UTC)
HOT = TierReport(name="hot", url="file:///nvme", is_known=True, checkpoints=2, free_bytes=1000, room_bytes=20)
UNLISTED = TierReport(name="cold", url="s3://bucket/prefix", is_known=False, error=NOT_LISTED_YET)
BUCKET = TierReport(name="cold", url="s3://bucket/prefix", is_known=True, checkpoints=2, used_bytes=20)


def status(**fields: Any) -> StatusReport:
    defaults: dict[str, Any] = {"pid": 42, "uptime_s": 9.0, "is_ready": True, "tiers": [HOT, BUCKET]}
    return StatusReport(version="0", node="here", **defaults | fields)


def failed(stage: str, kind: str, *, at: str = "2025-01-01T11:55:00+00:00", hint: str = "") -> StatusReport:
    queues = [QueueReport(tier="hot", checkpoints=1, oldest_age_s=1.0), QueueReport(tier="cold", checkpoints=1)]
    return status(failures=[FailureReport(at=at, stage=stage, kind=kind, message="x", hint=hint)], queues=queues)


def newest(step: int, age_s: float = 1.0, *, generation: int = 1) -> NewestCheckpoint:
    return NewestCheckpoint(step=step, generation=generation, created_at="", age_s=age_s)


def of_run(**fields: Any) -> StatusReport:
    defaults: dict[str, Any] = {"generation": 1, "state": "running"}
    return status(runs=[RunReport(run="gpt", **defaults | fields)])


def of_nodes(**fields: Any) -> StatusReport:
    return of_run(nodes=NodesReport(ranks=[0], world_size=2, **fields))


def node(**fields: Any) -> NodeReport:
    return NodeReport(**{"ranks": [1], "address": "n2:9465", "is_here": False} | fields)


def followed(*, behind_s: float = 0.0, **fields: Any) -> SidecarReport:
    return SidecarReport(path="/out", run="gpt", files=1, size_bytes=10, behind_s=behind_s, **fields)


def watched(**fields: Any) -> WatchReport:
    return WatchReport(path="/out", run="hf", preset="lightning", is_there=True, **fields)


def copied(**fields: Any) -> QueueReport:
    """The last copy was a second ago."""
    return QueueReport(tier="cold", last_copy_age_s=1.0, **fields)


TRAINS = RunReport(run="gpt", generation=1, state="running", tiers={"hot": newest(5)})
SLOW = QueueReport(tier="cold", checkpoints=1, given_up={"replaced": 3}, given_up_age_s={"replaced": 9.0})
PART = NewestPart(ranks=[1], world_size=2, step=5, generation=1, created_at="", age_s=1801.0)
WRONG: list[tuple[str, StatusReport]] = [
    ("TierdDown", status(pid=None)),
    ("TierdDown", status(pid=None, holder=HolderReport(pid=7, state="T"))),
    ("TierdLoopStuck", failed("loop", "transient")),
    ("TierdDrillFailed", failed("drill", "transient")),
    ("TierdDiskFull", failed("persist", "full")),
    ("TierdCopiesGivenUp", failed("reap", "given_up")),
    ("TierdVerifyFailed", failed("scrub", "corrupt")),
    ("TierdCheckpointsLost", failed("list", "lost")),
    ("TierdUnhealthy", failed("examine", "corrupt")),
    ("TierdStaleSnapshots", failed("examine", "corrupt", hint="docs/RUNBOOK.md#stale-snapshots")),
    ("TierdWatchProblem", status(watches=[watched(problems=["x"])])),
    ("TierdSidecarLag", status(sidecars=followed(problems=["x"]))),
    ("TierdSidecarLag", status(sidecars=followed(behind_s=601.0))),
    ("TierdSidecarRewritten", status(sidecars=followed(rewritten={".loss.json": 1}))),
    ("TierdFenced", failed("wire", "stale")),
    ("TierdBug", failed("list", "bug")),
    ("TierdNotDurable", failed("persist", "transient")),
    ("TierdNotDurable", status(queues=[QueueReport(tier="hot", checkpoints=1, oldest_age_s=50.0)])),
    ("TierdColdRequestsFail", failed("replicate", "transient")),
    ("TierdCheckpointsLost", status(lost=[LostReplica(run="gpt", step=1, generation=1, tier="cold")])),
    ("TierdForeignCheckpoints", status(foreign=["x is not signed"])),
    ("TierdDiskAlmostFull", status(tiers=[msgspec.structs.replace(HOT, free_bytes=19)])),
    ("TierdHalted", status(tiers=[TierReport(name="hot", url="file:///nvme", is_known=False, error="I/O error")])),
    ("TierdColdRequestsFail", status(tiers=[TierReport(name="cold", url="s3://b/p", is_known=False, error="403")])),
    ("TierdColdRequestsFail", status(tiers=[UNLISTED], uptime_s=601.0)),
    ("TierdHalted", status(halted=["unreadable_manifest: x"])),
    ("TierdHalted", status(halted=["shared_generation: x"])),
    ("TierdDamagedReplica", status(halted=["damaged_replica: x"])),
    ("TierdColdBehind", status(queues=[QueueReport(tier="cold", checkpoints=1, oldest_age_s=3601.0)])),
    ("TierdColdStalled", status(queues=[QueueReport(tier="cold", checkpoints=1, last_copy_age_s=3601.0)])),
    ("TierdColdTooSlow", status(queues=[SLOW])),
    ("TierdRunEnded", of_run(state="lost", ended_age_s=9.0)),
    ("TierdRunEnded", of_run(reason="rank 1 lost: killed", tiers={"hot": newest(5)})),
    ("TierdRunSilent", of_run(pause=Pause(31.0, 30.0))),
    ("TierdNoNewCheckpoint", of_run(tiers={"hot": newest(5, 4 * 3600 + 1.0)})),
    ("TierdNoNewCheckpoint", of_run(tiers={"memory": None, "hot": None, "cold": None}, attached_s=4 * 3600 + 1.0)),
    ("TierdNoNewCheckpoint", of_nodes(everywhere=newest(5, 4 * 3600 + 1.0), parts={"hot": PART})),
    ("TierdNewerGeneration", of_run(newer_generation=2)),
    ("TierdUnhealthy", of_run(unhealthy_steps=[6], tiers={"hot": newest(5)})),
    ("TierdUnhealthy", of_run(generation=2, unhealthy_steps=[6], unhealthy_generation=2, tiers={"hot": newest(9)})),
    ("TierdCommitStalled", of_nodes(awaited={"cold": PART})),
    ("TierdDown", of_nodes(roster=[node(problem="connection refused")])),
    ("TierdPeerBehind", of_nodes(roster=[node(copy_lag_s=901.0)])),
]  # fmt: skip
RIGHT = [
    status(),
    status(tiers=[UNLISTED], uptime_s=9.0),
    status(queues=[QueueReport(tier="hot", checkpoints=1, oldest_age_s=10.0), QueueReport(tier="cold", checkpoints=1)]),
    status(halted=["tier_unreachable: the tier itself says it"]),
    failed("wire", "full", at="2025-01-01T11:40:00+00:00"),
    failed("stage", "full"),  # memory that could not be page-locked
    msgspec.structs.replace(failed("persist", "full"), runs=[TRAINS], queues=[]),  # five minutes ago
    msgspec.structs.replace(failed("audit", "full"), runs=[TRAINS], queues=[]),  # on the same disk
    msgspec.structs.replace(failed("replicate", "transient"), queues=[copied(checkpoints=1)]),
    status(queues=[copied(checkpoints=0, given_up={"replaced": 3}, given_up_age_s={"replaced": 9.0})]),
    status(watches=[watched(notes=["it is not there"])]),
    of_run(pause=Pause(29.0, 30.0), tiers={"hot": newest(5)}, unhealthy_steps=[4]),
    of_run(unhealthy_steps=[6], unhealthy_generation=1, generation=2, tiers={"hot": newest(4)}),  # it has gone back
    of_run(
        state="finished",
        unhealthy_steps=[6],
        unhealthy_generation=1,
        generation=2,
        tiers={"hot": newest(5, generation=2)},
    ),
    of_run(unhealthy_steps=[4], nodes=NodesReport(ranks=[0], world_size=2, parts={"hot": PART})),
    of_run(state="finished", tiers={"hot": newest(5, 1e6)}),
    of_run(tiers={"hot": newest(5, 1e6)}, attached_s=300.0),  # it has rested
    of_run(tiers={"hot": None, "cold": newest(5, 9.0)}, attached_s=1e6),  # hot is full
    of_run(attached_s=1e6, nodes=NodesReport(ranks=[0], world_size=2, parts={"hot": PART})),
    of_run(state="lost", ended_age_s=25 * 3600.0),
    of_nodes(roster=[node()], awaited={}),
]


@pytest.mark.parametrize(("alert", "wrong"), WRONG, ids=[f"{alert}-{at}" for at, (alert, _) in enumerate(WRONG)])
def test_what_is_wrong_is_named_with_its_alert_its_section_and_a_command(alert: str, wrong: StatusReport) -> None:
    named = {alarm.alert: alarm for alarm in alarms(wrong, NOW)}
    assert alert in named
    of_alert = next(rule for rule in rules() if rule["alert"] == alert)
    assert named[alert].severity == of_alert["labels"]["severity"]
    assert named[alert].command
    assert named[alert].message


@pytest.mark.parametrize("right", RIGHT)
def test_nothing_is_named_when_nothing_is_wrong(right: StatusReport) -> None:
    assert alarms(right, NOW) == []


def test_checkpoint_with_nan_is_named_once_and_never_as_damaged_bytes() -> None:
    failure = FailureReport(at="2025-01-01T11:55:00+00:00", stage="examine", kind="corrupt", message="x", run="gpt")
    wrong = msgspec.structs.replace(of_run(unhealthy_steps=[6], tiers={"hot": newest(5)}), failures=[failure])
    (alarm,) = alarms(wrong, NOW)
    assert (alarm.alert, alarm.runbook) == ("TierdUnhealthy", "unhealthy-checkpoint")
    assert alarm.command == "tierd stop --run gpt"
    (alarm,) = alarms(of_run(state="finished", unhealthy_steps=[6]), NOW)
    assert alarm.command == "tierd show gpt 6", "there is nothing to stop"


@pytest.mark.parametrize(("in_hot", "is_over"), [(newest(5, 1e4), True), (newest(4, 1e4), False), (None, False)])
@pytest.mark.parametrize("generation", [1, 2])
def test_a_snapshot_that_hot_has_taken_after_all_ends_the_alarm(
    in_hot: NewestCheckpoint | None, is_over: bool, generation: int
) -> None:
    """Its trainers are dead: no later one will come."""
    failure = msgspec.structs.replace(failed("persist", "full").failures[0], run="gpt", step=5)
    full = of_run(state="finished", generation=generation, tiers={"hot": in_hot})
    named = {alarm.alert for alarm in alarms(msgspec.structs.replace(full, failures=[failure]), NOW)}
    # A checkpoint of a former generation is not the snapshot that failed.
    assert ("TierdDiskFull" not in named) is (is_over and generation == 1)


def test_a_daemon_that_is_stopped_is_continued_and_not_started_again() -> None:
    (alarm,) = alarms(status(pid=None, holder=HolderReport(pid=7, state="T")), NOW)
    assert (alarm.severity, alarm.command) == (Severity.CRITICAL, "kill -CONT 7")


def test_a_daemon_that_cannot_be_asked_is_not_said_to_be_absent() -> None:
    (alarm,) = alarms(status(pid=None, silence="HTTP 401 Unauthorized"), NOW)
    assert alarm.message == "it is not known whether a daemon takes snapshots here: HTTP 401 Unauthorized"
    (alarm,) = alarms(status(pid=None), NOW)
    assert alarm.message.startswith("no daemon runs here: no snapshots are taken")


def test_many_lost_checkpoints_are_one_alarm_for_each_tier_and_run() -> None:
    lost = [LostReplica(run="gpt", step=step, generation=1, tier=tier) for tier in ("cold", "dr") for step in range(9)]
    wrong = status(lost=lost, failures=failed("list", "lost").failures)
    of_cold, of_dr = alarms(wrong, NOW)
    assert "gpt/000000000002-g0001 and 6 more disappeared from cold" in of_cold.message
    assert "disappeared from dr" in of_dr.message


@pytest.mark.parametrize(
    ("message", "command"), [("write x in file:///nvme: no space", "df -h /nvme"), ("write x: no space", "df -h")]
)
def test_a_full_disk_is_named_in_the_command_if_it_is_that_of_a_tier(message: str, command: str) -> None:
    failure = msgspec.structs.replace(failed("persist", "full").failures[0], message=message)
    alarm = alarms(status(failures=[failure]), NOW)[0]
    assert (alarm.alert, alarm.command) == ("TierdDiskFull", command)


def test_lost_checkpoints_that_are_back_are_still_named_and_so_is_that_they_are_back() -> None:
    """Whoever has deleted them may do it again."""

    def named(message: str) -> str:
        failure = msgspec.structs.replace(failed("list", "lost").failures[0], message=message)
        (alarm,) = alarms(status(failures=[failure]), NOW)
        assert alarm.alert == "TierdCheckpointsLost"
        return alarm.message

    assert named("x disappeared from cold") == "LOST: x disappeared from cold. None is missing now"
    assert named("cold had a marker and has none now") == "LOST: cold had a marker and has none now", "not listed since"


@pytest.mark.parametrize(
    ("alert", "wrong", "command"),
    [
        ("TierdCommitStalled", of_nodes(awaited={"cold": PART}), "tierd doctor --tier cold"),
        ("TierdCommitStalled", of_nodes(awaited={"cold": PART}, roster=[node()]), "ssh n2 tierd doctor --tier cold"),
        ("TierdDown", of_nodes(roster=[node(problem="connection refused")]), "ssh n2 tierd status"),
        ("TierdPeerBehind", of_nodes(roster=[node(copy_lag_s=901.0)]), "ssh n2 tierd doctor"),
    ],
)
def test_an_alarm_about_another_node_leads_to_that_node(alert: str, wrong: StatusReport, command: str) -> None:
    """And not to the command that has printed it."""
    (alarm,) = (each for each in alarms(wrong, NOW) if each.alert == alert)
    assert alarm.command == command
    if alert != "TierdCommitStalled":
        assert "n2:9465" in alarm.message or "ranks 1 " in alarm.message


@pytest.mark.parametrize("address", ["-oProxyCommand=reboot:9465", "n2; reboot:9465", "$(reboot):9465", "n2", ""])
def test_a_command_of_an_alarm_holds_no_address_that_a_shell_or_ssh_would_run(address: str) -> None:
    wrong = of_nodes(roster=[node(problem="connection refused", copy_lag_s=901.0, address=address)])
    commands = {alarm.command for alarm in alarms(wrong, NOW)}
    assert commands == ({"tierd status", "tierd doctor"} if address else {"tierd doctor"})


def test_critical_alarms_come_first() -> None:
    wrong = status(lost=[LostReplica(run="gpt", step=1, generation=1, tier="cold")], halted=["unreadable_manifest: x"])
    assert [alarm.severity for alarm in alarms(wrong, NOW)] == [Severity.CRITICAL, Severity.WARNING]


@pytest.mark.parametrize("state", ["lost", "failed", "halted"])
def test_a_run_that_has_ended_is_named_with_where_a_restart_begins(state: str) -> None:
    risk = RiskReport(lost="trainers", tier="hot", step=160)
    (alarm,) = alarms(of_run(state=state, reason="x", ended_age_s=9.0, at_risk=[risk]), NOW)
    assert ("The same command continues at step 160, from hot" in alarm.message) == (state != "halted")
    assert ("oom-kill" in alarm.command) == (state == "lost")


def test_silent_trainers_are_named_with_their_processes_and_one_that_is_stopped_is_continued() -> None:
    def named(*processes: HolderReport) -> Alarm:
        (alarm,) = alarms(of_run(pause=Pause(31.0, 30.0), processes=list(processes)), NOW)
        return alarm

    assert named().command == "py-spy dump --pid PID", "of another container"
    asleep, stopped = HolderReport(pid=7, state="S"), HolderReport(pid=8, state="T")
    assert named(asleep).command == "py-spy dump --pid 7"
    both = named(asleep, stopped)
    assert both.command == "kill -CONT 8"
    assert both.message.endswith("; process 8 is stopped, by SIGSTOP or a debugger")
    waits = named(HolderReport(pid=9, state="D"))
    assert (waits.command, "process 9 waits for a disk or a driver" in waits.message) == ("ps -o stat,wchan -p 9", True)
