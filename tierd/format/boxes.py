"""Parts of a tensor: whether they cover each element exactly once, and what two of them have in common.

Pure, without tensor data.

A part is a box: its offsets in the whole tensor, and its shape. A count of elements proves nothing, because one part
may lie over another while elements elsewhere belong to none.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Collection, Iterator, Sequence

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offsets, shape), both in elements and with one number for each dimension."""

VISITS_MAX = 5_000_000  # some seconds; a grid of n parts takes about n for each dimension


def spanned_shape(boxes: Collection[Box]) -> tuple[int, ...]:
    """The shape of the smallest tensor that contains all boxes, of which there is at least one."""
    ends = [map(sum, zip(offsets, shape, strict=True)) for offsets, shape in boxes]
    return tuple(max(axis_ends) for axis_ends in zip(*ends, strict=True))


def common_runs(first: Box, second: Box) -> Iterator[tuple[int, int, int]]:
    """The elements that both parts have, as runs that are contiguous in both: (where it begins in the first part, where
    in the second, its length), all in elements."""
    sides = list(zip(*first, *second, strict=True))
    begins = [max(begin, other) for begin, _, other, _ in sides]
    sizes = [
        min(begin + size, other + length) - at
        for at, (begin, size, other, length) in zip(begins, sides, strict=True)
    ]  # fmt: skip
    if any(size <= 0 for size in sizes):
        return
    # From the last axis that one of the parts has more of, the common elements are contiguous in both.
    partial = (axis for axis, size in enumerate(sizes) if not size == first[1][axis] == second[1][axis])
    cut = max(partial, default=0)
    length = math.prod(sizes[cut:])
    for index in itertools.product(*map(range, sizes[:cut])):
        yield _position(first, begins, index), _position(second, begins, index), length


def _position(box: Box, begins: Sequence[int], index: Sequence[int]) -> int:
    """The position of an element in the C order of the box. `index`: from `begins` on, along the first axes."""
    position = 0
    for axis, (offset, size) in enumerate(zip(*box, strict=True)):
        position = position * size + begins[axis] - offset + (index[axis] if axis < len(index) else 0)
    return position


def cover_problem(boxes: Collection[Box], shape: tuple[int, ...]) -> str:
    """Why the boxes do not cover a tensor of this shape, as the end of a sentence about them; empty if they do.

    Boxes that are equal count once, since several ranks may store the same part.
    """
    distinct = sorted({(offsets, size) for offsets, size in boxes if 0 not in size})
    for offsets, size in distinct:
        if any(at < 0 or at + length > whole for at, length, whole in zip(offsets, size, shape, strict=True)):
            return f"contain a part of shape {list(size)} at {list(offsets)}, outside of its shape {list(shape)}"
    count, expected = sum(math.prod(size) for _, size in distinct), math.prod(shape)
    if count < expected:
        return f"contain {count} of its {expected} elements"
    try:
        # With the right number of elements, none is missing unless another one is there twice.
        is_exact = count == expected and (not expected or _is_exact(distinct, shape, 0, [VISITS_MAX]))
    except _TooManyVisits:
        return f"contain it in {len(distinct)} parts that are too irregular to be checked"
    return "" if is_exact else f"contain parts of it that overlap: {count} elements in parts, {expected} in all"


class _TooManyVisits(Exception):
    """The boxes are arranged so that a sweep would take minutes. No sharding of tensors looks like that."""


def _is_exact(boxes: Sequence[Box], shape: tuple[int, ...], axis: int, visits_left: list[int]) -> bool:
    """Whether boxes that share a point on each axis before `axis` cover each point of the other axes exactly once.

    `boxes`: sorted by offsets. Sweeps along the axis: between two neighbouring begins or ends, the boxes that are
    there must cover the remaining axes.
    """
    if axis == len(shape):
        return len(boxes) == 1
    if all(size[axis] == shape[axis] for _, size in boxes):
        visits_left[0] -= len(boxes)
        return _is_exact(boxes, shape, axis + 1, visits_left)
    by_begin = sorted(boxes, key=lambda box: box[0][axis])
    edges = sorted({edge for offsets, size in boxes for edge in (offsets[axis], offsets[axis] + size[axis])})
    if (edges[0], edges[-1]) != (0, shape[axis]):
        return False
    active: list[tuple[int, int]] = []  # (end, index in by_begin), a heap by end
    following = 0
    for edge in edges[:-1]:
        has_changed = False
        while active and active[0][0] <= edge:
            heapq.heappop(active)
            has_changed = True
        while following < len(by_begin) and by_begin[following][0][axis] == edge:
            offsets, size = by_begin[following]
            heapq.heappush(active, (offsets[axis] + size[axis], following))
            following += 1
            has_changed = True
        assert has_changed
        visits_left[0] -= len(active) + 1
        if visits_left[0] < 0:
            raise _TooManyVisits
        slab = sorted(by_begin[index] for _, index in active)
        if not slab or not _is_exact(slab, shape, axis + 1, visits_left):
            return False
    return True
