"""Each key is written once, by a rank that holds it, evenly; every rank computes the same assignment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tierd_client.state.ownership import (
    COMPARED_PER_SNAPSHOT,
    COPIED_BYTES_MAX,
    HeldTensor,
    ReplicaComparison,
    assign_owners,
    copied_here,
    has_stages,
    keys_written,
)
from tierd_client.state.tensors import CapturedTensor, capture_tensor

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


@given(ranks, st.data())
def test_each_node_writes_all_small_tensors_of_its_ranks_once(held: list[set[str]], data: st.DataObject) -> None:
    listed = [[holding(key) for key in sorted(keys)] for keys in held]
    owned = assign_owners(listed)
    on_node = data.draw(st.lists(st.booleans(), min_size=len(held), max_size=len(held)))
    node = [rank for rank, is_here in enumerate(on_node) if is_here]
    copied = copied_here(listed, owned, node)
    assert all(rank in node and key in held[rank] for key, rank in copied.items())
    written = [key for rank in node for key in owned[rank]] + list(copied)
    assert sorted(written) == sorted(set().union(*(owned[rank] | held[rank] for rank in node)))


def test_rank_writes_what_it_owns_and_over_several_nodes_also_what_its_node_copies() -> None:
    small, large = holding("b"), holding("a", COPIED_BYTES_MAX + 1)
    held = [[small, large], [small], [small], [small, large]]
    owned = assign_owners(held)
    assert [keys_written(held, rank, ()) for rank in range(4)] == owned
    nodes = [[0, 1], [2, 3]]
    written = [keys_written(held, rank, nodes[rank // 2]) for rank in range(4)]
    assert all(own <= keys for own, keys in zip(owned, written, strict=True))
    for first, second in nodes:
        assert sorted([*written[first], *written[second]]).count("b") == 1
    assert sum("a" in keys for keys in written) == 1


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ([["model.a", "optimizer.a"], ["model.a", "optimizer.b"]], False),
        ([["model.a[0:2]"], ["model.a[2:4]"]], False),
        ([["model.a@00000"], ["model.a@00001"]], False),
        ([["model.a"], ["model.b"]], True),
        ([["model.a", "model.b"], ["model.a"]], True),
    ],
)
def test_ranks_have_stages_when_they_hold_different_tensors_of_the_model(keys: list[list[str]], expected: bool) -> None:
    assert has_stages([[HeldTensor(key=key, size_bytes=8) for key in of_rank] for of_rank in keys]) == expected


def test_large_tensor_is_written_once_over_all_nodes() -> None:
    held = [[holding("a", COPIED_BYTES_MAX + 1), holding("b", COPIED_BYTES_MAX)] for _ in range(4)]
    owned = assign_owners(held)
    nodes = [copied_here(held, owned, node) for node in ([0, 1], [2, 3])]
    assert sorted(key for copied in nodes for key in copied) == ["b"]


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
    assert "per_rank" in caught.value.hint


def _captured(values: dict[str, float]) -> list[CapturedTensor]:
    return [capture_tensor(name, torch.full((5,), value)) for name, value in values.items()]


def _compare(comparisons: Sequence[ReplicaComparison], ranks: Sequence[dict[str, float] | None]) -> None:
    """One snapshot: the ranks exchange their samples by the element-wise maximum, and each checks the result."""
    samples = [
        comparison.samples(None if values is None else _captured(values))
        for comparison, values in zip(comparisons, ranks, strict=True)
    ]
    maxima = [max(values) for values in zip(*samples, strict=True)]
    for comparison in comparisons:
        comparison.check(maxima)


def _compare_three_times(comparisons: Sequence[ReplicaComparison], ranks: Sequence[dict[str, float] | None]) -> None:
    for _ in range(3):
        _compare(comparisons, ranks)


def _comparisons(keys: Sequence[Sequence[str]]) -> list[ReplicaComparison]:
    held = [[holding(key, 20, sample=1) for key in of_rank] for of_rank in keys]
    return [ReplicaComparison(held, rank) for rank in range(len(held))]


def test_every_shared_tensor_is_compared_within_a_few_snapshots() -> None:
    names = [f"model.{index}" for index in range(3 * COMPARED_PER_SNAPSHOT)]
    same = dict.fromkeys(names, 1.0)
    for changed in names:
        comparisons = _comparisons([names, names])
        with pytest.raises(Unsupported, match=rf"compare {changed} between the ranks"):
            _compare_three_times(comparisons, [same, same | {changed: 2.0}])
    comparisons = _comparisons([names, names])
    for _ in range(7):
        _compare(comparisons, [same, same])


def test_tensor_of_one_rank_is_not_compared_and_others_need_not_hold_it() -> None:
    comparisons = _comparisons([["a", "shared"], ["shared", "b"], ["c"]])
    for step in range(3):
        _compare(comparisons, [{"a": step, "shared": 5}, {"shared": 5, "b": -step}, {"c": 1}])
    with pytest.raises(Unsupported, match="compare shared"):
        _compare(comparisons, [{"a": 1, "shared": 5}, {"shared": 6, "b": 1}, {"c": 1}])


def test_rank_whose_tensors_have_changed_takes_no_part_in_the_comparison() -> None:
    comparisons = _comparisons([["x"], ["x"]])
    _compare(comparisons, [{"x": 1}, None])
    _compare(comparisons, [None, None])
    _compare(_comparisons([[], []]), [{}, {}])
