"""A slot maps foreign memory: only what can never shrink under the daemon's feet."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.slots import PAGE_BYTES, make_memfd, make_slot
from tierd.errors import BadRequest
from tierd.format import checksum
from tierd.memory.slot import MappedSlot, snapshot_entry
from tierd.memory.slot_states import SlotEvent, SlotState


@pytest.fixture(autouse=True)
def _no_descriptor_leaks() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


def test_slot_reads_what_its_trainer_writes() -> None:
    descriptor = make_memfd(PAGE_BYTES)
    trainers_own = os.dup(descriptor)
    slot = MappedSlot(descriptor, PAGE_BYTES)
    os.pwrite(trainers_own, b"state", 100)
    assert slot.view[100:105] == b"state"
    assert slot.view.readonly
    os.close(trainers_own)
    assert slot.view[100:105] == b"state", "the daemon's descriptor keeps the bytes alive"
    slot.close()


def test_memory_that_could_shrink_is_refused() -> None:
    with pytest.raises(BadRequest, match="not sealed against shrinking"):
        MappedSlot(make_memfd(PAGE_BYTES, seals=fcntl.F_SEAL_GROW), PAGE_BYTES)


def test_what_is_no_memfd_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(PAGE_BYTES))
    for descriptor in (os.open(tmp_path / "file", os.O_RDWR), os.open("/dev/zero", os.O_RDWR), os.pipe2(0)[0]):
        with pytest.raises(BadRequest, match="no memfd"):
            MappedSlot(descriptor, PAGE_BYTES)
        with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
            os.fstat(descriptor)
    os.close(descriptor + 1)  # the other end of the pipe


@pytest.mark.parametrize("capacity_bytes", [0, -1, PAGE_BYTES + 1, 1 << 62, 1 << 70])
def test_capacity_that_the_memory_does_not_have_is_refused(capacity_bytes: int) -> None:
    with pytest.raises(BadRequest, match="capacity"):
        MappedSlot(make_memfd(PAGE_BYTES), capacity_bytes)


def test_memory_that_cannot_be_mapped_is_refused() -> None:
    enormous = make_memfd((1 << 63) - PAGE_BYTES)
    with pytest.raises(BadRequest, match="map a slot of"):
        MappedSlot(enormous, (1 << 63) - PAGE_BYTES)


def test_slots_are_the_same_memory_only_with_the_same_capacity() -> None:
    descriptor = make_memfd(2 * PAGE_BYTES)
    one, same, grown = (MappedSlot(os.dup(descriptor), PAGE_BYTES * pages) for pages in (1, 1, 2))
    other = make_slot(capacity_bytes=PAGE_BYTES)
    assert one.is_same_memory(same)
    assert not one.is_same_memory(grown)
    assert not one.is_same_memory(other)
    for slot in (one, same, grown, other):
        slot.close()
    os.close(descriptor)


def test_unlisted_move_raises_and_changes_nothing() -> None:
    slot = make_slot()
    with pytest.raises(BadRequest, match="seal a slot that is free"):
        slot.move(SlotEvent.SEAL)
    assert slot.state is SlotState.FREE
    slot.close()


def test_closed_slot_stays_mapped_for_a_read_that_still_goes_on() -> None:
    slot = make_slot(b"state")
    view = slot.view[:5]
    slot.close()
    assert bytes(view) == b"state"
    del view


def test_entry_of_a_snapshot_has_the_checksums_of_its_bytes_alone() -> None:
    slot = make_slot(b"state")
    entry = snapshot_entry(slot.view[:5], "rank-00000-of-00001.safetensors")
    assert (entry.size_bytes, entry.crc64nvme) == (5, checksum.encode(checksum.crc64nvme(b"state")))
    assert entry.chunks == [entry.crc64nvme]
    slot.close()
