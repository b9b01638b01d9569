"""Which destinations of a restore share memory: restored in parallel, they would overwrite each other's bytes."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tierd_client.state.tensors import CapturedTensor, as_bytes

ALIGN_BYTES = 16  # of the largest dtype: complex128


@dataclass(slots=True)
class _Ranges:
    """Disjoint ranges `[begin, end)` of addresses, sorted, each with the tensors in it: three lists of one length."""

    begins: list[int] = field(default_factory=list[int])
    ends: list[int] = field(default_factory=list[int])
    tensors: list[list[CapturedTensor]] = field(default_factory=list[list[CapturedTensor]])

    def overlapped(self, begin: int, end: int) -> slice:
        first = bisect.bisect_right(self.ends, begin)
        return slice(first, bisect.bisect_left(self.begins, end, lo=first))


class MemoryRanges:
    """Disjoint ranges of memory by device, with the tensors in each. Tensors of one range may share memory."""

    def __init__(self) -> None:
        self._ranges: dict[torch.device, _Ranges] = defaultdict(_Ranges)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` overlaps a range."""
        if not self._ranges:
            return False
        begin, end = _addresses(tensor)
        found = self._ranges[tensor.device].overlapped(begin, end)
        return begin < end and found.start < found.stop

    def overlapped(self, tensor: torch.Tensor) -> list[CapturedTensor]:
        """The tensors of the ranges that `tensor` overlaps."""
        if not self._ranges:
            return []
        begin, end = _addresses(tensor)
        ranges = self._ranges[tensor.device]
        joined = ranges.tensors[ranges.overlapped(begin, end)] if begin < end else []
        return [member for tensors in joined for member in tensors]

    def add(self, tensor: CapturedTensor) -> None:
        begin, end = _addresses(tensor.tensor)
        if begin == end:
            return
        ranges = self._ranges[tensor.tensor.device]
        joined = ranges.overlapped(begin, end)
        if joined.start == joined.stop:  # most tensors; the code below is slower
            ranges.begins.insert(joined.start, begin)
            ranges.ends.insert(joined.start, end)
            ranges.tensors.insert(joined.start, [tensor])
            return
        members = [member for tensors in ranges.tensors[joined] for member in tensors]
        ranges.begins[joined] = [min([begin, *ranges.begins[joined]])]
        ranges.ends[joined] = [max([end, *ranges.ends[joined]])]
        ranges.tensors[joined] = [[*members, tensor]]

    def shared(self) -> Iterator[list[CapturedTensor]]:
        """The tensors of each range that holds several."""
        return (tensors for ranges in self._ranges.values() for tensors in ranges.tensors if len(tensors) > 1)


def _addresses(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses from the first to the last element of a tensor; equal for an empty one."""
    begin = tensor.data_ptr()
    if tensor.is_contiguous():
        return begin, begin + tensor.nbytes
    if not tensor.numel():
        return begin, begin
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


def can_hold(tensors: Sequence[CapturedTensor], values: Sequence[torch.Tensor]) -> bool:
    """Whether tensors that share memory can hold these values at once. `values` are contiguous tensors on the CPU.

    Writes the values into a copy of the memory's layout and compares: tensors may share only some of their elements.
    """
    if len({(t.tensor.data_ptr(), t.tensor.shape, t.tensor.stride(), t.tensor.dtype) for t in tensors}) == 1:
        first, *others = (as_bytes(value).numpy() for value in values)
        # Tied weights. torch.equal would start torch's threads, which keep the cores busy for a while afterwards.
        return all(np.array_equal(first, other) for other in others)
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
