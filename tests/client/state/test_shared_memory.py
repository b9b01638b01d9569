"""Live tensors that share memory: two stored tensors are never restored into one memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tierd_client.state.dict_state import DictState
from tierd_client.state.memory_ranges import MemoryRanges
from tierd_client.state.tensors import capture_tensor
from tierd_client.state.training_state import TrainingState

from tests.support.state import Files, assert_same, one_step, restore, small_net, stage
from tierd.errors import Corrupt, Mismatch, Unsupported


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    opened = Files(tmp_path)
    yield opened
    opened.close()


class Tied(torch.nn.Module):
    """An embedding and an output layer, with one weight or with two."""

    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 8)
        self.output = torch.nn.Linear(8, 50, bias=False)
        if is_tied:
            self.output.weight = self.embedding.weight


def test_ema_dict_that_aliases_the_model_gets_tensors_of_its_own(files: Files) -> None:
    model = small_net()
    ema = {name: tensor.clone() + 1 for name, tensor in model.state_dict().items()}
    raw = stage(TrainingState(model=model, ema=ema))

    fresh = small_net()
    aliased: dict[str, Any] = dict(fresh.state_dict())
    restore(TrainingState(model=fresh, ema=aliased), [files.on_disk(raw)])
    assert_same(fresh.state_dict(), model.state_dict())
    assert_same(aliased, ema)


@pytest.mark.parametrize("make", [lambda values: TrainingState(model=small_net(), extra=values), DictState])
def test_two_values_that_are_one_tensor_now_get_their_own_bytes(files: Files, make: Any) -> None:
    raw = stage(make({"best": torch.arange(9.0), "current": -torch.arange(9.0)}))
    shared = torch.zeros(9)
    values: dict[str, Any] = {"best": shared, "current": shared}
    restore(make(values), [files.on_disk(raw)])
    assert_same(values, {"best": torch.arange(9.0), "current": -torch.arange(9.0)})


def test_value_never_takes_the_memory_of_a_module_that_comes_after_it(files: Files) -> None:
    head = torch.nn.Linear(3, 3)
    raw = stage(TrainingState(model=small_net(), extra={"best": torch.ones(3, 3), "head": head}))
    live_head = torch.nn.Linear(3, 3)
    extra: dict[str, Any] = {"best": live_head.weight.detach(), "head": live_head}
    restore(TrainingState(model=small_net(), extra=extra), [files.on_disk(raw)])
    assert_same(live_head.state_dict(), head.state_dict())
    assert_same(extra["best"], torch.ones(3, 3))


def test_tied_model_takes_a_checkpoint_of_a_tied_model(files: Files) -> None:
    model = Tied(is_tied=True)
    raw = stage(TrainingState(model=model))
    fresh = Tied(is_tied=True)
    restore(TrainingState(model=fresh), [files.on_disk(raw)])
    assert_same(fresh.state_dict(), model.state_dict())
    assert fresh.output.weight is fresh.embedding.weight


def test_tied_model_refuses_a_checkpoint_of_different_weights(files: Files) -> None:
    raw = stage(TrainingState(model=Tied(is_tied=False)))
    fresh = Tied(is_tied=True)
    before = copy.deepcopy(fresh.state_dict())
    with pytest.raises(Mismatch, match=r"nothing was changed\n  model.embedding.weight and model.output"):
        restore(TrainingState(model=fresh), [files.on_disk(raw)])
    assert_same(fresh.state_dict(), before)


def test_damaged_copy_of_a_tied_weight_is_corrupt_rather_than_a_difference(files: Files) -> None:
    raw = stage(TrainingState(model=Tied(is_tied=True)))
    shard = files.on_disk(raw, chunk_bytes=1024)  # so the header is in chunks of its own
    at = shard.shard().tensors["model.output.weight"].offset + 1024
    (files.folder / shard.name).write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
    with pytest.raises(Corrupt, match="read chunk"):
        restore(TrainingState(model=Tied(is_tied=True)), [shard])


def test_buffers_that_are_one_tensor_only_now_are_refused(files: Files) -> None:
    def build(first: torch.Tensor, second: torch.Tensor) -> torch.nn.Module:
        net = small_net()
        net.register_buffer("first", first)
        net.register_buffer("second", second)
        return net

    raw = stage(TrainingState(model=build(torch.zeros(4), torch.ones(4))))
    shared = torch.zeros(4)
    with pytest.raises(Mismatch, match=r"model\.first and model\.second share memory"):
        restore(TrainingState(model=build(shared, shared)), [files.on_disk(raw)])


def test_parameter_that_is_a_part_of_another_is_restored_when_the_values_agree(files: Files) -> None:
    def build() -> torch.nn.Module:
        net = torch.nn.Module()
        net.whole = torch.nn.Parameter(torch.randn(6, 4))
        net.register_buffer("rows", net.whole.detach()[2:4])
        net.register_buffer("columns", net.whole.detach()[:, 1])
        return net

    model = build()
    raw = stage(TrainingState(model=model))
    fresh = build()
    restore(TrainingState(model=fresh), [files.on_disk(raw)])
    assert_same(fresh.state_dict(), model.state_dict())

    with torch.no_grad():
        model.register_buffer("columns", torch.full((6,), 7.0))
    raw = stage(TrainingState(model=model))
    with pytest.raises(Mismatch, match=r"model\.columns"):
        restore(TrainingState(model=build()), [files.on_disk(raw, "other.safetensors")])


def test_moments_that_are_one_tensor_now_get_their_own_bytes(files: Files) -> None:
    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = small_net()
        optimizer = torch.optim.AdamW(model.parameters())
        one_step(model, optimizer, lambda: model(torch.randn(4, 3)))
        return model, optimizer

    model, optimizer = build()
    raw = stage(TrainingState(model=model, optimizer=optimizer))
    fresh, other = build()
    for entries in other.state.values():
        entries["exp_avg_sq"] = entries["exp_avg"]
    restore(TrainingState(model=fresh, optimizer=other), [files.on_disk(raw)])
    assert_same(other.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("place", ["value", "buffer"])
def test_expanded_tensor_is_refused_by_name(place: str) -> None:
    expanded = torch.zeros(1).expand(4)
    net = small_net()
    if place == "buffer":
        net.register_buffer("mask", expanded)
    state = TrainingState(model=net, extra={"mask": expanded} if place == "value" else {})
    with pytest.raises(Unsupported, match=r"(extra|model)\.mask: several elements share one memory location"):
        state.capture(0, 1)


def test_size_one_dimension_with_stride_zero_is_no_expansion(files: Files) -> None:
    net = small_net()
    net.register_buffer("ids", torch.arange(5).expand(1, -1))
    raw = stage(TrainingState(model=net))
    fresh = small_net()
    fresh.register_buffer("ids", torch.zeros(5, dtype=torch.int64).expand(1, -1))
    restore(TrainingState(model=fresh), [files.on_disk(raw)])
    assert_same(fresh.state_dict(), net.state_dict())


def test_ranges_join_all_tensors_between_which_memory_is_shared() -> None:
    memory = torch.zeros(100)
    ranges = MemoryRanges()
    for name, tensor in {"a": memory[:10], "b": memory[20:30], "c": memory[40:50], "empty": memory[5:5]}.items():
        ranges.add(capture_tensor(name, tensor))
    assert not list(ranges.shared())
    assert ranges.holds(memory[9:21])
    assert not ranges.holds(memory[10:20])
    assert not ranges.holds(memory[25:25])
    assert not ranges.holds(torch.zeros(100))
    ranges.add(capture_tensor("bridge", memory[5:45]))
    ranges.add(capture_tensor("d", memory[49:60]))
    (shared,) = ranges.shared()
    assert {tensor.name for tensor in shared} == {"a", "b", "c", "bridge", "d"}


@pytest.mark.parametrize("saved_kind", range(4))
@pytest.mark.parametrize("live_kind", range(4))
def test_value_is_of_the_kind_that_was_saved_and_in_the_live_memory(
    files: Files, saved_kind: int, live_kind: int
) -> None:
    def build(kind: int, value: float) -> torch.Tensor:
        tensor = torch.full((3,), value)
        return [
            tensor,
            tensor.clone().requires_grad_(),
            torch.nn.Parameter(tensor),
            torch.nn.Parameter(tensor, requires_grad=False),
        ][kind]

    raw = stage(DictState({"a": build(saved_kind, 1.0)}))
    live = build(live_kind, 5.0)
    values: dict[str, Any] = {"a": live}
    restore(DictState(values), [files.on_disk(raw)])
    assert (values["a"] is live) == (saved_kind == live_kind)
    assert type(values["a"]) is type(build(saved_kind, 0.0))
    assert values["a"].requires_grad == build(saved_kind, 0.0).requires_grad
    assert live.tolist() == values["a"].tolist() == [1, 1, 1]
