"""Two ranks with experts and averages of their own, which `per_rank` names, and layers that they share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tierd_client
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support.daemon import Daemon
from tests.support.topology import ranks_by
from tests.support.trainer import Training, refusals, together

PER_RANK = ["model.expert", "ema.*"]


def arrange(training: Training, rank: int, count: int, rendezvous: str, is_sharded: bool, per_rank: list[str]) -> None:
    """Each rank has an expert of its own. `is_sharded`: as DTensors of the one rank that has it."""
    if count > 1:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=count)
    torch.manual_seed(1)
    shared = nn.Linear(4, 4)
    torch.manual_seed(10 + rank)
    training.model = model = nn.ModuleDict({"shared": shared, "expert": nn.Linear(4, 4)})
    if is_sharded:
        fully_shard(
            model["expert"], mesh=init_device_mesh("cpu", (count, 1), mesh_dim_names=("expert", "data"))["data"]
        )
    training.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    training.average = {"loss": torch.zeros(())}
    training.state = tierd_client.TrainingState(
        model=model, optimizer=training.optimizer, ema=training.average, per_rank=per_rank
    )


def train(training: Training, steps: int) -> list[float]:
    losses: list[float] = []
    for _ in range(steps):
        training.step += 1
        loss = training.model["expert"](training.model["shared"](torch.randn(3, 4))).square().mean()
        loss.backward()
        for parameter in training.model["shared"].parameters():
            dist.all_reduce(parameter.grad)
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.average["loss"].lerp_(loss.detach(), 0.5)
        losses += [loss.item(), training.average["loss"].item()]
    return losses


@pytest.mark.parametrize("is_sharded", [pytest.param(False, marks=pytest.mark.long), True])
def test_experts_of_each_rank_and_their_moments_are_restored_and_refused_on_one_rank(
    tmp_path: Path, is_sharded: bool
) -> None:
    with Daemon(tmp_path) as daemon:
        with ranks_by(arrange, daemon, 2, is_sharded, PER_RANK) as trainers:
            together(trainers, "apply", train, 2)
            together(trainers, "durable")
            expected: list[Any] = together(trainers, "apply", train, 3)
        assert expected[0] != expected[1]
        with ranks_by(arrange, daemon, 2, is_sharded, PER_RANK) as trainers:
            assert [found.step for found in together(trainers, "restore")] == [2, 2]
            assert together(trainers, "apply", train, 3) == expected
        if not is_sharded:
            with ranks_by(arrange, daemon, 1, is_sharded, PER_RANK) as trainers:
                (error,) = refusals(trainers, "restore")
                assert isinstance(error, tierd_client.Mismatch)
                assert "ema.loss: it differs between the 2 ranks" in error.message


@pytest.mark.parametrize(
    ("is_sharded", "per_rank", "refused"), [(False, ["model.expert"], "ema.loss"), (True, ["ema"], "model.expert.")]
)
def test_what_differs_and_is_not_named_is_refused_and_the_hint_names_per_rank(
    tmp_path: Path, is_sharded: bool, per_rank: list[str], refused: str
) -> None:
    """Experts as DTensors on a mesh of one rank have the same names and offsets on both ranks."""
    with Daemon(tmp_path) as daemon, ranks_by(arrange, daemon, 2, is_sharded, per_rank) as trainers:
        together(trainers, "apply", train, 1)
        for error in refusals(trainers, "snapshot"):
            assert isinstance(error, tierd_client.Unsupported)
            assert refused in error.message
            assert "per_rank" in error.hint
