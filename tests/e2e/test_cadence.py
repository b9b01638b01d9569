"""`snapshot.cadence = "auto"` with a real daemon: the trainers follow it, and status gives the reasons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import Daemon, serving
from tests.support.trainer import Trainer, Training, joined, together
from tests.support.waiting import wait_until
from tierd.lifecycle.cadence import FIRST_S

# A failure each second makes the shortest interval the best one.
AUTO = '[snapshot]\ncadence = "auto"\nmtbf_s = 1.0\nstall_share_max = 0\n'


def cadence(daemon: Daemon) -> Any:
    return daemon.status()["runs"][0]["cadence"]


def train_until_due(training: Training) -> int:
    """The step. Training goes on until `due` asks for a snapshot, as in a training loop."""
    training.train(1)
    while not training.client.due(training.step):
        training.train(1)
    return training.step


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.long), 2])
def test_trainers_follow_the_interval_that_the_daemon_has_measured(tmp_path: Path, world_size: int) -> None:
    with serving(tmp_path, more=AUTO) as daemon, joined(tmp_path, world_size) as trainers:
        for trainer in trainers:
            trainer.begin("connect", daemon.socket)
        for trainer in trainers:
            trainer.end()
        assert cadence(daemon)["every_s"] == FIRST_S
        together(trainers, "train", 1)
        together(trainers, "durable")
        wait_until(lambda: cadence(daemon)["every_s"] < FIRST_S, "a measured interval")
        steps = together(trainers, "apply", train_until_due)
        assert len(set(steps)) == 1
        assert "Young's interval is" in daemon.tierd("status").stdout
        assert "MTBF 1 s as configured" in daemon.tierd("status").stdout


def test_interval_of_the_script_replaces_auto(tmp_path: Path) -> None:
    with serving(tmp_path, more=AUTO) as daemon, Trainer() as trainer:
        trainer.connect(daemon.socket, every_steps=7)
        assert trainer.apply(due_steps) == [7, 14]
        shown = "saves every 1 min 0 s (auto, unless the script sets an interval): no snapshot was measured yet"
        assert shown in daemon.tierd("status").stdout, "the daemon does not know the interval of the script"


def due_steps(training: Training) -> list[int]:
    return [step for step in range(1, 15) if training.client.due(step)]


def test_killed_trainer_counts_as_a_failure_and_a_stop_does_not(tmp_path: Path) -> None:
    with serving(tmp_path, more='[snapshot]\ncadence = "auto"\n') as daemon:
        for end in ("kill", "close"):
            with Trainer() as trainer:
                trainer.connect(daemon.socket)
                daemon.wait_attached()
                if end == "close":
                    trainer.apply(finish)
            wait_until(lambda: not daemon.status()["runs"][0]["ranks_attached"], "the trainer to be gone")
        with Trainer() as trainer:
            trainer.connect(daemon.socket)
            assert ", 1 failure in " in " ".join(cadence(daemon)["reasons"]).replace(" and ", ", ")


def finish(training: Training) -> None:
    with training.client:
        pass
