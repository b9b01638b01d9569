"""The look for NaN: every float format by its bits, what is looked at, and the digest of what is trained."""

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
from tierd.format.health import TENSORS_LISTED_MAX, Examined
from tierd.health.program import BLOCK_BYTES, COUNTS, examine

FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def examined(folder: Path, *shards: bytes) -> Examined:
    files: list[tuple[int, int]] = []
    try:
        for number, raw in enumerate(shards):
            path = folder / f"shard-{number}"
            path.write_bytes(raw + b"\xff" * 5000)  # a slot is larger than the shard in it
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


def holding(**tensors: torch.Tensor) -> bytes:
    """Tensors that are trained: parameters of an optimizer."""
    model = nn.Module()
    for name, tensor in tensors.items():
        model.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return stage(TrainingState(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), rng=False))


def trained(model: nn.Module, *, lr: float = 0.1, **more: Any) -> tuple[TrainingState, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return TrainingState(model=model, optimizer=optimizer, rng=False, **more), optimizer


# ── what is finite ──


def test_every_float_of_a_shard_is_looked_at() -> None:
    assert set(COUNTS) == set(FLOATS)


@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_and_inf_are_counted_and_the_largest_number_is_none(dtype: str, tmp_path: Path) -> None:
    kind = FLOATS[dtype]
    largest = torch.finfo(kind).max
    sane = torch.tensor([0.0, -0.0, 1.0, largest, -largest, torch.finfo(kind).tiny], dtype=torch.float64).to(kind)
    assert examined(tmp_path, holding(weight=sane)).tensors == 0
    odd = torch.tensor([1.0, math.nan, math.inf, -math.inf, math.nan]).to(kind)
    if kind is torch.float8_e4m3fn:  # it has no infinity: torch makes the largest number of it
        nan, inf = 2, 0
    else:
        nan, inf = 2, 2
    found = examined(tmp_path, holding(sane=sane, weight=odd))
    assert found.tensors == 1
    assert (found.not_finite[0].tensor, found.not_finite[0].nan, found.not_finite[0].inf) == ("model.weight", nan, inf)


@given(raw=st.binary(min_size=16, max_size=16))
@settings(max_examples=300, deadline=None)
def test_any_bits_are_judged_as_torch_judges_them(raw: bytes) -> None:
    for dtype, kind in FLOATS.items():
        numbers = torch.frombuffer(bytearray(raw), dtype=kind)
        plain = torch.view_as_real(numbers) if numbers.is_complex() else numbers.to(torch.float64)
        expected = (int(plain.isnan().sum()), int(plain.isinf().sum()))
        assert COUNTS[dtype](memoryview(raw)) == expected, dtype


@pytest.mark.parametrize("place", [0, BLOCK_BYTES // 4 - 1, BLOCK_BYTES // 4, -1])
def test_one_bad_number_anywhere_in_a_large_tensor_is_found(place: int, tmp_path: Path) -> None:
    weight = torch.zeros(2 * BLOCK_BYTES // 4 + 3)
    weight[place] = math.nan
    assert examined(tmp_path, holding(weight=weight)).tensors == 1


def test_moments_and_averages_are_looked_at_and_what_the_user_keeps_is_not(tmp_path: Path) -> None:
    def shard(**spoiled: bool) -> bytes:
        model = nn.Linear(2, 2)
        extra = {"best": math.inf, "tensor": torch.tensor([math.nan])}
        ema = {"weight": torch.zeros(2)}
        state, optimizer = trained(model, ema=ema, extra=extra)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if spoiled.get("moment"):
            optimizer.state[model.weight]["momentum_buffer"][0, 0] = math.inf
        if spoiled.get("ema"):
            ema["weight"][1] = math.nan
        return stage(state)

    assert examined(tmp_path, shard()).tensors == 0
    assert examined(tmp_path, shard(moment=True)).not_finite[0].tensor == "optimizer.state.weight.momentum_buffer"
    assert examined(tmp_path, shard(ema=True)).not_finite[0].tensor == "ema.weight"


def test_state_under_names_of_its_own_is_looked_at_but_for_scores(tmp_path: Path) -> None:
    weight = torch.zeros(3)
    state: Any = DictState({"app": {"model": {"weight": weight}}, "callbacks": {"score": torch.tensor(math.nan)}})
    assert examined(tmp_path, stage(state)).tensors == 0
    weight[1] = math.nan
    assert [one.tensor for one in examined(tmp_path, stage(state)).not_finite] == ["app.model.weight"]


def test_infinities_of_a_buffer_are_a_mask_and_nan_is_none(tmp_path: Path) -> None:
    mask = torch.full((4, 4), -math.inf).triu(1)
    state, _ = trained(nn.Sequential(nn.Linear(2, 2), Holder(mask=mask)), ema={"mask": mask.clone()})
    assert examined(tmp_path, stage(state)).tensors == 0
    mask[0, 0] = math.nan
    assert [one.tensor for one in examined(tmp_path, stage(state)).not_finite] == ["model.1.mask"]


def test_the_list_is_bounded_and_the_count_is_not(tmp_path: Path) -> None:
    many = {f"b{number:03d}": torch.tensor([math.nan]) for number in range(50)}
    found = examined(tmp_path, holding(**many))
    assert (found.tensors, len(found.not_finite)) == (50, TENSORS_LISTED_MAX)


def test_what_is_no_shard_is_damage(tmp_path: Path) -> None:
    for raw in (b"", b"\0" * 7, b"\xff" * 64, holding(weight=torch.zeros(4))[:-1]):
        with pytest.raises(Corrupt):
            examined(tmp_path, raw)


# ── what has been trained ──


def test_the_digest_changes_with_a_parameter_and_with_nothing_else(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    state, optimizer = trained(model, extra={"step": 0})
    first = examined(tmp_path, stage(state)).digest
    model(torch.randn(4, 3))  # moves the buffers only
    optimizer.param_groups[0]["lr"] = 0.05
    assert examined(tmp_path, stage(state)).digest == first != ""
    with torch.no_grad():
        model[0].bias[0] += 1
    assert examined(tmp_path, stage(state)).digest != first


def test_with_every_learning_rate_at_nought_or_no_optimizer_there_is_none(tmp_path: Path) -> None:
    state, _ = trained(nn.Linear(2, 2), lr=0.0)
    assert examined(tmp_path, stage(state)).digest == ""
    assert examined(tmp_path, stage(TrainingState(model=nn.Linear(2, 2), rng=False))).digest == ""


def test_the_digest_is_of_all_ranks_whoever_wrote_what(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    state, _ = trained(model)
    keys = {tensor.key for tensor in state.capture(0, 2).tensors}
    one = {"model.weight"}
    there = [stage(state, rank=rank, world_size=2, owned=owned) for rank, owned in enumerate((one, keys - one))]
    swapped = [stage(state, rank=rank, world_size=2, owned=owned) for rank, owned in enumerate((keys - one, one))]
    assert examined(tmp_path, *there).digest == examined(tmp_path, *swapped).digest != ""


def test_of_several_optimizers_and_foreign_parameters_all_count(tmp_path: Path) -> None:
    model, foreign = nn.Linear(2, 2), nn.Parameter(torch.zeros(2))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD([foreign], lr=0.1)]
    state = TrainingState(model=model, optimizer=optimizers, rng=False)
    first = examined(tmp_path, stage(state)).digest
    with torch.no_grad():
        foreign += 1
    assert examined(tmp_path, stage(state)).digest != first
