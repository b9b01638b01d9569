"""Whole tensors from parts, for any sharding and any buffer size."""

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
    """Shards of tensors that are cut along each axis at the given positions. Part i is in shard i."""
    ranks: list[list[tuple[str, torch.Tensor, tuple[int, ...]]]] = []
    for name, (tensor, places) in cuts.items():
        edges = [[0, *at, size] for at, size in zip(places, tensor.shape, strict=True)]
        for number, box in enumerate(itertools.product(*map(itertools.pairwise, edges))):
            ranks += [[]] * (number + 1 - len(ranks))
            part = tensor[tuple(slice(low, high) for low, high in box)]
            ranks[number] = [*ranks[number], (name, part, tuple(low for low, _ in box))]
    return {f"rank-{rank}": shard_of(parts, rank=rank) for rank, parts in enumerate(ranks)}


def assemble(raws: dict[str, bytes], file: WholeFile, buffer_bytes: int) -> bytes:
    content = bytearray(file.header)
    for begin in range(len(file.header), file.size_bytes, buffer_bytes):
        end = min(begin + buffer_bytes, file.size_bytes)
        buffer, done = bytearray(end - begin), 0
        for piece in file.pieces(begin, end):
            buffer[piece.at - begin : piece.at - begin + piece.length] = raws[piece.shard][piece.offset :][
                : piece.length
            ]
            done += piece.length
        assert done == end - begin
        content += buffer
    return bytes(content)


def headers(raws: dict[str, bytes]) -> Any:
    return {name: parse_header(raw, len(raw), where=name) for name, raw in raws.items()}


def places(size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(1, size - 1), max_size=1).map(sorted)


@settings(deadline=None, max_examples=40)
@given(cuts=st.tuples(places(6), places(5), places(4)), rows=places(7), buffer_bytes=st.integers(1, 700))
def test_any_sharding_of_a_tensor_is_assembled_with_any_buffer_size(
    tmp_path_factory: pytest.TempPathFactory, cuts: Any, rows: list[int], buffer_bytes: int
) -> None:
    tensors = {
        "cube": (torch.randn(6, 5, 4), list(cuts)),
        "half": (torch.arange(7, dtype=torch.bfloat16), [rows]),
        "scalar": (torch.tensor(3.5), []),
        "empty": (torch.empty(0, 3), [[], []]),
    }
    raws = shards_of({f"model.{name}": tensor for name, tensor in tensors.items()} | {"other": (torch.ones(1), [[]])})
    whole = WholeFile(whole_tensors(headers(raws), "model."), {"format": "pt"})
    path = tmp_path_factory.mktemp("whole") / "model.safetensors"
    path.write_bytes(assemble(raws, whole, buffer_bytes))
    with safe_open(str(path), "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(tensors)
        for name, (tensor, _) in tensors.items():
            assert torch.equal(file.get_tensor(name), tensor)


def test_a_tensor_with_a_missing_part_is_refused_with_its_name() -> None:
    raws = shards_of({"model.weight": (torch.ones(6, 4), [[3], []])})
    del raws["rank-1"]
    assert whole_tensors(headers(raws))[0].shape == (3, 4), "missing last rows cannot be detected"
    raws = shards_of({"model.weight": (torch.ones(6, 4), [[3], []])})
    del raws["rank-0"]
    with pytest.raises(Corrupt, match=r"model\.weight: the shards contain 12 of its 24 elements"):
        whole_tensors(headers(raws))


def test_parts_of_different_dtypes_are_refused() -> None:
    parts = [("weight", torch.ones(2), (0,)), ("weight", torch.ones(2, dtype=torch.float64), (2,))]
    raws = {f"rank-{rank}": shard_of([part]) for rank, part in enumerate(parts)}
    with pytest.raises(Corrupt, match="differ in dtype"):
        whole_tensors(headers(raws))


def test_tensors_are_split_into_files_in_order_and_never_cut() -> None:
    raws = shards_of({name: (torch.ones(size), [[]]) for name, size in (("a", 3), ("b", 3), ("c", 9), ("d", 1))})
    files = split(whole_tensors(headers(raws)), 24)
    assert [[tensor.name for tensor in file] for file in files] == [["a", "b"], ["c"], ["d"]]
    one_file = split(whole_tensors(headers(raws)), 1000)
    assert [[tensor.name for tensor in file] for file in one_file] == [["a", "b", "c", "d"]]
    assert split([], 10) == [[]]
