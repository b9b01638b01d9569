"""Trainings of each framework that are killed at random instants and started again end as undisturbed ones.

Losses, logs, evaluations, metrics and weights are equal bit for bit. Two more starts after the end train nothing.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import Daemon
from tests.support.forks import Forks
from tests.support.killed_runs import run_killed

SEED = random.SystemRandom().randrange(1 << 20)
COMPILER = shutil.which("c++") or shutil.which("g++")


def check(script: str, folder: Path, *, kills: int, ranks: int = 1, seed: int = SEED, **options: Any) -> None:
    """Runs the training undisturbed, then with `kills` at instants that depend on `seed`."""
    print(f"seed {seed}")
    with Forks(script, folder) as forks, Daemon(folder / "daemon") as daemon:
        alone = forks.run("alone", ranks=ranks, **{**options, "socket": None})
        run_killed(forks, "run", daemon, alone, kills=kills, seed=seed, ranks=ranks, **options)


@pytest.mark.long
def test_lightning_epoch_that_was_killed_logs_and_steps_its_plateau_scheduler_by_all_its_batches(
    tmp_path: Path,
) -> None:
    check("lightning_training", tmp_path, kills=2, seed=1, every=1, trainer={"max_epochs": 3})


@pytest.mark.long
def test_accelerate_stream_without_a_state_resumes_twice_in_one_epoch(tmp_path: Path) -> None:
    check("accelerate_training", tmp_path, kills=4, seed=9, every=3, data="stream")


def test_loop_with_scaler_average_and_accumulation_resumes_identically(tmp_path: Path) -> None:
    check("raw_training", tmp_path, kills=3, seed=3, every=2, compiles=False)


@pytest.mark.long
def test_lightning_snapshot_of_two_ranks_is_refused_on_one(tmp_path: Path) -> None:
    with Forks("lightning_training", tmp_path) as forks, Daemon(tmp_path / "daemon") as daemon:
        command = {"socket": daemon.socket, "every": 1, "trainer": {"max_epochs": 1}}
        assert forks.run("run", ranks=2, **command).codes == [0, 0]
        refused = forks.run("run", **command)
    assert refused.codes == [1]
    assert "metrics: it differs between the 2 ranks that saved the checkpoint" in refused.stderr


LIGHTNING: dict[str, dict[str, Any]] = {
    "plain": {"every": 1},
    "stateful": {"every": 3, "data": "stateful"},
    "stream": {"every": 1, "data": "stream"},
    "stateful stream": {"every": 2, "data": "stateful-stream"},
    "torchdata's loader of a stream without a state": {"every": 2, "data": "torchdata-stream"},
    "stopped early": {"every": 2, "stop_early": 1, "rate": 1.0, "trainer": {"max_epochs": 8}},
    "plateau by step": {"every": 1, "monitor": "val_loss", "trainer": {"val_check_interval": 1, "max_epochs": 2}},
    "accumulation by epoch": {"every": 2, "accumulate": 2},
    "steps": {"every": 2, "trainer": {"max_epochs": -1, "max_steps": 17}},
    "manual": {"every": 1, "make": "manual"},
    "manual stream": {"every": 3, "make": "manual", "data": "stream"},
    "two ranks": {"every": 1, "ranks": 2},
    "two ranks, stateful": {"every": 3, "data": "stateful", "ranks": 2},
    "two ranks, manual": {
        "every": 3,
        "make": "manual",
        "strategy": "ddp_find_unused_parameters_true",
        "ranks": 2,
    },
}


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("options", LIGHTNING.values(), ids=LIGHTNING.keys())
def test_lightning_training_killed_at_random_instants_ends_identically(tmp_path: Path, options: dict[str, Any]) -> None:
    check("lightning_training", tmp_path, kills=4, **options)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("data", [None, "stream", "stateful"])
@pytest.mark.parametrize("every", [1, 3])
def test_accelerate_training_killed_at_random_instants_ends_identically(
    tmp_path: Path, data: str | None, every: int, ranks: int
) -> None:
    check("accelerate_training", tmp_path, kills=4, data=data, every=every, ranks=ranks)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    shutil.which("c++") is None and shutil.which("g++") is None, reason="torch.compile: no C++ compiler"
)
def test_compiled_loop_killed_at_random_instants_ends_identically(tmp_path: Path) -> None:
    check("raw_training", tmp_path, kills=4, every=2, compiles=True)
