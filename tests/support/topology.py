"""One small model on any topology: one process, DDP, FSDP2, HSDP, tensor parallel, FSDP2 within tensor parallel.

The functions run in the processes of `runs.Trainer`, with gloo on the CPU. The dimensions are not divisible by the
world sizes, so parts are uneven and some are empty. The batch of a step is the same on every topology.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import tierd_client
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support.daemon import Daemon
from tests.support.trainer import Trainer, Training, together

BATCH_ROWS = 12  # divisible by 1, 2, 3 and 4 ranks

Bits = dict[str, tuple[str, tuple[int, ...], bytes]]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 30)
        self.down = nn.Linear(30, 5)
        self.norm = nn.LayerNorm(5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.norm(self.down(nn.functional.gelu(self.up(x))))


def _plain(net: nn.Module, world_size: int) -> tuple[int, int]:
    return 0, 1


def _ddp(net: nn.Module, world_size: int) -> tuple[int, int]:
    return dist.get_rank(), world_size


def _fsdp(net: nn.Module, world_size: int) -> tuple[int, int]:
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in (net.up, net.down):
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return dist.get_rank(), world_size


def _hsdp(net: nn.Module, world_size: int) -> tuple[int, int]:
    fully_shard(net, mesh=init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard")))
    return dist.get_rank(), world_size


TENSOR_PARALLEL = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def _tp(net: nn.Module, world_size: int) -> tuple[int, int]:
    parallelize_module(net, init_device_mesh("cpu", (world_size,)), TENSOR_PARALLEL)
    return 0, 1


def _fsdp_tp(net: nn.Module, world_size: int) -> tuple[int, int]:
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(net, mesh["tensor"], TENSOR_PARALLEL)
    fully_shard(net, mesh=mesh["data"])
    return mesh.get_local_rank("data"), world_size // 2


TOPOLOGIES: dict[str, Callable[[nn.Module, int], tuple[int, int]]] = {
    "plain": _plain,
    "ddp": _ddp,
    "fsdp": _fsdp,
    "hsdp": _hsdp,
    "tp": _tp,
    "fsdp+tp": _fsdp_tp,
}
"""Each function shards a model in place and returns the part of a batch that this rank takes: (index, of how many)."""


def arrange(training: Training, rank: int, world_size: int, rendezvous: str, topology: str, dtype: str) -> None:
    """Makes this process a rank of that topology, before training."""
    if world_size > 1:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    torch.manual_seed(1)
    training.net = net = Net().to(getattr(torch, dtype))
    training.share = TOPOLOGIES[topology](net, world_size)
    training.model = nn.parallel.DistributedDataParallel(net) if topology == "ddp" else net
    training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-2)
    training.scheduler = torch.optim.lr_scheduler.LambdaLR(training.optimizer, lambda step: 1 / (1 + step))
    training.extra = {"seen": 0}
    training.state = training._state()
    torch.manual_seed(100 + rank)


def train(training: Training, steps: int) -> list[float]:
    """The losses of the whole batches."""
    losses: list[float] = []
    index, count = training.share
    for _ in range(steps):
        training.step += 1
        numbers = torch.Generator().manual_seed(training.step)
        x, y = torch.randn(BATCH_ROWS, 16, generator=numbers), torch.randn(BATCH_ROWS, 5, generator=numbers)
        rows = slice(index * BATCH_ROWS // count, (index + 1) * BATCH_ROWS // count)
        dtype = next(training.model.parameters()).dtype
        loss = (training.model(x[rows].to(dtype)) - y[rows].to(dtype)).square().mean()
        training.optimizer.zero_grad()
        loss.backward()
        training.optimizer.step()
        training.scheduler.step()
        training.extra["seen"] += BATCH_ROWS
        whole = loss.detach().float()
        if dist.is_initialized():
            dist.all_reduce(whole)
            whole /= dist.get_world_size()
        losses.append(whole.item())
    return losses


def gathered(training: Training) -> Bits:
    """The model and the optimizer, gathered by torch: dtype, shape and bytes of each tensor."""
    tensors: dict[str, torch.Tensor] = dict(training.net.state_dict())
    for name, parameter in training.net.named_parameters():
        tensors |= {f"{name}.{key}": value for key, value in training.optimizer.state[parameter].items()}
    return {name: _bits(tensor) for name, tensor in tensors.items()}


def _bits(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    raw = whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return str(whole.dtype), tuple(whole.shape), raw


def generators(training: Training) -> bytes:
    return torch.get_rng_state().numpy().tobytes()


@contextmanager
def arranged(daemon: Daemon, topology: str, world_size: int, *, dtype: str = "float32") -> Generator[list[Trainer]]:
    """Connected ranks of one run, killed at the end."""
    with ranks_by(arrange, daemon, world_size, topology, dtype) as trainers:
        yield trainers


@contextmanager
def ranks_by(
    work: Callable[..., None], daemon: Daemon, world_size: int, *arguments: object
) -> Generator[list[Trainer]]:
    """The same of a test's own training: `work` gets the training, the rank, the world size, the rendezvous and
    `arguments`."""
    with ExitStack() as stack:
        trainers = [stack.enter_context(Trainer()) for _ in range(world_size)]
        rendezvous = str(daemon.root / f"rendezvous-{trainers[0].pid}")
        for rank, trainer in enumerate(trainers):
            trainer.begin("apply", work, rank, world_size, rendezvous, *arguments)
        for trainer in trainers:
            trainer.end()
        together(trainers, "connect", daemon.socket)
        yield trainers


def every(trainers: list[Trainer], work: Callable[..., Any], *arguments: Any) -> list[Any]:
    return together(trainers, "apply", work, *arguments)


def one_of(answers: list[Any]) -> Any:
    """The answer of all ranks, which must be equal."""
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


def restored(trainers: list[Trainer], **which: Any) -> tuple[int, str]:
    """(step, tier), the same on all ranks."""
    found_by_rank: list[tierd_client.Found] = together(trainers, "restore", **which)
    return one_of([(found.step, found.tier) for found in found_by_rank])
