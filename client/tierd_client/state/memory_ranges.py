"""Which destinations of a restore share memory: restored in parallel, they would overwrite each other's bytes."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tierd_client.state.tensors import CapturedTensor, as_bytes

ALIGN_BYTES = 16  # of the largest dtype: complex128


@dataclass(frozen=True, slots=True)
class _Range:
    """The addresses `[begin, end)`, which all `tensors` lie in."""

    begin: int
    end: int
    tensors: tuple[CapturedTensor, ...]


class MemoryRanges:
    """Disjoint ranges of memory by device, with the tensors in each. Tensors of one range may share memory."""

    def __init__(self) -> None:
        self._ranges: dict[torch.device, list[_Range]] = defaultdict(list)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` overlaps a range."""
        begin, end = _addresses(tensor)
        return begin < end and bool(self._ranges[tensor.device][self._overlapped(tensor.device, begin, end)])

    def add(self, tensor: CapturedTensor) -> None:
        begin, end = _addresses(tensor.tensor)
        if begin == end:
            return
        device = tensor.tensor.device
        overlapped = self._overlapped(device, begin, end)
        joined = self._ranges[device][overlapped]
        self._ranges[device][overlapped] = [
            _Range(
                min([begin, *(known.begin for known in joined)]),
                max([end, *(known.end for known in joined)]),
                (*(member for known in joined for member in known.tensors), tensor),
            )
        ]

    def shared(self) -> Iterator[tuple[CapturedTensor, ...]]:
        """The tensors of each range that holds several."""
        return (known.tensors for ranges in self._ranges.values() for known in ranges if len(known.tensors) > 1)

    def _overlapped(self, device: torch.device, begin: int, end: int) -> slice:
        ranges = self._ranges[device]
        first = bisect.bisect_right(ranges, begin, key=lambda known: known.end)
        return slice(first, bisect.bisect_left(ranges, end, lo=first, key=lambda known: known.begin))


def _addresses(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses from the first to the last element of a tensor; equal for an empty one."""
    begin = tensor.data_ptr()
    if not tensor.numel():
        return begin, begin
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


def can_hold(tensors: Sequence[CapturedTensor], values: Sequence[torch.Tensor]) -> bool:
    """Whether tensors that share memory can hold these values at once. `values` are contiguous tensors on the CPU.

    Writes the values into a copy of the memory's layout and compares: tensors may share only some of their elements.
    """
    ranges = [_addresses(tensor.tensor) for tensor in tensors]
    base = min(begin for begin, _ in ranges) // ALIGN_BYTES * ALIGN_BYTES
    length = max(end for _, end in ranges) - base
    memory = torch.zeros(-(-length // ALIGN_BYTES) * ALIGN_BYTES, dtype=torch.uint8, device="cpu")
    views: list[torch.Tensor] = []
    for (begin, _), tensor, value in zip(ranges, tensors, values, strict=True):
        offset = (begin - base) // value.element_size()
        view = memory.view(value.dtype).as_strided(value.shape, tensor.tensor.stride(), offset)
        views.append(view.copy_(value))
    return all(
        torch.equal(as_bytes(view.contiguous()), as_bytes(value)) for view, value in zip(views, values, strict=True)
    )
