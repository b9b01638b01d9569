"""Ranks that save and load with torch.distributed.checkpoint over tierd, for tests that PyTorch has for its own files.

A case is a function of one rank's `Ranks`, which has the client. Each save takes the next step of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import tierd_client
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tierd_client.frameworks.dcp import TierdReader, TierdWriter

from tests.support.daemon import Daemon
from tests.support.trainer import Trainer, Training, together


def save(training: Training, state: dict[str, Any], **options: Any) -> None:
    training.step += 1
    dcp.save(state, storage_writer=TierdWriter(training.client, training.step), **options)


def load(training: Training, state: dict[str, Any], **options: Any) -> None:
    """Loads what the last `save` saved."""
    dcp.load(state, storage_reader=TierdReader(training.client, step=training.step), **options)


def join(training: Training, rank: int, world_size: int, rendezvous: str, socket: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    training.client = tierd_client.connect(f"ranks-{world_size}", socket=socket)


@contextmanager
def connected(daemon: Daemon, world_size: int) -> Generator[Callable[..., list[Any]]]:
    """Starts ranks. Calls a case on all of them at once, and returns the results by rank."""
    with ExitStack() as stack:
        ranks = [stack.enter_context(Trainer()) for _ in range(world_size)]
        together_with = daemon.root / f"rendezvous-{ranks[0].pid}"
        for rank, trainer in enumerate(ranks):
            trainer.begin("apply", join, rank, world_size, str(together_with), daemon.socket)
        for trainer in ranks:
            trainer.end()

        def call(case: Callable[..., Any], *arguments: Any) -> list[Any]:
            return together(ranks, "apply", in_step, case, *arguments)

        yield call


def in_step(training: Training, case: Callable[..., Any], *arguments: Any) -> Any:
    torch.manual_seed(0)
    return case(training, *arguments)


def differences(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    """The keys of tensors that differ. DTensors and sharded tensors are compared by this rank's part."""
    assert left.keys() == right.keys()
    return [key for key in left if not torch.equal(own_part(left[key]), own_part(right[key]))]


def own_part(value: Any) -> torch.Tensor:
    if hasattr(value, "local_shards"):
        return torch.cat([shard.tensor.flatten() for shard in value.local_shards()] or [torch.empty(0)])
    return value.to_local() if hasattr(value, "to_local") else value
