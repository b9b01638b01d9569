"""A training with Accelerate as a user writes it, run by `Forks("accelerate_training", …)`.

Two models, two optimizers, a scheduler, dropout, shuffled and randomly masked data, gradient accumulation, a registered
object, and an evaluation. The loss of each batch is a line in a file. The training kills itself at the step `kill_step`
or after `kill_at` lines.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import tierd_client
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from tierd_client.frameworks.accelerate import training_state
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.support.forks import write
from tests.support.killed_runs import Lines, digest


class Average:
    """A user's object that is registered for checkpointing."""

    def __init__(self) -> None:
        self.value = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Stream(IterableDataset[tuple[torch.Tensor]]):
    """The rows without a length, in an order that depends on the epoch, which Accelerate sets."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> list[int]:
        return torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(self.epoch)).tolist()

    def __iter__(self) -> Iterator[tuple[torch.Tensor]]:
        yield from ((self.rows[index],) for index in self.order())


class StatefulStream(Stream):
    """A stream that keeps its position."""

    given = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor]]:
        for index in self.order()[self.given :]:
            self.given += 1
            yield (self.rows[index],)
        self.given = 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.given = state["epoch"], state["given"]


def masked(samples: list[tuple[torch.Tensor]]) -> torch.Tensor:
    batch = torch.stack([sample[0] for sample in samples])
    return batch.masked_fill(torch.rand(batch.shape) < 0.2, 0)


def main(options: dict[str, Any]) -> object:
    set_seed(options.get("seed", 1))
    lines = Lines(options["lines"], options.get("kill_at"))
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(
            use_stateful_dataloader=options.get("stateful", True),
            use_seedable_sampler=options.get("seedable", True),
            dispatch_batches=options.get("dispatch", False),
        ),
    )
    encoder = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.GELU())
    decoder = nn.Linear(16, 8)
    first = torch.optim.AdamW(encoder.parameters(), lr=1e-2)
    second = torch.optim.SGD(decoder.parameters(), lr=1e-2, momentum=0.9)
    rows = torch.randn(53, 8, generator=torch.Generator().manual_seed(5))
    loader: Any = DataLoader(TensorDataset(rows), batch_size=4, shuffle=True, collate_fn=masked)
    if data := options.get("data"):
        stream = Stream(rows) if data == "stream" else StatefulStream(rows)
        loader = DataLoader(stream, batch_size=4, collate_fn=masked, num_workers=options.get("workers", 0))
    unseen: Any = DataLoader(TensorDataset(rows[:8]), batch_size=4, collate_fn=masked)
    scheduler: Any = torch.optim.lr_scheduler.CosineAnnealingLR(first, 100)
    encoder, decoder, first, second, loader, unseen, scheduler = accelerator.prepare(
        encoder, decoder, first, second, loader, unseen, scheduler
    )
    average = Average()
    accelerator.register_for_checkpointing(average)

    progress = {"step": 0, **dict.fromkeys(options.get("names", []), 0)}
    client = found = None
    if options["socket"]:
        client = tierd_client.connect("accelerate", socket=options["socket"], every_steps=options["every"])
        state = training_state(accelerator, extra=progress)
        found = client.restore(state)
        write(options["lines"], resumed=found.step if found else 0, batches=accelerator.step)
    with client or nullcontext():
        for _ in range(loader.iteration, options.get("epochs", 4)):
            for batch in loader:
                with accelerator.accumulate(encoder, decoder):
                    loss = (decoder(encoder(batch)) - batch).square().mean()
                    accelerator.backward(loss)
                    for optimizer in (first, second):
                        optimizer.step()
                        optimizer.zero_grad()
                    scheduler.step()
                lines(step=progress["step"] + 1, loss=loss.item(), rate=scheduler.get_last_lr())
                average.value = 0.9 * average.value + 0.1 * loss.item()
                if accelerator.sync_gradients or options.get("every_batch"):
                    progress["step"] += 1
                    if progress["step"] == options.get("kill_step"):
                        os.kill(os.getpid(), signal.SIGKILL)
                    if progress["step"] % 5 == 0:
                        with torch.no_grad():
                            evaluated = sum(decoder(encoder(batch)).mean().item() for batch in unseen)
                        lines(step=progress["step"], evaluated=evaluated)
                    if client and client.due(progress["step"]):
                        client.snapshot(progress["step"], state)
        if client and progress["step"] > (found.step if found else 0):
            client.snapshot(progress["step"], state)  # the same command finds that the training has ended
    write(options["lines"], average=average.value, weights=digest(encoder, decoder), step=progress["step"])
    accelerator.end_training()
    return encoder, decoder
