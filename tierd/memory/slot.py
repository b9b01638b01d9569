"""One slot: a memfd that a trainer has created, mapped read-only, and its states.

    FREE → FILLING → SEALED → PERSISTING → RETAINED → FREE

The newest complete snapshot is RETAINED until a newer one is complete: after the first one, a crash at any instant
leaves a complete snapshot in memory. Whether a tier has the checkpoint is not a state here: its manifest says so.

A slot is mapped only if it is sealed against shrinking: otherwise a peer could truncate it and kill the daemon by
SIGBUS. The daemon's own descriptor keeps the bytes alive after the trainer has exited.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from enum import Enum

from tierd.errors import BadRequest
from tierd.failpoints import failpoint
from tierd.format.checksum import CHUNK_BYTES
from tierd.format.manifest import FileEntry
from tierd.tiers.chunks import ChunkSums
from tierd.transitions import next_state

BLOCK_BYTES = 512  # of st_blocks: inode(7)
UNMAPPED_AT_ONCE_BYTES = 16 << 20  # takes some milliseconds


class SlotState(Enum):
    FREE = "free"
    FILLING = "filling"  # the trainer writes into it
    SEALED = "sealed"  # it holds a complete snapshot, which now survives the trainer
    PERSISTING = "persisting"  # its bytes are being written to the hot tier
    RETAINED = "retained"  # durable in the hot tier, and still in memory


class SlotEvent(Enum):
    FILL = "fill"
    ABANDON = "abandon"  # the trainer could not finish staging
    SEAL = "seal"
    PERSIST = "persist"
    PERSISTED = "persisted"
    PERSIST_FAILED = "persist_failed"  # it is retried: the bytes are still in the slot
    RELEASE = "release"  # a newer snapshot is complete
    SUPERSEDE = "supersede"  # it is not committed, and a newer one is complete, or its set was given up or fenced
    TRAINER_DIED = "trainer_died"


TRANSITIONS: dict[tuple[SlotState, SlotEvent], SlotState] = {
    (SlotState.FREE, SlotEvent.FILL): SlotState.FILLING,
    (SlotState.FILLING, SlotEvent.ABANDON): SlotState.FREE,
    (SlotState.FILLING, SlotEvent.SEAL): SlotState.SEALED,
    (SlotState.SEALED, SlotEvent.PERSIST): SlotState.PERSISTING,
    (SlotState.SEALED, SlotEvent.SUPERSEDE): SlotState.FREE,
    (SlotState.PERSISTING, SlotEvent.PERSISTED): SlotState.RETAINED,
    (SlotState.PERSISTING, SlotEvent.PERSIST_FAILED): SlotState.SEALED,
    (SlotState.RETAINED, SlotEvent.RELEASE): SlotState.FREE,
    # When a trainer dies, only unsealed data is lost.
    (SlotState.FREE, SlotEvent.TRAINER_DIED): SlotState.FREE,
    (SlotState.FILLING, SlotEvent.TRAINER_DIED): SlotState.FREE,
    (SlotState.SEALED, SlotEvent.TRAINER_DIED): SlotState.SEALED,
    (SlotState.PERSISTING, SlotEvent.TRAINER_DIED): SlotState.PERSISTING,
    (SlotState.RETAINED, SlotEvent.TRAINER_DIED): SlotState.RETAINED,
}


class MappedSlot:
    """Takes ownership of `fd`. Raises BadRequest, and closes `fd`, unless it is a memfd that can safely be mapped."""

    def __init__(self, fd: int, capacity_bytes: int) -> None:
        self.state = SlotState.FREE
        self.capacity_bytes = capacity_bytes
        self.fd = fd
        try:
            _check_sealed(fd, capacity_bytes)
            failpoint("slot.map")
            mapping = mmap.mmap(fd, capacity_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
            mapping.madvise(mmap.MADV_DONTDUMP)  # else a core file of the daemon contains every slot
        except OSError as error:
            os.close(fd)
            raise BadRequest(f"map a slot of {capacity_bytes} bytes: {error.strerror}") from error
        except BaseException:
            os.close(fd)
            raise
        # No other reference: the memory stays mapped after `close` only while a thread still reads a slice of the view.
        self.view = memoryview(mapping)

    def move(self, event: SlotEvent) -> None:
        """Change the state as TRANSITIONS says. Raises BadRequest for a move that is not in it."""
        self.state = next_state(TRANSITIONS, self.state, event)

    def is_same_memory(self, other: MappedSlot) -> bool:
        is_same_file = os.path.samestat(os.fstat(self.fd), os.fstat(other.fd))
        return is_same_file and self.capacity_bytes == other.capacity_bytes

    def is_allocated(self, size_bytes: int) -> bool:
        """Whether so many bytes of it have memory. Zeros that nobody has written have none: a sparse file costs its
        owner nothing, and would cost the hot disk its whole size."""
        return os.fstat(self.fd).st_blocks * BLOCK_BYTES >= size_bytes

    def close(self) -> None:
        """Gives the memory back to the system. A large slot: in a thread, because that takes seconds for 10 GiB."""
        if self.capacity_bytes <= UNMAPPED_AT_ONCE_BYTES:
            _free(self.view, self.fd)
        else:
            threading.Thread(target=_free, args=(self.view, self.fd), name="tierd-unmap", daemon=True).start()


def _free(view: memoryview, fd: int) -> None:
    view.release()
    os.close(fd)


def _check_sealed(fd: int, capacity_bytes: int) -> None:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise BadRequest("map a slot: the descriptor is not a memfd") from None
    if not seals & fcntl.F_SEAL_SHRINK:
        raise BadRequest("map a slot: the memfd is not sealed against shrinking", hint="add F_SEAL_SHRINK")
    size = os.fstat(fd).st_size
    if not 0 < capacity_bytes <= size:
        raise BadRequest(f"map a slot: capacity {capacity_bytes}, but the memfd has {size} bytes")


def snapshot_entry(view: memoryview, name: str, algorithm: str = "") -> FileEntry:
    """The file entry of a snapshot that is not persisted yet. Reads the whole slot: blocks for seconds. `algorithm`: of
    its digests; empty: none."""
    sums = ChunkSums(len(view), CHUNK_BYTES, algorithm)
    sums.add(0, view)
    return sums.entry(name)
