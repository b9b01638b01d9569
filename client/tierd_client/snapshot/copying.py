"""Copies many tensors in host memory at memory bandwidth, also while other processes use the cores.

A few threads take jobs from one queue. torch's own copy splits each tensor evenly over its threads, so one thread that
is not scheduled delays all. A job is a piece of a large tensor, copied by memmove, or many small tensors, copied by one
call of torch. Large tensors that are not contiguous are left to torch and its threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from operator import length_hint

import torch

LARGE_BYTES = 32 << 10  # smaller tensors are copied many by one call, in one thread
PIECE_BYTES = 16 << 20  # so that the threads end together
TENSORS_A_CALL = 1024  # of small tensors; fewer take less time than it takes to start a thread
THREADS_MAX = 16  # more do not add bandwidth

Job = Callable[[], object]
"""Holds the GIL only at its start."""

Pairs = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Tensors to copy to, and those to copy from."""


class Copier:
    """A pool of copy threads that all snapshots use."""

    def __init__(self) -> None:
        # More threads than torch may use: those that are not scheduled do not delay the rest.
        self._threads = min(2 * torch.get_num_threads(), THREADS_MAX)
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="tierd-copy")

    def copy(
        self, to: Sequence[torch.Tensor], from_: Sequence[torch.Tensor], meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        """Copy each tensor of `from_` into the contiguous tensor of `to`, of the same dtype and shape, all in host
        memory. The calling thread runs `meanwhile` while the threads copy, then copies too."""
        jobs, strided = _sort(to, from_)
        running: list[Future[None]] = []
        try:
            if length_hint(jobs) > 1:
                self._share(jobs, running)
            meanwhile()
            copy_each(*strided)
            _take(jobs)
        finally:
            wait(running)  # also after an error: the threads hold bare addresses
        for job in running:
            job.result()

    def start(self, to: Sequence[torch.Tensor], from_: Sequence[torch.Tensor], running: list[Future[None]]) -> None:
        """As `copy`, but only the threads copy. Adds their futures to `running`; the caller keeps the tensors alive
        until these are done."""
        jobs, strided = _sort(to, from_)
        if strided[0]:
            running.append(self._pool.submit(copy_each, *strided))
        self._share(jobs, running)

    def _share(self, jobs: Iterator[Job], running: list[Future[None]]) -> None:
        running.extend(self._pool.submit(_take, jobs) for _ in range(min(self._threads, length_hint(jobs))))


def _sort(to: Sequence[torch.Tensor], from_: Sequence[torch.Tensor]) -> tuple[Iterator[Job], Pairs]:
    """The jobs for the threads, and the large tensors that torch must copy."""
    jobs: list[Job] = []
    small: Pairs = [], []
    strided: Pairs = [], []
    for destination, source in zip(to, from_, strict=True):
        length = source.nbytes
        if length >= LARGE_BYTES and has_plain_bytes(source):
            to_address, from_address = destination.data_ptr(), source.data_ptr()
            for offset in range(0, length, PIECE_BYTES):
                size = min(PIECE_BYTES, length - offset)
                jobs.append(partial(ctypes.memmove, to_address + offset, from_address + offset, size))
            continue
        pairs = small if length < LARGE_BYTES else strided
        pairs[0].append(destination)
        pairs[1].append(source)
    for begin in range(0, len(small[0]), TENSORS_A_CALL):
        end = begin + TENSORS_A_CALL
        jobs.append(partial(copy_each, small[0][begin:end], small[1][begin:end]))
    return iter(jobs), strided  # a list's iterator gives each job to one thread only


def _take(jobs: Iterator[Job]) -> None:
    for job in jobs:
        job()


def copy_each(to: list[torch.Tensor], from_: list[torch.Tensor], *, non_blocking: bool = False) -> None:
    """For any devices and strides: the loop is in C++."""
    if not to:
        return
    with torch.no_grad():
        torch._foreach_copy_(to, from_, non_blocking=non_blocking)  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]


def has_plain_bytes(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory is its value in C order: contiguous, without a lazy conjugate or sign."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
