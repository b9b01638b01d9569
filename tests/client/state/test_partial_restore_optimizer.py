"""A partial restore of an optimizer: its state has the parameter's dtype and local shape, and no stale moments stay."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tierd_client.state.restore_filter import RestoreFilter
from tierd_client.state.restore_report import RestoreReport
from tierd_client.state.training_state import TrainingState
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.state import Files, restore, stage
from tierd.errors import Mismatch


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    opened = Files(tmp_path)
    yield opened
    opened.close()


def restored(state: TrainingState, files: Files, raw: bytes, *, name: str = "", **arguments: Any) -> RestoreReport:
    defaults: dict[str, Any] = {"only": None, "rename": None, "strict": True, "cast": False, "keep": ()}
    shard = files.on_disk(raw, *([name] if name else []))
    return restore(state, [shard], filter=RestoreFilter.parse(**{**defaults, **arguments}))


class Pair(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(4, 2, dtype=dtype))
        self.b = nn.Parameter(torch.ones(3, dtype=dtype))


def training(stepped: str = "", dtype: torch.dtype = torch.float32) -> tuple[Pair, torch.optim.AdamW, TrainingState]:
    """A model and an optimizer that has state of the parameters `stepped`."""
    model = Pair(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for name in stepped:
        parameter = model.get_parameter(name)
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer, TrainingState(model=model, optimizer=optimizer, rng=False)


@pytest.mark.parametrize(
    ("stored", "live", "arguments"),
    [
        (torch.complex64, torch.complex128, {"cast": True}),
        (torch.complex64, torch.float32, {"cast": True}),
        (torch.float32, torch.complex64, {"cast": True}),
        (torch.float32, torch.bfloat16, {}),
    ],
)
@pytest.mark.parametrize("stepped", ["", "ab"])
def test_moments_of_a_parameter_of_another_dtype_do_not_fit(
    files: Files, stored: torch.dtype, live: torch.dtype, arguments: dict[str, Any], stepped: str
) -> None:
    raw = stage(training("ab", stored)[2])
    model, optimizer, state = training(stepped, live)
    with pytest.raises(Mismatch, match=r"optimizer\.state\.a: its parameter is \w+ in the checkpoint, now \w+"):
        restored(state, files, raw, only=["optimizer"], **arguments)
    report = restored(state, files, raw, only=["optimizer"], strict=False, **arguments)
    assert set(report.mismatched) == {"optimizer.state.a", "optimizer.state.b"}
    assert not report.cast
    assert all(entries["exp_avg"].dtype == live for entries in optimizer.state.values())
    assert set(optimizer.state) == (set(model.parameters()) if stepped else set())


@pytest.mark.parametrize("strict", [True, False])
def test_moments_that_the_checkpoint_lacks_are_cleared_as_by_a_whole_restore(files: Files, *, strict: bool) -> None:
    raw = stage(training("a")[2])
    model, optimizer, state = training("ab")
    report = restored(state, files, raw, keep=["optimizer.*lr"], strict=strict)
    assert set(optimizer.state) == {model.a}
    assert report.cleared == ["optimizer.state.b"]
    assert ", 1 cleared" in str(report)


@pytest.mark.parametrize(
    "arguments",
    [{"only": "model"}, {"only": "optimizer.param_groups"}, {"only": "optimizer.state.a"}, {"keep": "optimizer.state"}],
)
def test_moments_that_are_not_asked_for_or_kept_are_not_cleared(files: Files, arguments: dict[str, Any]) -> None:
    raw = stage(training("a")[2])
    model, optimizer, state = training("ab")
    report = restored(state, files, raw, **arguments)
    assert set(optimizer.state) == set(model.parameters())
    assert not report.cleared


def test_moments_of_a_dtensor_that_differs_by_rank_are_restored_by_their_local_part(files: Files) -> None:
    raws: list[bytes] = []
    try:
        for rank in (0, 1):
            state = _distributed(rank, float(rank + 1))[1]
            raws.append(stage(state, rank=rank, world_size=2))
        module, state, optimizer = _distributed(1, 9.0, is_stepped=False)
        shards = [files.on_disk(raw, f"rank-{rank:05d}-of-00002.safetensors") for rank, raw in enumerate(raws)]
        filter = RestoreFilter.parse(only=["optimizer"], rename=None, strict=True, cast=False, keep=())
        report = restore(state, shards, rank=1, filter=filter)
        assert "optimizer.state.a" in report.loaded
        moment = optimizer.state[module.a]["exp_avg"].to_local()
        assert moment.shape == (2, 2)
        assert torch.allclose(moment, torch.full((2, 2), 0.2))
    finally:
        torch.distributed.destroy_process_group()


def _distributed(
    rank: int, gradient: float, *, is_stepped: bool = True
) -> tuple[Pair, TrainingState, torch.optim.Optimizer]:
    """A model whose parameter `a` is sharded over two ranks, each of which stores its own part."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(f"own_r{rank}",))  # torch caches meshes by their names
    module = Pair()
    module.a = nn.Parameter(distribute_tensor(module.a.detach(), mesh, [Shard(0)], src_data_rank=None))
    optimizer = torch.optim.AdamW([module.a], foreach=False)
    if is_stepped:
        module.a.grad = torch.ones_like(module.a) * gradient
        optimizer.step()
    return module, TrainingState(model=module, optimizer=optimizer, rng=False, per_rank=["model.a"]), optimizer


