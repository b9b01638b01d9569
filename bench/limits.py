"""What this machine can do at best with the bytes of a state: copied in memory, written to the disk, read from it."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from rounds import MIB

COPY_BYTES = 8 * MIB  # one call of memmove: small enough to share the work out evenly
BLOCK_BYTES = 16 * MIB  # one write or read
IN_FLIGHT = 4


class Limits:
    def __init__(self, tensors: list[torch.Tensor], threads: int, folder: Path) -> None:
        self.tensors = tensors  # whose addresses are kept below
        self.size_bytes = sum(tensor.nbytes for tensor in tensors)
        self.path = folder / "limit"
        self.direct = True
        self.copiers = ThreadPoolExecutor(threads)
        self.workers = ThreadPoolExecutor(IN_FLIGHT)
        padded = -(-self.size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE  # O_DIRECT moves whole pages
        self.memory = memoryview(mmap.mmap(-1, padded))
        self.memory[:: mmap.PAGESIZE] = bytes(padded // mmap.PAGESIZE)  # touch each page before any clock runs
        self.shares: list[list[tuple[int, int, int]]] = [[] for _ in range(threads)]
        target = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        done = 0
        for tensor in tensors:
            for offset in range(0, tensor.nbytes, COPY_BYTES):
                size = min(COPY_BYTES, tensor.nbytes - offset)
                share = self.shares[min(threads - 1, done * threads // self.size_bytes)]
                share.append((target + done, tensor.data_ptr() + offset, size))
                done += size

    def copy(self) -> float:
        """With all threads, into pages that are there already."""

        def work(share: list[tuple[int, int, int]]) -> None:
            for piece in share:
                ctypes.memmove(*piece)

        began = time.perf_counter()
        list(self.copiers.map(work, self.shares))
        return time.perf_counter() - began

    def write(self) -> float:
        """To a new file, and fsynced."""
        self.path.unlink(missing_ok=True)
        began = time.perf_counter()
        handle = self._open(os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            self._move(lambda block, at: os.pwrite(handle, block, at))
            os.fsync(handle)
        finally:
            os.close(handle)
        return time.perf_counter() - began

    def read(self, *, direct: bool) -> float:
        """What write() has left; who reads it buffered drops it from the page cache first."""
        began = time.perf_counter()
        handle = self._open(os.O_RDONLY) if direct else os.open(self.path, os.O_RDONLY)
        try:
            self._move(lambda block, at: os.preadv(handle, [block], at))
        finally:
            os.close(handle)
        return time.perf_counter() - began

    def _open(self, flags: int) -> int:
        try:
            return os.open(self.path, flags | os.O_DIRECT, 0o600)
        except OSError:  # tmpfs and some others refuse O_DIRECT
            self.direct = False
            return os.open(self.path, flags & ~os.O_EXCL, 0o600)

    def _move(self, one: Callable[[memoryview, int], int]) -> None:
        offsets = range(0, len(self.memory), BLOCK_BYTES)
        moved = self.workers.map(lambda at: one(self.memory[at : at + BLOCK_BYTES], at), offsets)
        if sum(moved) != len(self.memory):
            raise OSError(f"{self.path}: fewer bytes than asked for were moved")
