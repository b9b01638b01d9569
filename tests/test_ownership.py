"""Who writes what: each key once, by one that has it, evenly, and every rank comes to the same answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tierd_client.ownership import owner_of

from tierd.errors import Unsupported

SIZES = {"a": 100, "b": 7, "c": 7, "d": 0, "e": 31, "f": 1}
ranks = st.lists(st.sets(st.sampled_from(sorted(SIZES))), min_size=1, max_size=5)


@given(ranks)
def test_each_key_is_written_once_by_a_rank_that_has_it(held: list[set[str]]) -> None:
    owned = owner_of([[(key, SIZES[key]) for key in keys] for keys in held])
    assert sorted(key for keys in owned for key in keys) == sorted(set().union(*held))
    assert all(mine <= has for mine, has in zip(owned, held, strict=True))


@given(ranks, st.randoms())
def test_the_order_of_the_lists_does_not_matter(held: list[set[str]], random: object) -> None:
    listed = [[(key, SIZES[key]) for key in sorted(keys)] for keys in held]
    assert owner_of([keys[::-1] for keys in listed]) == owner_of(listed)


def test_replicas_are_spread_evenly() -> None:
    tensors = [(f"t{index}", 1000 + index) for index in range(80)]
    sizes = dict(tensors)
    loads = [sum(sizes[key] for key in keys) for keys in owner_of([tensors] * 8)]
    assert max(loads) - min(loads) < 100


def test_who_has_most_of_its_own_writes_least_of_the_shared() -> None:
    shared = [("x", 10), ("y", 10)]
    assert owner_of([[("mine", 50), *shared], shared]) == [{"mine"}, {"x", "y"}]


def test_sizes_that_differ_between_ranks_are_refused_by_name() -> None:
    with pytest.raises(Unsupported, match=r"model\.head: 10 bytes on rank 0, 12 on rank 2"):
        owner_of([[("model.head", 10)], [("model.head", 10)], [("model.head", 12)]])
