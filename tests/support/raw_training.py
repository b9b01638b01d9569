"""A training loop without a framework, run by `Forks("raw_training", …)`.

torch.compile, mixed precision with a GradScaler on the CPU, an average of the weights, and gradients accumulated over
two batches. The loss of each batch is a line in a file. The training kills itself after `kill_at` lines.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import tierd_client
import torch
import torch._inductor.config
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

from tests.support.forks import write
from tests.support.killed_runs import Lines, digest

EPOCHS, BATCHES, ACCUMULATED = 3, 14, 2
STEPS = EPOCHS * BATCHES // ACCUMULATED


def main(options: dict[str, Any]) -> object:
    torch.manual_seed(options.get("seed", 1))
    lines = Lines(options["lines"], options.get("kill_at"))
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    torch._inductor.config.compile_threads = 1  # no further processes: this one is forked
    compiled: Any = torch.compile(model) if options["compiles"] else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=40)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=4)
    rows = torch.randn(4 * BATCHES, 8, generator=torch.Generator().manual_seed(5))
    sampler = tierd_client.ResumableSampler(len(rows), batch_size=4, seed=3)
    loader = tierd_client.ResumableLoader(TensorDataset(rows), sampler)
    progress = {"batch": 0, "step": 0, "best": float("inf")}
    state = tierd_client.TrainingState(
        model=compiled,
        optimizer=optimizer,
        scheduler=scheduler,
        scaler=scaler,
        ema=average,
        dataloader=loader,
        extra=progress,
    )
    client = found = None
    if options["socket"]:
        client = tierd_client.connect("raw", socket=options["socket"], every_steps=options["every"])
        found = client.restore(state)
        write(options["lines"], resumed=found.step if found else 0)
    with client or nullcontext():
        for epoch in range(loader.epoch, EPOCHS):
            for (batch,) in loader:
                progress["batch"] += 1
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = (compiled(batch) - batch).square().mean()
                scaler.scale(loss / ACCUMULATED).backward()
                lines(epoch=epoch, loss=loss.item(), scale=scaler.get_scale())
                if progress["batch"] % ACCUMULATED:
                    continue
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                scheduler.step()
                average.update_parameters(model)
                progress["step"] += 1
                progress["best"] = min(progress["best"], loss.item())
                if progress["step"] % 4 == 0:
                    with torch.no_grad():
                        lines(evaluated=average(rows).square().mean().item(), **progress)
                if client and (client.due(progress["step"]) or progress["step"] == STEPS):
                    client.snapshot(progress["step"], state)
    rates = scheduler.get_last_lr()
    write(options["lines"], weights=digest(model, average), scaler=scaler.state_dict(), rates=rates, **progress)
    return model, average
