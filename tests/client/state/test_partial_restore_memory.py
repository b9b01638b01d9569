"""Partial restores of dicts with any keys, and of tensors that share memory: right values, or a Mismatch."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tierd_client.state.dict_state import DictState
from tierd_client.state.restore_filter import RestoreFilter
from tierd_client.state.restore_report import RestoreReport
from tierd_client.state.training_state import State, TrainingState
from torch import nn

from tests.support.state import Files, restore, stage
from tierd.errors import Mismatch


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


def test_paths_that_are_written_alike_do_not_replace_each_other(files: Files) -> None:
    def build(value: float) -> dict[str, Any]:
        return {"a": {"b": torch.full((2,), value)}, "a.b": torch.full((2,), value + 1)}

    raw = stage(state_of(ema=build(5.0), extra={"k": 1}))
    average = build(0.0)
    restored(state_of(ema=average, extra={"k": 0}), files, raw, keep="extra.k")
    assert average["a"]["b"].tolist() == [5, 5]
    assert average["a.b"].tolist() == [6, 6]


def test_renamed_entry_does_not_replace_a_stored_one_of_its_name(files: Files) -> None:
    def build(value: float) -> nn.Module:
        module = nn.Module()
        module.w = nn.Parameter(torch.full((4,), value))
        return module

    raw = stage(state_of(build(3.0), extra={"t": {"w": torch.full((4,), 7.0)}}))
    extra: dict[str, Any] = {"t": build(1.0), "u": {"w": torch.ones(4)}}
    renames = {"extra.t": "extra.u", "model": "extra.t"}
    restored(state_of(build(0.0), extra=extra), files, raw, only=["model", "extra"], rename=renames, strict=False)
    assert extra["t"].w.tolist() == [3] * 4
    assert extra["u"]["w"].tolist() == [7] * 4


def test_option_that_two_groups_take_is_read_for_each(files: Files) -> None:
    def build(groups: int, rate: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        module = nn.ModuleList([nn.Linear(1, 1) for _ in range(2)])
        parts = [list(module.parameters())] if groups == 1 else [list(part.parameters()) for part in module]
        options = [{"params": part, "lr": torch.tensor(rate)} for part in parts]
        return module, torch.optim.AdamW(options, foreach=False)

    module, optimizer = build(1, 0.5)
    raw = stage(state_of(module, optimizer=optimizer))
    module, optimizer = build(2, 0.1)
    restored(state_of(module, optimizer=optimizer), files, raw, strict=False)
    assert [group["lr"].item() for group in optimizer.param_groups] == [0.5, 0.5]


# ── shared memory ──


class Pair(nn.Module):
    def __init__(self, value: float, *, tied: bool = False, dtypes: str = "float32 float32") -> None:
        super().__init__()
        first, second = (getattr(torch, name) for name in dtypes.split())
        self.a = nn.Parameter(torch.full((3,), value, dtype=first))
        self.b = self.a if tied else nn.Parameter(torch.full((3,), value + 1, dtype=second))


@pytest.mark.parametrize("dtypes", ["float32 bfloat16", "bfloat16 float32"])
@pytest.mark.parametrize("strict", [True, False])
def test_tied_tensor_that_fits_and_is_cast_too_is_refused(files: Files, dtypes: str, *, strict: bool) -> None:
    raw = stage(state_of(Pair(5.0, dtypes=dtypes)))
    module = Pair(1.0, tied=True, dtypes="bfloat16 bfloat16")
    with pytest.raises(Mismatch, match=r"model\.b: it shares memory .* gets model\.a"):
        restored(state_of(module), files, raw, cast=True, strict=strict)
    assert module.a.tolist() == [1, 1, 1]


def test_value_that_shares_memory_with_a_cast_tensor_gets_one_of_its_own(files: Files) -> None:
    raw = stage(state_of(Pair(5.0), extra={"v": [torch.full((3,), 7.0, dtype=torch.bfloat16)]}))
    module = Pair(1.0, dtypes="bfloat16 bfloat16")
    extra = {"v": [module.a.detach()]}
    restored(state_of(module, extra=extra), files, raw, cast=True)
    assert module.a.tolist() == [5, 5, 5]
    assert extra["v"][0].tolist() == [7, 7, 7]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("keep", ["model.a", "model.b"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_of_two_tied_tensors_cannot_be_kept(files: Files, keep: str, dtype: str, *, strict: bool) -> None:
    raw = stage(state_of(Pair(5.0, tied=True)))
    module = Pair(1.0, tied=True, dtypes=f"{dtype} {dtype}")
    other = "model.b" if keep == "model.a" else "model.a"
    with pytest.raises(Mismatch, match=f"keep: {keep} shares memory with a tensor that gets {other}"):
        restored(state_of(module), files, raw, keep=keep, cast=["model"], strict=strict)
    assert module.b.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("section", "entry"), [("ema", "ema.w"), ("ema-list", "ema.list"), ("extra", "extra.v"), ("ema-module", "ema.a")]
)
def test_what_shares_memory_with_the_restored_model_cannot_be_kept(files: Files, section: str, entry: str) -> None:
    def build(value: float) -> tuple[Pair, TrainingState]:
        module = Pair(value)
        alias = module.a.detach()
        sections: dict[str, Any] = {
            "ema": {"ema": {"w": alias}},
            "ema-list": {"ema": {"list": [alias]}},
            "ema-module": {"ema": module},
            "extra": {"extra": {"v": [alias]}},
        }
        return module, state_of(module, **sections[section])

    raw = stage(build(5.0)[1])
    module, state = build(1.0)
    with pytest.raises(Mismatch, match=f"keep: {entry} shares memory with a tensor that gets model.a"):
        restored(state, files, raw, keep=entry)
    assert module.a.tolist() == [1, 1, 1]
    restored(state, files, raw, keep=[entry, "model.a"])
    assert module.a.tolist() == [1, 1, 1]


def test_what_shares_memory_with_a_restored_value_of_a_dict_cannot_be_kept(files: Files) -> None:
    raw = stage(DictState({"a": torch.ones(2), "b": [torch.ones(2)]}))
    shared = torch.zeros(2)
    values = {"a": shared, "b": [shared]}
    with pytest.raises(Mismatch, match="keep: b shares memory with a tensor that gets a: keep both"):
        restored(DictState(values), files, raw, keep="b")
    assert shared.tolist() == [0, 0]
