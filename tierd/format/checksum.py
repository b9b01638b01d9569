"""CRC64NVME of chunks and of whole files, written as S3 writes it: base64 of 8 big-endian bytes.

CRC64NVME because S3 stores it for a multipart object as a whole, and because two CRCs combine without
reading the bytes again. awscrt computes it at some 12 GB/s a core, without holding the GIL.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Iterator

CHUNK_BYTES = 64 << 20
"""One checksum, one upload part. 64 MiB: S3 allows 10,000 parts, so a shard may have 625 GiB."""


def crc64nvme(view: bytes | bytearray | memoryview, previous: int = 0) -> int:
    """The CRC64NVME of contiguous bytes, going on from `previous`."""
    from awscrt import checksums  # here: it takes 0.1 s to load, and a listing needs no sum

    return checksums.crc64nvme(view, previous)  # pyright: ignore[reportArgumentType]


def combine(parts: Iterable[tuple[int, int]]) -> int:
    """The checksum of the concatenation of parts, each given as (checksum, length in bytes)."""
    from awscrt import checksums

    whole = 0
    for checksum, length in parts:
        whole = checksums.combine_crc64nvme(whole, checksum, length)
    return whole


def encode(checksum: int) -> str:
    return base64.b64encode(checksum.to_bytes(8, "big")).decode("ascii")


def decode(text: str) -> int:
    """The inverse of `encode`. Raises ValueError for anything that is not base64 of exactly 8 bytes."""
    try:
        raw = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"{text!r} is not base64") from error
    if len(raw) != 8:
        raise ValueError(f"{text!r} holds {len(raw)} bytes, not 8")
    return int.from_bytes(raw, "big")


def chunk_ranges(size_bytes: int, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """The (offset, length) of every chunk of a file, in order. An empty file has none."""
    for offset in range(0, size_bytes, chunk_bytes):
        yield offset, min(chunk_bytes, size_bytes - offset)
