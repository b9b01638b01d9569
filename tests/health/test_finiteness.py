"""Counting NaN and Inf: every float dtype, which tensors are examined, and the digest of the trained tensors."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tierd_client.state.dict_state import DictState
from tierd_client.state.training_state import TrainingState
from torch import nn

from tests.support.state import stage
from tierd.errors import Corrupt
from tierd.format.health import TENSORS_LISTED_MAX, Diagnosis
from tierd.health.finiteness import BLOCK_BYTES, COUNTS, examine

FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}


def examined(folder: Path, *shards: bytes) -> Diagnosis:
    files: list[tuple[int, int]] = []
    try:
        for number, raw in enumerate(shards):
            path = folder / f"shard-{number}"
            path.write_bytes(raw + b"\xff" * 5000)  # a slot is larger than its shard
            files.append((os.open(path, os.O_RDONLY), len(raw)))
        return examine(files)
    finally:
        for descriptor, _ in files:
            os.close(descriptor)


class Holder(nn.Module):
    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def shard_of_trained(**tensors: torch.Tensor) -> bytes:
    """A shard in which an optimizer trains these tensors."""
    model = nn.Module()
    for name, tensor in tensors.items():
        model.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return stage(TrainingState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), rng=False))


def trained(model: nn.Module, *, lr: float = 0.1, **more: Any) -> tuple[TrainingState, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return TrainingState(model=model, optimizer=optimizer, rng=False, **more), optimizer


# ── NaN and Inf ──


def test_every_float_dtype_is_examined() -> None:
    assert set(COUNTS) == set(FLOATS)


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_and_inf_are_counted_and_the_largest_number_is_finite(dtype: str, tmp_path: Path) -> None:
    kind = FLOATS[dtype]
    largest = torch.finfo(kind).max
    finite = torch.tensor([0.0, -0.0, 1.0, largest, -largest, torch.finfo(kind).tiny], dtype=torch.float64).to(kind)
    assert examined(tmp_path, shard_of_trained(weight=finite)).tensors == 0
    not_finite = torch.tensor([1.0, math.nan, math.inf, -math.inf, math.nan]).to(kind)
    if dtype == "F8_E4M3":  # it has no Inf: torch converts Inf to the largest number
        nan, inf = 2, 0
    elif dtype.endswith("FNUZ"):  # neither have these: torch converts Inf to NaN
        nan, inf = 4, 0
    else:
        nan, inf = 2, 2
    result = examined(tmp_path, shard_of_trained(finite=finite, weight=not_finite))
    assert result.tensors == 1
    (tensor,) = result.not_finite
    assert (tensor.tensor, tensor.nan, tensor.inf) == ("model.weight", nan, inf)


@given(raw=st.binary(min_size=16, max_size=16))
@settings(max_examples=300, deadline=None)
def test_any_bits_are_counted_as_torch_counts_them(raw: bytes) -> None:
    for dtype, kind in FLOATS.items():
        numbers = torch.frombuffer(bytearray(raw), dtype=kind)
        plain = torch.view_as_real(numbers) if numbers.is_complex() else numbers.to(torch.float64)
        expected = (int(plain.isnan().sum()), int(plain.isinf().sum()))
        assert COUNTS[dtype](memoryview(raw)) == expected, dtype


@pytest.mark.parametrize("position", [0, BLOCK_BYTES // 4 - 1, BLOCK_BYTES // 4, -1])
def test_one_nan_at_any_position_of_a_large_tensor_is_found(position: int, tmp_path: Path) -> None:
    weight = torch.zeros(2 * BLOCK_BYTES // 4 + 3)
    weight[position] = math.nan
    assert examined(tmp_path, shard_of_trained(weight=weight)).tensors == 1


def test_optimizer_state_and_ema_are_examined_and_extra_is_not(tmp_path: Path) -> None:
    def shard(**damaged: bool) -> bytes:
        model = nn.Linear(2, 2)
        extra = {"best": math.inf, "tensor": torch.tensor([math.nan])}
        ema = {"weight": torch.zeros(2)}
        state, optimizer = trained(model, ema=ema, extra=extra)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if damaged.get("moment"):
            optimizer.state[model.weight]["momentum_buffer"][0, 0] = math.inf
        if damaged.get("ema"):
            ema["weight"][1] = math.nan
        return stage(state)

    assert examined(tmp_path, shard()).tensors == 0
    assert examined(tmp_path, shard(moment=True)).not_finite[0].tensor == "optimizer.state.weight.momentum_buffer"
    assert examined(tmp_path, shard(ema=True)).not_finite[0].tensor == "ema.weight"


def test_tensors_of_a_dict_state_are_examined_except_scalars(tmp_path: Path) -> None:
    weight = torch.zeros(3)
    state: Any = DictState({"app": {"model": {"weight": weight}}, "callbacks": {"score": torch.tensor(math.nan)}})
    assert examined(tmp_path, stage(state)).tensors == 0
    weight[1] = math.nan
    assert [tensor.tensor for tensor in examined(tmp_path, stage(state)).not_finite] == ["app.model.weight"]


def test_inf_in_a_buffer_is_allowed_and_nan_is_not(tmp_path: Path) -> None:
    mask = torch.full((4, 4), -math.inf).triu(1)
    state, _ = trained(nn.Sequential(nn.Linear(2, 2), Holder(mask=mask)), ema={"mask": mask.clone()})
    assert examined(tmp_path, stage(state)).tensors == 0
    mask[0, 0] = math.nan
    assert [tensor.tensor for tensor in examined(tmp_path, stage(state)).not_finite] == ["model.1.mask"]


def test_the_list_of_tensors_is_bounded_and_their_number_is_not(tmp_path: Path) -> None:
    many = {f"b{number:03d}": torch.tensor([math.nan]) for number in range(50)}
    result = examined(tmp_path, shard_of_trained(**many))
    assert (result.tensors, len(result.not_finite)) == (50, TENSORS_LISTED_MAX)


def test_an_invalid_shard_is_corrupt(tmp_path: Path) -> None:
    for raw in (b"", b"\0" * 7, b"\xff" * 64, shard_of_trained(weight=torch.zeros(4))[:-1]):
        with pytest.raises(Corrupt):
            examined(tmp_path, raw)


# ── digest ──


def test_the_digest_changes_only_with_a_parameter(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    state, optimizer = trained(model, extra={"step": 0})
    first = examined(tmp_path, stage(state)).digest
    model(torch.randn(4, 3))  # changes the buffers only
    optimizer.param_groups[0]["lr"] = 0.05
    assert examined(tmp_path, stage(state)).digest == first != ""
    with torch.no_grad():
        model[0].bias[0] += 1
    assert examined(tmp_path, stage(state)).digest != first


def test_the_digest_is_empty_without_an_optimizer_or_with_learning_rate_0(tmp_path: Path) -> None:
    state, _ = trained(nn.Linear(2, 2), lr=0.0)
    assert examined(tmp_path, stage(state)).digest == ""
    assert examined(tmp_path, stage(TrainingState(model=nn.Linear(2, 2), rng=False))).digest == ""


def test_the_digest_does_not_depend_on_which_rank_wrote_a_tensor(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    state, _ = trained(model)
    keys = {tensor.key for tensor in state.capture(0, 2).tensors}
    weight = {"model.weight"}
    shards = [stage(state, rank=rank, world_size=2, owned=owned) for rank, owned in enumerate((weight, keys - weight))]
    swapped = [stage(state, rank=rank, world_size=2, owned=owned) for rank, owned in enumerate((keys - weight, weight))]
    assert examined(tmp_path, *shards).digest == examined(tmp_path, *swapped).digest != ""


def test_the_digest_includes_several_optimizers_and_parameters_outside_the_model(tmp_path: Path) -> None:
    model, foreign = nn.Linear(2, 2), nn.Parameter(torch.zeros(2))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD([foreign], lr=0.1)]
    state = TrainingState(model=model, optimizer=optimizers, rng=False)
    first = examined(tmp_path, stage(state)).digest
    with torch.no_grad():
        foreign += 1
    assert examined(tmp_path, stage(state)).digest != first
