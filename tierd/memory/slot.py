"""One slot: a memfd made by a trainer, mapped here read-only. The only mmap of foreign memory.

A slot is mapped only when it is sealed against shrinking: a peer that truncates it would kill the daemon by
SIGBUS. The daemon's own descriptor keeps the bytes alive after the trainer is gone.
"""

from __future__ import annotations

import fcntl
import mmap
import os

from tierd.errors import BadRequest
from tierd.format import checksum
from tierd.format.manifest import FileEntry, file_entry
from tierd.memory.slot_states import SlotEvent, SlotState, next_state


class MappedSlot:
    """Takes over `fd`. Raises BadRequest, with `fd` closed, when it is no memfd that can safely be mapped."""

    def __init__(self, fd: int, capacity_bytes: int) -> None:
        self.state = SlotState.FREE
        self.capacity_bytes = capacity_bytes
        self.fd = fd
        try:
            _check_sealed(fd, capacity_bytes)
            mapping = mmap.mmap(fd, capacity_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        except OSError as error:
            os.close(fd)
            raise BadRequest(f"map a slot of {capacity_bytes} bytes: {error.strerror}") from error
        except BaseException:
            os.close(fd)
            raise
        # The only reference: a read that goes on in a thread after `close` keeps the memory mapped, and nothing else.
        self.view = memoryview(mapping)

    def move(self, event: SlotEvent) -> None:
        """Change state by the table of lifecycle/states; an unlisted move raises."""
        self.state = next_state(self.state, event)

    def is_same_memory(self, other: MappedSlot) -> bool:
        mine, its = os.fstat(self.fd), os.fstat(other.fd)
        return (mine.st_dev, mine.st_ino, self.capacity_bytes) == (its.st_dev, its.st_ino, other.capacity_bytes)

    def close(self) -> None:
        self.view.release()
        os.close(self.fd)


def _check_sealed(fd: int, capacity_bytes: int) -> None:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise BadRequest("map a slot: the descriptor is no memfd") from None
    if not seals & fcntl.F_SEAL_SHRINK:
        raise BadRequest("map a slot: the memfd is not sealed against shrinking", hint="add F_SEAL_SHRINK")
    size = os.fstat(fd).st_size
    if not 0 < capacity_bytes <= size:
        raise BadRequest(f"map a slot: capacity {capacity_bytes} of a memfd of {size} bytes")


def snapshot_entry(view: memoryview, name: str) -> FileEntry:
    """The file entry of a snapshot that was not persisted yet, read once from its slot. Blocking: seconds."""
    chunks = [
        checksum.crc64nvme(view[offset : offset + length])
        for offset, length in checksum.chunk_ranges(len(view), checksum.CHUNK_BYTES)
    ]
    return file_entry(name, len(view), checksum.CHUNK_BYTES, chunks)
