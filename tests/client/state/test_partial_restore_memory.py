"""Partial restores of dicts with any keys, and of tensors that share memory: right values, or a Mismatch."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tierd_client.state.restore_filter import RestoreFilter
from tierd_client.state.restore_report import RestoreReport
from tierd_client.state.training_state import State, TrainingState
from torch import nn

from tests.support.state import Files, restore, stage


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    opened = Files(tmp_path)
    yield opened
    opened.close()


def restored(state: State, files: Files, raw: bytes, **arguments: Any) -> RestoreReport:
    defaults: dict[str, Any] = {"only": None, "rename": None, "strict": True, "cast": False, "keep": ()}
    return restore(state, [files.on_disk(raw)], filter=RestoreFilter.parse(**{**defaults, **arguments}))


def state_of(model: nn.Module | None = None, **sections: Any) -> TrainingState:
    return TrainingState(model=model or nn.Linear(1, 1), rng=False, **sections)


# ── dicts of tensors ──


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("make", "entry"),
    [
        (OrderedDict, "ema.w"),
        (dict, "ema.w"),
        (lambda items: {0: items["w"], "list": items["list"]}, "ema.[0]"),
        (lambda items: {"$w": items["w"], "list": items["list"]}, "ema.$w"),
        (lambda items: {"[w]": items["w"], "list": items["list"]}, "ema.['[w]']"),
        (lambda items: defaultdict(list, items), "ema.w"),
    ],
)
def test_dict_of_tensors_is_restored_in_place_whatever_its_keys(
    files: Files, make: Callable[[Any], Any], entry: str, *, strict: bool
) -> None:
    def build(value: float) -> Any:
        return make({"w": torch.full((2,), value), "list": [torch.full((2,), value)]})

    raw = stage(state_of(ema=build(5.0), extra={"k": 1}))
    average = build(0.0)
    tensor, *_ = average.values()
    in_list = average["list"][0]
    report = restored(state_of(ema=average, extra={"k": 0}), files, raw, keep="extra.k", strict=strict)
    assert next(iter(average.values())) is tensor
    assert average["list"][0] is in_list
    assert tensor.tolist() == in_list.tolist() == [5, 5]
    assert {entry, "ema.list"} <= set(report.loaded)
    assert not [*report.missing, *report.left_over]


def test_keys_that_are_written_alike_are_different_entries(files: Files) -> None:
    raw = stage(state_of(ema={0: torch.ones(2), "0": torch.full((2,), 2.0)}))
    average: dict[Any, Any] = {"0": torch.zeros(2), 0: torch.zeros(2)}
    restored(state_of(ema=average), files, raw, only="ema")
    assert average[0].tolist() == [1, 1]
    assert average["0"].tolist() == [2, 2]
