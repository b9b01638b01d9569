"""Copies many tensors in host memory at the speed of that memory, also while others use the cores.

In a few threads, each taking the next job when it is done with one: torch's own copy splits every tensor evenly over
its threads, and one thread that is kept waiting holds up all. A job is a piece of a large tensor, by memmove, or some
small ones, by one call of torch. Large ones in other strides are left to torch and its threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from operator import length_hint

import torch

LARGE_BYTES = 32 << 10  # below, torch copies in the calling thread alone, many tensors by one call
PIECE_BYTES = 16 << 20  # so that the threads end together
TENSORS_A_CALL = 1024  # fewer are copied sooner than a thread has begun
THREADS_MAX = 16  # more do not add bandwidth

Job = Callable[[], object]
"""A share of the copying, done without the GIL but for its beginning."""

Pairs = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Tensors to copy to, and those to copy from."""


class Copier:
    """Keeps its threads. `copy` returns when all is copied, `start` at once."""

    def __init__(self) -> None:
        # More than the cores that torch was given: those that others keep waiting do not hold up the rest.
        self._threads = min(2 * torch.get_num_threads(), THREADS_MAX)
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="tierd-copy")

    def copy(
        self, to: Sequence[torch.Tensor], from_: Sequence[torch.Tensor], meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        """Each of `from_` into the contiguous one of `to`, of the same dtype and shape, all in host memory. The caller
        does `meanwhile` while the threads copy, then helps them."""
        jobs, strided = _sort(to, from_)
        running: list[Future[None]] = []
        try:
            if length_hint(jobs) > 1:
                self._share(jobs, running)
            meanwhile()
            copy_each(*strided)
            _take(jobs)
        finally:
            wait(running)  # whatever happens here: the threads hold bare addresses
        for one in running:
            one.result()

    def start(self, to: Sequence[torch.Tensor], from_: Sequence[torch.Tensor], running: list[Future[None]]) -> None:
        """As `copy`, but all of it is done by the threads: what is added to `running` says when, and what went wrong.
        The tensors must be kept alive until then."""
        jobs, strided = _sort(to, from_)
        if strided[0]:
            running.append(self._pool.submit(copy_each, *strided))
        self._share(jobs, running)

    def _share(self, jobs: Iterator[Job], running: list[Future[None]]) -> None:
        running.extend(self._pool.submit(_take, jobs) for _ in range(min(self._threads, length_hint(jobs))))


def _sort(to: Sequence[torch.Tensor], from_: Sequence[torch.Tensor]) -> tuple[Iterator[Job], Pairs]:
    """What the threads copy, and the large tensors that are not plain bytes."""
    jobs: list[Job] = []
    small: Pairs = [], []
    strided: Pairs = [], []
    for destination, source in zip(to, from_, strict=True):
        length = source.nbytes
        if length >= LARGE_BYTES and has_plain_bytes(source):
            jobs += _cut(destination.data_ptr(), source.data_ptr(), length)
            continue
        pairs = small if length < LARGE_BYTES else strided
        pairs[0].append(destination)
        pairs[1].append(source)
    for begin in range(0, len(small[0]), TENSORS_A_CALL):
        end = begin + TENSORS_A_CALL
        jobs.append(partial(copy_each, small[0][begin:end], small[1][begin:end]))
    return iter(jobs), strided  # a list's iterator gives each job to one thread only


def _cut(to: int, from_: int, length: int) -> Iterator[Job]:
    for offset in range(0, length, PIECE_BYTES):
        yield partial(ctypes.memmove, to + offset, from_ + offset, min(PIECE_BYTES, length - offset))


def _take(jobs: Iterator[Job]) -> None:
    for job in jobs:
        job()


def copy_each(to: list[torch.Tensor], from_: list[torch.Tensor], *, non_blocking: bool = False) -> None:
    """Any devices, any strides: the loop is in C++."""
    if not to:
        return
    with torch.no_grad():
        torch._foreach_copy_(to, from_, non_blocking=non_blocking)  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]


def has_plain_bytes(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory is its value in C order: contiguous, with no conjugate or sign left to apply."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
