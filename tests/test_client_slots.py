"""The trainer's slots: sealed memory that outlives its maker, grows, and never leaves a tensor dangling."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tierd_client import slots
from tierd_client.slots import Slot, map_to_read

from tierd.errors import Corrupt, Full

MIB = 1 << 20


@pytest.fixture
def slot() -> Iterator[Slot]:
    made = Slot.create(3 * MIB)
    yield made
    made.close()


def test_slot_is_sealed_against_shrinking_but_not_against_growing(slot: Slot) -> None:
    seals = fcntl.fcntl(slot.fd, fcntl.F_GET_SEALS)
    assert seals == fcntl.F_SEAL_SHRINK
    with pytest.raises(PermissionError):
        os.ftruncate(slot.fd, MIB)
    assert os.fstat(slot.fd).st_size == slot.capacity_bytes >= 3 * MIB


def test_slot_closes_on_exec(slot: Slot) -> None:
    assert fcntl.fcntl(slot.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC


def test_slot_is_faulted_in_beforehand(slot: Slot) -> None:
    assert slot.wait_prefaulted(30)
    assert os.fstat(slot.fd).st_blocks * 512 >= slot.capacity_bytes
    assert slot.tensor.sum() == 0


def test_bytes_are_seen_by_whoever_has_the_descriptor(slot: Slot) -> None:
    slot.view[:5] = b"hello"
    assert os.pread(slot.fd, 5, 0) == b"hello"
    slot.tensor[0] = ord("J")
    assert bytes(map_to_read(slot.fd, 5).numpy().data) == b"Jello"


def test_a_mapping_to_read_does_not_write_through(slot: Slot) -> None:
    map_to_read(slot.fd, 4096)[0] = 9
    assert os.pread(slot.fd, 1, 0) == b"\0"


def test_slot_that_outlived_its_trainer_is_adopted_with_its_bytes(slot: Slot) -> None:
    slot.view[:5] = b"hello"
    descriptor = os.dup(slot.fd)
    slot.close()
    adopted = Slot.adopt(descriptor, slot.capacity_bytes)
    assert bytes(adopted.view[:5]) == b"hello"
    assert adopted.wait_prefaulted(30)
    assert bytes(adopted.view[:5]) == b"hello"
    adopted.close()


def _unsealed() -> int:
    descriptor = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 2 * MIB)
    return descriptor


def _short() -> int:
    descriptor = os.memfd_create("short", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, MIB)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return descriptor


@pytest.mark.parametrize("make", [_unsealed, _short])
def test_memory_that_could_kill_its_user_is_not_adopted(make: object) -> None:
    descriptor = make()  # type: ignore[operator]
    with pytest.raises(Corrupt, match="adopt a slot"):
        Slot.adopt(descriptor, 2 * MIB)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_file_of_a_disk_is_not_adopted(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(2 * MIB))
    with pytest.raises(Corrupt, match="sealed against shrinking: False"):
        Slot.adopt(os.open(path, os.O_RDWR), 2 * MIB)


def test_slot_grows_and_keeps_its_bytes_and_its_descriptor(slot: Slot) -> None:
    slot.view[:5] = b"hello"
    before, descriptor = slot.tensor, slot.fd
    slot.grow(9 * MIB)
    assert slot.fd == descriptor
    assert slot.capacity_bytes == slot.tensor.numel() == os.fstat(descriptor).st_size >= 9 * MIB
    assert bytes(slot.view[:5]) == b"hello"
    before[0] = ord("J")  # the former mapping still is one
    assert slot.tensor[0] == ord("J")
    assert slot.wait_prefaulted(30)
    slot.grow(MIB)
    assert slot.capacity_bytes >= 9 * MIB


def test_tensor_that_is_kept_outlives_the_closed_slot() -> None:
    slot = Slot.create(MIB)
    kept = slot.tensor[:4]
    kept.fill_(7)
    slot.close()
    slot.close()
    assert kept.tolist() == [7, 7, 7, 7]


def test_size_that_no_memory_has_is_full_and_leaks_nothing() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Full, match="allocate a slot"):
        Slot.create(1 << 62)
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_that_runs_short_in_the_background_is_full_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "posix_fallocate", short)
    slot = Slot.create(MIB)
    with pytest.raises(Full, match="ENOSPC"):
        slot.wait_prefaulted(30)
    slot.close()


def test_kernel_that_cannot_populate_leaves_it_to_the_faults(slot: Slot) -> None:
    assert slot.wait_prefaulted(30)
    slots.populate(1, mmap.PAGESIZE, is_written=True)  # refused by the kernel, and that is all


def test_forked_child_has_no_mapping(tmp_path: Path) -> None:
    """A child that touches it dies of SIGSEGV, alone."""
    script = (
        "import os, sys\n"
        "from tierd_client.slots import Slot\n"
        "slot = Slot.create(1 << 20)\n"
        "assert slot.wait_prefaulted(30)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    slot.tensor.numpy()[0]\n"
        "    os._exit(0)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), int(slot.tensor[0]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == ["-11", "0"]


def test_without_a_gpu_in_use_nothing_is_pinned(slot: Slot) -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        pytest.skip("a GPU is in use")
    assert slot.pin() is False
    assert not torch.cuda.is_initialized()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_slot_is_page_locked_and_let_go(slot: Slot) -> None:
    torch.cuda.init()
    assert slot.wait_prefaulted(30)
    assert slot.pin()
    assert slot.tensor.is_pinned()
    slot.grow(9 * MIB)
    assert slot.pin()
