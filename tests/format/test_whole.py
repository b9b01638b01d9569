"""Whole tensors out of parts: every byte from where it lies, whatever the sharding and the buffer."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from tests.support.state import shard_of
from tierd.errors import Corrupt
from tierd.format.shard import parse_header
from tierd.format.whole import WholeFile, split, whole_tensors


def shards_of(cuts: dict[str, tuple[torch.Tensor, list[list[int]]]]) -> dict[str, bytes]:
    """As many shards as the tensor in most parts has: each is cut along each axis at the places given."""
    held: list[list[tuple[str, torch.Tensor, tuple[int, ...]]]] = []
    for name, (tensor, places) in cuts.items():
        edges = [[0, *at, size] for at, size in zip(places, tensor.shape, strict=True)]
        for number, box in enumerate(itertools.product(*(itertools.pairwise(one) for one in edges))):
            held += [[]] * (number + 1 - len(held))
            part = tensor[tuple(slice(low, high) for low, high in box)]
            held[number] = [*held[number], (name, part, tuple(low for low, _ in box))]
    return {f"rank-{rank}": shard_of(parts, rank=rank) for rank, parts in enumerate(held)}


def assemble(raws: dict[str, bytes], file: WholeFile, buffer_bytes: int) -> bytes:
    found = bytearray(file.header)
    for begin in range(len(file.header), file.size_bytes, buffer_bytes):
        end = min(begin + buffer_bytes, file.size_bytes)
        buffer, done = bytearray(end - begin), 0
        for piece in file.pieces(begin, end):
            buffer[piece.at - begin : piece.at - begin + piece.length] = raws[piece.shard][piece.offset :][
                : piece.length
            ]
            done += piece.length
        assert done == end - begin
        found += buffer
    return bytes(found)


def headers(raws: dict[str, bytes]) -> Any:
    return {name: parse_header(raw, len(raw), where=name) for name, raw in raws.items()}


def places(size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(1, size - 1), max_size=1).map(sorted)


@settings(deadline=None, max_examples=40)
@given(cuts=st.tuples(places(6), places(5), places(4)), rows=places(7), buffer_bytes=st.integers(1, 700))
def test_any_cut_of_a_tensor_is_put_together_through_any_buffer(
    tmp_path_factory: pytest.TempPathFactory, cuts: Any, rows: list[int], buffer_bytes: int
) -> None:
    tensors = {
        "cube": (torch.randn(6, 5, 4), list(cuts)),
        "half": (torch.arange(7, dtype=torch.bfloat16), [rows]),
        "scalar": (torch.tensor(3.5), []),
        "empty": (torch.empty(0, 3), [[], []]),
    }
    raws = shards_of({f"model.{name}": one for name, one in tensors.items()} | {"other": (torch.ones(1), [[]])})
    whole = WholeFile(whole_tensors(headers(raws), "model."), {"format": "pt"})
    path = tmp_path_factory.mktemp("whole") / "model.safetensors"
    path.write_bytes(assemble(raws, whole, buffer_bytes))
    with safe_open(str(path), "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(tensors)
        for name, (tensor, _) in tensors.items():
            assert torch.equal(file.get_tensor(name), tensor)


def test_a_tensor_of_which_a_part_is_missing_is_refused_by_name() -> None:
    raws = shards_of({"model.weight": (torch.ones(6, 4), [[3], []])})
    del raws["rank-1"]
    assert whole_tensors(headers(raws))[0].shape == (3, 4), "nobody can tell that the last rows are missing"
    raws = shards_of({"model.weight": (torch.ones(6, 4), [[3], []])})
    del raws["rank-0"]
    with pytest.raises(Corrupt, match=r"model\.weight together: the shards hold 12 of its 24 elements"):
        whole_tensors(headers(raws))


def test_parts_that_are_not_of_one_tensor_are_refused() -> None:
    parts = [("weight", torch.ones(2), (0,)), ("weight", torch.ones(2, dtype=torch.float64), (2,))]
    raws = {f"rank-{rank}": shard_of([part]) for rank, part in enumerate(parts)}
    with pytest.raises(Corrupt, match="disagree"):
        whole_tensors(headers(raws))


def test_files_are_filled_in_order_and_a_tensor_is_never_cut() -> None:
    raws = shards_of({name: (torch.ones(size), [[]]) for name, size in (("a", 3), ("b", 3), ("c", 9), ("d", 1))})
    files = split(whole_tensors(headers(raws)), 24)
    assert [[one.name for one in file] for file in files] == [["a", "b"], ["c"], ["d"]]
    assert [[one.name for one in file] for file in split(whole_tensors(headers(raws)), 1000)] == [["a", "b", "c", "d"]]
    assert split([], 10) == [[]]
