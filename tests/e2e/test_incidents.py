"""Incidents that are staged on a real daemon and a real trainer: what `tierd status` and the metrics say of each."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from tests.support.daemon import Daemon
from tests.support.trainer import Trainer
from tests.support.waiting import wait_until


def named(daemon: Daemon) -> set[str]:
    return {alarm["alert"] for alarm in daemon.status()["alarms"]}


def test_takeover_killed_trainer_and_hung_daemon_are_named(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon, Trainer() as old, Trainer() as new:
        old.connect(daemon.socket)
        old.train(2)
        old.durable()
        assert daemon.tierd("status", "--check").returncode == 0
        assert daemon.metric('tierd_run_state{run="run",state="running"}') == 1
        assert daemon.metric('tierd_run_pause_seconds{run="run"}') >= 0
        (run,) = daemon.status()["runs"]
        risks: dict[str, Any] = {risk["lost"]: risk["tier"] for risk in run["at_risk"]}
        assert risks["trainers"] == "memory"
        assert risks["node"] is risks["region"] is None, "cold is a directory on hot's disk"
        shown = daemon.tierd("status").stdout
        assert "if the node is lost now: all work is lost: no cold tier off hot's disk has a checkpoint" in shown
        assert f"file://{daemon.cold}  on hot's disk\n" in shown
        new.connect(daemon.socket)
        wait_until(lambda: "TierdFenced" in named(daemon), "the takeover")
        assert daemon.metric('tierd_failures_total{kind="stale",stage="wire"}') >= 1
        assert daemon.metric("tierd_fenced_total") == 1
        new.kill()
        wait_until(lambda: "TierdRunEnded" in named(daemon), "the killed trainer")
        assert daemon.metric('tierd_run_state{run="run",state="lost"}') == 1
        assert daemon.tierd("status", "--check").returncode == 1
        pid = daemon.pid
        daemon.signal(signal.SIGSTOP)
        hung, checked = daemon.tierd("status"), daemon.tierd("status", "--check")
        daemon.signal(signal.SIGCONT)
    assert hung.returncode == 13
    assert f"next: kill -CONT {pid}" in hung.stdout
    assert "no daemon" not in hung.stdout
    assert f"its process {pid} holds the lock" in hung.stderr
    assert checked.returncode == 2
    assert checked.stdout.startswith("CRITICAL: the daemon")
