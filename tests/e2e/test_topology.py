"""A checkpoint of one topology is restored on another with the same bits: any number of ranks, any mesh, any tier."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from tierd_client import Unsupported

from tests.support.daemon import Daemon
from tests.support.topology import Bits, Net, arranged, every, gathered, generators, one_of, restored, train
from tests.support.trainer import Training, refusals, together

CURVE_TOLERANCE = 1e-5  # relative: sums in another order, over a few steps in float32


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path) as daemon:
        yield daemon


def save(daemon: Daemon, topology: str, world_size: int, **options: Any) -> tuple[Bits, list[float]]:
    """Three steps, a checkpoint in every tier, and SIGKILL during further steps. Returns (the state, later losses)."""
    with arranged(daemon, topology, world_size, **options) as trainers:
        every(trainers, train, 3)
        together(trainers, "durable")
        together(trainers, "wait_replicated")
        state = one_of(every(trainers, gathered))
        losses = one_of(every(trainers, train, 4))
        for trainer in trainers:
            trainer.begin("apply", train, 1000)
    return state, losses


def check(
    daemon: Daemon, topology: str, world_size: int, saved: tuple[Bits, list[float]], tier: str, **options: Any
) -> None:
    """The checkpoint is restored bit for bit on that topology, and training has the same losses."""
    state, losses = saved
    with arranged(daemon, topology, world_size, **options) as trainers:
        assert restored(trainers, tier=tier) == (3, tier)
        assert one_of(every(trainers, gathered)) == state
        assert one_of(every(trainers, train, 4)) == pytest.approx(losses, rel=CURVE_TOLERANCE)


def tensors_of(folder: Path) -> Counter[str]:
    """How many parts of each tensor the shards of a checkpoint hold, by name."""
    counts: Counter[str] = Counter()
    for shard in folder.glob("*.safetensors"):
        with safe_open(str(shard), "pt") as file:
            counts.update(file.keys())
    return counts


@pytest.mark.parametrize(
    ("topology", "world_size"),
    [("ddp", 2), *(pytest.param(name, 4, marks=pytest.mark.long) for name in ("fsdp", "fsdp+tp"))],
)
def test_killed_training_resumes_with_bit_identical_losses(daemon: Daemon, topology: str, world_size: int) -> None:
    with arranged(daemon, topology, world_size) as first:
        assert together(first, "restore") == [None] * world_size
        every(first, train, 3)
        together(first, "durable")
        state, numbers = one_of(every(first, gathered)), every(first, generators)
        losses = one_of(every(first, train, 4))
        for trainer in first:
            trainer.begin("apply", train, 1000)

    with arranged(daemon, topology, world_size) as second:
        assert restored(second, resume="require") == (3, "memory")
        assert one_of(every(second, gathered)) == state
        assert every(second, generators) == numbers
        assert len(set(numbers)) == world_size
        assert one_of(every(second, train, 4)) == losses


def test_fsdp_is_restored_from_4_ranks_to_2_and_3_from_memory_hot_and_cold(daemon: Daemon) -> None:
    saved = save(daemon, "fsdp", 4)
    check(daemon, "fsdp", 2, saved, "memory")
    check(daemon, "fsdp", 3, saved, "hot")
    check(daemon, "fsdp", 3, saved, "cold")

    with arranged(daemon, "fsdp", 2) as two:  # adopts slots that are too small
        assert restored(two) == (3, "memory")
        every(two, train, 1)
        together(two, "durable")
        state = one_of(every(two, gathered))
    with arranged(daemon, "fsdp", 3) as three:
        assert restored(three) == (4, "memory")
        assert one_of(every(three, gathered)) == state
        every(three, train, 1)
        together(three, "durable")
        assert daemon.steps("hot") == [3, 4, 5]


# Each topology is saved once and restored at least once, and each tier is read.
CHOSEN = {
    ("ddp", 2): [("fsdp", 3, "memory")],
    ("hsdp", 4): [("ddp", 3, "hot")],
    ("tp", 2): [("plain", 1, "cold")],
    ("fsdp+tp", 4): [("tp", 2, "memory")],
    ("plain", 1): [("fsdp+tp", 4, "hot"), ("hsdp", 4, "memory")],
}
ALL = [("plain", 1), ("ddp", 2), ("ddp", 3), ("fsdp", 2), ("fsdp", 3), ("hsdp", 4), ("tp", 2), ("fsdp+tp", 4)]


@pytest.mark.parametrize(
    "topology",
    [pytest.param(topology, marks=[pytest.mark.long] * (topology != ("ddp", 2))) for topology in CHOSEN],
    ids=lambda topology: f"{topology[0]}-{topology[1]}",
)
def test_a_topology_is_restored_on_others(daemon: Daemon, topology: tuple[str, int]) -> None:
    saved = save(daemon, *topology)
    for other, world_size, tier in CHOSEN[topology]:
        check(daemon, other, world_size, saved, tier)


@pytest.mark.long
@pytest.mark.parametrize(("topology", "world_size"), ALL)
def test_every_topology_is_restored_on_every_other(daemon: Daemon, topology: str, world_size: int) -> None:
    saved = save(daemon, topology, world_size)
    for tier, (other, size) in zip(itertools.cycle(("memory", "hot", "cold")), ALL, strict=False):
        check(daemon, other, size, saved, tier)


@pytest.mark.long
def test_bfloat16_is_restored_bit_for_bit_on_fewer_ranks(daemon: Daemon) -> None:
    state, _ = save(daemon, "fsdp", 3, dtype="bfloat16")
    assert state["up.weight.exp_avg"][0] == "torch.bfloat16"
    with arranged(daemon, "fsdp", 2, dtype="bfloat16") as trainers:
        restored(trainers)
        assert one_of(every(trainers, gathered)) == state


@pytest.mark.long
def test_each_part_of_a_tensor_is_written_by_one_of_the_ranks_that_hold_it(daemon: Daemon) -> None:
    save(daemon, "hsdp", 4)
    counts = tensors_of(daemon.folder(3))
    assert counts["model.up.weight"] == 2, "one for each part, not for each replica"
    assert counts["model.calls"] == counts["optimizer.state.up.weight.step"] == 1
    assert max(counts.values()) == 2


@pytest.mark.filterwarnings("ignore")
def test_stock_pytorch_loads_what_fsdp_on_4_ranks_saved(daemon: Daemon, tmp_path: Path) -> None:
    state, _ = save(daemon, "fsdp", 4)
    done = daemon.tierd("restore", "--tier", "cold", "--to", tmp_path / "restored")
    assert done.returncode == 0, done.stderr

    net = Net()
    tensors = {f"model.{name}": tensor for name, tensor in net.state_dict().items()}
    for name, parameter in net.named_parameters():
        tensors |= {f"optimizer.state.{name}.{key}": torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
    dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path / "restored")), no_dist=True)
    for name, tensor in tensors.items():
        plain = name.removeprefix("model.").removeprefix("optimizer.state.")
        assert tensor.numpy().tobytes() == state[plain][2], name
    assert len(tensors) == 3 * 6 + 1


def test_tensor_parallel_with_plain_tensors_is_refused_by_name(daemon: Daemon) -> None:
    with arranged(daemon, "plain", 1) as alone:
        every(alone, train, 1)
        together(alone, "durable")
    with arranged(daemon, "ddp", 2) as trainers:
        together(trainers, "restore")
        every(trainers, _shard_by_hand)
        errors = refusals(trainers, "snapshot", 2)
        assert [type(error) for error in errors] == [Unsupported, Unsupported]
        assert "compare model.up.weight between the ranks" in str(errors[0])
        assert daemon.steps("hot") == [1]

        every(trainers, _make_equal)
        together(trainers, "durable", step=3)
        assert daemon.steps("hot") == [1, 3]


def test_buffers_that_differ_between_ranks_are_restored_from_rank_0(daemon: Daemon) -> None:
    with arranged(daemon, "ddp", 3) as first:
        every(first, _add_statistics)
        every(first, train, 2)
        together(first, "durable")
        statistics = every(first, _statistics)
        assert len(set(statistics)) == 3
        losses = every(first, train, 3)
        after = every(first, _statistics)
    with arranged(daemon, "ddp", 3) as second:
        every(second, _add_statistics)
        assert restored(second) == (2, "memory")
        assert every(second, _statistics) == [statistics[0]] * 3
        assert every(second, train, 3) == losses
        assert every(second, _statistics) == after


@pytest.mark.long
def test_sharded_module_in_extra_is_resharded(daemon: Daemon) -> None:
    with arranged(daemon, "fsdp", 3) as first:
        every(first, _add_critic, 2)
        every(first, train, 1)
        together(first, "durable")
        critic = one_of(every(first, _critic))
    for world_size, topology in ((2, "fsdp"), (1, "plain")):
        with arranged(daemon, topology, world_size) as others:
            every(others, _add_critic, 3)
            restored(others)
            assert one_of(every(others, _critic)) == critic


# ── functions that run in a trainer ──


def _shard_by_hand(training: Training) -> None:
    with torch.no_grad():
        training.net.up.weight.add_(training.share[0])


def _make_equal(training: Training) -> None:
    with torch.no_grad():
        training.net.up.weight.fill_(1.0)


def _add_statistics(training: Training) -> None:
    """Adds a BatchNorm, whose running mean differs between ranks until the next forward."""
    training.net.norm = torch.nn.BatchNorm1d(5)
    # Without it DDP reorders its buckets after the first backward, and sums of three numbers depend on their order.
    training.model = torch.nn.parallel.DistributedDataParallel(training.net, find_unused_parameters=True)
    training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-2)
    training.scheduler = torch.optim.lr_scheduler.LambdaLR(training.optimizer, lambda step: 1.0)
    training.state = training._state()


def _statistics(training: Training) -> bytes:
    return training.net.norm.running_mean.numpy().tobytes()


def _add_critic(training: Training, seed: int) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    critic = torch.nn.Linear(7, 5)
    if training.share[1] > 1:
        fully_shard(critic)
    training.extra["critic"] = critic


def _critic(training: Training) -> list[bytes]:
    return [
        (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).detach().numpy().tobytes()
        for weight in training.extra["critic"].parameters()
    ]
