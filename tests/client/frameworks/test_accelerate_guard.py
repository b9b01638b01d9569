"""A training with Accelerate and `LossGuard`: NaN on one of its batches, with gradients accumulated over two."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import tierd_client
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from tierd_client import LossGuard
from tierd_client.frameworks.accelerate import training_state
from torch.utils.data import DataLoader, TensorDataset

from tests.support.daemon import Daemon

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")

ROWS, DUE = 24, 3


def train(run: str, socket: str, bad: list[int]) -> tuple[list[tuple[int, int, float]], bool]:
    """(step, row, loss) of each batch, and whether the weights are finite at the end."""
    torch.manual_seed(1)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True),
    )
    net = torch.nn.Linear(4, 1)
    rows = TensorDataset(torch.arange(float(ROWS))[:, None].expand(ROWS, 4))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(rows, batch_size=1))
    seen: list[tuple[int, int, float]] = []
    with tierd_client.connect(run, socket=socket, every_steps=DUE) as client:
        state = training_state(accelerator)
        client.restore(state)
        guard = LossGuard(client, state, action="rollback")
        step, losses = 0, list[torch.Tensor]()
        for (batch,) in loader:
            row = int(batch[0, 0])
            with accelerator.accumulate(model):
                loss = model(torch.sin(batch * torch.linspace(1, 2, 4))).square().mean()
                loss = loss * (math.nan if row in bad else 1.0)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
            seen.append((step + 1, row, loss.item()))
            if not accelerator.sync_gradients:
                continue
            step += 1
            mean, losses = sum(losses) / len(losses), []
            back = guard.check(step, mean)
            if back is not None:
                step = back
            elif client.due(step):
                client.snapshot(step, state).wait_persisted(60)
    return seen, all(bool(torch.isfinite(each).all()) for each in net.parameters())


def test_nan_goes_back_and_the_run_ends_finite(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        undisturbed, _ = train("undisturbed", daemon.socket, [])
        seen, is_finite = train("guarded", daemon.socket, [8])
        checkpoints = daemon.get("/api/v1/checkpoints?run=guarded")
    assert is_finite
    assert seen[:8] == undisturbed[:8], "the curve up to the rollback"
    assert [step for step, _, _ in seen] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, *(n for n in range(4, 11) for _ in "ab")]
    assert [row for _, row, _ in seen] == [*range(ROWS)], "no batch is trained on twice"
    assert all(math.isfinite(loss) for _, _, loss in seen[10:])
    assert ("bad-loss-5-g1", False) in {(each["milestone"], each["healthy"]) for each in checkpoints}
