"""Staging: a valid shard in the slot, with one layout while the state keeps its shape, for any strides and sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load
from tierd_client.slots.slot import Slot
from tierd_client.snapshot import copying
from tierd_client.snapshot.copying import Copier
from tierd_client.snapshot.guards import Watch, deferrable
from tierd_client.snapshot.staging import ByDevice, Stager, Staging, Streams
from tierd_client.state.training_state import TrainingState

from tests.support.gpu import DEVICE, gpu_that_draws_lots
from tests.support.state import Training, metadata, one_step, stage, stage_into, staged_bytes
from tierd.errors import Full, Torn
from tierd.format.shard import parse_header, plan_layout

EMPTY = plan_layout([], {})


@pytest.fixture
def slot() -> Iterator[Slot]:
    made = Slot.create(1 << 20)
    yield made
    made.close()


def into(slot: Slot, stager: Stager, state: TrainingState, step: int = 5, **also: Any) -> bytes:
    captured = state.capture(0, 1)
    return stage_into(slot, stager, captured, metadata(captured.tree, step=step) | also)


def test_staged_bytes_are_a_safetensors_file_with_everything_in_it() -> None:
    training = Training.fresh()
    training.train(2)
    raw = stage(training.state())
    tensors = load(raw)
    for name, tensor in training.model.state_dict().items():
        assert torch.equal(tensors[f"model.{name}"], tensor)
    assert torch.equal(tensors["ema.0.weight"], training.ema.module[0].weight)
    moments = training.optimizer.state[training.model[0].weight]
    assert torch.equal(tensors["optimizer.state.0.weight.exp_avg"], moments["exp_avg"])
    shard = parse_header(raw, len(raw), where="slot")
    assert shard.tierd["state"]["scheduler"]["value"]["milestones"] == {"$counter": [[3, 1], [7, 1]]}


def test_the_same_state_gives_the_same_bytes() -> None:
    training = Training.fresh()
    training.train(1)
    assert stage(training.state()) == stage(training.state())


def test_layout_is_kept_until_the_state_changes(slot: Slot) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    state, stager = TrainingState(model=model, optimizer=optimizer), Stager()

    def layout() -> object:
        captured = state.capture(0, 1)
        return stager.plan(captured, metadata(captured.tree))

    first = layout()
    assert layout() is first
    assert "optimizer.state.bias.step" not in load(into(slot, stager, state))
    one_step(model, optimizer, lambda: model(torch.ones(1, 4)))
    assert layout() is not first
    second = layout()
    assert "optimizer.state.bias.step" in load(into(slot, stager, state))
    with torch.no_grad():
        model.weight.fill_(3)
    assert layout() is second
    assert torch.equal(load(into(slot, stager, state))["model.weight"], torch.full((4, 4), 3.0))
    model.half()
    assert load(into(slot, stager, state))["model.weight"].dtype == torch.float16


def test_two_slots_hold_two_snapshots(slot: Slot) -> None:
    model = torch.nn.Linear(2, 2)
    state, stager, other = TrainingState(model=model), Stager(), Slot.create(1 << 20)
    for value, into_slot in ((1.0, slot), (2.0, other), (3.0, slot)):
        torch.nn.init.constant_(model.weight, value)
        raw = into(into_slot, stager, state)
        assert load(raw)["model.weight"][0, 0] == value
    assert load(bytes(other.tensor.numpy().data[: len(raw)]))["model.weight"][0, 0] == 2.0
    other.close()


def test_slot_that_is_too_small_grows(slot: Slot) -> None:
    model = torch.nn.Linear(1024, 1024)
    raw = into(slot, Stager(), TrainingState(model=model))
    assert slot.capacity_bytes >= len(raw) > 4 << 20
    assert torch.equal(load(raw)["model.weight"], model.weight)


def test_metadata_that_does_not_fit_gets_a_larger_area(slot: Slot) -> None:
    model, stager = torch.nn.Linear(2, 2), Stager()
    state = TrainingState(model=model)
    small = into(slot, stager, state, note="x")
    large = into(slot, stager, state, note="x" * 200_000)
    assert len(large) > len(small) + 200_000
    assert torch.equal(load(large)["model.weight"], model.weight)
    assert len(into(slot, stager, state, note="x")) == len(large)


def test_rank_stages_only_what_it_owns(slot: Slot) -> None:
    model = torch.nn.Linear(2, 2)
    raw = stage(TrainingState(model=model, extra={"mine": torch.ones(1)}), owned={"model.bias"}, world_size=2)
    assert set(load(raw)) == {"model.bias"}


def test_state_without_tensors_is_a_shard_too() -> None:
    raw = stage(TrainingState(model=torch.nn.ReLU(), rng=False, extra={"step": 3}))
    assert load(raw) == {}
    assert parse_header(raw, len(raw), where="slot").tierd["state"]["extra.step"]["value"] == 3


def test_short_memory_raises_full_before_a_byte_is_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    def short(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "no space")

    monkeypatch.setattr(os, "posix_fallocate", short)
    slot = Slot.create(1 << 20)
    with pytest.raises(Full):
        into(slot, Stager(), TrainingState(model=torch.nn.Linear(2, 2)))
    slot.close()


def test_deferred_tensors_are_copied_after_start_and_the_header_is_written_last(slot: Slot) -> None:
    model = torch.nn.Linear(300, 300)
    state, stager = TrainingState(model=model, optimizer=torch.optim.SGD(model.parameters())), Stager()
    captured = state.capture(0, 1)
    later = deferrable(captured, state.optimizers)
    assert set(later) == {"model.weight"}
    staging = stager.begin(captured, slot, metadata(captured.tree), later)
    before = model.weight.detach().clone()
    with pytest.raises(Torn, match="interrupted"):
        staging.finish()
    staging.start()
    staging.release()
    assert bytes(slot.tensor.numpy().data[:8]) == bytes(8)
    with torch.no_grad():
        model.weight.zero_()
    assert staging.is_copied
    staging.finish()
    raw = staged_bytes(slot, staging)
    assert torch.equal(load(raw)["model.weight"], before)


def test_strided_tensors_are_deferred_too(slot: Slot) -> None:
    convolution = torch.nn.Conv2d(64, 64, 3).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    state, stager = TrainingState(model=convolution, optimizer=torch.optim.SGD(convolution.parameters())), Stager()
    captured = state.capture(0, 1)
    staging = stager.begin(captured, slot, metadata(captured.tree), deferrable(captured, state.optimizers))
    assert staging.deferred
    staging.start()
    staging.finish()
    assert torch.equal(load(staged_bytes(slot, staging))["model.weight"], convolution.weight)


# ── copying ──


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([0, 1, 63, 64, 65, 129, 1000]), st.booleans()), max_size=8),
)
def test_large_and_small_contiguous_and_strided_tensors_are_copied_whole(sizes: list[tuple[int, bool]]) -> None:
    from_ = [torch.randn(size, 3).t() if is_strided else torch.randn(3, size) for size, is_strided in sizes]
    to = [torch.zeros(3, size) for size, _ in sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "LARGE_BYTES", 64 * 12)
        patch.setattr(copying, "PIECE_BYTES", 500)
        Copier().copy(to, from_)
    assert all(torch.equal(copy, source) for copy, source in zip(to, from_, strict=True))


def test_lazy_conjugates_are_copied_by_value() -> None:
    source = torch.randn(200_000, dtype=torch.complex64).conj()
    to = torch.zeros(200_000, dtype=torch.complex64)
    Copier().copy([to], [source])
    assert torch.equal(to, source.resolve_conj())


# ── copies that a GPU queues ──


@pytest.mark.parametrize("seed", range(200))
def test_shard_is_the_state_at_the_call_in_any_order_of_gpu_streams(seed: int) -> None:
    weight, buffer = torch.zeros(8), torch.zeros(8)
    mapping = torch.zeros(EMPTY.size_bytes + 64, dtype=torch.uint8)
    weight_to, buffer_to = mapping[EMPTY.size_bytes :].view(torch.float32).chunk(2)
    with gpu_that_draws_lots(seed) as gpu:
        later: ByDevice = {DEVICE: ([weight_to], [weight])}
        streams = Streams()
        for step in (1.0, 2.0):
            for tensor in (weight, buffer):
                tensor.fill_(step)
            watch = Watch([("weight", weight, weight.detach())])
            staging = Staging(mapping, EMPTY, {}, later, watch, Copier(), streams)
            staging.copy({DEVICE: ([buffer_to], [buffer])})
            staging.start()
            buffer.fill_(-step)  # as the next forward does
            gpu.work(gpu.random.randrange(8))
            staging.release()
            weight.fill_(-step)  # as the next optimizer step does
            gpu.work(gpu.random.randrange(8))
            staging.finish()
            assert (weight_to.tolist(), buffer_to.tolist()) == ([step] * 8, [step] * 8)


def test_change_on_a_gpu_is_detected_when_it_is_queued() -> None:
    weight, to = torch.zeros(8), torch.zeros(8)
    with gpu_that_draws_lots(0):
        watch = Watch([("weight", weight, weight.detach())])
        later: ByDevice = {DEVICE: ([to], [weight])}
        staging = Staging(torch.zeros(0, dtype=torch.uint8), EMPTY, {}, later, watch, Copier(), Streams())
        staging.start()
        weight.fill_(1)
        assert not staging.is_copied, "nothing has run yet"
        staging.release()
        assert staging.changed == ["weight"]
        with pytest.raises(Torn, match="weight changed in place"):
            staging.finish()


@pytest.mark.parametrize("seed", range(20))
def test_copies_of_an_interrupted_snapshot_do_not_write_into_the_next(seed: int, slot: Slot) -> None:
    model, weight, stager = torch.nn.Linear(2, 2), torch.full((1 << 18,), 1.0), Stager()
    with gpu_that_draws_lots(seed) as gpu:
        stager._streams.copy(DEVICE, [slot.tensor.view(torch.float32)[: 1 << 18]], [weight])
        gpu.work(gpu.random.randrange(3))
    captured = TrainingState(model=model).capture(0, 1)
    raw = stage_into(slot, stager, captured, metadata(captured.tree))
    stager._streams.synchronize()
    assert torch.equal(load(raw)["model.weight"], model.weight)


def test_copy_that_a_gpu_has_no_memory_for_fails_in_finish_and_not_in_start() -> None:
    class Streamless(Streams):
        def copy(self, *_: object) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

    later: ByDevice = {DEVICE: ([torch.zeros(1)], [torch.zeros(1)])}
    staging = Staging(torch.zeros(0, dtype=torch.uint8), EMPTY, {}, later, Watch([]), Copier(), Streamless())
    staging.start()
    staging.release()
    with pytest.raises(torch.OutOfMemoryError):
        staging.finish()
