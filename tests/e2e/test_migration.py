"""docs/guides/migrate.md: its code moves a training of two ranks from ZeroRedundancyOptimizer or FSDP1 to tierd."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import tierd_client
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from tests.support.daemon import Daemon
from tests.support.topology import ranks_by
from tests.support.trainer import Training, together

GUIDE = Path(__file__).parents[2] / "docs/guides/migrate.md"

pytestmark = pytest.mark.filterwarnings("ignore")


def zero(model: nn.Module) -> torch.optim.Optimizer:
    with warnings.catch_warnings():  # its import warns of torch.jit
        warnings.simplefilter("ignore")
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.05)


def build_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 7), nn.GELU(), nn.Linear(7, 3))


def arrange(training: Training, rank: int, world_size: int, rendezvous: str, kind: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    model = build_model()
    match kind:
        case "FSDP1":
            training.model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        case "FSDP2":
            training.model = fully_shard(model)
        case _:
            training.model = nn.parallel.DistributedDataParallel(model)
    if kind == "ZeroRedundancyOptimizer":
        training.optimizer = zero(training.model)
    else:
        training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=0.05)
    if kind in ("FSDP2", "DDP"):
        training.state = tierd_client.TrainingState(model=training.model, optimizer=training.optimizer)


def train(training: Training, steps: int) -> list[float]:
    losses: list[float] = []
    for _ in range(steps):
        training.step += 1
        numbers = torch.Generator().manual_seed(training.step * 2 + dist.get_rank())
        loss = training.model(torch.randn(5, 4, generator=numbers)).square().mean()
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def migrate(training: Training, code: str) -> None:
    exec(  # the guide's code, with the names that it expects
        code,
        {
            "torch": torch,
            "dist": dist,
            "tierd_client": tierd_client,
            "client": training.client,
            "step": training.step,
            "model": training.model,
            "old_model": training.model,
            "old_optimizer": training.optimizer,
            "build_model": build_model,
        },
    )


@pytest.mark.parametrize(
    ("old", "new"), [pytest.param("ZeroRedundancyOptimizer", "DDP", marks=pytest.mark.long), ("FSDP1", "FSDP2")]
)
def test_training_is_migrated_by_the_code_of_the_guide(tmp_path: Path, old: str, new: str) -> None:
    (code,) = re.findall(rf"## {old}\n.*?```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    with Daemon(tmp_path) as daemon:
        with ranks_by(arrange, daemon, 2, old) as trainers:
            together(trainers, "apply", train, 3)
            together(trainers, "apply", migrate, code)
        with ranks_by(arrange, daemon, 2, old) as trainers:
            together(trainers, "apply", train, 3)
            expected = together(trainers, "apply", train, 3)
        with ranks_by(arrange, daemon, 2, new) as trainers:
            assert [found.step for found in together(trainers, "restore")] == [3, 3]
            losses = together(trainers, "apply", train, 3)
    for rank in range(2):
        assert losses[rank] == pytest.approx(expected[rank], rel=1e-5)


def test_optimizer_with_parts_of_ranks_is_refused_with_the_way_out() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = build_model()
        optimizer = zero(model)
        with pytest.raises(tierd_client.BadConfig, match="ZeroRedundancyOptimizer") as caught:
            tierd_client.TrainingState(model=model, optimizer=optimizer)
    finally:
        dist.destroy_process_group()
    assert "docs/guides/migrate.md" in caught.value.hint
