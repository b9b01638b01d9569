"""Each key is written once, by a rank that holds it, evenly; every rank computes the same assignment."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tierd_client.state.ownership import HeldTensor, assign_owners

from tierd.errors import Unsupported

SIZES = {"a": 100, "b": 7, "c": 7, "d": 0, "e": 31, "f": 1}


def holding(key: str, size_bytes: int | None = None, **more: Any) -> HeldTensor:
    return HeldTensor(key=key, size_bytes=SIZES[key] if size_bytes is None else size_bytes, **more)


ranks = st.lists(st.sets(st.sampled_from(sorted(SIZES))), min_size=1, max_size=5)


@given(ranks)
def test_each_key_is_written_once_by_a_rank_that_holds_it(held: list[set[str]]) -> None:
    owned = assign_owners([[holding(key) for key in keys] for keys in held])
    assert sorted(key for keys in owned for key in keys) == sorted(set().union(*held))
    assert all(written <= keys for written, keys in zip(owned, held, strict=True))


@given(ranks, st.randoms())
def test_the_order_of_the_lists_does_not_matter(held: list[set[str]], random: object) -> None:
    listed = [[holding(key) for key in sorted(keys)] for keys in held]
    assert assign_owners([keys[::-1] for keys in listed]) == assign_owners(listed)


def test_replicas_are_spread_evenly() -> None:
    tensors = [holding(f"t{index}", 1000 + index) for index in range(80)]
    sizes = {tensor.key: tensor.size_bytes for tensor in tensors}
    loads = [sum(sizes[key] for key in keys) for keys in assign_owners([tensors] * 8)]
    assert max(loads) - min(loads) < 100


def test_rank_with_the_most_unshared_bytes_writes_the_fewest_shared_ones() -> None:
    shared = [holding("x", 10), holding("y", 10)]
    assert assign_owners([[holding("own", 50), *shared], shared]) == [{"own"}, {"x", "y"}]


def test_buffers_are_written_by_the_lowest_rank_that_holds_them_and_count_in_its_load() -> None:
    shared = [holding("mean", 10, is_buffer=True), holding("x", 9), holding("y", 9)]
    assert assign_owners([shared[1:], shared, shared]) == [{"x"}, {"mean"}, {"y"}]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (holding("model.head", 12), r"to a rank: ranks 0 and 2 hold different tensors \(12 and 10 bytes\)"),
        (holding("model.head", 10, sample=2), "to a rank: ranks 0 and 2 hold different tensors"),
    ],
)
def test_tensors_of_one_name_that_differ_between_ranks_are_refused_by_name(other: HeldTensor, message: str) -> None:
    head = holding("model.head", 10, sample=1)
    with pytest.raises(Unsupported, match=rf"model\.head {message}") as caught:
        assign_owners([[head], [head], [other]])
    assert "must be a DTensor, or belong to extra" in caught.value.hint
