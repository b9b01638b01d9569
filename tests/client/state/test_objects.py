"""Enum members, dataclasses, named tuples and own types: restored into the live value or by a hook, never by import."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tierd_client.export import whole_state
from tierd_client.state.completeness import check_restorable
from tierd_client.state.dict_state import DictState
from tierd_client.state.training_state import TrainingState

from tests.support.state import Files, Loader, commit, restore, small_net, stage
from tierd.errors import BadConfig, Mismatch, TierdError, Unsupported


class Phase(enum.Enum):
    WARM_UP = 1
    TRAIN = 2


class Parts(enum.Flag):
    A = 1
    B = 2
    C = 4


class Pair(NamedTuple):
    a: int
    b: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: Any


@dataclasses.dataclass
class Limits:
    inner: Any
    weights: Any


def with_property(setter: Callable[[Any, int], None] | None) -> Any:
    """A dataclass Limit whose field `most` is a property."""

    @dataclasses.dataclass
    class Limit:
        most: int

    value = Limit(3)
    Limit.most = property(lambda self: 3, setter)  # type: ignore[assignment]
    Limit.__qualname__ = "Limit"
    vars(value).clear()
    return value


def refuse(*_: object) -> None:
    raise ValueError("at most 2")


@dataclasses.dataclass
class Progress:
    epoch: int
    phase: Phase
    best: torch.Tensor


class Box:
    """Computes from its content when it is made."""

    def __init__(self, content: torch.Tensor) -> None:
        self.sum = content.sum().item()
        self.content = content


HOOKS: dict[str, Any] = {
    "encode": lambda value: ("box", value.content) if isinstance(value, Box) else None,
    "decode": lambda name, content: Box(content),
}


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    opened = Files(tmp_path)
    yield opened
    opened.close()


def state_of(value: object, **more: Any) -> TrainingState:
    return TrainingState(model=small_net(), extra={"value": value}, rng=False, **more)


def test_dataclass_is_restored_in_place_with_its_tensors(files: Files) -> None:
    raw = stage(state_of(Progress(3, Phase.TRAIN, torch.ones(2))))
    live = Progress(0, Phase.WARM_UP, torch.zeros(2))
    tensor = live.best
    extra = {"value": live}
    restore(TrainingState(model=small_net(), extra=extra, rng=False), [files.on_disk(raw)])
    assert extra["value"] is live
    assert (live.epoch, live.phase) == (3, Phase.TRAIN)
    assert live.best is tensor
    assert tensor.tolist() == [1.0, 1.0]


def test_dataclass_under_two_keys_gets_both_values(files: Files) -> None:
    def build(*epochs: int) -> dict[str, Any]:
        return {str(index): Progress(epoch, Phase.TRAIN, torch.ones(1)) for index, epoch in enumerate(epochs)}

    raw = stage(TrainingState(model=small_net(), extra=build(1, 2), rng=False))
    live = build(0)["0"]
    extra = {"0": live, "1": live}
    restore(TrainingState(model=small_net(), extra=extra, rng=False), [files.on_disk(raw)])
    assert [progress.epoch for progress in extra.values()] == [1, 2]


def test_dataclass_that_two_places_share_keeps_both_references_if_both_saved_the_same(files: Files) -> None:
    def build(number: float) -> dict[str, Any]:
        array = np.array([number, np.nan])
        inner = Frozen([Pair(1, Phase.TRAIN), number, torch.tensor([number, torch.nan]), array, np.float32(number)])
        outer = Limits(inner, {"w": torch.tensor(number, requires_grad=True)})
        return {"a": outer, "b": [outer], "c": inner, "d": copy.deepcopy(outer)}

    raw = stage(TrainingState(model=small_net(), extra=build(-0.0), rng=False))
    extra = build(0.0)
    live = extra["a"]
    restore(TrainingState(model=small_net(), extra=extra, rng=False), [files.on_disk(raw)])
    assert extra["a"] is extra["b"][0] is live
    assert extra["c"] is live.inner
    assert extra["d"] is not live
    assert str(live.inner.a[1]) == "-0.0"


@pytest.mark.parametrize(
    "values",
    [
        [0.0, -0.0],
        [1, True],
        [torch.zeros(2), torch.zeros(2, dtype=torch.int64)],
        [torch.zeros(2), -torch.zeros(2)],
        [np.zeros(2), np.zeros(2, dtype=np.float32)],
        [Pair(1, 2), (1, 2)],
    ],
)
def test_shared_dataclass_whose_places_saved_values_of_other_bits_or_types_gets_both(
    files: Files, values: list[Any]
) -> None:
    saved = {str(index): Limits(value, None) for index, value in enumerate(values)}
    raw = stage(TrainingState(model=small_net(), extra=saved, rng=False))
    live = Limits(values[0], None)
    extra = {"0": live, "1": live}
    restore(TrainingState(model=small_net(), extra=extra, rng=False), [files.on_disk(raw)])
    assert extra["0"] is not extra["1"]
    assert repr(extra["1"].inner) == repr(values[1])


def test_enum_in_a_dict_of_averages_is_refused_by_its_path() -> None:
    state = TrainingState(model=small_net(), ema={"m": [Phase.TRAIN]}, rng=False)
    with pytest.raises(Unsupported, match=r"  ema\.m\[0\]: a Phase can be restored only in extra"):
        check_restorable(state, state.capture(0, 1))


@pytest.mark.parametrize(
    ("saved", "live", "message"),
    [
        (Phase.TRAIN, None, "extra.value: the checkpoint holds a Phase, the state has nothing there"),
        ([1, Phase.TRAIN], [1], r"extra.value\[1\]: the checkpoint holds a Phase, the state has nothing there"),
        ({"a": Phase.TRAIN}, {"a": "TRAIN"}, "extra.value.a: the checkpoint holds a Phase, the state has a str there"),
        (Phase.TRAIN, enum.Enum("Phase", "OTHER").OTHER, "Phase.TRAIN, which is no member now"),  # type: ignore[attr-defined]
        (Parts.A | Parts.C, enum.Flag("Parts", "A B").A, "Parts.5, which is no member now"),  # type: ignore[attr-defined]
        (Parts.A | Parts.C, enum.Flag("Parts", "A B", boundary=enum.EJECT).A, "Parts.5, which"),  # type: ignore[attr-defined]
        (Parts.A | Parts.C, enum.Flag("Parts", "A B", boundary=enum.CONFORM).A, "Parts.5, which"),  # type: ignore[attr-defined]
        (Parts.A | Parts.C, enum.Enum("Parts", "A B").A, "Parts.5, which is no member now"),  # type: ignore[attr-defined]
        (
            Progress(1, Phase.TRAIN, torch.ones(1)),
            dataclasses.make_dataclass("Progress", ["epoch", "step"])(1, 2),
            "Progress with epoch, phase, best, now it has epoch, step",
        ),
    ],
)
def test_value_whose_class_the_live_state_lacks_is_a_mismatch_and_nothing_is_changed(
    files: Files, saved: object, live: object, message: str
) -> None:
    raw = stage(state_of(saved))
    extra = {"value": live}
    state = TrainingState(model=small_net(), extra=extra, rng=False)
    with pytest.raises(Mismatch, match=message):
        restore(state, [files.on_disk(raw)])
    assert extra["value"] is live


def test_dataclass_with_a_field_that_cannot_be_set_is_refused_at_every_snapshot_and_restore(files: Files) -> None:
    with pytest.raises(Unsupported, match=r"encode extra\.value: a restore could not set most of this Limit"):
        state_of(with_property(None)).capture(0, 1)
    raw = stage(state_of(with_property(lambda self, most: None)))
    with pytest.raises(Unsupported, match=r"encode extra\.value: a restore could not set most of this Limit"):
        restore(state_of(with_property(None)), [files.on_disk(raw)])


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({Phase.TRAIN: 1}, r"value\.<key <Phase\.TRAIN: 2>>"),
        ({"a": {Phase.TRAIN}}, r"value\.a\[0\]"),
        ([frozenset([Phase.TRAIN])], r"value\[0\]\[0\]"),
        (collections.Counter([Phase.TRAIN]), r"value\.<key"),
        (collections.defaultdict(int, {(1, Phase.TRAIN): 1}), r"value\.<key .*\[1\]"),
        ({Pair(1, 2): 1}, r"value\.<key"),
        ({Frozen(1)}, r"value\[0\]"),
    ],
)
def test_class_in_a_key_or_a_set_is_refused_at_every_snapshot(value: object, path: str) -> None:
    """No live value corresponds to them. Only the first snapshot plans a restore to check that it is possible."""
    with pytest.raises(Unsupported, match=rf"encode extra\.{path}.*: .* which a key of a dict or an element of a set"):
        state_of(value).capture(0, 1)


def test_own_types_in_keys_and_sets_and_classes_beside_them_are_restored(files: Files) -> None:
    hooks: dict[str, Any] = {
        "encode": lambda value: ("phase", value.name) if type(value) is Phase else None,
        "decode": lambda name, content: Phase[content],
    }
    raw = stage(state_of([{Phase.TRAIN: 1}, {Phase.TRAIN}, Frozen(2)], **hooks))
    extra: dict[str, Any] = {"value": [{}, set(), Frozen(0)]}
    restore(TrainingState(model=small_net(), extra=extra, rng=False, **hooks), [files.on_disk(raw)])
    assert extra["value"] == [{Phase.TRAIN: 1}, {Phase.TRAIN}, Frozen(2)]


def test_value_that_cannot_be_made_is_no_damage_of_the_checkpoint(files: Files) -> None:
    """Corrupt would make the client report the replica, and restore an older step."""
    raw = stage(state_of([with_property(lambda self, most: None)]))
    with pytest.raises(TierdError, match=r"restore extra\.value\[0\]: to make a Limit raised ValueError") as caught:
        restore(state_of([with_property(refuse)]), [files.on_disk(raw)])
    assert type(caught.value) is TierdError
    assert "half restored" in caught.value.hint


def test_class_in_a_state_dict_is_refused_at_the_first_snapshot() -> None:
    """What `state_dict` returns may have side effects, so a restore has no live value to take the class from."""
    loader = Loader()
    loader.state = {"phase": Phase.TRAIN}
    state = TrainingState(model=small_net(), dataloader=loader, rng=False)
    with pytest.raises(Unsupported, match=r"dataloader\.phase: the checkpoint holds a Phase"):
        check_restorable(state, state.capture(0, 1))


def test_dict_state_refuses_classes_because_a_restore_may_fill_an_empty_dict() -> None:
    with pytest.raises(Unsupported, match=r"encode phase: .*Phase has no safe form") as refused:
        DictState({"phase": Phase.TRAIN}).capture(0, 1)
    assert "encode=" in refused.value.hint


@pytest.mark.parametrize("make_state", [DictState, lambda extra, **hooks: state_of(extra["value"], **hooks)])
def test_own_type_is_made_by_decode_from_the_tensors_that_were_read(files: Files, make_state: Any) -> None:
    raw = stage(make_state({"value": Box(torch.arange(4.0))}, **HOOKS))
    values: dict[str, Any] = {"value": 0}
    state = DictState(values, **HOOKS) if make_state is DictState else None
    state = state or TrainingState(model=small_net(), extra=values, rng=False, **HOOKS)
    restore(state, [files.on_disk(raw)])  # type: ignore[arg-type]
    assert values["value"].sum == 6.0


def test_own_type_in_a_state_dict_and_in_extra_state_of_a_module(files: Files) -> None:
    class Module(torch.nn.Module):
        box: Any = None

        def get_extra_state(self) -> Any:
            return self.box

        def set_extra_state(self, state: Any) -> None:
            self.box = state

    loader, fresh, module, fresh_module = Loader(), Loader(), Module(), Module()
    loader.state = {"box": Box(torch.ones(3))}
    module.box = Box(torch.ones(2))
    raw = stage(TrainingState(model=module, dataloader=loader, **HOOKS))
    restore(TrainingState(model=fresh_module, dataloader=fresh, **HOOKS), [files.on_disk(raw)])
    assert (fresh.state["box"].sum, fresh_module.box.sum) == (3.0, 2.0)


def test_own_type_without_decode_at_the_restore_is_a_mismatch(files: Files) -> None:
    raw = stage(state_of(Box(torch.ones(1)), **HOOKS))
    with pytest.raises(Mismatch, match=r"extra\.value: the checkpoint holds a 'box' of encode=: pass decode="):
        restore(state_of(0), [files.on_disk(raw)])


def test_one_hook_without_the_other_is_refused() -> None:
    with pytest.raises(BadConfig, match="encode= or decode= alone"):
        state_of(0, encode=HOOKS["encode"])


@pytest.mark.parametrize("answer", ["box", ("box",), (1, 2)])
def test_encode_with_another_answer_is_refused_by_path(answer: object) -> None:
    with pytest.raises(Unsupported, match=r"encode extra\.value: encode="):
        state_of(Box(torch.ones(1)), encode=lambda value: answer, decode=HOOKS["decode"]).capture(0, 1)


def test_decode_that_raises_is_named(files: Files) -> None:
    raw = stage(state_of(Box(torch.ones(1)), **HOOKS))
    state = state_of(0, encode=HOOKS["encode"], decode=lambda name, content: 1 / 0)
    with pytest.raises(TierdError, match=r"restore extra\.value: decode= raised ZeroDivisionError"):
        restore(state, [files.on_disk(raw)])


def test_export_holds_the_contents_without_their_classes(tmp_path: Path) -> None:
    extra = {"progress": Progress(3, Phase.TRAIN, torch.ones(1)), "box": Box(torch.ones(2))}
    raw = stage(TrainingState(model=small_net(), extra=extra, rng=False, **HOOKS))
    exported = whole_state(commit(tmp_path, [raw]))["extra"]
    assert exported["progress"]["phase"] == "TRAIN"
    assert exported["progress"]["best"].tolist() == [1.0]
    assert exported["box"].tolist() == [1.0, 1.0]
