"""Slots of real memory, and the message with which a trainer seals one."""

from __future__ import annotations

import fcntl
import os
from typing import Any

from tierd.format import wire
from tierd.memory.slot import MappedSlot, SlotEvent, SlotState

CREATED_AT = "2025-01-01T00:00:00.000+00:00"
PAGE_BYTES = 4096
ALLOCATED_BYTES_MAX = 1 << 30


def make_memfd(size_bytes: int, *, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    """Up to 1 GiB its memory is allocated, as that of a trainer; more of it would take the machine's memory."""
    descriptor = os.memfd_create("slot", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size_bytes)
    if size_bytes <= ALLOCATED_BYTES_MAX:
        os.posix_fallocate(descriptor, 0, size_bytes)  # a sparse one cannot be sealed
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def make_slot(
    content: bytes = b"", *, capacity_bytes: int = 4 * PAGE_BYTES, state: SlotState = SlotState.FREE
) -> MappedSlot:
    """A slot of real memory, brought to `state` by events."""
    descriptor = make_memfd(capacity_bytes)
    os.pwrite(descriptor, content, 0)
    slot = MappedSlot(descriptor, capacity_bytes)
    events = {
        SlotState.FREE: [],
        SlotState.FILLING: [SlotEvent.FILL],
        SlotState.SEALED: [SlotEvent.FILL, SlotEvent.SEAL],
    }
    for event in events[state]:
        slot.move(event)
    return slot


def make_sealed(step: int, size_bytes: int = 100, *, slot: int = 0, **fields: Any) -> wire.Sealed:
    defaults: dict[str, Any] = {
        "slot": slot,
        "step": step,
        "size_bytes": size_bytes,
        "created_at": CREATED_AT,
        "stall_s": 0.01,
        "metrics": {"loss": 2.5},
        "milestone": None,
        "parent": None,
        "architecture_hash": "0123",
        "versions": {"tierd": "test"},
        "resent": False,
    }
    return wire.Sealed(**defaults | fields)
