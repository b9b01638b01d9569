"""Arrays, scalars and tensors in the state tree; values without a safe form are refused by their path."""

from __future__ import annotations

import enum
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tierd_client.state.encoding import Collector
from tierd_client.state.training_state import TrainingState

from tests.support.state import Files, Loader, restore, small_net, stage
from tierd.errors import Unsupported


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    opened = Files(tmp_path)
    yield opened
    opened.close()


class Unit(torch.Tensor):
    """A tensor with a meaning of its own, and memory of its own."""


class Wrapper(torch.Tensor):
    """A tensor without memory, and without the methods that would show what it wraps."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return Wrapper(torch.empty(arguments[0].shape, dtype=arguments[0].dtype))
        raise NotImplementedError(str(function))


STATE = {
    "epoch": 3,
    ("tuple", 1): [None, True, float("nan"), b"\0\xff"],
    "generator": torch.arange(5, dtype=torch.uint8),
    "order": np.arange(6).reshape(2, 3),
    "wide": np.array([1 + 2j, 3j], dtype=np.complex128),
    "words": np.array(["a", "bc"]),
    "big endian": np.array([1, 2], dtype=">i4"),
    "none": np.zeros((0, 3), dtype="U4"),
    "scalar": np.float32(0.1),
    "when": np.datetime64("2024-01-02"),
    "dtype": torch.bfloat16,
    "device": torch.device("cpu"),
    "size": torch.Size([2, 3]),
    "mutable bytes": bytearray(b"\0\xff"),
    "a.b": torch.ones(1),
    "a": {"b": torch.zeros(1)},
}


def test_arrays_scalars_and_uncommon_values_are_restored_with_their_types(files: Files) -> None:
    loader, fresh = Loader(), Loader()
    loader.state = STATE
    state = TrainingState(model=small_net(), dataloader=loader)
    restore(TrainingState(model=small_net(), dataloader=fresh), [files.on_disk(stage(state))])
    assert list(fresh.state) == list(STATE)
    for key, value in STATE.items():
        restored = fresh.state[key]
        assert type(restored) is type(value), key
        if isinstance(value, np.ndarray):
            assert restored.dtype == value.dtype, key
            assert restored.shape == value.shape, key
            assert (restored == value).all(), key
        else:
            assert repr(restored) == repr(value), key


@pytest.mark.parametrize(
    ("state", "path"),
    [
        ({"extra": {"deep": [{"x": object()}]}}, "extra.deep[0].x"),
        ({"extra": {"array": np.array([object()])}}, "extra.array"),
        ({"extra": {"sparse": torch.ones(2, 2).to_sparse()}}, "extra.sparse"),
        ({"extra": {"meta": torch.ones(2, device="meta")}}, "extra.meta"),
        ({"extra": {"wide": torch.empty(2, dtype=torch.bits8)}}, "extra.wide"),
        ({"ema": {"f": lambda: 0}}, "ema.f"),
        ({"extra": {"masked": np.ma.masked_array([1, 2], mask=[True, False])}}, "extra.masked"),
        ({"extra": {"time": time.gmtime(0)}}, "extra.time"),
        ({"extra": {"pair": torch.max(torch.ones(2, 2), dim=0)}}, "extra.pair"),
        ({"extra": {"nested": [torch.ones(2).as_subclass(Unit)]}}, "extra.nested[0]"),
        ({"model": torch.nn.LazyLinear(3)}, "model.weight"),
        ({"model": torch.nn.ParameterDict({"w": torch.nn.Parameter(Wrapper(torch.ones(2)))})}, "model.w"),
    ],
)
def test_state_without_a_safe_form_is_refused_by_its_path(state: dict[str, Any], path: str) -> None:
    with pytest.raises(Unsupported) as refused:
        TrainingState(**{"model": small_net(), **state}).capture(0, 1)
    assert path in refused.value.message


LIVE_WITHOUT_SAFE_FORM = {
    "sparse": torch.zeros(3).to_sparse(),
    "meta": torch.zeros(3, device="meta"),
    "elements that share memory": torch.zeros(1).expand(3),
}


@pytest.mark.parametrize("saved", ["w", "other"])
@pytest.mark.parametrize("kind", LIVE_WITHOUT_SAFE_FORM)
def test_restore_over_a_live_tensor_without_a_safe_form_is_refused_by_its_path(
    files: Files, kind: str, saved: str
) -> None:
    """Corrupt would blame the replica, and each of the others in turn."""
    raw = stage(TrainingState(model=small_net(), extra={"dict": {saved: torch.ones(3)}}))
    state = TrainingState(model=small_net(), extra={"dict": {"w": LIVE_WITHOUT_SAFE_FORM[kind]}})
    with pytest.raises(Unsupported, match=r"extra\.dict\.w"):
        restore(state, [files.on_disk(raw)])


DICTS = {
    "plain": {"exp_avg": torch.ones(3), "step": torch.zeros(())},
    "parameter": {"w": torch.nn.Parameter(torch.ones(2, 2))},
    "empty": {},
    "keys that need a tag": {"$tensor": torch.ones(1), "b": torch.ones(2)},
    "keys that are no strings": {0: torch.ones(1)},
    "a name that is taken": {"taken": torch.ones(1)},
    "strides": {"w": torch.ones(3, 2).T},
}


@pytest.mark.parametrize("suffix", ["", "@00001"])
@pytest.mark.parametrize("home", [torch.device("cpu"), None])
@pytest.mark.parametrize("name", DICTS)
def test_fast_path_for_dicts_of_tensors_encodes_as_the_general_path(
    name: str, home: torch.device | None, suffix: str
) -> None:
    """A dict of tensors only takes the fast path; with a number among them it takes the general one."""
    alone, mixed = Collector(), Collector()
    for into in (alone, mixed):
        into.suffix = suffix
        into.add("path.taken", torch.zeros(1))
    number_key = 1 if name == "keys that are no strings" else "number"

    encoded = alone.encode(DICTS[name], "path", home)
    expected = mixed.encode(DICTS[name] | {number_key: 7}, "path", home)

    (tag,) = expected.keys() & {"$dict"} or {""}
    if tag:
        expected[tag].remove([number_key, 7])
    else:
        del expected[number_key]
    assert encoded == expected
    assert list(map(id, alone.live.values()))[1:] == list(map(id, mixed.live.values()))[1:]
    for captured, captured_mixed in zip(alone.tensors, mixed.tensors, strict=True):
        assert (captured.name, captured.dtype, captured.global_shape) == (
            captured_mixed.name,
            captured_mixed.dtype,
            captured_mixed.global_shape,
        )
        assert not captured.tensor.requires_grad


class Part(enum.StrEnum):
    WEIGHT = "weight"


def test_key_that_only_equals_a_string_is_not_taken_for_it() -> None:
    """Also after a dict whose key is the string."""
    tensor = torch.ones(1)
    assert Collector().encode({"weight": tensor}, "path", tensor.device) == {"weight": {"$tensor": "path.weight"}}
    encoded = Collector().encode({np.str_("weight"): tensor}, "path")
    assert list(encoded) == ["$dict"]
    with pytest.raises(Unsupported, match="WEIGHT"):
        Collector().encode({Part.WEIGHT: tensor}, "path")
