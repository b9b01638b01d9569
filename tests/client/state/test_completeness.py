"""A state that a checkpoint would not restore completely is refused at the first snapshot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tierd_client.state.completeness import check_restorable
from tierd_client.state.dict_state import DictState
from tierd_client.state.training_state import Capturable, TrainingState

from tests.support.state import Files, Training, assert_same, one_step, restore, small_net, stage
from tierd.errors import Unsupported


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    opened = Files(tmp_path)
    yield opened
    opened.close()


def check(state: Capturable) -> None:
    check_restorable(state, state.capture(0, 1))


class Lookahead(torch.optim.Optimizer):
    """Slow weights beside an inner optimizer, as the Lookahead implementations do."""

    def __init__(self, inner: torch.optim.Optimizer, *, shares_state: bool = False) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner
        self.param_groups = inner.param_groups
        if shares_state:
            self.state = inner.state

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class OwnStateDict(torch.optim.SGD):
    """Returns from state_dict what `.state` does not hold."""

    slow: Any = None
    returns_more = True

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {**state, "slow": 1} if self.returns_more else state


class Consolidated(torch.optim.SGD):
    """As ZeroRedundancyOptimizer, whose state_dict works only after all ranks have sent their parts."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("call consolidate_state_dict first")


def test_ordinary_states_pass() -> None:
    training = Training.fresh()
    training.train(2)
    training.extra |= {"a": torch.ones(3), "nested": {"b": [torch.zeros(2)]}, "head": torch.nn.Linear(2, 2)}
    check(training.state())
    check(DictState({"model": {"w": torch.ones(3)}, "step": 3}))
    model = small_net()
    for optimizer in (torch.optim.LBFGS(model.parameters()), torch.optim.Adafactor(model.parameters())):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step(lambda: torch.tensor(1.0))
        check(TrainingState(model=model, optimizer=optimizer))


def test_optimizer_within_an_optimizer_is_refused_unless_both_are_given(files: Files) -> None:
    model = small_net()
    inner = torch.optim.AdamW(model.parameters())
    outer = Lookahead(inner)
    one_step(model, outer, lambda: model(torch.ones(4, 3)))
    with pytest.raises(Unsupported, match=r"the Lookahead keeps a AdamW in \.inner") as caught:
        check(TrainingState(model=model, optimizer=outer))
    assert "optimizer=[optimizer, optimizer.inner]" in caught.value.hint
    both = TrainingState(model=model, optimizer=[outer, inner])
    check(both)
    raw = stage(both)

    other = small_net()
    fresh = torch.optim.AdamW(other.parameters())
    restore(TrainingState(model=other, optimizer=[Lookahead(fresh), fresh]), [files.on_disk(raw)])
    assert_same(fresh.state_dict(), inner.state_dict())
    check(TrainingState(model=model, optimizer=Lookahead(inner, shares_state=True)))


def test_state_dict_with_more_than_the_state_is_refused() -> None:
    model = small_net()
    optimizer = OwnStateDict(model.parameters(), lr=0.1, momentum=0.9)
    one_step(model, optimizer, lambda: model(torch.ones(4, 3)))
    with pytest.raises(Unsupported, match=r"OwnStateDict.state_dict\(\) returns slow") as caught:
        check(TrainingState(model=model, optimizer=optimizer))
    assert 'extra={"optimizer": optimizer}' in caught.value.hint
    check(TrainingState(model=model, extra={"optimizer": optimizer}))
    optimizer.returns_more = False
    check(TrainingState(model=model, optimizer=optimizer))


def test_state_dict_that_raises_is_refused() -> None:
    model = small_net()
    with pytest.raises(Unsupported, match=r"Consolidated.*raised RuntimeError: call consolidate_state_dict first"):
        check(TrainingState(model=model, optimizer=Consolidated(model.parameters(), lr=0.1)))


@pytest.mark.parametrize("slow", [lambda: torch.zeros(3), lambda: [torch.zeros(3)], lambda: {"a": [torch.zeros(3)]}])
def test_tensors_in_attributes_of_an_optimizer_are_refused_unless_stored(slow: Any) -> None:
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.slow = slow()  # type: ignore[attr-defined]
    with pytest.raises(Unsupported, match=r"keeps a tensor of shape \[3\] in \.slow"):
        check(TrainingState(model=model, optimizer=optimizer))
    check(TrainingState(model=model, optimizer=optimizer, extra={"slow": optimizer.slow}))  # type: ignore[attr-defined]


class Renaming(torch.nn.Module):
    """Returns an entry from state_dict that load_state_dict does not take, as a quantized layer does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))
        self.scale = torch.ones(1)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight.scale"] = self.scale


class Loading(Renaming):
    """Takes that entry too."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *more: Any) -> None:
        self.scale = state_dict.pop(prefix + "weight.scale")
        super()._load_from_state_dict(state_dict, prefix, *more)


def test_entry_that_a_module_returns_and_does_not_take_is_refused(files: Files) -> None:
    with pytest.raises(Unsupported, match=r"model\.0\.weight\.scale: state_dict returns it, load_state_dict does not"):
        check(TrainingState(model=torch.nn.Sequential(Renaming())))
    model = torch.nn.Sequential(Loading())
    model[0].scale.fill_(7)
    check(TrainingState(model=model))
    raw = stage(TrainingState(model=model))
    fresh = torch.nn.Sequential(Loading())
    restore(TrainingState(model=fresh), [files.on_disk(raw)])
    assert fresh[0].scale.item() == 7


def test_check_makes_no_tensor_on_an_accelerator_and_draws_no_numbers() -> None:
    training = Training.fresh()
    training.train(1)
    before = torch.get_rng_state()
    check(training.state())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "extra",
    [
        {"net": torch.nn.Linear(2, 2), "net.more": torch.ones(3)},
        {"net": torch.nn.Linear(2, 2), "net.weight": torch.ones(3)},
        {"a.b": torch.ones(3), "a": {"b": torch.zeros(2)}},
    ],
)
def test_keys_that_are_prefixes_of_each_other_are_restored_or_refused(files: Files, extra: dict[str, Any]) -> None:
    state = TrainingState(model=small_net(), extra=extra)
    check(state)
    raw = stage(state)
    fresh = {name: torch.nn.Linear(2, 2) if name == "net" else None for name in extra}
    restore(TrainingState(model=small_net(), extra=fresh), [files.on_disk(raw)])
    for name, value in extra.items():
        if isinstance(value, torch.nn.Module):
            assert_same(fresh[name].state_dict(), value.state_dict())  # type: ignore[union-attr]
        else:
            assert_same(fresh[name], value)


@pytest.mark.parametrize("world_size", [1, 2])
def test_module_whose_entry_has_the_name_of_a_value_is_refused(world_size: int) -> None:
    """The names of its tensors are not in the state tree, so a restore would read the value into the module."""
    extra = {"net.weight": torch.ones(2, 2), "net": torch.nn.Linear(2, 2)}
    with pytest.raises(Unsupported, match=r"capture extra\.net\.weight: another entry of the state has this name"):
        TrainingState(model=small_net(), extra=extra).capture(0, world_size)


def test_buffer_whose_memory_was_freed_is_refused_before_it_is_read() -> None:
    model = small_net()
    model.register_buffer("table", torch.ones(4))
    model.table.untyped_storage().resize_(0)
    with pytest.raises(Unsupported, match=r"capture model\.table: the memory of this tensor was freed \(0 bytes"):
        check(TrainingState(model=model))
