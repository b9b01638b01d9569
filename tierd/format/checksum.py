"""CRC64NVME of chunks and of whole files, encoded as in S3: base64 of 8 big-endian bytes.

S3 computes CRC64NVME over a whole multipart object, and two CRCs can be combined without reading the bytes again.
awscrt computes about 12 GB/s per core without holding the GIL.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Iterator

CHUNK_BYTES = 64 << 20
"""A chunk is one checksum and one upload part. S3 allows 10,000 parts, so a shard may have 625 GiB."""


def crc64nvme(view: bytes | bytearray | memoryview, previous: int = 0) -> int:
    """The CRC64NVME of bytes that follow those with the checksum `previous`."""
    from awscrt import checksums  # imported here: it takes 0.1 s, and most commands compute no checksum

    return checksums.crc64nvme(view, previous)  # pyright: ignore[reportArgumentType]


def combine(parts: Iterable[tuple[int, int]]) -> int:
    """The checksum of the concatenation of parts. A part is (checksum, length in bytes)."""
    from awscrt import checksums

    combined = 0
    for checksum, length in parts:
        combined = checksums.combine_crc64nvme(combined, checksum, length)
    return combined


def encode(checksum: int) -> str:
    return base64.b64encode(checksum.to_bytes(8, "big")).decode("ascii")


def decode(text: str) -> int:
    """The inverse of `encode`. Raises ValueError unless `text` is base64 of exactly 8 bytes."""
    try:
        raw = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"{text!r} is not base64") from error
    if len(raw) != 8:
        raise ValueError(f"{text!r} is {len(raw)} bytes, expected 8")
    return int.from_bytes(raw, "big")


def chunk_ranges(size_bytes: int, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """The (offset, length) of every chunk of a file, in order. An empty file has none."""
    for offset in range(0, size_bytes, chunk_bytes):
        yield offset, min(chunk_bytes, size_bytes - offset)
