"""What `tierd status` prints of a report, and the page with it: where a number holds only with a reservation."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.support.cli import make_house
from tests.support.daemon import Daemon
from tests.support.trainer import Trainer
from tests.support.waiting import DEADLINE_S
from tierd.catalog.entry import NOT_LISTED_YET
from tierd.cli.options import Settings
from tierd.cli.status import print_status
from tierd.format import layout
from tierd.status.alarm_rules import alarms
from tierd.status.report import FailureReport, LostReplica, QueueReport, RunReport, StatusReport, TierReport
from tierd.status.work_at_risk import RiskReport
from tierd.web.pages import run_page

NOW = datetime(2025, 1, 1, tzinfo=UTC)
RUN = RunReport(
    run="gpt",
    generation=1,
    state="running",
    at_risk=[RiskReport(lost="node", tier="cold", step=5, seconds=30.0, gpu_seconds=240.0, steps=3)],
)
HOT = TierReport(name="hot", url="file:///nvme", is_known=True, checkpoints=3, used_bytes=30, listed_age_s=4.0)


def shown(capsys: pytest.CaptureFixture[str], cold: TierReport, run: RunReport = RUN) -> str:
    status = StatusReport(version="0", node="n1", pid=1, uptime_s=9.0, is_ready=True, runs=[run], tiers=[HOT, cold])
    print_status(status, Settings(None))
    is_reserved = run is RUN and not cold.is_known
    assert ("at step 5 from cold, which is not reachable" in run_page(status, run, [], {})) is is_reserved
    return capsys.readouterr().out


def test_a_restart_from_a_tier_that_cannot_be_reached_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    cold = TierReport(name="cold", url="s3://b/p", is_known=True, checkpoints=1, used_bytes=10, listed_age_s=3.0)
    text = shown(capsys, cold)
    assert "  if the node is lost now: 3 steps, 30 s, 4 min 0 s of GPU time; back to step 5 from cold\n" in text
    lost = TierReport(name="cold", url="s3://b/p", is_known=False, error="no connection", checkpoints=1, used_bytes=10)
    text = shown(capsys, lost)
    assert "; back to step 5 from cold, WHICH IS NOT REACHABLE\n" in text
    assert "s3://b/p  NOT REACHABLE: no connection\n" in text


def test_a_tier_that_is_not_listed_yet_may_have_what_the_others_lack(capsys: pytest.CaptureFixture[str]) -> None:
    cold = TierReport(name="cold", url="s3://b/p", is_known=False, error=NOT_LISTED_YET)
    lost = RunReport(run="gpt", generation=1, state="running", at_risk=[RiskReport(lost="node")])
    text = shown(capsys, cold, lost)
    assert "all work is lost: no cold tier has a checkpoint that is known; NOT KNOWN: cold\n" in text
    assert "s3://b/p  note: not listed yet\n" in text


def test_an_old_listing_is_shown_with_its_age(capsys: pytest.CaptureFixture[str]) -> None:
    cold = TierReport(name="cold", url="s3://b/p", is_known=True, checkpoints=1, used_bytes=10, listed_age_s=400.0)
    text = shown(capsys, cold)
    assert "s3://b/p  as listed 6 min 40 s ago\n" in text
    assert "file:///nvme\n" in text


def test_one_failure_is_on_the_screen_twice_and_not_once_for_each_stage(capsys: pytest.CaptureFixture[str]) -> None:
    """As the alarm with its hint, and where the tier is."""
    error = "list s3://b/p: no connection"
    cold = TierReport(name="cold", url="s3://b/p", is_known=False, error=f"{error} (hint: is it up?)")
    failures = [
        FailureReport(
            at=NOW.isoformat(), stage=stage, kind="tier_unreachable", message=error, hint="is it up?", count=9
        )
        for stage in ("list", "replicate")
    ]
    waiting = QueueReport(tier="cold", checkpoints=1)
    status = StatusReport(
        version="0",
        node="n1",
        pid=1,
        uptime_s=900.0,
        is_ready=True,
        tiers=[HOT, cold],
        failures=failures,
        queues=[waiting],
        halted=[f"tier_unreachable: cold: {error}"],
    )
    status.alarms = alarms(status, NOW)
    print_status(status, Settings(None))
    text = capsys.readouterr().out
    assert (text.count(error), text.count("is it up?")) == (2, 1), text


def test_the_check_prints_json_also_where_nothing_is_known(tmp_path: Path) -> None:
    house = make_house(tmp_path, more="wrong = 1")
    result = house.tierd("status", "--check", "--json")
    assert result.exit_code == 3
    assert "wrong" in json.loads(result.stdout)["unknown"]


def test_a_directory_that_is_not_there_has_an_unknown_number_of_checkpoints(tmp_path: Path) -> None:
    house = make_house(tmp_path)
    house.cold.rmdir()
    hot, cold = json.loads(house.tierd("status", "--json").stdout)["tiers"]
    assert (hot["checkpoints"], hot["used_bytes"]) == (0, 0)
    assert (cold["checkpoints"], cold["used_bytes"], cold["error"]) == (None, None, "no such directory")


def test_a_token_that_cannot_be_read_is_named_and_no_daemon_is_missed(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a" * 32)
    (tmp_path / "token").chmod(0o600)
    with Daemon(tmp_path, more='[listen]\ntoken_file = "token"\n') as daemon:
        assert daemon.tierd("status", "--check").returncode == 0
        daemon.config.write_text(daemon.config.read_text().replace('"token"', '"none"'))
        checked = daemon.tierd("status", "--check")
        shown = daemon.tierd("status")
    assert checked.returncode == 2
    assert "/none', although its process" in checked.stdout
    assert "no daemon" not in shown.stdout


def test_a_lost_checkpoint_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    at = datetime.now(UTC).isoformat()
    failures = [
        FailureReport(at=at, stage="list", kind="lost", message="gpt/5 disappeared from cold"),
        FailureReport(at=at, stage="list", kind="lost", message="the marker of cold is gone"),
    ]
    lost = [LostReplica(run="gpt", step=5, generation=1, tier="cold")]
    status = StatusReport(version="0", node="n1", pid=1, uptime_s=9.0, is_ready=True, lost=lost, failures=failures)
    status.alarms = alarms(status, datetime.now(UTC))
    print_status(status, Settings(None))
    text = capsys.readouterr().out
    assert text.count("disappeared from cold") == 1
    assert "the marker of cold is gone" in text


def test_watch_prints_it_again_until_it_is_interrupted(tmp_path: Path) -> None:
    house = make_house(tmp_path)
    assert house.tierd("status", "--watch", "--check").exit_code == 2
    watching = house.start("status", "--watch")
    try:
        lines = [watching.stdout.readline() for _ in range(30)]
        watching.send_signal(signal.SIGINT)
        assert watching.wait(DEADLINE_S) == 128 + signal.SIGINT
    finally:
        watching.kill()
        watching.communicate()
    assert sum(line.startswith("CRITICAL: no daemon runs here") for line in lines) >= 2
    assert "\x1b" not in "".join(lines)


def test_watch_ends_where_the_config_is_wrong(tmp_path: Path) -> None:
    house = make_house(tmp_path, more="[lifecycle.hto]\nkeep_last = 3")
    watched = house.tierd("status", "--watch")
    assert watched.exit_code == 2
    assert "there is no key" in watched.stderr


def test_watch_keeps_the_screen_until_there_is_a_new_status(tmp_path: Path) -> None:
    """A daemon that hangs is asked for seconds. Meanwhile the terminal shows what was known."""
    house = make_house(tmp_path)
    leader, follower = pty.openpty()
    os.set_blocking(leader, False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(DEADLINE_S)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        (house.hot / layout.LOCK).write_text(json.dumps({"pid": 1, "listen": address}))
        command = [sys.executable, "-m", "tierd", "--config", str(house.config), "status", "--watch"]
        watching = subprocess.Popen(command, stdout=follower, stderr=follower)
        try:
            shown: list[str] = []
            for _ in range(2):
                asked, _address = listener.accept()  # the command waits for the answer
                with contextlib.suppress(BlockingIOError):
                    shown.append(os.read(leader, 1 << 16).decode())
                asked.close()
        finally:
            watching.kill()
            watching.wait()
            os.close(leader)
            os.close(follower)
    (screen,) = shown
    assert screen.startswith("\x1b[2J\x1b[H")
    assert screen.count("\x1b[2J") == 1
    assert "although" in screen or "no daemon answers" in screen


def drip(listener: socket.socket) -> None:
    """Answers with one byte every 50 ms, for two seconds."""
    with contextlib.suppress(OSError):
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            for _ in range(40):
                connection.sendall(b" ")
                time.sleep(0.05)


def test_an_answer_of_one_byte_at_a_time_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program may have the port."""
    monkeypatch.setattr("tierd.cli.daemon_http.TIMEOUT_S", 0.1)
    house = make_house(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        house.config.write_text(house.config.read_text().replace(":0", f":{listener.getsockname()[1]}"))
        thread = threading.Thread(target=drip, args=(listener,))
        thread.start()
        checked = house.tierd("status", "--check")
        is_dripping = thread.is_alive()
        thread.join()
    assert is_dripping
    assert (checked.exit_code, "no whole answer within 1 s" in checked.stdout) == (2, True), checked.stdout


def test_a_run_that_has_just_begun_has_a_rate_and_no_forecast_yet(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon, Trainer() as trainer:
        trainer.connect(daemon.socket)
        trainer.train(1)
        trainer.snapshot()
        trainer.wait_replicated()
        hot, cold = daemon.status()["tiers"]
        text = daemon.tierd("status").stdout
    assert hot["disk"]["verdict"] == "unknown"
    assert cold["disk"] is None, "it is on hot's disk"
    assert min(hot["write_bytes_per_s"], cold["write_bytes_per_s"]) > 0
    assert "hot: full at an unknown time" in text
    assert "written in the last minute: " in text
