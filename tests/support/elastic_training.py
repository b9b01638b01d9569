"""A training for an elastic `torchrun`. Its losses are the same to the last bit on 1, 2, 3, 4 or 6 ranks.

All numbers are multiples of a power of two, and small, so that sums are exact in any order. Each rank writes what it
does to a file of its own, one JSON object a line: `elastic_training.py FOLDER ddp|fsdp`. Steps are slow until the file
FOLDER/finish exists.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import tierd_client
import torch
import torch.distributed as dist
from tierd_client.loaders.loader import ResumableLoader
from tierd_client.loaders.sampler import ResumableSampler
from torch import nn

BATCH = 12  # of all ranks together
SAMPLES = 250 * BATCH
WIDTH = 8
SEED = 3
STEP_S = 0.05


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


def make_model() -> nn.Module:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64) for _ in range(2)))
    for number, parameter in enumerate(model.parameters()):
        parameter.data = torch.eye(WIDTH, dtype=torch.float64) * (number + 1)
    model[0].requires_grad_(False)
    return model


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD((each for each in model.parameters() if each.requires_grad), lr=0.5, momentum=1.0)


def loss_of(model: nn.Module, samples: list[int]) -> torch.Tensor:
    """The sum over the samples, as a multiple of 1/16."""
    features = torch.tensor([[index * power % 7 for power in range(1, WIDTH + 1)] for index in samples])
    return model(features.double()).sum() / 16


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of all parameters and momenta. All ranks call it."""
    hashed = hashlib.sha256()
    momenta = [value for state in optimizer.state.values() for value in state.values()]
    for tensor in [*model.state_dict().values(), *momenta]:
        whole: Any = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        hashed.update(whole.numpy().tobytes())
    return hashed.hexdigest()


def train(folder: Path, kind: str) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = make_model()
    if kind == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    else:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = make_optimizer(model)
    sampler = ResumableSampler(SAMPLES, batch_size=BATCH // world, seed=SEED)
    loader = ResumableLoader(Numbers(), sampler, collate_fn=list)
    state = tierd_client.TrainingState(model=model, optimizer=optimizer, dataloader=loader)
    with (
        (folder / f"events-{os.getpid()}.jsonl").open("w") as events,
        tierd_client.connect("run", every_steps=3) as client,
    ):

        def tell(event: str, **facts: Any) -> None:
            facts |= {"event": event, "generation": client.generation, "rank": rank, "world": world}
            events.write(json.dumps(facts) + "\n")
            events.flush()

        found = client.restore(state)
        step = found.step if found else 0
        whence = {"tier": found.tier, "from": found.generation} if found else {"tier": "", "from": 0}
        tell("begun", step=step, **whence, digest=digest(model, optimizer))
        for samples in loader:
            step += 1
            loss = loss_of(model, samples)
            optimizer.zero_grad()
            (loss * world).backward()  # of which the mean over the ranks is taken
            optimizer.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            tell("step", step=step, samples=samples, loss=total.item())
            if rank == 0 and not (folder / "finish").exists():
                time.sleep(STEP_S)
            if client.due(step) or client.stopping:
                tell("snapshot", step=step, digest=digest(model, optimizer))
                client.snapshot(step, state)
            if client.stopping:
                break
        else:
            tell("finished", step=step)
    dist.destroy_process_group()


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2])