# ── schedulers ──


@pytest.mark.parametrize("kind", ["sequential", "chained", "plateau", "nested"])
@pytest.mark.parametrize("strict", [True, False])
def test_scheduler_of_another_number_of_groups_does_not_fit(files: Files, kind: str, *, strict: bool) -> None:
    schedulers = torch.optim.lr_scheduler

    def build(groups: int) -> tuple[TrainingState, Any]:
        module = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
        parts = [[*part.parameters()] for part in module.values()] if groups == 2 else [[*module.parameters()]]
        optimizer = torch.optim.SGD([{"params": part} for part in parts], lr=1.0)
        linear: list[torch.optim.lr_scheduler.LRScheduler] = [
            schedulers.LinearLR(optimizer),
            schedulers.CosineAnnealingLR(optimizer, 10),
        ]
        scheduler = {
            "sequential": lambda: schedulers.SequentialLR(optimizer, linear, [3]),
            "chained": lambda: schedulers.ChainedScheduler(linear, optimizer),
            "plateau": lambda: schedulers.ReduceLROnPlateau(optimizer),
            "nested": lambda: schedulers.ChainedScheduler([schedulers.ChainedScheduler(linear, optimizer)], optimizer),
        }[kind]()
        return TrainingState(model=module, optimizer=optimizer, scheduler=scheduler, rng=False), scheduler

    raw = stage(build(1)[0])
    state, scheduler = build(2)
    before = copy.deepcopy(scheduler.state_dict())
    if strict:
        with pytest.raises(Mismatch, match="scheduler: checkpoint 1 parameter groups, now 2"):
            restored(state, files, raw, only=["model", "scheduler"])
    else:
        report = restored(state, files, raw, strict=False)
        assert report.mismatched["scheduler"] == "checkpoint 1 parameter groups, now 2"
    assert scheduler.state_dict() == before


def test_scheduler_of_another_number_of_schedulers_does_not_fit(files: Files) -> None:
    def build(count: int) -> TrainingState:
        module = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        parts = [torch.optim.lr_scheduler.LinearLR(optimizer) for _ in range(count)]
        scheduler = torch.optim.lr_scheduler.ChainedScheduler(parts, optimizer)
        return TrainingState(model=module, scheduler=scheduler, rng=False)

    raw = stage(build(2))
    with pytest.raises(Mismatch, match="scheduler: checkpoint 2 schedulers, now 1"):
        restored(build(1), files, raw, only=["model", "scheduler"])
