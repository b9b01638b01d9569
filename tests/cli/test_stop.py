"""`tierd stop` and `tierd snapshot` beside real trainers: what they make happen, say, and end with."""

from __future__ import annotations

import json
import random
import subprocess
import sys
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


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path) as daemon:
        yield daemon


@contextmanager
def training(
    daemon: Daemon, world_size: int = 1, *, is_deaf: bool = False, own: str | None = None
) -> Generator[list[Trainer]]:
    """Trainers of a run that train until they are stopped."""
    with joined(daemon.root, world_size) as trainers:
        together(trainers, "connect", daemon.socket, every_steps=0)
        together(trainers, "enter")
        for trainer in trainers:
            trainer.begin("apply", _loop, is_deaf, own)
        yield trainers


def _loop(training: Training, is_deaf: bool, own: str | None) -> list[int]:
    """The steps of which a snapshot was taken. In the trainer. `is_deaf`: it never asks whether to stop."""
    taken: list[int] = []
    with training.client as client:
        while training.step < FOREVER:
            training.train(1)
            if client.due(training.step) or (client.stopping and not is_deaf):
                client.snapshot(training.step, training.state, milestone=own if not taken else None)
                taken.append(training.step)
            if client.stopping and not is_deaf:
                break
    return taken


@pytest.mark.parametrize("world_size", [1, 2])
def test_stop_says_the_step_and_how_the_run_has_ended(daemon: Daemon, world_size: int) -> None:
    with training(daemon, world_size) as trainers:
        said = daemon.json("stop", "--run", "run")
        taken = [trainer.end() for trainer in trainers]
    assert taken == [[said["step"]]] * world_size
    assert said == {"run": "run", "generation": 1, "step": said["step"], "state": "stopped", "reason": "tierd stop"}
    assert daemon.newest("hot") == said["step"]
    assert "stopped: start it again (tierd stop)" in daemon.tierd("status").stdout


def test_snapshot_says_the_step_and_where_it_lies_and_training_goes_on(daemon: Daemon) -> None:
    with training(daemon) as (trainer,):
        said = daemon.json("snapshot", "--run", "run", "--milestone", "before-lunch")
        assert Path(said["path"]) == daemon.folder(said["step"])
        assert (Path(said["path"]) / "milestone-before-lunch.json").is_file()
        second = daemon.tierd("snapshot", "--run", "run")
        assert second.returncode == 0
        assert "is durable in" in second.stdout
        assert trainer.is_busy
        assert daemon.tierd("stop", "--run", "run").returncode == 0
        first, *rest = trainer.end()
    assert first == said["step"]
    assert len(rest) == 2
    shown = daemon.json("show", "run", str(first))
    assert shown["milestones"] == ["before-lunch"]


def test_a_name_that_the_loop_gives_itself_costs_one_more_snapshot_not_the_operators_name(daemon: Daemon) -> None:
    with training(daemon, own="of-the-loop") as (trainer,):
        said = daemon.json("snapshot", "--run", "run", "--milestone", "of-the-operator")
        assert daemon.tierd("stop", "--run", "run").returncode == 0
        taken = trainer.end()
    assert taken.index(said["step"]) == 1
    assert (daemon.folder(taken[0]) / "milestone-of-the-loop.json").is_file()
    assert (daemon.folder(taken[1]) / "milestone-of-the-operator.json").is_file()


@pytest.mark.parametrize("world_size", [1, 2])
def test_forced_it_is_interrupted_without_a_snapshot(daemon: Daemon, world_size: int) -> None:
    with training(daemon, world_size, is_deaf=True) as trainers:
        done = daemon.tierd("stop", "--run", "run", "--force")
        assert done.returncode == 0, done.stderr
        assert "is being interrupted after step" in done.stdout
        for trainer in trainers:
            assert trainer.wait_exit() != 0
    assert daemon.steps("hot") == []


def test_a_loop_that_does_not_leave_is_told_of_when_the_wait_is_over(daemon: Daemon) -> None:
    with training(daemon, is_deaf=True) as (trainer,):
        done = daemon.tierd("stop", "--run", "run", "--wait", "1")
        assert done.returncode == 1
        assert "its trainers are still attached" in done.stderr
        assert "--force" in done.stderr
        assert trainer.is_busy


def test_a_training_that_is_stuck_is_told_of_when_the_wait_is_over(daemon: Daemon) -> None:
    with Trainer() as trainer:
        trainer.connect(daemon.socket)
        for verb in ("stop", "snapshot"):
            done = daemon.tierd(verb, "--run", "run", "--wait", "0.5")
            assert done.returncode == 1
            assert "it is still asked for" in done.stderr


@pytest.mark.parametrize("verb", ["stop", "snapshot"])
def test_with_nobody_there_it_says_so_and_ends_with_a_code_of_its_own(daemon: Daemon, verb: str) -> None:
    absent = daemon.tierd(verb, "--run", "run")
    assert absent.returncode == 10
    assert "no trainer of it is attached here" in absent.stderr
    assert daemon.tierd(verb, "--run", "../run").returncode == 2
    daemon.kill()
    assert daemon.tierd(verb, "--run", "run").returncode == 13


def test_a_run_that_was_halted_meanwhile_ends_stop_with_seventeen(daemon: Daemon) -> None:
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
    """What a verb answers in a process of its own: in ours only one at a time can be called."""
    command = [sys.executable, "-m", "tierd", "--config", str(daemon.config), *arguments, "--json"]
    return json.loads(subprocess.run(command, capture_output=True, check=True, timeout=DEADLINE_S).stdout)


def test_many_operators_at_once_are_all_answered(daemon: Daemon) -> None:
    """At random moments, on two ranks: every answer names a step that was taken."""
    chance = random.Random(3)
    with training(daemon, 2) as trainers, ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(4))
        names = [chance.choice([None, f"name-{number}"]) for number in range(6)]
        asked = [
            pool.submit(operator, daemon, "snapshot", "--run", "run", *(["--milestone", name] if name else []))
            for name in names
        ]
        said = [one.result() for one in asked]
        wait_until(lambda: all(trainer.is_busy for trainer in trainers))
        stopped = daemon.json("stop", "--run", "run")
        taken = [trainer.end() for trainer in trainers]
    assert taken[0] == taken[1]
    assert {one["step"] for one in said} <= set(taken[0])
    assert taken[0][-1] == stopped["step"]
    named = [(name, one["step"]) for name, one in zip(names, said, strict=True) if name is not None]
    shown = {step: daemon.json("show", "run", str(step))["milestones"] for _, step in named}
    assert all(name in shown[step] for name, step in named)
