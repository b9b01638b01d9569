from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.store_contract import content, entry_of
from tierd.errors import Corrupt
from tierd.format import checksum
from tierd.tiers.chunks import ChunkSums, difference, differences


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


@pytest.mark.parametrize("damaged", [False, True])
def test_digests_alone_show_a_damaged_chunk(damaged: bool) -> None:
    data = content(5000)
    whole = ChunkSums(5000, 1000, "sha256")
    whole.add(0, memoryview(data))
    expect = whole.entry("x")
    sums = ChunkSums(5000, 1000, "sha256", has_crc=False)
    sums.add(0, memoryview(data[:3999] + (b"?" if damaged else data[3999:4000]) + data[4000:]))
    chunks = [sums.pop_chunk(index) for index in range(5)]
    assert {chunk.crc64nvme for chunk in chunks if chunk} == {""}
    problems = [difference(expect, index, chunk) for index, chunk in enumerate(chunks) if chunk]
    assert [bool(problem) for problem in problems] == [False, False, False, damaged, False]
    assert not damaged or problems[3].startswith("chunk 3 of 5: sha256 ")


def test_a_chunk_without_crc_differs_from_an_entry_without_digests() -> None:
    digests = ChunkSums(5000, 5000, "sha256", has_crc=False)
    digests.add(0, memoryview(content(5000)))
    found = digests.pop_chunk(0)
    assert found is not None
    assert difference(entry_of(content(5000), "x", 5000), 0, found)
    neither = ChunkSums(5000, 5000, has_crc=False)
    neither.add(0, memoryview(content(5000)))
    assert neither.entry("x") == entry_of(content(5000), "x", 5000)


def test_different_size_is_reported_as_one_difference() -> None:
    shorter, longer = entry_of(content(10), "x", 4), entry_of(content(11), "x", 4)
    assert differences(longer, shorter) == ["10 bytes in chunks of 4, expected 11 in chunks of 4"]
    assert differences(longer, longer) == []
