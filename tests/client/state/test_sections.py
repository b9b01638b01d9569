"""Modules, stateful objects and plain values are restored unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tierd_client.state.training_state import TrainingState

from tests.support.state import Files, Loader, assert_same, names, one_step, restore, small_net, stage


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    opened = Files(tmp_path)
    yield opened
    opened.close()


class _Warmup:
    """A callable object, of which LambdaLR saves the fields."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, step: int) -> float:
        return min(1.0, (step + 1) / self.steps)


SCHEDULERS = {
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "multi step": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 1, 4]),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=20),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, total_iters=2), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[2],
    ),
    "chained": lambda o: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.ConstantLR(o, total_iters=4), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "sequence with a callable object": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LambdaLR(o, _Warmup(2)), torch.optim.lr_scheduler.CosineAnnealingLR(o, 5)],
        milestones=[2],
    ),
    "callable object": lambda o: torch.optim.lr_scheduler.LambdaLR(o, _Warmup(5)),
    "swa": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1),
}


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_scheduler_continues_where_it_was(files: Files, name: str) -> None:
    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
        model = small_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, SCHEDULERS[name](optimizer)

    def run(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
        rates: list[float] = []
        for step in range(steps):
            scheduler.step(*[float(step)] if name == "plateau" else [])
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    model, optimizer, scheduler = build()
    run(optimizer, scheduler, 3)
    raw = stage(TrainingState(model=model, optimizer=optimizer, scheduler=scheduler))
    expected = run(optimizer, scheduler, 4)
    other, fresh, restarted = build()
    restore(TrainingState(model=other, optimizer=fresh, scheduler=restarted), [files.on_disk(raw)])
    assert run(fresh, restarted, 4) == expected


def test_grad_scaler_is_restored(files: Files) -> None:
    model, scaler = small_net(), torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=7)
    raw = stage(TrainingState(model=model, scaler=scaler))
    fresh = torch.amp.GradScaler("cpu")
    restore(TrainingState(model=small_net(), scaler=fresh), [files.on_disk(raw)])
    assert fresh.state_dict() == scaler.state_dict()


