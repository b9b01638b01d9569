"""A slot: one memfd that holds one snapshot, mapped shared, faulted in beforehand, page-locked where there is a GPU.

The daemon gets the descriptor of the same memory, so the bytes outlive the trainer. It is sealed against shrinking:
access to a truncated mapping would kill the daemon. A mapping lives until its last tensor is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import threading
import weakref
from typing import Any

import torch

from tierd.errors import Corrupt, Full
from tierd_client.log import log

PREFAULT_BYTES = 64 << 20  # faulted in between two checks for a request to stop
_HUGE_PAGE_BYTES = 2 << 20
_MADV_POPULATE_READ = 22  # Linux 5.14; not in the mmap module
_MADV_POPULATE_WRITE = 23
_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every GPU of the process

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_open: weakref.WeakSet[Slot] = weakref.WeakSet()
"""The slots that this process has mapped."""
_mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
"""The mappings of this process that a forked child does not inherit."""


class Slot:
    """Use `create` or `adopt`. `tensor` is the mapping as uint8; `fd`, which the slot owns, goes to the daemon too."""

    def __init__(self, fd: int, capacity_bytes: int) -> None:
        self.fd = fd
        self.capacity_bytes = capacity_bytes
        self.tensor = _map(fd, capacity_bytes)
        self.refusal = ""
        """Why the GPU's driver refused to page-lock the mapping."""
        self._pinning: threading.Thread | None = None
        self._pinned_for: torch.device | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: Full | None = None
        _open.add(self)

    @classmethod
    def create(cls, capacity_bytes: int) -> Slot:
        """A new slot, faulted in by a thread. Raises Full when the kernel refuses the size."""
        capacity_bytes = _round_up(capacity_bytes)
        fd = os.memfd_create("tierd-slot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(fd, 0o644)  # else another user who gets a read-only descriptor could open it again to write
            os.ftruncate(fd, capacity_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            slot = cls(fd, capacity_bytes)
        except OSError as error:
            os.close(fd)
            raise _full(capacity_bytes, error) from error
        slot._prefault(is_new=True)
        return slot

    @classmethod
    def adopt(cls, fd: int, capacity_bytes: int) -> Slot:
        """The slot of a trainer that has ended, pages faulted in. Owns or closes `fd`. Raises Corrupt when it is no
        slot of that size, OSError when it cannot be mapped."""
        with contextlib.ExitStack() as on_error:
            on_error.callback(os.close, fd)
            size_bytes = os.fstat(fd).st_size
            if not is_sealed(fd) or size_bytes < capacity_bytes:
                raise Corrupt(
                    f"adopt a slot of {capacity_bytes} bytes: the descriptor has {size_bytes} bytes, "
                    f"sealed against shrinking: {is_sealed(fd)}"
                )
            slot = cls(fd, capacity_bytes)
            on_error.pop_all()
        slot._prefault(is_new=False)
        return slot

    def grow(self, capacity_bytes: int) -> None:
        """Make room for `capacity_bytes`. The bytes stay; `tensor` is a new one. Raises Full when memory is short."""
        if capacity_bytes <= self.capacity_bytes:
            return
        capacity_bytes = _round_up(capacity_bytes)
        self._end_prefault()
        self._unpin()
        try:
            os.ftruncate(self.fd, capacity_bytes)
            self.tensor = _map(self.fd, capacity_bytes)
        except OSError as error:
            raise _full(capacity_bytes, error) from error
        self.capacity_bytes = capacity_bytes
        self._prefault(is_new=True)

    def wait_prefaulted(self, timeout_s: float) -> bool:
        """True when all pages are faulted in, False at the timeout. Raises Full when memory ran short."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
        if self._error is not None:
            raise self._error
        return True

    def pin(self, device: torch.device) -> None:
        """Page-lock the mapping, so that copies from GPUs run at full speed and asynchronously. Tried once per mapping:
        when the driver refuses, `refusal` says why. `device`: a GPU that is in use."""
        if self._pinning is None:
            # On a thread of its own: CUDA keeps an error as the last error of the calling thread, and torch would raise
            # it after the next kernel of the training.
            self._pinning = threading.Thread(target=self._register, args=(device,), name="tierd-pin", daemon=True)
            self._pinning.start()
        self._pinning.join()

    def close(self) -> None:
        """Close the descriptor. The memory is freed with the last tensor on it and the daemon's descriptor."""
        if self.fd < 0:
            return
        _open.discard(self)
        self._end_prefault()
        self._unpin()
        self.tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
        os.close(self.fd)
        self.fd = -1

    def _register(self, device: torch.device) -> None:
        arguments = self.tensor.data_ptr(), self.capacity_bytes, _REGISTER_PORTABLE
        refusal = _call_runtime(device, "cudaHostRegister", *arguments)
        if not refusal:
            self._pinned_for = device
            return
        self.refusal = f"page-lock a slot of {self.capacity_bytes} bytes for {device}: {refusal}"
        log.warning('tierd: %s; copies are slower, and with staging="overlap" the host waits for them', self.refusal)

    def _unpin(self) -> None:
        """Before the mapping is freed, when no copy can be writing to it."""
        if self._pinning is not None:
            self._pinning.join()
        if self._pinned_for is not None:
            # Synchronized, as an interrupted snapshot may have left a copy running.
            address = self.tensor.data_ptr()
            refusal = _call_runtime(self._pinned_for, "cudaHostUnregister", address, is_synchronized=True)
            if refusal:
                log.warning("tierd: unlock a slot of %d bytes: %s", self.capacity_bytes, refusal)
        self._pinning, self._pinned_for, self.refusal = None, None, ""

    def _prefault(self, *, is_new: bool) -> None:
        self._error = None
        self._stop.clear()
        self._thread = threading.Thread(
            target=self._prefault_all, args=(self.tensor, is_new), name="tierd-prefault", daemon=True
        )
        self._thread.start()

    def _prefault_all(self, mapping: torch.Tensor, is_new: bool) -> None:
        """Runs in a thread; both system calls release the GIL. `mapping` keeps the memory mapped meanwhile."""
        address, capacity_bytes = mapping.data_ptr(), mapping.numel()
        for offset in range(0, capacity_bytes, PREFAULT_BYTES):
            if self._stop.is_set():
                return
            length = min(PREFAULT_BYTES, capacity_bytes - offset)
            try:
                # When memory is short this call returns an error; touching the page would raise SIGBUS.
                os.posix_fallocate(self.fd, offset, length)
            except OSError as error:
                self._error = _full(capacity_bytes, error)
                return
            populate(address + offset, length, are_new=is_new)

    def _end_prefault(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()


def _close_in_child() -> None:
    """A forked child, such as a data loader's worker, must not keep the memory of a trainer that has died.

    The child has no mapping, so the kernel may place memory of the child at the same addresses. It would be unmapped
    with the Python object of the mapping; that object is therefore never freed.
    """
    for slot in _open:
        os.close(slot.fd)
        slot.fd = -1
    _open.clear()
    for mapping in _mappings:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapping))


os.register_at_fork(after_in_child=_close_in_child)


def _call_runtime(device: torch.device, name: str, *arguments: int, is_synchronized: bool = False) -> str:
    """Calls a function of CUDA's runtime. Returns why it was refused; empty when it succeeded."""
    try:
        with torch.cuda.device(device):  # otherwise a process that has chosen none gets a context on GPU 0 too
            if is_synchronized:
                torch.cuda.synchronize()
            runtime: Any = torch.cuda.cudart()
            status = int(getattr(runtime, name)(*arguments))
    except RuntimeError as error:  # for example of a GPU that has failed
        return str(error)
    return f"{name} returns {status}" if status else ""


def is_sealed(fd: int) -> bool:
    """Whether `fd` is memory that cannot shrink, so that it is safe to map."""
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # EINVAL: a file on a disk has no seals
        return False


def map_to_read(fd: int, size_bytes: int) -> torch.Tensor:
    """The first `size_bytes` of a sealed memfd, as uint8, for reading.

    A slot that this process has open is mapped and faulted in already. Other memory gets a private mapping.
    """
    for slot in _open:
        if size_bytes <= slot.capacity_bytes and os.path.sameopenfile(fd, slot.fd):
            return slot.tensor[:size_bytes]
    mapping = mmap.mmap(fd, size_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return torch.frombuffer(mapping, dtype=torch.uint8)


def populate(address: int, length: int, *, are_new: bool) -> None:
    """Fault pages in by one call. A kernel without that call does nothing.

    Pages that hold bytes are faulted in for reading, which maps 16 at a time and takes half the time; in shared
    writable memory a later write causes no fault. For new pages, faulting in for writing is faster.
    """
    _libc.madvise(address, length, _MADV_POPULATE_WRITE if are_new else _MADV_POPULATE_READ)


def _map(fd: int, capacity_bytes: int) -> torch.Tensor:
    """A shared mapping that lives as long as any tensor on it."""
    mapping = mmap.mmap(fd, capacity_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    mapping.madvise(mmap.MADV_DONTFORK)  # a forked data loader must not share page-locked memory
    _mappings.add(mapping)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)


def _round_up(size_bytes: int) -> int:
    return max(-(-size_bytes // _HUGE_PAGE_BYTES), 1) * _HUGE_PAGE_BYTES


def _full(capacity_bytes: int, error: OSError) -> Full:
    return Full(
        f"allocate a slot of {capacity_bytes} bytes of shared memory: {errno.errorcode.get(error.errno or 0, error)}",
        hint="raise the container's memory limit by slots_per_rank times the state size, for each rank",
    )
