"""A training with NaN, with a real daemon: what is kept, what a restart restores, and what an operator sees."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tierd_client import Unhealthy

from tests.support.daemon import Daemon
from tests.support.trainer import Trainer, Training
from tests.support.waiting import DEADLINE_S, wait_until

pytestmark = pytest.mark.usefixtures("checkpoints_examined")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path, more="[lifecycle.cold]\nkeep_every = 2\n") as daemon:
        yield daemon


def spoil(training: Training) -> None:
    with torch.no_grad():
        next(training.model.parameters())[0, 0] = math.nan


def is_examined(daemon: Daemon, step: int) -> bool:
    return any(row["step"] == step and row["healthy"] is not None for row in daemon.json("ls"))


def test_checkpoints_with_nan_are_neither_restored_nor_replicated(daemon: Daemon) -> None:
    with Trainer() as trainer:
        trainer.connect(daemon.socket)
        for _ in range(2):
            trainer.train(1)
            trainer.durable()
        wait_until(lambda: is_examined(daemon, 2), "step 2 to be examined")
        trainer.apply(spoil)
        for _ in range(4):
            trainer.train(1)
            trainer.durable()
        trainer.kill()

    # From memory, whether or not it has been examined by now.
    with Trainer() as trainer:
        trainer.connect(daemon.socket)
        assert trainer.restore().step == 2
        with pytest.raises(Unhealthy, match="not finite"):
            trainer.restore(resume=6)
        found = trainer.restore(allow_unhealthy=True)
        assert found.step == 6

    # The lifecycle keeps the newest unhealthy checkpoint in hot as evidence, none in cold, and the newest healthy one.
    wait_until(lambda: daemon.steps("hot") == [2, 6], "the hot tier to keep step 2 and the newest unhealthy one")
    wait_until(lambda: daemon.steps("cold") == [2], "the cold tier to hold only healthy ones")
    listed = {row["step"]: row["healthy"] for row in daemon.json("ls") if "hot" in row["tiers"]}
    assert listed == {2: True, 6: False}
    assert (daemon.folder(6) / "unhealthy.json").exists()
    assert daemon.metric('tierd_unhealthy_checkpoints{run="run"}') >= 1
    status = daemon.tierd("status").stdout
    assert "UNHEALTHY: step 6" in status
    assert "--step 2 " in status, "the suggested command restores a healthy one"

    # `tierd restore` takes the newest healthy one unless an unhealthy one is allowed.
    done = daemon.tierd("restore", "--to", daemon.root / "newest")
    assert "step 2 " in done.stdout, done.stderr
    refused = daemon.tierd("restore", "--step", "6", "--to", daemon.root / "refused")
    assert (refused.returncode, "--allow-unhealthy" in refused.stderr) == (18, True)
    export = ("export", "--step", "6", "--format", "safetensors", "--to", daemon.root / "exported")
    assert daemon.tierd(*export).returncode == 18
    assert daemon.tierd(*export, "--allow-unhealthy").returncode == 0
    daemon.json("restore", "--step", "6", "--allow-unhealthy", "--to", daemon.root / "evidence")
    assert (daemon.root / "evidence/unhealthy.json").exists()
    assert (
        "NO: " in daemon.tierd("show", "--run", "run", "3").stdout or "NO: " in daemon.tierd("show", "run", "6").stdout
    )


def test_restore_is_refused_when_every_checkpoint_has_nan(daemon: Daemon) -> None:
    with Trainer() as trainer:
        trainer.connect(daemon.socket)
        trainer.apply(spoil)
        trainer.train(1)
        trainer.durable()
        with pytest.raises(Unhealthy):
            trainer.restore()


@pytest.mark.long
def test_snapshots_of_unchanged_weights_are_reported(daemon: Daemon) -> None:
    with Trainer() as trainer:
        trainer.connect(daemon.socket)
        trainer.train(1)
        trainer.snapshot()
        trainer.wait_persisted(DEADLINE_S)
        wait_until(lambda: is_examined(daemon, 1))
        trainer.train(1)
        trainer.snapshot()
        wait_until(lambda: is_examined(daemon, 2))
        assert daemon.metric('tierd_stale_snapshots_total{run="run"}') == 0
        trainer.apply(stale)
        for _ in range(2):
            trainer.train(1)
            trainer.durable()
            wait_until(lambda: is_examined(daemon, daemon.newest("hot")))
        assert daemon.metric('tierd_stale_snapshots_total{run="run"}') == 2
    assert "same weights" in daemon.tierd("status").stdout


def stale(training: Training) -> None:
    """The bug: the state has a copy of the model, and the optimizer of that copy."""
    import copy

    import tierd_client

    model = copy.deepcopy(training.model)
    training.state = tierd_client.TrainingState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
