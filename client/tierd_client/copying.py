"""Copies many tensors in host memory at the speed of that memory, also while others use the cores.

Large ones by memmove in a few threads, each taking the next piece when it is done with one: torch's own copy
splits every tensor evenly over its threads, and one thread that is kept waiting holds up all. Small ones, and
those in other strides, by one call of torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

LARGE_BYTES = 256 << 10  # below, handing a tensor to a thread costs more than copying it
PIECE_BYTES = 16 << 20  # so that the threads end together
THREADS_MAX = 16  # more do not add bandwidth

Piece = tuple[int, int, int]
"""(address to copy to, address to copy from, length in bytes)."""


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
        does `meanwhile` while the threads copy."""
        pieces, rest = _sort(to, from_)
        running: list[Future[None]] = []
        try:
            self._share(pieces, running)
            meanwhile()
            copy_each(*rest)
        finally:
            wait(running)  # whatever happens here: the threads hold bare addresses
        for one in running:
            one.result()

    def start(self, to: Sequence[torch.Tensor], from_: Sequence[torch.Tensor], running: list[Future[None]]) -> None:
        """As `copy`, but all of it is done by the threads: what is added to `running` says when, and what went wrong.
        The tensors must be kept alive until then."""
        pieces, rest = _sort(to, from_)
        if rest[0]:
            running.append(self._pool.submit(copy_each, *rest))
        self._share(pieces, running)

    def _share(self, pieces: list[Piece], running: list[Future[None]]) -> None:
        shared = iter(pieces)  # a list's iterator gives each piece to one thread only
        running.extend(self._pool.submit(_take, shared) for _ in range(min(self._threads, len(pieces))))


def _sort(
    to: Sequence[torch.Tensor], from_: Sequence[torch.Tensor]
) -> tuple[list[Piece], tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """What is copied as bare bytes, and the rest as (to, from)."""
    pieces: list[Piece] = []
    rest: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    for destination, source in zip(to, from_, strict=True):
        length = destination.numel() * destination.element_size()
        if length >= LARGE_BYTES and has_plain_bytes(source):
            pieces += _cut(destination.data_ptr(), source.data_ptr(), length)
        else:
            rest[0].append(destination)
            rest[1].append(source)
    return pieces, rest


def _cut(to: int, from_: int, length: int) -> Iterator[Piece]:
    for offset in range(0, length, PIECE_BYTES):
        yield to + offset, from_ + offset, min(PIECE_BYTES, length - offset)


def _take(pieces: Iterator[Piece]) -> None:
    for to, from_, length in pieces:
        ctypes.memmove(to, from_, length)  # lets go of the GIL


def copy_each(to: list[torch.Tensor], from_: list[torch.Tensor], *, non_blocking: bool = False) -> None:
    """Any devices, any strides: the loop is in C++."""
    if not to:
        return
    with torch.no_grad():
        torch._foreach_copy_(to, from_, non_blocking=non_blocking)  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]


def has_plain_bytes(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory is its value in C order: contiguous, with no conjugate or sign left to apply."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
