"""A set of small integers as bytes: the chunks of a file that a message asks for."""

from __future__ import annotations

from collections.abc import Iterable


def pack_indexes(indexes: Iterable[int]) -> bytes:
    """A set of small integers as a bitmap: bit `n % 8` of byte `n // 8` is set if the set contains `n`."""
    packed = bytearray()
    for index in indexes:
        packed.extend(bytes(max(0, index // 8 + 1 - len(packed))))
        packed[index // 8] |= 1 << index % 8
    return bytes(packed)


def unpack_indexes(packed: bytes) -> list[int]:
    return [8 * at + bit for at, byte in enumerate(packed) for bit in range(8) if byte >> bit & 1]
