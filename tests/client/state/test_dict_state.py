"""A nested dict as state: restored unchanged and in place where possible, refused where it has no safe form."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tierd_client import DictState, TrainingState

from tests.support.state import Files, assert_same, restore, small_net, stage
from tierd.errors import BadConfig, Mismatch, Unsupported


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    opened = Files(tmp_path)
    yield opened
    opened.close()


def nested() -> dict[str, Any]:
    return {
        "model": {"weight": torch.arange(6.0).view(2, 3), "half": torch.ones(2, dtype=torch.bfloat16)},
        "optimizer": [{"state": {0: {"step": torch.tensor(3.0)}}, "groups": [{"betas": (0.9, 0.99), "lr": 1e-3}]}],
        "epoch": 3,
        "name": "a",
        "nothing": None,
    }


def test_nested_dict_is_restored_unchanged(files: Files) -> None:
    raw = stage(DictState({**nested(), "array": np.arange(4)}))
    restored: dict[str, Any] = {}
    restore(DictState(restored), [files.on_disk(raw)])
    assert restored.pop("array").tolist() == [0, 1, 2, 3]
    assert list(restored) == list(nested())
    assert_same(restored, nested())


def test_tensors_that_fit_are_restored_in_place_and_others_are_replaced(files: Files) -> None:
    raw = stage(DictState(nested()))
    live = nested()
    live["model"]["weight"].zero_()
    live["model"]["half"] = torch.zeros(5)
    weight = live["model"]["weight"]
    restore(DictState(live), [files.in_memory(raw)])
    assert live["model"]["weight"] is weight
    assert_same(live, nested())


def test_per_rank_keys_are_stored_for_each_rank_and_other_keys_once(files: Files) -> None:
    def build(rank: int) -> DictState:
        return DictState({"model": torch.zeros(2), "own": torch.tensor([rank])}, per_rank=["own"])

    captured = [build(rank).capture(rank, 2) for rank in range(2)]
    assert [{tensor.name for tensor in state.tensors} for state in captured] == [
        {"model", "own@00000"},
        {"model", "own@00001"},
    ]
    raws = [stage(build(rank), rank=rank, world_size=2) for rank in range(2)]
    opened = [files.on_disk(raw, f"rank-{rank:05d}-of-00002.safetensors") for rank, raw in enumerate(raws)]
    for rank in range(2):
        restored: dict[str, Any] = {}
        restore(DictState(restored), opened, rank=rank)
        assert restored["own"].item() == rank


def test_keys_missing_in_the_checkpoint_stay_unchanged_and_are_logged(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    raw = stage(DictState({"a": 1}))
    live = {"a": 0, "later": 7}
    with caplog.at_level(logging.WARNING):
        restore(DictState(live), [files.on_disk(raw)])
    assert live == {"a": 1, "later": 7}
    assert "has no later" in caplog.text


def test_object_without_a_safe_form_in_a_dict_is_refused_by_its_path() -> None:
    with pytest.raises(Unsupported, match=r"callbacks\.early\.fn"):
        DictState({"callbacks": {"early": {"fn": print}}}).capture(0, 1)


def test_keys_that_are_not_strings_are_refused() -> None:
    values: Any = {1: torch.zeros(1)}
    with pytest.raises(BadConfig, match="must be strings"):
        DictState(values)


def test_checkpoint_of_another_kind_of_state_is_refused_in_both_directions(files: Files) -> None:
    of_training = files.on_disk(stage(TrainingState(model=small_net())))
    restored: dict[str, Any] = {}
    with pytest.raises(Mismatch, match="model: checkpoint holds a module, now it is a value"):
        restore(DictState(restored), [of_training])
    assert restored == {}
    of_dict = files.on_disk(stage(DictState({"weights": torch.zeros(1)})))
    with pytest.raises(Mismatch, match="nothing in common"):
        restore(TrainingState(model=small_net()), [of_dict])


def test_empty_dict_counts_as_not_stepped() -> None:
    values: dict[str, Any] = {}
    state = DictState(values)
    assert not state.is_stepped
    values["a"] = 1
    assert state.is_stepped
