"""The trainer's slots: sealed memory that outlives the trainer, grows, and stays mapped while a tensor uses it."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tierd_client.slots import slot as slots
from tierd_client.slots.slot import Slot, map_to_read

from tests.support.descriptors import no_descriptor_leaks
from tests.support.gpu import Runtime
from tierd.errors import Corrupt, Full

MIB = 1 << 20
KERNEL = tuple(int(part) for part in platform.release().split(".")[:2])
GPU = torch.device("cuda", 1)


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


def test_slot_is_faulted_in_before_use(slot: Slot) -> None:
    assert slot.wait_prefaulted(30)
    assert os.fstat(slot.fd).st_blocks * 512 >= slot.capacity_bytes
    assert slot.tensor.sum() == 0


def test_bytes_are_visible_through_the_descriptor(slot: Slot) -> None:
    slot.tensor.numpy().data[:5] = b"hello"
    assert os.pread(slot.fd, 5, 0) == b"hello"
    slot.tensor[0] = ord("J")
    descriptor = os.dup(slot.fd)
    assert bytes(map_to_read(descriptor, 5).numpy().data) == b"Jello"
    slot.close()
    assert bytes(map_to_read(descriptor, 5).numpy().data) == b"Jello"
    os.close(descriptor)


def test_open_slot_is_read_through_its_own_mapping_also_after_it_has_grown(slot: Slot) -> None:
    other = Slot.create(3 * MIB)
    descriptor = os.dup(slot.fd)
    for _ in range(2):
        assert map_to_read(descriptor, 5).data_ptr() == slot.tensor.data_ptr()
        assert map_to_read(other.fd, other.capacity_bytes).data_ptr() == other.tensor.data_ptr()
        slot.grow(9 * MIB)
    os.close(descriptor)
    other.close()


def test_memory_that_grew_beyond_our_mapping_is_mapped_again(slot: Slot) -> None:
    os.ftruncate(slot.fd, slot.capacity_bytes + MIB)
    mapping = map_to_read(slot.fd, slot.capacity_bytes + MIB)
    assert mapping.numel() == slot.capacity_bytes + MIB
    assert mapping[-1] == 0


def test_mapping_of_another_processs_memory_is_private(slot: Slot) -> None:
    descriptor = os.dup(slot.fd)
    slot.close()
    map_to_read(descriptor, 4096)[0] = 9
    assert os.pread(descriptor, 1, 0) == b"\0"
    os.close(descriptor)


def test_slot_that_outlived_its_trainer_is_adopted_with_its_bytes(slot: Slot) -> None:
    slot.tensor.numpy().data[:5] = b"hello"
    descriptor = os.dup(slot.fd)
    slot.close()
    adopted = Slot.adopt(descriptor, slot.capacity_bytes)
    assert bytes(adopted.tensor.numpy().data[:5]) == b"hello"
    assert adopted.wait_prefaulted(30)
    assert bytes(adopted.tensor.numpy().data[:5]) == b"hello"
    adopted.close()


@pytest.mark.skipif(KERNEL < (5, 14), reason="the kernel cannot populate a mapping")
def test_write_to_an_adopted_slot_causes_no_faults(slot: Slot) -> None:
    """Its pages were faulted in for reading: a fault per page would slow the first snapshot."""
    slot.tensor.fill_(1)
    adopted = Slot.adopt(os.dup(slot.fd), slot.capacity_bytes)
    assert adopted.wait_prefaulted(30)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    ctypes.memset(adopted.tensor.data_ptr(), 7, adopted.capacity_bytes)
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    assert faults < adopted.capacity_bytes // mmap.PAGESIZE // 50
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
def test_memory_that_can_shrink_or_is_too_small_is_not_adopted(make: object) -> None:
    descriptor = make()  # type: ignore[operator]
    with pytest.raises(Corrupt, match="adopt a slot"):
        Slot.adopt(descriptor, 2 * MIB)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_file_on_a_disk_is_not_adopted(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(2 * MIB))
    with pytest.raises(Corrupt, match="sealed against shrinking: False"):
        Slot.adopt(os.open(path, os.O_RDWR), 2 * MIB)


def test_slot_grows_and_keeps_its_bytes_and_its_descriptor(slot: Slot) -> None:
    slot.tensor.numpy().data[:5] = b"hello"
    before, descriptor = slot.tensor, slot.fd
    slot.grow(9 * MIB)
    assert slot.fd == descriptor
    assert slot.capacity_bytes == slot.tensor.numel() == os.fstat(descriptor).st_size >= 9 * MIB
    assert bytes(slot.tensor.numpy().data[:5]) == b"hello"
    before[0] = ord("J")  # the former mapping is still valid
    assert slot.tensor[0] == ord("J")
    assert slot.wait_prefaulted(30)
    slot.grow(MIB)
    assert slot.capacity_bytes >= 9 * MIB


def test_tensor_outlives_the_closed_slot() -> None:
    slot = Slot.create(MIB)
    kept = slot.tensor[:4]
    kept.fill_(7)
    slot.close()
    slot.close()
    assert kept.tolist() == [7, 7, 7, 7]


def test_impossible_size_raises_full_and_leaks_nothing() -> None:
    with no_descriptor_leaks(), pytest.raises(Full, match="allocate a slot"):
        Slot.create(1 << 62)


def test_memory_that_runs_short_in_the_background_raises_full_in_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "posix_fallocate", short)
    slot = Slot.create(MIB)
    with pytest.raises(Full, match="ENOSPC"):
        slot.wait_prefaulted(30)
    slot.close()


def test_populate_refused_by_the_kernel_is_ignored(slot: Slot) -> None:
    assert slot.wait_prefaulted(30)
    slots.populate(1, mmap.PAGESIZE, are_new=True)  # refused by the kernel, and not raised


def printed_by(script: str) -> list[str]:
    """The words that a process of its own prints."""
    command = [sys.executable, "-W", "ignore", "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.split()


def test_forked_child_has_no_mapping() -> None:
    """A child that touches it dies of SIGSEGV; the parent goes on."""
    script = (
        "import os, sys\n"
        "from tierd_client.slots.slot import Slot\n"
        "slot = Slot.create(1 << 20)\n"
        "assert slot.wait_prefaulted(30)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    slot.tensor.numpy()[0]\n"
        "    os._exit(0)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), int(slot.tensor[0]))\n"
    )
    assert printed_by(script) == ["-11", "0"]


@pytest.mark.parametrize("is_open", [True, pytest.param(False, marks=pytest.mark.long)])
def test_forked_child_keeps_its_memory_when_a_slot_is_freed(is_open: bool) -> None:
    """The kernel places the child's memory where the slot was in the parent. A garbage collection in the child that
    frees the slot must not unmap it: a data loader's worker died of SIGSEGV."""
    script = (
        "import gc, os, torch\n"
        "from tierd_client.slots.slot import Slot\n"
        "gc.disable()\n"
        "def leave_a_cycle():\n"
        "    cycle = []\n"
        "    slot = Slot.create(64 << 20)\n"
        "    slot.wait_prefaulted(30)\n"
        f"    cycle += [cycle, slot.tensor, slot if {is_open} else slot.close()]\n"
        "leave_a_cycle()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    parts = [torch.ones(4 << 20) for _ in range(3)]\n"
        "    gc.collect()\n"
        "    os._exit(all(part.sum() == 4 << 20 for part in parts))\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    assert printed_by(script) == ["1"]


# ── page-locked ──


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    return Runtime(monkeypatch)


def test_mapping_is_page_locked_once_by_the_gpu_in_use(slot: Slot, runtime: Runtime) -> None:
    slot.pin(GPU)
    slot.pin(GPU)
    assert runtime.calls == [("register", "cuda:1")]
    assert runtime.locked == {slot.tensor.data_ptr(): slot.capacity_bytes}
    assert not slot.refusal


def test_mapping_is_unlocked_before_it_is_freed_and_after_the_gpu_has_finished(slot: Slot, runtime: Runtime) -> None:
    end = [("synchronize", "cuda:1"), ("unregister", "cuda:1")]
    slot.pin(GPU)
    slot.grow(9 * MIB)
    assert runtime.calls == [("register", "cuda:1"), *end]
    slot.pin(GPU)
    assert runtime.locked == {slot.tensor.data_ptr(): slot.capacity_bytes}
    slot.close()
    assert runtime.calls == 2 * [("register", "cuda:1"), *end]
    assert not runtime.locked


def test_refused_page_lock_is_logged_once_and_tried_again_for_a_new_mapping(
    slot: Slot, runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    runtime.refuses_with = 2
    for _ in range(3):
        slot.pin(GPU)
    assert runtime.calls == [("register", "cuda:1")]
    assert "cudaHostRegister returns 2" in slot.refusal
    assert caplog.text.count("copies are slower") == 1
    runtime.refuses_with = 0
    slot.grow(9 * MIB)
    slot.pin(GPU)
    assert not slot.refusal
    assert runtime.locked


def test_refused_page_lock_leaves_no_error_on_the_training_thread(slot: Slot, runtime: Runtime) -> None:
    """CUDA keeps the last error of each thread, and torch checks it after the next kernel."""
    threads: list[int] = []
    ask = runtime.cudaHostRegister
    runtime.cudaHostRegister = lambda *args: threads.append(threading.get_ident()) or ask(*args)  # type: ignore[method-assign]
    slot.pin(GPU)
    assert threads
    assert threads[0] != threading.get_ident()


def test_failed_gpu_breaks_neither_grow_nor_close(
    slot: Slot, runtime: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    slot.pin(GPU)

    def fail(*_: object) -> int:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    runtime.cudaHostUnregister = runtime.cudaHostRegister = fail  # type: ignore[method-assign]
    slot.grow(9 * MIB)
    assert "unlock a slot" in caplog.text
    slot.pin(GPU)
    assert "illegal memory access" in slot.refusal
    slot.close()
