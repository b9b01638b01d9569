"""Copies that run on a GPU while the training goes on: their bytes are those of the moment of the snapshot."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import load
from tierd_client.slots.slot import Slot
from tierd_client.snapshot.guards import Guard, deferrable
from tierd_client.snapshot.staging import Stager
from tierd_client.state.training_state import TrainingState

from tests.support.cuda import DEVICE, OPTIMIZERS, Training, assert_same, needs_cuda
from tests.support.state import metadata, stage_into, staged_bytes

pytestmark = needs_cuda

SNAPSHOTS = 50


@pytest.fixture
def slot() -> Iterator[Slot]:
    made = Slot.create(1 << 20)
    yield made
    made.close()


def test_gpu_state_is_staged_behind_the_work_that_makes_it(slot: Slot) -> None:
    model, stager = torch.nn.Linear(2048, 2048, device=DEVICE), Stager()
    state = TrainingState(model=model)
    for value in range(5):
        with torch.no_grad():
            for _ in range(50):
                model.weight.copy_(torch.full((2048, 2048), float(value), device=DEVICE))
        captured = state.capture(0, 1)
        raw = stage_into(slot, stager, captured, metadata(captured.tree))
        assert (load(raw)["model.weight"] == value).all()


def test_what_is_copied_later_holds_back_the_step_and_not_the_host(slot: Slot) -> None:
    model = torch.nn.Linear(4096, 4096, device=DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state, stager = TrainingState(model=model, optimizer=optimizer), Stager()
    for value in range(5):
        with torch.no_grad():
            model.weight.fill_(value)
        captured = state.capture(0, 1)
        staging = stager.begin(captured, slot, metadata(captured.tree), deferrable(captured, state.optimizers))
        staging.start()
        staging.release()
        with torch.no_grad():  # as the step would, behind the copy
            model.weight.fill_(-1)
        staging.finish()
        assert (load(staged_bytes(slot, staging))["model.weight"] == value).all()


@pytest.mark.parametrize("options", OPTIMIZERS)
@pytest.mark.parametrize("is_pinned", [True, False])
def test_while_forward_backward_and_step_run_the_bytes_stay_those_of_the_snapshot(
    slot: Slot, options: str, is_pinned: bool
) -> None:
    training, stager = Training(options=OPTIMIZERS[options]), Stager()
    training.train(1)
    if not is_pinned:
        slot.pin = lambda device: None  # type: ignore[method-assign]  # as where it is refused
    streams = [torch.cuda.default_stream(DEVICE), torch.cuda.Stream(DEVICE), torch.cuda.Stream(DEVICE, priority=-1)]
    for number in range(SNAPSHOTS if is_pinned else 3):
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[number % len(streams)]):
            training.train(1)
            expected = training.now()
            captured = training.state.capture(0, 1)
            later = deferrable(captured, training.state.optimizers)
            assert any(name.startswith("model.") for name in later)
            assert any(name.endswith(".exp_avg") for name in later)
            staging = stager.begin(captured, slot, metadata(captured.tree), later)
            guard = Guard(staging.release)
            try:
                staging.start()
                training.train(2)
            finally:
                guard.close()
            staging.finish()
        assert slot.tensor.is_pinned() == is_pinned
        assert_same(load(staged_bytes(slot, staging)), expected)


def test_strided_tensors_are_gathered_on_the_gpu(slot: Slot) -> None:
    convolution = torch.nn.Conv2d(64, 64, 3).to(DEVICE, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    state, stager = TrainingState(model=convolution, optimizer=torch.optim.SGD(convolution.parameters())), Stager()
    captured = state.capture(0, 1)
    staging = stager.begin(captured, slot, metadata(captured.tree), deferrable(captured, state.optimizers))
    staging.start()
    staging.finish()
    assert torch.equal(load(staged_bytes(slot, staging))["model.weight"], convolution.weight.cpu())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_model_on_two_gpus_is_one_shard(slot: Slot) -> None:
    training = Training(devices=(DEVICE, torch.device("cuda", 1)))
    stager = Stager()
    for _ in range(10):
        training.train(1)
        expected = training.now()
        captured = training.state.capture(0, 1)
        later = deferrable(captured, training.state.optimizers)
        staging = stager.begin(captured, slot, metadata(captured.tree), later)
        guard = Guard(staging.release)
        try:
            staging.start()
            training.train(2)
        finally:
            guard.close()
        staging.finish()
        assert_same(load(staged_bytes(slot, staging)), expected)
