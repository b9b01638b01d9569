"""Optimizers of every kind are restored bit for bit, by the names of their parameters."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tierd_client.state.training_state import TrainingState

from tests.support.state import Files, assert_same, names, one_step, plan, restore, small_net, stage
from tierd.errors import Mismatch


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    opened = Files(tmp_path)
    yield opened
    opened.close()


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 2])
def test_optimizer_is_restored_bit_for_bit(files: Files, name: str, steps: int) -> None:
    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(4, 3)).square().mean()
            loss.backward()
            return loss

        for _ in range(steps):
            optimizer.step(closure)

    model = small_net()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, steps)
    raw = stage(TrainingState(model=model, optimizer=optimizer))
    saved = copy.deepcopy(optimizer.state_dict())

    for warm in (0, 1):
        other = small_net()
        fresh = OPTIMIZERS[name](other.parameters())
        train(other, fresh, warm)
        restore(TrainingState(model=other, optimizer=fresh), [files.on_disk(raw)])
        assert_same(fresh.state_dict(), saved)
    train(model, optimizer, 2)
    train(other, fresh, 2)
    assert_same(other.state_dict(), model.state_dict())


def test_names_of_parameters_stay_in_the_order_of_the_live_optimizer(files: Files) -> None:
    def build(names: list[str]) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = small_net()
        parameters = dict(model.named_parameters())
        optimizer = torch.optim.AdamW([(name, parameters[name]) for name in names])
        one_step(model, optimizer, lambda: model(torch.ones(4, 3)))
        return model, optimizer

    order = [name for name, _ in small_net().named_parameters()]
    model, optimizer = build(order)
    raw = stage(TrainingState(model=model, optimizer=optimizer))
    other, reversed_ = build(order[::-1])
    restore(TrainingState(model=other, optimizer=reversed_), [files.on_disk(raw)])
    assert reversed_.param_groups[0]["param_names"] == order[::-1]
    moments = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
    assert_same({name: reversed_.state[parameter] for name, parameter in other.named_parameters()}, moments)


def test_capture_does_not_step_an_optimizer_without_state() -> None:
    model = small_net()
    optimizer = torch.optim.AdamW(model.parameters())
    TrainingState(model=model, optimizer=optimizer).capture(0, 1)
    assert len(optimizer.state) == 0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_bf16_parameters_keep_their_fp32_moments(files: Files) -> None:
    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = small_net().bfloat16()
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = build()
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.randn(parameter.shape, dtype=torch.float32),
            "exp_avg_sq": torch.rand(parameter.shape, dtype=torch.float32) * 1e-12,
        }
    raw = stage(TrainingState(model=model, optimizer=optimizer))
    other, fresh = build()
    restore(TrainingState(model=other, optimizer=fresh), [files.on_disk(raw)])
    for restored, saved in zip(other.parameters(), model.parameters(), strict=True):
        assert_same(fresh.state[restored], optimizer.state[saved])
        assert fresh.state[restored]["exp_avg"].dtype == torch.float32


def test_optimizer_names_are_those_of_torch() -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    model = torch.nn.Sequential(torch.nn.Embedding(4, 3), torch.nn.TransformerEncoderLayer(3, 1, 4, batch_first=True))
    optimizer = torch.optim.AdamW(model.parameters())
    one_step(model, optimizer, lambda: model(torch.zeros(1, 2, dtype=torch.long)))
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    torch_names = {
        f"optimizer.{name}"
        for name, value in get_optimizer_state_dict(model, optimizer, options=options).items()
        if isinstance(value, torch.Tensor)
    }
    assert {
        name for name in names(TrainingState(model=model, optimizer=optimizer)) if "optimizer" in name
    } == torch_names


def test_several_optimizers_and_parameters_outside_the_model_are_restored(files: Files) -> None:
    def build() -> tuple[torch.nn.Module, torch.nn.Parameter, list[torch.optim.Optimizer]]:
        model, alpha = small_net(), torch.nn.Parameter(torch.randn(3))
        groups = [{"params": [model[0].weight]}, {"params": [alpha], "lr": 0.5}]
        return model, alpha, [torch.optim.Adam(groups, lr=0.1), torch.optim.SGD(model[1].parameters(), momentum=0.9)]

    model, alpha, optimizers = build()
    (model(torch.ones(2, 3)).sum() * alpha.sum()).backward()
    for optimizer in optimizers:
        optimizer.step()
    state = TrainingState(model=model, optimizer=optimizers)
    assert {
        "optimizer.0.param.1.0",
        "optimizer.0.state.param.1.0.exp_avg",
        "optimizer.1.state.1.bias.momentum_buffer",
    } <= (names(state))
    other, beta, fresh = build()
    restore(TrainingState(model=other, optimizer=fresh), [files.on_disk(stage(state))])
    assert torch.equal(beta, alpha)
    for restored, saved in zip(fresh, optimizers, strict=True):
        assert_same(restored.state_dict(), saved.state_dict())


def test_parameters_of_a_group_may_be_in_another_order(files: Files) -> None:
    model = small_net()
    optimizer = torch.optim.AdamW(model.parameters())
    one_step(model, optimizer, lambda: model(torch.ones(2, 3)))
    raw = stage(TrainingState(model=model, optimizer=optimizer))
    other = small_net()
    fresh = torch.optim.AdamW(list(other.parameters())[::-1])
    restore(TrainingState(model=other, optimizer=fresh), [files.on_disk(raw)])
    assert torch.equal(fresh.state[other[0].weight]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])


def test_new_moments_have_the_memory_format_of_their_parameter(files: Files) -> None:
    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = build()
    one_step(model, optimizer, lambda: model(torch.ones(1, 3, 5, 5)))
    other, fresh = build()
    restore(
        TrainingState(model=other, optimizer=fresh),
        [files.on_disk(stage(TrainingState(model=model, optimizer=optimizer)))],
    )
    assert fresh.state[other.weight]["exp_avg"].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(fresh.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda m: torch.optim.SGD(m.parameters(), momentum=0.9), "betas"),
        (lambda m: torch.optim.AdamW(m[0].parameters()), "1.weight is in the checkpoint"),
        (lambda m: torch.optim.AdamW([{"params": [p]} for p in m.parameters()]), "param_groups: checkpoint 1, now 4"),
        (lambda m: [torch.optim.AdamW(layer.parameters()) for layer in m], "optimizer: checkpoint 1, now 2"),
    ],
)
def test_another_optimizer_is_a_mismatch(files: Files, build: Any, expected: str) -> None:
    model = small_net()
    raw = stage(TrainingState(model=model, optimizer=torch.optim.AdamW(model.parameters())))
    other = small_net()
    with pytest.raises(Mismatch) as caught:
        plan(TrainingState(model=other, optimizer=build(other)), files.on_disk(raw))
    assert expected in caught.value.message


def test_optimizer_with_hyperparameters_of_a_newer_torch_is_accepted(files: Files) -> None:
    model = small_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    raw = stage(TrainingState(model=model, optimizer=optimizer))
    other = small_net()
    newer = torch.optim.AdamW(other.parameters())
    newer.defaults["invented_later"] = newer.param_groups[0]["invented_later"] = True
    restore(TrainingState(model=other, optimizer=newer), [files.on_disk(raw)])
    assert newer.param_groups[0]["lr"] == 0.5
    assert newer.param_groups[0]["invented_later"] is True


def test_parameter_outside_of_the_model_never_takes_the_name_of_one_inside(files: Files) -> None:
    def build(value: float) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        names = torch.nn.ModuleDict({"0": torch.nn.ParameterList([torch.full((2,), value)])})
        model = torch.nn.ModuleDict({"param": names})
        assert [name for name, _ in model.named_parameters()] == ["param.0.0"]
        outside = torch.nn.Parameter(torch.full((2,), -value))
        return model, torch.optim.SGD([outside, *model.parameters()], lr=0.1, momentum=0.9)

    model, optimizer = build(1.0)
    for value, parameter in enumerate(optimizer.param_groups[0]["params"]):
        parameter.grad = torch.full((2,), float(value))
    optimizer.step()
    raw = stage(TrainingState(model=model, optimizer=optimizer))
    other, fresh = build(5.0)
    restore(TrainingState(model=other, optimizer=fresh), [files.on_disk(raw)])
    assert_same(fresh.state_dict(), optimizer.state_dict())
    assert_same(fresh.param_groups[0]["params"], optimizer.param_groups[0]["params"])
