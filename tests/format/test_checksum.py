"""CRC64NVME, encoded as in S3."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.format import checksum


def test_check_value_of_the_algorithm() -> None:
    """CRC-64/NVME of "123456789" is 0xAE8B14860A799888: the catalogue's check value."""
    assert checksum.crc64nvme(b"123456789") == 0xAE8B14860A799888
    assert checksum.encode(0xAE8B14860A799888) == "rosUhgp5mIg="
    assert checksum.crc64nvme(b"") == 0


@given(st.binary(max_size=500), st.integers(1, 100))
def test_chunk_checksums_combine_to_the_checksum_of_the_file(content: bytes, chunk_bytes: int) -> None:
    ranges = list(checksum.chunk_ranges(len(content), chunk_bytes))
    assert b"".join(content[offset : offset + length] for offset, length in ranges) == content
    parts = [(checksum.crc64nvme(content[offset : offset + length]), length) for offset, length in ranges]
    assert checksum.combine(parts) == checksum.crc64nvme(content)


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_a_checksum_continues_from_a_previous_one(first: bytes, second: bytes) -> None:
    assert checksum.crc64nvme(memoryview(second), checksum.crc64nvme(bytearray(first))) == checksum.crc64nvme(
        first + second
    )


@given(st.integers(0, 2**64 - 1))
def test_a_decoded_text_gives_the_encoded_checksum(number: int) -> None:
    assert checksum.decode(checksum.encode(number)) == number


@pytest.mark.parametrize(
    "text",
    ["", "x", "rosUhgp5mIg", "rosUhgp5mI g=", "rosUhgp5mIg==", "rosUhgp5mIg=\n", "AAAA", "AAAAAAAAAAAAAAAA", "é"],
)
def test_a_text_that_is_not_a_checksum_raises_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        checksum.decode(text)
