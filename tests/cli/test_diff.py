"""`tierd diff`: what differs between two checkpoints, against torch's own arithmetic."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.cli import House, flip_a_bit, make_house
from tests.support.state import commit, shard_of

NUMBERS = ("max_abs", "max_rel", "norm_a", "norm_b", "norm_difference", "relative")
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
FNUZ = [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


@pytest.fixture
def house(tmp_path: Path) -> House:
    return make_house(tmp_path)


def whole(tensors: dict[str, torch.Tensor], tree: Any = None) -> list[bytes]:
    return [shard_of([(name, tensor, (0,) * tensor.ndim) for name, tensor in tensors.items()], tree)]


def two(house: House, a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    commit(house.hot, whole(a), step=10)
    commit(house.cold, whole(b), step=20)


def expected(a: torch.Tensor, b: torch.Tensor) -> dict[str, float]:
    first, second = a.double(), b.double()
    distance = (second - first).abs()
    largest = torch.maximum(first.abs(), second.abs())
    return {
        "max_abs": distance.max().item(),
        "max_rel": torch.where(distance > 0, distance / largest, 0.0).max().item(),
        "norm_a": first.norm().item(),
        "norm_b": second.norm().item(),
        "norm_difference": distance.norm().item(),
        "relative": (distance.norm() / first.norm()).item(),
    }


@pytest.mark.parametrize("dtype", [*FLOATS, *FNUZ, *INTEGERS], ids=str)
def test_numbers_are_those_of_torch(house: House, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    a = (10 * torch.randn(40, 30, generator=generator)).to(dtype)
    b = a.clone()
    b[:7] = (10 * torch.randn(7, 30, generator=generator)).to(dtype)
    two(house, {"model.w": a}, {"model.w": b})

    (tensor,) = house.json("diff", "10", "20")["tensors"]

    assert {name: tensor[name] for name in NUMBERS} == pytest.approx(expected(a, b), rel=1e-12)
    assert tensor["elements"] == 1200
    assert tensor["differing"] == int((a.double() != b.double()).sum())
    assert not tensor["not_finite"]


def test_checkpoints_of_different_numbers_of_ranks_are_compared_element_by_element(house: House) -> None:
    a, b = torch.randn(300, 64), torch.randn(300, 64)
    columns = [[("model.t", a[:, :24], (0, 0))], [("model.t", a[:, 24:], (0, 24))]]
    rows = [[("model.t", b[:7], (0, 0))], [("model.t", b[7:120], (7, 0))], [("model.t", b[120:], (120, 0))]]
    for step, parts in ((10, columns), (20, rows)):
        shards = [shard_of(part, rank=rank) for rank, part in enumerate(parts)]
        commit(house.hot, shards, step=step, chunk_bytes=8192)

    (tensor,) = house.json("diff", "10", "20")["tensors"]

    assert {name: tensor[name] for name in NUMBERS} == pytest.approx(expected(a, b))
    assert (tensor["elements"], tensor["shape"]) == (300 * 64, [300, 64])


def test_checkpoints_of_many_ranks_are_compared_in_time(house: House) -> None:
    """There are as many pairs of parts as the square of the number of ranks."""
    for step in (10, 20):
        commit(house.hot, [shard_of([("t", torch.ones(1), (rank,))], rank=rank) for rank in range(100)], step=step)
    began_s = time.process_time()
    report = house.json("diff", "10", "20")
    assert report["tensors"][0]["elements"] == 100
    assert time.process_time() - began_s < 5


def test_a_part_that_several_ranks_have_counts_once(house: House) -> None:
    weight = torch.ones(5)
    commit(house.hot, [shard_of([("model.w", weight, (0,))], rank=rank) for rank in range(2)], step=10)
    commit(house.hot, whole({"model.w": 2 * weight}), step=20)

    (tensor,) = house.json("diff", "10", "20")["tensors"]

    assert (tensor["elements"], tensor["norm_a"], tensor["max_rel"]) == (5, pytest.approx(math.sqrt(5)), 0.5)


def test_numbers_that_are_not_finite_are_counted_apart(house: House) -> None:
    a = torch.tensor([1.0, math.nan, math.inf, 4.0])
    two(house, {"model.w": a}, {"model.w": torch.tensor([1.0, math.nan, 3.0, math.nan])})

    (tensor,) = house.json("diff", "10", "20")["tensors"]

    assert (tensor["not_finite"], tensor["differing"], tensor["max_abs"], tensor["norm_a"]) == (3, 2, 0.0, 1.0)


def test_text_names_what_differs_and_hides_what_is_equal(house: House) -> None:
    same = torch.ones(3)
    a = {"model.same": same, "model.w": torch.zeros(2, 2), "model.gone": same, "model.grown": same}
    b = {"model.same": same, "model.w": torch.ones(2, 2), "model.new": same, "model.grown": torch.ones(4)}
    commit(house.hot, whole(a, {"lr": 0.1, "list": [1, 2]}), step=10)
    commit(house.hot, whole(b, {"lr": 0.2, "list": [1, 2, 3]}), step=20)

    result = house.tierd("diff", "run/10", "latest")

    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert next(line for line in lines if line[:1] == ["model.w"])[3:] == ["4", "of", "4", "1", "1", "0", "2", "-"]
    assert "model.same" not in result.stdout
    assert "F32 [3] and F32 [4]" in result.stdout
    assert "only in A: model.gone\nonly in B: model.new\n" in result.stdout
    assert "lr: 0.1 → 0.2" in result.stdout
    assert "list[2]: absent → 3" in result.stdout
    assert result.stdout.endswith("1 of 3 tensors are equal, 2 other values differ\n")
    assert "model.same" in house.tierd("diff", "run/10", "latest", "--all").stdout


def test_equal_checkpoints_are_equal(house: House) -> None:
    two(house, {"model.w": torch.ones(3)}, {"model.w": torch.ones(3)})
    assert house.json("diff", "10", "20")["is_equal"]
    assert house.tierd("diff", "10", "20").stdout.endswith("EQUAL: 1 of 1 tensors are equal\n")


def test_values_of_every_rank_are_compared(house: House) -> None:
    for step, seed in ((10, 1), (20, 2)):
        trees = [{"extra.a": {"value": 5}}, {"extra.a": {"value": 5}, "rng": {"value": seed}}]
        commit(house.hot, [shard_of([], tree, rank=rank) for rank, tree in enumerate(trees)], step=step)
    report = house.json("diff", "10", "20")
    assert report["values"] == [{"path": "rank 1: rng.value", "a": "1", "b": "2"}]
    assert not report["is_equal"]


def test_only_chosen_tensors_are_read(house: House) -> None:
    two(house, {"model.w": torch.ones(3), "ema.w": torch.ones(3)}, {"model.w": torch.ones(3), "ema.w": torch.zeros(3)})
    report = house.json("diff", "10", "20", "--only", "model.*")
    assert [tensor["name"] for tensor in report["tensors"]] == ["model.w"]
    assert report["is_equal"]


def test_a_damaged_chunk_comes_from_another_tier_or_is_named(house: House) -> None:
    two(house, {"model.w": torch.ones(9000)}, {"model.w": torch.zeros(9000)})
    flip_a_bit(commit(house.hot, whole({"model.w": torch.zeros(9000)}), step=20) / "rank-00000-of-00001.safetensors")

    assert house.json("diff", "10", "20")["tensors"][0]["max_abs"] == 1
    result = house.tierd("diff", "10", "20", "--tier", "hot")
    assert result.exit_code != 0


def test_what_names_no_checkpoint_is_refused(house: House) -> None:
    commit(house.hot, whole({"model.w": torch.ones(3)}), step=10)
    for arguments, code, text in (
        (("10", "ten"), 2, "'ten' names no checkpoint"),
        (("10", "11"), 10, "there is none"),
        (("10", "other/10", "--run", "run"), 2, "is of run other"),
        (("10", "run/10-g7"), 10, "there is none"),
    ):
        result = house.tierd("diff", *arguments)
        assert (result.exit_code, text in result.output) == (code, True), result.output
    assert house.tierd("diff", "run/000000000010-g0001", "10").exit_code == 0
