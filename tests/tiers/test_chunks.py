from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.store_contract import content, entry_of
from tierd.errors import Corrupt
from tierd.format import checksum
from tierd.tiers.chunks import ChunkSums, differences


@given(
    size_bytes=st.integers(0, 5000),
    chunk_bytes=st.integers(1, 3000),
    piece_bytes=st.integers(1, 3000),
    seed=st.integers(0, 99),
)
def test_pieces_of_any_size_in_any_order_give_the_entry_of_the_file(
    size_bytes: int, chunk_bytes: int, piece_bytes: int, seed: int
) -> None:
    data = content(size_bytes)
    pieces = list(checksum.chunk_ranges(size_bytes, piece_bytes))
    random.Random(seed).shuffle(pieces)
    sums = ChunkSums(size_bytes, chunk_bytes)
    for offset, length in pieces:
        piece = memoryview(data)[offset : offset + length]
        sums.add(offset, piece)
    expect = entry_of(data, "x", chunk_bytes)
    assert sums.entry("x", expect, "check") == expect


def test_error_names_the_chunk_that_differs() -> None:
    expect = entry_of(content(5000), "x", 1000)
    sums = ChunkSums(5000, 1000)
    sums.add(0, memoryview(content(5000)[:3999] + b"?" + content(5000)[4000:]))
    with pytest.raises(Corrupt, match=r"^write x: chunk 3 of 5: crc64nvme .* expected "):
        sums.entry("x", expect, "write x")


def test_different_size_is_reported_as_one_difference() -> None:
    shorter, longer = entry_of(content(10), "x", 4), entry_of(content(11), "x", 4)
    assert differences(longer, shorter) == ["10 bytes in chunks of 4, expected 11 in chunks of 4"]
    assert differences(longer, longer) == []
