"""`tierd stop` and `tierd snapshot` with real trainers: their effect, output and exit codes."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import Daemon
from tests.support.trainer import Trainer, Training, joined, together
from tests.support.waiting import DEADLINE_S, wait_until

FOREVER = 1_000_000
STEP_S = 0.005  # without it, each training of these tests takes a core from the daemon and from other tests


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path) as daemon:
        yield daemon


@contextmanager
def training(
    daemon: Daemon, world_size: int = 1, *, is_deaf: bool = False, own: str | None = None
) -> Generator[list[Trainer]]:
    """Trainers of a run that train until a stop request."""
    with joined(daemon.root, world_size) as trainers:
        together(trainers, "connect", daemon.socket, every_steps=0)
        together(trainers, "enter")
        for trainer in trainers:
            trainer.begin("apply", _loop, is_deaf, own)
        yield trainers


def _loop(training: Training, is_deaf: bool, own: str | None) -> list[int]:
    """Runs in the trainer. Returns the steps of its snapshots. `is_deaf`: the loop ignores stop requests."""
    taken: list[int] = []
    with training.client as client:
        while training.step < FOREVER:
            training.train(1)
            time.sleep(STEP_S)
            if client.due(training.step) or (client.stopping and not is_deaf):
                client.snapshot(training.step, training.state, milestone=own if not taken else None)
                taken.append(training.step)
            if client.stopping and not is_deaf:
                break
    return taken


@pytest.mark.parametrize("world_size", [1, 2])
def test_stop_prints_the_step_and_how_the_run_ended(daemon: Daemon, world_size: int) -> None:
    with training(daemon, world_size) as trainers:
        answer = daemon.json("stop", "--run", "run")
        taken = [trainer.end() for trainer in trainers]
    assert taken == [[answer["step"]]] * world_size
    assert answer == {"run": "run", "generation": 1, "step": answer["step"], "state": "stopped", "reason": "tierd stop"}
    assert daemon.newest("hot") == answer["step"]
    assert "stopped: start it again (tierd stop)" in daemon.tierd("status").stdout


def test_snapshot_prints_the_step_and_path_and_training_continues(daemon: Daemon) -> None:
    with training(daemon) as (trainer,):
        answer = daemon.json("snapshot", "--run", "run", "--milestone", "before-lunch")
        assert Path(answer["path"]) == daemon.folder(answer["step"])
        assert (Path(answer["path"]) / "milestone-before-lunch.json").is_file()
        second = daemon.tierd("snapshot", "--run", "run")
        assert second.returncode == 0
        assert "is durable in" in second.stdout
        assert trainer.is_busy
        assert daemon.tierd("stop", "--run", "run").returncode == 0
        first, *rest = trainer.end()
    assert first == answer["step"]
    assert len(rest) == 2
    shown = daemon.json("show", "run", str(first))
    assert shown["milestones"] == ["before-lunch"]


def test_operators_milestone_is_kept_if_the_loop_names_its_own_snapshot(daemon: Daemon) -> None:
    with training(daemon, own="of-the-loop") as (trainer,):
        answer = daemon.json("snapshot", "--run", "run", "--milestone", "of-the-operator")
        assert daemon.tierd("stop", "--run", "run").returncode == 0
        taken = trainer.end()
    assert taken.index(answer["step"]) == 1
    assert (daemon.folder(taken[0]) / "milestone-of-the-loop.json").is_file()
    assert (daemon.folder(taken[1]) / "milestone-of-the-operator.json").is_file()


@pytest.mark.parametrize("world_size", [1, 2])
def test_stop_force_interrupts_without_a_snapshot(daemon: Daemon, world_size: int) -> None:
    with training(daemon, world_size, is_deaf=True) as trainers:
        done = daemon.tierd("stop", "--run", "run", "--force")
        assert done.returncode == 0, done.stderr
        assert "is being interrupted after step" in done.stdout
        for trainer in trainers:
            assert trainer.wait_exit() != 0
    assert daemon.steps("hot") == []


def test_stop_reports_a_loop_that_does_not_end_within_the_wait(daemon: Daemon) -> None:
    with training(daemon, is_deaf=True) as (trainer,):
        done = daemon.tierd("stop", "--run", "run", "--wait", "0.5")
        assert done.returncode == 1
        assert "its trainers are still attached" in done.stderr
        assert "--force" in done.stderr
        assert trainer.is_busy


def test_stop_reports_stuck_training_after_the_wait(daemon: Daemon) -> None:
    with Trainer() as trainer:
        trainer.connect(daemon.socket)
        for verb in ("stop", "snapshot"):
            done = daemon.tierd(verb, "--run", "run", "--wait", "0.5")
            assert done.returncode == 1
            assert "the request stays pending" in done.stderr


@pytest.mark.parametrize("verb", ["stop", "snapshot"])
def test_stop_and_snapshot_without_a_trainer_or_daemon_have_their_own_exit_codes(daemon: Daemon, verb: str) -> None:
    absent = daemon.tierd(verb, "--run", "run")
    assert absent.returncode == 10
    assert "no trainer of this run is connected" in absent.stderr
    assert daemon.tierd(verb, "--run", "../run").returncode == 2
    daemon.kill()
    assert daemon.tierd(verb, "--run", "run").returncode == 13


def test_stop_of_a_run_that_halted_meanwhile_is_exit_17(daemon: Daemon) -> None:
    with training(daemon, is_deaf=True) as (trainer,):
        trainer.kill()
    with Trainer() as trainer:
        trainer.connect(daemon.socket, every_steps=0)
        trainer.begin("apply", _halt_when_asked)
        done = daemon.tierd("stop", "--run", "run", "--json")
    assert done.returncode == 17
    assert json.loads(done.stdout)["reason"] == "the data are gone"


def _halt_when_asked(training: Training) -> None:
    with training.client as client:
        while True:
            training.train(1)
            client.due(training.step)
            if client.stopping:
                client.halt("the data are gone")


def operator(daemon: Daemon, *arguments: str) -> Any:
    """The output of a verb run as a process: in this process only one verb can run at a time."""
    command = [sys.executable, "-m", "tierd", "--config", str(daemon.config), *arguments, "--json"]
    return json.loads(subprocess.run(command, capture_output=True, check=True, timeout=DEADLINE_S).stdout)


@pytest.mark.usefixtures("forked_python")
@pytest.mark.long
def test_many_concurrent_operators_all_get_an_answer(daemon: Daemon) -> None:
    """With two ranks: every answer names a step whose snapshot was taken."""
    chance = random.Random(3)
    with training(daemon, 2) as trainers, ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(4))
        names = [chance.choice([None, f"name-{number}"]) for number in range(6)]
        asked = [
            pool.submit(operator, daemon, "snapshot", "--run", "run", *(["--milestone", name] if name else []))
            for name in names
        ]
        answer = [one.result() for one in asked]
        wait_until(lambda: all(trainer.is_busy for trainer in trainers))
        stopped = daemon.json("stop", "--run", "run")
        taken = [trainer.end() for trainer in trainers]
    assert taken[0] == taken[1]
    assert {one["step"] for one in answer} <= set(taken[0])
    assert taken[0][-1] == stopped["step"]
    named = [(name, one["step"]) for name, one in zip(names, answer, strict=True) if name is not None]
    shown = {step: daemon.json("show", "run", str(step))["milestones"] for _, step in named}
    assert all(name in shown[step] for name, step in named)