def test_grad_scaler_that_was_disabled_starts_fresh(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    raw = stage(TrainingState(model=small_net(), scaler=torch.amp.GradScaler("cpu", enabled=False)))
    fresh = torch.amp.GradScaler("cpu", init_scale=8.0)
    restore(TrainingState(model=small_net(), scaler=fresh), [files.on_disk(raw)])
    assert fresh.get_scale() == 8.0
    assert "scaler is empty in the checkpoint" in caplog.text


class _Odd(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scalar", torch.tensor(3.25, dtype=torch.float64))
        self.register_buffer("empty", torch.empty(0, 7))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("fp8", torch.randn(5).to(torch.float8_e4m3fn))
        self.register_buffer("fp8_wide", torch.randn(5).to(torch.float8_e5m2))
        self.register_buffer("fp16", torch.randn(3, 3).half())
        self.register_buffer("brain", torch.tensor([float("nan"), float("-inf"), -0.0]).bfloat16())
        self.register_buffer("complex", torch.randn(2, 2, dtype=torch.complex64))
        self.register_buffer("conj", torch.randn(2, 3, dtype=torch.complex64).conj())
        self.register_buffer("counts", torch.tensor([2**63 + 5], dtype=torch.uint64))
        self.register_buffer("transposed", torch.randn(4, 6).t())
        self.register_buffer("strided", torch.randn(8)[::2])
        self.register_buffer("expanded", torch.randn(1, 3).expand(1, 3))
        self.register_buffer("not saved", torch.ones(1), persistent=False)
        self.conv = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)


def test_every_dtype_shape_and_stride_is_restored(files: Files) -> None:
    model = _Odd()
    state = TrainingState(model=model, rng=False)
    assert "model.not saved" not in names(state)
    raw = stage(state)
    other = _Odd()
    restore(TrainingState(model=other, rng=False), [files.on_disk(raw)])
    assert_same(other.state_dict(), model.state_dict())
    assert other.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert not other.get_buffer("transposed").is_contiguous()


def test_tied_weights_stay_tied(files: Files) -> None:
    def build() -> torch.nn.Module:
        model = torch.nn.Sequential(torch.nn.Embedding(7, 3), torch.nn.Linear(3, 7, bias=False))
        model[1].weight = model[0].weight
        return model

    model, other = build(), build()
    state = TrainingState(model=model)
    assert {"model.0.weight", "model.1.weight"} <= names(state)
    restore(TrainingState(model=other), [files.on_disk(stage(state))])
    assert other[1].weight is other[0].weight
    assert torch.equal(other[0].weight, model[0].weight)


@pytest.mark.parametrize(
    "wrap", [torch.nn.DataParallel, lambda m: torch.compile(m, backend="eager")], ids=["DataParallel", "compile"]
)
def test_names_do_not_contain_wrapper_prefixes(files: Files, wrap: Any) -> None:
    model = small_net()
    wrapped: Any = wrap(model)
    optimizer = torch.optim.AdamW(wrapped.parameters())
    one_step(model, optimizer, lambda: model(torch.ones(2, 3)))
    state = TrainingState(model=wrapped, optimizer=optimizer)
    assert "model.0.weight" in names(state)
    assert "optimizer.state.0.weight.exp_avg" in names(state)
    plain = small_net()
    restore(TrainingState(model=plain, optimizer=torch.optim.AdamW(plain.parameters())), [files.on_disk(stage(state))])
    assert_same(plain.state_dict(), model.state_dict())


def test_names_that_would_collide_without_their_wrapper_prefix_keep_it() -> None:
    model = torch.nn.Module()
    model.module = torch.nn.Linear(2, 2)
    model.weight = torch.nn.Parameter(torch.ones(1))
    assert {"model.module.weight", "model.weight", "model.bias"} <= names(TrainingState(model=model))


class _WithExtraState(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.scale: object = None

    def get_extra_state(self) -> object:
        return {"scale": self.scale, "history": torch.arange(3)}

    def set_extra_state(self, state: Any) -> None:
        self.scale, self.history = state["scale"], state["history"]


def test_extra_state_of_modules_is_restored_by_its_setter(files: Files) -> None:
    model = torch.nn.Sequential(_WithExtraState())
    model[0].scale = (1, "two", None)
    other = torch.nn.Sequential(_WithExtraState())
    restore(TrainingState(model=other), [files.on_disk(stage(TrainingState(model=model)))])
    assert other[0].scale == (1, "two", None)
    assert torch.equal(other[0].history, torch.arange(3))


class _Halved(torch.nn.Linear):
    """Its state_dict holds copies, as for merged adapters and packed weights."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_state_dict_post_hook(lambda module, state, prefix, _: state.update(weight=module.weight / 2))
        self.register_load_state_dict_pre_hook(lambda module, state, *_: state.update(weight=state["weight"] * 2))


def test_copies_in_a_state_dict_are_restored_by_load_state_dict(files: Files) -> None:
    model, other = _Halved(), _Halved()
    restore(TrainingState(model=other), [files.on_disk(stage(TrainingState(model=model)))])
    assert torch.equal(other.weight, model.weight)


def test_ema_dict_is_restored_in_place(files: Files) -> None:
    ema = {"a": torch.randn(3), "b": torch.randn(2, 2)}
    live = {name: torch.zeros_like(tensor) for name, tensor in ema.items()}
    tensor = live["a"]
    restore(
        TrainingState(model=small_net(), ema=live), [files.on_disk(stage(TrainingState(model=small_net(), ema=ema)))]
    )
    assert live["a"] is tensor
    assert_same(live, ema)


def test_modules_objects_and_values_in_extra_are_restored(files: Files) -> None:
    def build(value: float) -> dict[str, Any]:
        critic = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(critic.weight, value)
        return {"critic": critic, "loader": Loader(), "best": value, "history": torch.full((3,), value), "deep": [1]}

    extra, live = build(1.0), build(2.0)
    extra["loader"].state = {"at": 7}
    extra["deep"] = [{"x": (1, 2)}]
    extra["only then"] = "kept"
    history, critic = live["history"], live["critic"]
    restore(
        TrainingState(model=small_net(), extra=live),
        [files.on_disk(stage(TrainingState(model=small_net(), extra=extra)))],
    )
    assert live["history"] is history
    assert torch.equal(history, torch.ones(3))
    assert live["critic"] is critic
    assert torch.equal(critic.weight, torch.ones(2, 2))
    assert (live["loader"].state, live["best"], live["deep"]) == ({"at": 7}, 1.0, [{"x": (1, 2)}])
    assert live["only then"] == "kept"


def test_extra_tensor_of_another_size_is_replaced(files: Files) -> None:
    live = {"history": torch.zeros(1)}
    raw = stage(TrainingState(model=small_net(), extra={"history": torch.arange(4.0)}))
    restore(TrainingState(model=small_net(), extra=live), [files.on_disk(raw)])
    assert torch.equal(live["history"], torch.arange(4.0))
