"""A daemon that was restarted knows which runs had trainers here, and names those that do not come back."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import Daemon
from tests.support.processes import run_tierd
from tests.support.stage import named
from tests.support.trainer import Trainer
from tests.support.waiting import wait_until
from tierd.format import layout
from tierd.workers import attached_runs

GRACE_S = 2.0


def run_impatient(arguments: list[str], environ: Mapping[str, str], log: str) -> None:
    attached_runs.RECONNECT_GRACE_S = GRACE_S
    run_tierd(arguments, environ, log)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path)
    daemon.run_with(run_impatient)
    with daemon:
        yield daemon


@pytest.fixture
def trainer(daemon: Daemon) -> Iterator[Trainer]:
    with Trainer() as trainer:
        trainer.connect(daemon.socket)
        trainer.train(2)
        trainer.durable()
        wait_until(lambda: states(daemon) == ["running"], "the record of the run")
        yield trainer


def states(daemon: Daemon) -> list[str]:
    """Of the runs in the file."""
    with suppress(FileNotFoundError, json.JSONDecodeError):
        return [run["state"] for run in json.loads((daemon.hot / layout.ATTACHED_RUNS).read_bytes())["runs"]]
    return []


def run_of(daemon: Daemon) -> dict[str, Any]:
    (run,) = daemon.status()["runs"]
    return run


@pytest.mark.long
def test_a_run_whose_trainer_is_stopped_over_a_restart_is_lost_until_it_continues(
    daemon: Daemon, trainer: Trainer
) -> None:
    trainer.signal(signal.SIGSTOP)
    daemon.kill()
    daemon.start()
    assert run_of(daemon)["state"] is None, "it may come back"
    wait_until(lambda: "TierdRunEnded" in named(daemon), "the alarm")
    assert (
        "its trainers are lost: rank 0 did not attach again after a restart"
        in named(daemon)["TierdRunEnded"]["message"]
    )
    assert run_of(daemon)["state"] == "lost"
    assert daemon.metric('tierd_run_state{run="run",state="lost"}') == 1
    assert daemon.tierd("status", "--check").returncode == 1
    assert "killed, stopped by SIGSTOP, refused, or ended while no daemon ran" in daemon.tierd("status").stdout.replace(
        "\n", " "
    )
    assert states(daemon) == ["lost"]

    trainer.signal(signal.SIGCONT)
    wait_until(lambda: run_of(daemon)["state"] == "running", "the trainer")
    assert "TierdRunEnded" not in named(daemon)
    trainer.train(1)
    trainer.durable()
    wait_until(lambda: states(daemon) == ["running"], "the record of the run")


def test_a_run_whose_trainer_was_killed_while_no_daemon_ran_is_lost_until_it_starts_again(
    daemon: Daemon, trainer: Trainer
) -> None:
    daemon.kill()
    trainer.kill()
    daemon.start()
    wait_until(lambda: "TierdRunEnded" in named(daemon), "the alarm")
    daemon.kill()
    daemon.start()
    wait_until(lambda: run_of(daemon)["state"] == "lost", "what is known")
    with Trainer(seed=2) as second:
        assert second.connect(daemon.socket) == 2
        assert run_of(daemon)["state"] == "running"
        second.close()
        wait_until(lambda: states(daemon) == [], "the end in the record")


@pytest.mark.long
def test_a_trainer_that_ends_while_no_daemon_runs_is_a_warning_that_names_this_as_a_reason(
    daemon: Daemon, trainer: Trainer
) -> None:
    """No daemon knows how it ended. The alarm is not critical, and it ends after a day, or with the next start."""
    daemon.kill()
    trainer.close()
    assert trainer.leave() == 0
    daemon.start()
    wait_until(lambda: "TierdRunEnded" in named(daemon), "the alarm")
    alarm = named(daemon)["TierdRunEnded"]
    assert alarm["severity"] == "warning"
    assert "or ended while no daemon ran" in alarm["message"]


def test_a_trainer_that_lives_through_restarts_is_never_lost(daemon: Daemon, trainer: Trainer) -> None:
    assert daemon.stop() == 0
    assert states(daemon) == ["running"], "an upgrade ends no trainer"
    daemon.start()
    ends_s = time.monotonic() + GRACE_S + 1.0
    while time.monotonic() < ends_s:
        assert run_of(daemon)["state"] in (None, "running")
        time.sleep(0.1)
    assert run_of(daemon)["state"] == "running"
    trainer.close()
    wait_until(lambda: states(daemon) == [], "the end in the record")
    daemon.kill()
    daemon.start()
    assert run_of(daemon)["state"] is None


def test_a_damaged_record_does_not_keep_the_daemon_from_its_work(daemon: Daemon, trainer: Trainer) -> None:
    daemon.kill()
    (daemon.hot / layout.ATTACHED_RUNS).write_bytes(b'{"runs": [')
    daemon.start()
    wait_until(lambda: states(daemon) == ["running"], "the record of the run")
    assert daemon.log.count("it is ignored: runs of the former daemon") == 1
    trainer.train(1)
    trainer.durable()
