"""Ranks that hold different values or different tensors: refused by name, or restored each with its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tierd_client import TierdError, TrainingState, Unsupported
from tierd_client.state.training_state import Captured
from torch import nn

from tests.support.daemon import Daemon
from tests.support.trainer import Training, joined, refusals, together


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path) as daemon:
        yield daemon


# ── these run in the trainers ──


def _change_a_weight(training: Training) -> None:
    """As with local SGD: the ranks' models drift apart."""
    if dist.get_rank() == 1:
        with torch.no_grad():
            training.model.module[3].bias[1] += 1.0


def _try_snapshot(training: Training) -> TierdError | None:
    try:
        training.snapshot()
    except TierdError as error:
        return error
    return None


def _change_a_moment(training: Training) -> None:
    """As with a sharded optimizer that keeps its parts as plain tensors."""
    moments = next(iter(training.optimizer.state.values()))
    moments["exp_avg"][0] += dist.get_rank()


def _become_a_stage(training: Training) -> None:
    """Each rank holds one stage of a pipeline, and a layer that both have."""
    rank = dist.get_rank()
    torch.manual_seed(5)
    training.model = nn.ModuleDict({"shared": nn.Linear(2, 2), f"stage{rank}": nn.Linear(4, 4 + rank)})
    training.optimizer = torch.optim.AdamW(training.model.parameters())
    for parameter in training.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    training.optimizer.step()
    training.state = TrainingState(model=training.model, optimizer=training.optimizer, extra=training.extra)


def _values(training: Training) -> list[Any]:
    moments = [entry["exp_avg"].tolist() for entry in training.optimizer.state.values()]
    return [{name: tensor.tolist() for name, tensor in training.model.state_dict().items()}, moments]


def _clear(training: Training) -> None:
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.zero_()
            training.optimizer.state[parameter]["exp_avg"].zero_()


class _Raising(TrainingState):
    """A state of the user's own."""

    def capture(self, rank: int, world_size: int) -> Captured:
        raise ZeroDivisionError("a defect of the user's code")


def _break_on_one_rank(training: Training, is_broken: bool) -> None:
    kind = _Raising if is_broken and dist.get_rank() == 1 else TrainingState
    training.state = kind(model=training.model, optimizer=training.optimizer)


def _use_meta_by_default(training: Training) -> None:
    torch.set_default_device("meta")


# ── the tests ──


def test_models_that_drift_apart_after_the_first_snapshot_are_refused(daemon: Daemon) -> None:
    with joined(daemon.root, 2) as trainers:
        together(trainers, "connect", daemon.socket)
        together(trainers, "restore")
        together(trainers, "train", 1)
        together(trainers, "durable")
        together(trainers, "apply", _change_a_weight)
        refused = 0
        for _ in range(6):  # a few tensors are compared at each snapshot, and those that differ at each one after it
            together(trainers, "train", 1)
            refused += sum(isinstance(error, Unsupported) for error in together(trainers, "apply", _try_snapshot))
            assert refused % 2 == 0, "on both ranks or on none"
        assert refused >= 8


def test_moments_that_differ_are_refused_at_the_first_snapshot(daemon: Daemon) -> None:
    with joined(daemon.root, 2) as trainers:
        together(trainers, "connect", daemon.socket)
        together(trainers, "restore")
        together(trainers, "train", 1)
        together(trainers, "apply", _change_a_moment)
        for error in refusals(trainers, "snapshot"):
            assert isinstance(error, Unsupported)
            assert "optimizer.state.0.weight.exp_avg" in error.message


def test_each_stage_of_a_pipeline_gets_its_own_tensors_back(daemon: Daemon) -> None:
    with joined(daemon.root, 2) as trainers:
        together(trainers, "connect", daemon.socket)
        together(trainers, "apply", _become_a_stage)
        together(trainers, "restore")
        together(trainers, "durable", step=1)
        saved = together(trainers, "apply", _values)
        together(trainers, "apply", _clear)
        assert together(trainers, "apply", _values) != saved
        found = together(trainers, "restore")
        assert [replica.step for replica in found] == [1, 1]
        assert together(trainers, "apply", _values) == saved


def test_error_of_any_kind_on_one_rank_is_raised_on_all(daemon: Daemon) -> None:
    with joined(daemon.root, 2) as trainers:
        together(trainers, "connect", daemon.socket)
        together(trainers, "restore")
        together(trainers, "train", 1)
        together(trainers, "apply", _break_on_one_rank, True)
        for trainer in trainers:
            trainer.begin("snapshot")
        with pytest.raises(TierdError, match="rank 1: ZeroDivisionError: a defect of the user's code"):
            trainers[0].end()
        with pytest.raises(ZeroDivisionError):
            trainers[1].end()
        together(trainers, "apply", _break_on_one_rank, False)
        together(trainers, "durable")


def test_default_device_of_the_program_does_not_matter(daemon: Daemon) -> None:
    with joined(daemon.root, 2) as trainers:
        together(trainers, "apply", _use_meta_by_default)
        together(trainers, "connect", daemon.socket)
        together(trainers, "restore")
        together(trainers, "durable", step=1)
        found = together(trainers, "restore")
        assert [replica.step for replica in found] == [1, 1]
