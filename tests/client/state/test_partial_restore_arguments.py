"""The arguments of a partial restore: patterns and renames stand for entries by exact rules, or are refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tierd_client.state.dict_state import DictState
from tierd_client.state.restore_filter import RestoreFilter
from tierd_client.state.restore_report import RestoreReport
from tierd_client.state.training_state import State, TrainingState
from torch import nn

from tests.support.state import Files, assert_same, one_step, restore, stage
from tierd.errors import BadConfig, Mismatch


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    opened = Files(tmp_path)
    yield opened
    opened.close()


def filter_of(**arguments: Any) -> RestoreFilter:
    defaults: dict[str, Any] = {"only": None, "rename": None, "strict": True, "cast": False, "keep": ()}
    return RestoreFilter.parse(**{**defaults, **arguments})


def restored(state: State, files: Files, raw: bytes, **arguments: Any) -> RestoreReport:
    return restore(state, [files.on_disk(raw)], filter=filter_of(**arguments))


def net(*, body: str = "body", seed: int = 0) -> nn.ModuleDict:
    torch.manual_seed(seed)
    return nn.ModuleDict({body: nn.Linear(3, 8), "head": nn.Linear(8, 10)})


@pytest.fixture
def raw() -> bytes:
    """The shard of a model, its optimizer after a step, a scheduler and generators."""
    module = net()
    optimizer = torch.optim.AdamW(module.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    one_step(module, optimizer, lambda: module["head"](module["body"](torch.randn(4, 3))))
    return stage(TrainingState(model=module, optimizer=optimizer, scheduler=scheduler))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"only": ["modle.*"]},
            "only: 'modle.*' matches nothing in the checkpoint; the nearest names are model and",
        ),
        ({"keep": ["optimizer.*.rl"]}, r"keep: 'optimizer.*.rl' matches nothing in the state"),
        ({"rename": {"model.backbone": "model.body"}}, "rename: 'model.backbone' matches nothing"),
        ({"only": ["optimizer.state.body.weight.exp_avg"]}, "matches nothing in the checkpoint"),
        ({"rename": {"model.head": "model.body"}}, "model.body.weight and model.head.weight both become"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_pattern_without_an_entry_is_refused_and_nothing_is_changed(
    files: Files, raw: bytes, arguments: dict[str, Any], message: str, *, strict: bool
) -> None:
    module = net(seed=1)
    optimizer = torch.optim.AdamW(module.parameters())
    before = copy.deepcopy(module.state_dict())
    with pytest.raises((Mismatch, BadConfig)) as caught:
        restored(TrainingState(model=module, optimizer=optimizer), files, raw, strict=strict, **arguments)
    assert message in caught.value.message
    assert_same(module.state_dict(), before)
    assert not optimizer.state


@pytest.mark.parametrize(
    "arguments",
    [
        {"only": [1]},
        {"only": 5},
        {"keep": [""]},
        {"keep": None},
        {"rename": {1: "model"}},
        {"rename": ["model"]},
        {"rename": "model"},
        {"cast": [None]},
        {"cast": None},
        {"cast": 1},
        {"strict": None},
    ],
)
def test_argument_that_is_no_name_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(BadConfig, match=f"restore with {next(iter(arguments))}="):
        filter_of(**arguments)


def test_function_that_renames_must_return_a_name(files: Files, raw: bytes) -> None:
    with pytest.raises(BadConfig, match="rename=None"):
        restored(TrainingState(model=net()), files, raw, rename=lambda name: None)


def test_function_that_renames_and_raises_is_refused(files: Files, raw: bytes) -> None:
    with pytest.raises(BadConfig, match=r"for 'model\.\w+\.\w+' it raised KeyError"):
        restored(TrainingState(model=net()), files, raw, rename=lambda name: {}[name])


@pytest.mark.parametrize("old", ["optimizer.state.body", "optimizer.param_groups.0", "optimizer"])
def test_rename_of_an_optimizer_entry_is_refused(files: Files, raw: bytes, old: str) -> None:
    module = net(seed=1)
    state = TrainingState(model=module, optimizer=torch.optim.AdamW(module.parameters()))
    with pytest.raises(BadConfig, match=rf"{old}\S* cannot become optimizer\.other"):
        restored(state, files, raw, rename={old: "optimizer.other"}, strict=False)


def test_rename_of_an_optimizer_entry_may_repeat_that_of_its_parameter(files: Files, raw: bytes) -> None:
    module = net(body="encoder", seed=1)
    state = TrainingState(model=module, optimizer=torch.optim.AdamW(module.parameters()))
    rename = {"model.body": "model.encoder", "optimizer.state.body": "optimizer.state.encoder"}
    report = restored(state, files, raw, rename=rename)
    assert report.renamed["optimizer.state.body.bias"] == "optimizer.state.encoder.bias"


def test_rename_takes_no_patterns(files: Files, raw: bytes) -> None:
    with pytest.raises(BadConfig, match=r"rename: 'model\.\*' matches nothing"):
        restored(TrainingState(model=net(), rng=False), files, raw, rename={"model.*": "model"}, strict=False)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"only": ["extra.a[0]"]}, {"a[0]": 5, "a0": 1, "b?": 1, "bc": 1}),
        ({"only": ["extra.b?"]}, {"a[0]": 1, "a0": 1, "b?": 5, "bc": 1}),
        ({"only": ["extra.*]"]}, {"a[0]": 5, "a0": 1, "b?": 1, "bc": 1}),
        ({"keep": ["extra.*[0]"]}, {"a[0]": 1, "a0": 5, "b?": 5, "bc": 5}),
    ],
)
def test_only_a_star_is_special_in_a_pattern(files: Files, arguments: dict[str, Any], expected: dict[str, int]) -> None:
    raw = stage(TrainingState(model=net(), extra=dict.fromkeys(expected, 5)))
    extra = dict.fromkeys(expected, 1)
    restored(TrainingState(model=net(), extra=extra), files, raw, **arguments)
    assert extra == expected


def test_entries_of_a_dict_are_selected_and_renamed_by_their_keys(files: Files) -> None:
    raw = stage(DictState({"a": torch.ones(2), "b": 1, "c": "x"}))
    values: dict[str, Any] = {"a": torch.zeros(2), "new": 0, "d": 2}
    report = restored(DictState(values), files, raw, only=["a", "b"], rename={"b": "new"})
    assert torch.equal(values.pop("a"), torch.ones(2))
    assert values == {"new": 1, "d": 2}
    assert report.not_asked == ["c"]


def test_key_of_a_dict_is_renamed_though_it_begins_as_those_of_an_optimizer(files: Files) -> None:
    raw = stage(DictState({"optimizer.adam": torch.ones(2)}))
    values: dict[str, Any] = {"optimizer.main": torch.zeros(2)}
    restored(DictState(values), files, raw, rename={"optimizer.adam": "optimizer.main"})
    assert list(values) == ["optimizer.main"]
    assert values["optimizer.main"].tolist() == [1, 1]
