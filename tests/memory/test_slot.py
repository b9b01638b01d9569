"""A slot maps memory of another process, and only memory that cannot shrink. Its state follows the table."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from tests.support.descriptors import no_descriptor_leaks
from tests.support.slots import PAGE_BYTES, make_memfd, make_slot
from tests.support.waiting import DEADLINE_S, wait_until
from tierd import metrics
from tierd.errors import BadRequest
from tierd.format import checksum
from tierd.memory.slot import TRANSITIONS, MappedSlot, SlotEvent, SlotState, snapshot_entry
from tierd.transitions import next_state


@pytest.fixture(autouse=True)
def _no_descriptor_leaks(frozen_heap: None) -> Iterator[None]:
    with no_descriptor_leaks():
        yield


def test_slot_reads_what_its_trainer_writes() -> None:
    descriptor = make_memfd(PAGE_BYTES)
    trainers_descriptor = os.dup(descriptor)
    slot = MappedSlot(descriptor, PAGE_BYTES)
    os.pwrite(trainers_descriptor, b"state", 100)
    assert slot.view[100:105] == b"state"
    assert slot.view.readonly
    os.close(trainers_descriptor)
    assert slot.view[100:105] == b"state", "the daemon's descriptor keeps the bytes alive"
    slot.close()


def test_memory_that_is_not_sealed_against_shrinking_is_refused() -> None:
    with pytest.raises(BadRequest, match="not sealed against shrinking"):
        MappedSlot(make_memfd(PAGE_BYTES, seals=fcntl.F_SEAL_GROW), PAGE_BYTES)


def test_a_descriptor_that_is_not_a_memfd_is_refused_and_closed(disk_path: Path) -> None:
    (disk_path / "file").write_bytes(bytes(PAGE_BYTES))
    pipe_read_end, pipe_write_end = os.pipe2(0)
    for descriptor in (os.open(disk_path / "file", os.O_RDWR), os.open("/dev/zero", os.O_RDWR), pipe_read_end):
        with pytest.raises(BadRequest, match="not a memfd"):
            MappedSlot(descriptor, PAGE_BYTES)
        with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
            os.fstat(descriptor)
    os.close(pipe_write_end)


def test_memory_of_a_large_slot_is_given_back_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel frees a gigabyte in 0.1 s or more, and the event loop must go on."""
    monkeypatch.setattr("tierd.memory.slot.UNMAPPED_AT_ONCE_BYTES", PAGE_BYTES)
    slot = make_slot(capacity_bytes=2 * PAGE_BYTES)
    descriptor, freeing = slot.fd, threading.Event()

    def trace(frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code.co_name == "_free":
            freeing.set()

    threading.setprofile(trace)  # of threads that start from now on
    slot.close()
    threading.setprofile(None)
    assert freeing.wait(DEADLINE_S)
    wait_until(lambda: not os.path.exists(f"/proc/self/fd/{descriptor}"))


def test_slots_are_left_out_of_core_files() -> None:
    """systemd's watchdog ends a blocked daemon with SIGABRT, and a core file would be as large as all slots."""
    slot = make_slot(capacity_bytes=3 * PAGE_BYTES)
    mappings = Path("/proc/self/smaps").read_text().split("memfd:slot")
    assert mappings[1].partition("VmFlags:")[2].splitlines()[0].split().count("dd") == 1
    slot.close()


@pytest.mark.parametrize("capacity_bytes", [0, -1, PAGE_BYTES + 1, 1 << 62, 1 << 70])
def test_capacity_that_the_memory_does_not_have_is_refused(capacity_bytes: int) -> None:
    with pytest.raises(BadRequest, match="capacity"):
        MappedSlot(make_memfd(PAGE_BYTES), capacity_bytes)


def test_memory_that_cannot_be_mapped_is_refused() -> None:
    enormous = make_memfd((1 << 63) - PAGE_BYTES)
    with pytest.raises(BadRequest, match="map a slot of"):
        MappedSlot(enormous, (1 << 63) - PAGE_BYTES)


def test_slots_are_equal_only_with_the_same_memory_and_capacity() -> None:
    descriptor = make_memfd(2 * PAGE_BYTES)
    first, same, grown = (MappedSlot(os.dup(descriptor), PAGE_BYTES * pages) for pages in (1, 1, 2))
    other = make_slot(capacity_bytes=PAGE_BYTES)
    assert first.is_same_memory(same)
    assert not first.is_same_memory(grown)
    assert not first.is_same_memory(other)
    for slot in (first, same, grown, other):
        slot.close()
    os.close(descriptor)


def test_an_unlisted_transition_raises_and_changes_nothing() -> None:
    slot = make_slot()
    with pytest.raises(BadRequest, match="seal a slot that is free"):
        slot.move(SlotEvent.SEAL)
    assert slot.state is SlotState.FREE
    slot.close()


def test_a_closed_slot_stays_mapped_while_a_view_of_it_exists() -> None:
    slot = make_slot(b"state")
    view = slot.view[:5]
    slot.close()
    assert bytes(view) == b"state"
    del view


def test_the_entry_of_a_snapshot_has_the_checksum_of_its_bytes_without_the_rest_of_the_slot() -> None:
    slot = make_slot(b"state")
    entry = snapshot_entry(slot.view[:5], "rank-00000-of-00001.safetensors")
    assert (entry.size_bytes, entry.crc64nvme) == (5, checksum.encode(checksum.crc64nvme(b"state")))
    assert entry.chunks == [entry.crc64nvme]
    slot.close()


# ── states: all pairs of state and event, compared with a second copy of the table ──

MOVES = {
    "free": {"fill": "filling", "trainer_died": "free"},
    "filling": {"abandon": "free", "seal": "sealed", "trainer_died": "free"},
    "sealed": {"persist": "persisting", "supersede": "free", "trainer_died": "sealed"},
    "persisting": {"persisted": "retained", "persist_failed": "sealed", "trainer_died": "persisting"},
    "retained": {"release": "free", "trainer_died": "retained"},
}
PAIRS = list(itertools.product(SlotState, SlotEvent))


@pytest.mark.parametrize(("state", "event"), PAIRS, ids=lambda member: member.value)
def test_every_state_and_event_follows_the_table_or_is_refused(state: SlotState, event: SlotEvent) -> None:
    expected = MOVES[state.value].get(event.value)
    if expected is None:
        with pytest.raises(BadRequest, match=f"{event.value} a slot that is {state.value}"):
            next_state(TRANSITIONS, state, event)
    else:
        assert next_state(TRANSITIONS, state, event).value == expected


def test_a_refusal_names_the_allowed_events() -> None:
    with pytest.raises(BadRequest, match="expected one of abandon, seal, trainer_died"):
        next_state(TRANSITIONS, SlotState.FILLING, SlotEvent.RELEASE)


def test_the_normal_cycle_of_a_slot_ends_in_free() -> None:
    state = SlotState.FREE
    for event in (SlotEvent.FILL, SlotEvent.SEAL, SlotEvent.PERSIST, SlotEvent.PERSISTED, SlotEvent.RELEASE):
        state = next_state(TRANSITIONS, state, event)
    assert state is SlotState.FREE


def test_the_death_of_the_trainer_keeps_a_sealed_snapshot() -> None:
    for state in (SlotState.SEALED, SlotState.PERSISTING, SlotState.RETAINED):
        assert next_state(TRANSITIONS, state, SlotEvent.TRAINER_DIED) is state


def test_a_snapshot_is_dropped_from_memory_only_when_durable_or_superseded() -> None:
    complete = {SlotState.SEALED, SlotState.PERSISTING, SlotState.RETAINED}
    dropping = {
        (source, event)
        for (source, event), target in TRANSITIONS.items()
        if source in complete and target not in complete
    }
    assert dropping == {(SlotState.RETAINED, SlotEvent.RELEASE), (SlotState.SEALED, SlotEvent.SUPERSEDE)}


def test_every_state_has_a_series_in_the_metrics() -> None:
    assert tuple(state.value for state in SlotState) == metrics.SLOT_STATES
