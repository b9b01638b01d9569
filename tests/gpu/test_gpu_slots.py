"""Slots on a machine with a GPU: page-locked, adopted, refused, and let go."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from tierd_client.slots.slot import Slot

from tests.support.cuda import DEVICE, needs_cuda

pytestmark = needs_cuda

MIB = 1 << 20


@pytest.fixture
def slot() -> Iterator[Slot]:
    torch.cuda.init()
    made = Slot.create(3 * MIB)
    assert made.wait_prefaulted(60)
    yield made
    made.close()


def test_slot_is_page_locked_and_let_go(slot: Slot) -> None:
    slot.pin(DEVICE)
    assert not slot.refusal
    assert slot.tensor.is_pinned()
    before = slot.tensor
    slot.grow(9 * MIB)
    assert not before.is_pinned()
    slot.pin(DEVICE)
    assert slot.tensor.is_pinned()


def test_a_slot_that_outlived_its_trainer_is_page_locked_again(slot: Slot) -> None:
    slot.pin(DEVICE)
    slot.tensor.fill_(7)
    adopted = Slot.adopt(os.dup(slot.fd), slot.capacity_bytes)
    try:
        adopted.pin(DEVICE)
        assert adopted.tensor.is_pinned()
        assert bool((adopted.tensor.to(DEVICE) == 7).all())
    finally:
        adopted.close()


def test_what_is_refused_leaves_no_error_behind_and_copies_go_on(slot: Slot) -> None:
    slot.pin(DEVICE)
    again = Slot.adopt(os.dup(slot.fd), slot.capacity_bytes)
    again.tensor = slot.tensor  # the very addresses that are locked already: refused
    try:
        again.pin(DEVICE)
        assert "cudaHostRegister returns" in again.refusal
        ones = torch.ones(MIB, device=DEVICE)
        ones.add_(1)  # torch would find the refusal here, were it left to this thread
        torch.cuda.synchronize()
        assert float(ones.sum()) == 2 * MIB
    finally:
        again.close()
    assert slot.tensor.is_pinned()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_slot_is_page_locked_for_all_gpus_and_wakes_up_no_other(slot: Slot) -> None:
    slot.pin(torch.device("cuda", 1))
    with torch.cuda.device(0):
        assert slot.tensor.is_pinned()
