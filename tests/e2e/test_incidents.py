"""Incidents that are staged on a real daemon, trainer and bucket, with a real Prometheus beside them.

Of each: `tierd status` and the alert name it, what docs/RUNBOOK.md says cures it, and no durable checkpoint is lost.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_nodes_copies import lose, safe
from tests.e2e.test_nodes_peers import peers
from tests.e2e.test_nodes_restore import hold_cold
from tests.support.bucket import bucket_server
from tests.support.cli import flip_a_bit
from tests.support.daemon import Daemon
from tests.support.nodes import connect_on
from tests.support.prometheus import prometheus
from tests.support.runbook import Section
from tests.support.s3 import ACCESS_KEY, SECRET_KEY
from tests.support.small_disk import small_disk
from tests.support.stage import KEEP_ALL, NAMED_WITHIN_S, assert_shown, bucket, named, staged
from tests.support.trainer import Trainer, joined, together
from tests.support.waiting import wait_until
from tierd.format import layout
from tierd.memory.progress import SILENT_MIN_S


@pytest.mark.long
def test_disk_full(tmp_path: Path) -> None:
    """By something else. Cold takes the snapshot meanwhile."""
    with small_disk(tmp_path / "hot", size_mib=4) as hot, staged(tmp_path, is_empty=True) as stage:
        filler = hot / ".filler"
        about = os.statvfs(hot)
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, about.f_bavail * about.f_frsize - 4096)
        stage.save()
        section = stage.assert_named("TierdDiskFull", "No space left")
        assert str(hot) in stage.run(section.command("df -h HOT", HOT=hot)).stdout
        assert stage.run(section.command("tierd lifecycle --explain")).returncode == 0
        section.says("Free space")
        filler.unlink()
        section.says("tierd continues by itself when there is space.")
        stage.save()
        stage.assert_cured()
        assert 2 in stage.daemon.steps("hot")
        stage.assert_nothing_lost()


@pytest.mark.long
@pytest.mark.parametrize("code", ["SlowDown", "ServiceUnavailable"])
def test_bucket_overloaded(tmp_path: Path, code: str) -> None:
    with bucket_server() as served, staged(tmp_path, cold=bucket(served)) as stage:
        served.script = lambda operation, key: code
        stage.save(durable_in="hot")
        section = stage.assert_named("TierdColdRequestsFail", code)
        section.says("SlowDown, 503: the server is overloaded")
        served.script = lambda operation, key: ""
        stage.reload(section)
        stage.save()
        stage.assert_cured()
        assert {1, 3} <= set(stage.daemon.steps("cold")), "2 may have been replaced by 3 while it waited"
        stage.assert_nothing_lost()


@pytest.mark.long
def test_wrong_credentials(tmp_path: Path) -> None:
    """The key is replaced in the bucket, and later in the file where the daemon reads it."""
    keys = tmp_path / "credentials"
    text = f"[default]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
    keys.write_text(text)
    environ = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_SHARED_CREDENTIALS_FILE": str(keys)}
    with bucket_server() as served, staged(tmp_path, cold=bucket(served), environ=environ) as stage:
        served.access_keys = {"ANOTHERKEY"}
        stage.save(durable_in="hot")
        section = stage.assert_named("TierdColdRequestsFail", "S3 does not know this access key")
        assert "S3 does not know this access key" in stage.run(section.command("tierd doctor --tier cold")).stdout
        section.says("Replace them; no restart is needed.")
        keys.write_text(text.replace(ACCESS_KEY, "ANOTHERKEY"))
        stage.reload(section)
        stage.save()
        stage.assert_cured()
        assert SECRET_KEY not in stage.daemon.log
        stage.assert_nothing_lost()


@pytest.mark.long
def test_trainer_silent(tmp_path: Path) -> None:
    """It takes half a minute: the least that a run may be silent."""
    with staged(tmp_path) as stage:
        stage.save()
        stage.trainer.apply(train_with_due, 1.5)  # longer than a report of step times takes
        wait_until(lambda: stage.daemon.metric('tierd_run_pause_limit_seconds{run="run"}') == SILENT_MIN_S, "its steps")
        stage.trainer.signal(signal.SIGSTOP)
        section = stage.assert_named("TierdRunSilent", "gave no sign for")
        pid = stage.trainer.pid
        assert named(stage.daemon)["TierdRunSilent"]["command"] == f"kill -CONT {pid}"
        assert "T" in stage.run(section.command("ps -o stat,wchan -p PID", PID=pid)).stdout.splitlines()[1]
        assert stage.run(section.command("kill -CONT PID", PID=pid)).returncode == 0
        stage.save()
        stage.assert_cured()
        stage.assert_nothing_lost()


def train_with_due(training: Any, seconds: float) -> None:
    """As a training loop does, for so long."""
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s:
        training.train(1)
        training.client.due(training.step)


@pytest.mark.long
@pytest.mark.parametrize("tier", ["hot", "cold"])
def test_corrupt_replica(tmp_path: Path, tier: str) -> None:
    """Found by the scrub, which may not repair it here."""
    scrub = "[scrub]\ninterval_s = 1.0\ndeep_share = 1.0\nrepair = false\n"
    environ = {"TIERD_SCRUB_INTERVAL_S": "1.0"}
    with staged(tmp_path, more=KEEP_ALL + scrub, environ=environ) as stage:
        stage.save()
        flip_a_bit(next(stage.daemon.folder(1, tier=tier).glob("*.safetensors")))
        section = stage.assert_named("TierdDamagedReplica", "DELETION HALTED")
        assert stage.assert_named("TierdVerifyFailed").anchor == "corrupt-chunk"
        values = {"RUN": "run", "N": 1}
        checked = stage.run(section.command("tierd verify --run RUN --step N --deep", **values))
        assert checked.returncode == 12, checked.stdout
        repair = section.next("corrupt-chunk").command("tierd verify --run RUN --step N --deep --repair", **values)
        assert stage.run(repair).returncode == 0
        stage.assert_cured("TierdVerifyFailed")
        (stage.daemon.root / ("cold" if tier == "hot" else "hot") / "run").rename(tmp_path / "aside")
        stage.assert_nothing_lost()


@pytest.mark.long
def test_bucket_emptied(tmp_path: Path) -> None:
    """It had versions, so that all can be brought back. Hot has sent what it still had before."""
    keep = "[lifecycle.hot]\nkeep_last = 1\n[lifecycle.cold]\nkeep_last = 100\n"
    with bucket_server() as served, staged(tmp_path, cold=bucket(served), more=keep) as stage:
        for _ in range(2):
            stage.save()
        wait_until(lambda: stage.daemon.steps("hot") == [3], "the policy of hot")
        with served.lock:
            versions = dict(served.objects)
            served.objects.clear()
        section = stage.assert_named("TierdCheckpointsLost", "LOST: ", "000000000001-g0001", "disappeared from cold")
        wait_until(lambda: stage.daemon.steps("cold") == [3], "what hot sends again")
        assert stage.run(section.command("tierd ls")).returncode == 0
        section.says("Restore the shards first and `manifest.json` last.")
        for key in sorted(versions, key=lambda key: key.endswith(layout.MANIFEST)):
            with served.lock:
                served.objects.setdefault(key, versions[key])
        stage.assert_cured("TierdCheckpointsLost")
        assert stage.daemon.steps("cold") == [1, 2, 3]
        stage.assert_nothing_lost()


@pytest.mark.long
def test_node_lost(tmp_path: Path) -> None:
    """With its disk, before cold has the newest step: a spare continues with the copy on its partner."""
    with peers(tmp_path, "a", "b", "spare") as (first, second, spare), ExitStack() as stack:
        observer = stack.enter_context(prometheus(tmp_path / "prometheus", [first.url, second.url]))
        with joined(tmp_path, 4) as trainers:
            connect_on([first, second], trainers)
            together(trainers, "restore")
            hold_cold(second)
            digests = safe(trainers)
            assert not named(first)
            lose(second)
            alarm = wait_until(lambda: named(first).get("TierdDown"), "the alarm", NAMED_WITHIN_S)
            assert_shown(first, alarm, "1 of 2 nodes of run do not answer (ranks 2-3)")
            observer.wait_firing("TierdDown")
        section = Section(alarm["runbook"])
        section.says("start the run again on a spare")
        with joined(tmp_path, 4, seed=2) as trainers:
            connect_on([first, spare], trainers)
            assert {found.step for found in together(trainers, "restore")} == {1}
            assert together(trainers, "digest") == digests
            wait_until(lambda: not named(first), "no alarm", NAMED_WITHIN_S)
            assert first.tierd("status", "--check").returncode == 0


def test_takeover_killed_trainer_and_hung_daemon_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        monkeypatch.setattr("tierd.cli.daemon_http.TIMEOUT_S", 0.5)
        daemon.signal(signal.SIGSTOP)
        hung, checked = daemon.tierd("status"), daemon.tierd("status", "--check")
        daemon.signal(signal.SIGCONT)
    assert hung.returncode == 13
    assert f"next: kill -CONT {pid}" in hung.stdout
    assert "no daemon" not in hung.stdout
    assert f"its process {pid} holds the lock" in hung.stderr
    assert checked.returncode == 2
    assert checked.stdout.startswith("CRITICAL: the daemon")


def test_a_killed_rank_whose_others_hang_is_named(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        with joined(tmp_path, 2) as trainers:
            together(trainers, "connect", daemon.socket)
            together(trainers, "durable")
            assert named(daemon) == {}
            trainers[1].kill()
            alarm = wait_until(lambda: named(daemon).get("TierdRunEnded"), "the killed rank")
            assert "run trains without all of its ranks: rank 1 lost" in alarm["message"]
            assert alarm["command"] == "tierd stop --run run --force"
            assert (
                "1 of 2 ranks attached, running (rank 1 lost: it ended without a message"
                in daemon.tierd("status").stdout
            )
            Section(alarm["runbook"]).says("trains without all of its ranks")
        with joined(tmp_path, 2) as trainers:
            together(trainers, "connect", daemon.socket)
            assert named(daemon) == {}
