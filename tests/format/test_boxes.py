"""Parts of a tensor cover it: compared with a mask of its elements, and fast for many parts."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.format import boxes
from tierd.format.boxes import VISITS_MAX, Box, common_runs, cover_problem, spanned_shape


def is_exact_by_mask(boxes: list[Box], shape: tuple[int, ...]) -> bool:
    counts = np.zeros(shape, dtype=np.int64)
    for offsets, size in {box for box in boxes if 0 not in box[1]}:
        if any(at + length > whole for at, length, whole in zip(offsets, size, shape, strict=True)):
            return False
        counts[tuple(slice(at, at + length) for at, length in zip(offsets, size, strict=True))] += 1
    return bool((counts == 1).all())


@st.composite
def cut_boxes(draw: st.DrawFn) -> tuple[list[Box], tuple[int, ...]]:
    """A tensor that is cut in two again and again, so that the parts need not be a grid; then perhaps changed."""
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        offsets, size = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, size[axis]))
        first = (*size[:axis], at, *size[axis + 1 :])
        second = (*size[:axis], size[axis] - at, *size[axis + 1 :])
        boxes += [(offsets, first), ((*offsets[:axis], offsets[axis] + at, *offsets[axis + 1 :]), second)]
    for _ in range(draw(st.integers(0, 2))):
        index = draw(st.integers(0, len(boxes) - 1))
        kind = draw(st.sampled_from(["move", "resize", "repeat", "remove"]))
        offsets, size = boxes[index]
        numbers = tuple(draw(st.integers(0, 6)) for _ in shape)
        if kind == "remove" and len(boxes) > 1:
            del boxes[index]
        elif kind == "repeat":
            boxes.append(boxes[index])
        else:
            boxes[index] = (numbers, size) if kind == "move" else (offsets, numbers)
    return boxes, shape


@given(cut_boxes())
def test_the_answer_is_that_of_a_mask_of_all_elements(case: tuple[list[Box], tuple[int, ...]]) -> None:
    boxes, shape = case
    assert (cover_problem(boxes, shape) == "") == is_exact_by_mask(boxes, shape)
    assert (cover_problem(boxes, spanned_shape(boxes)) == "") == is_exact_by_mask(boxes, spanned_shape(boxes))


def test_each_problem_has_its_own_message() -> None:
    rows = [((0, 0), (3, 4)), ((3, 0), (1, 4))]
    assert cover_problem(rows, (4, 4)) == ""
    assert cover_problem(rows[:1], (4, 4)) == "contain 12 of its 16 elements"
    assert "overlap" in cover_problem([rows[0], ((2, 0), (1, 4))], (4, 4))
    assert "overlap" in cover_problem([*rows, ((0, 0), (1, 1))], (4, 4))
    assert "outside" in cover_problem([*rows, ((4, 0), (1, 4))], (4, 4))
    assert cover_problem([((), ())], ()) == ""
    assert cover_problem([((0, 0), (0, 4))], (0, 4)) == ""


@pytest.mark.parametrize("counts", [(20_000,), (1, 20_000), (100, 200), (25, 20, 40)])
def test_a_grid_of_thousands_of_parts_takes_about_its_length_for_each_dimension(counts: tuple[int, ...]) -> None:
    boxes: list[Box] = [(tuple(3 * at for at in index), (3,) * len(counts)) for index in np.ndindex(*counts)]
    began_s = time.process_time()
    assert cover_problem(boxes, tuple(3 * count for count in counts)) == ""
    quadratic = len(boxes) ** 2  # comparisons; a million take more than 0.1 s
    assert time.process_time() - began_s < 0.1 * quadratic / 1e6


@pytest.mark.parametrize("visits_max", [VISITS_MAX // 25, pytest.param(VISITS_MAX, marks=pytest.mark.long)])
def test_parts_that_are_forged_to_take_long_are_refused(monkeypatch: pytest.MonkeyPatch, visits_max: int) -> None:
    monkeypatch.setattr(boxes, "VISITS_MAX", visits_max)
    count = 2 * math.isqrt(visits_max)
    # Each row ends elsewhere, so that almost all rows are there at each of the many edges.
    rows = [((0, row), (row + 1, 1)) for row in range(count)]
    rest = [((row + 1, row), (count - row - 1, 1)) for row in range(count - 1)]
    problem = cover_problem([*itertools.chain(rows, rest)], (count, count))
    assert problem.endswith("too irregular to be checked")


def elements(box: Box) -> dict[tuple[int, ...], int]:
    """The position of each element in the box, by its index in the whole tensor."""
    offsets, shape = box
    indexes = itertools.product(*(range(at, at + size) for at, size in zip(offsets, shape, strict=True)))
    return {index: position for position, index in enumerate(indexes)}


def boxes_of(axes: int) -> st.SearchStrategy[Box]:
    sides = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=axes, max_size=axes)
    return sides.map(lambda each: (tuple(at for at, _ in each), tuple(size for _, size in each)))


@given(st.integers(0, 3).flatmap(lambda axes: st.tuples(boxes_of(axes), boxes_of(axes))))
def test_common_runs_are_the_elements_that_both_parts_have(pair: tuple[Box, Box]) -> None:
    first, second = map(elements, pair)
    expected = {(first[index], second[index]) for index in first.keys() & second.keys()}
    runs = list(common_runs(*pair))
    found = [(a + step, b + step) for a, b, length in runs for step in range(length)]
    assert sorted(found) == sorted(expected)
    assert all(length > 0 for _, _, length in runs)


def test_equal_parts_are_one_run() -> None:
    assert list(common_runs(((0, 8), (4, 8)), ((0, 8), (4, 8)))) == [(0, 0, 32)]
