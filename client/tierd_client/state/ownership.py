"""Decides which rank writes a tensor that several ranks hold. A pure function: every rank gets the same answer.

Each key is written by exactly one rank that holds it, and the bytes are spread evenly.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tierd.errors import Unsupported


class HeldTensor(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A tensor, or a part of one, that a rank holds. Ranks with the same key must have the same size and `sample`.

    `sample` is a checksum of a few elements, or None where ranks may hold different values.
    """

    key: str
    size_bytes: int
    sample: int | None = None
    is_buffer: bool = False


def assign_owners(held: Sequence[Sequence[HeldTensor]]) -> list[set[str]]:
    """For each rank the keys that it writes, from the tensors that each rank holds.

    Raises Unsupported when ranks hold different tensors under one key: to write one of them would lose the others.
    """
    first: dict[str, HeldTensor] = {}
    holders: dict[str, list[int]] = {}
    for rank, tensors in enumerate(held):
        for tensor in tensors:
            known = first.setdefault(tensor.key, tensor)
            holders.setdefault(tensor.key, []).append(rank)
            if (tensor.size_bytes, tensor.sample) != (known.size_bytes, known.sample):
                sizes = f" ({tensor.size_bytes} and {known.size_bytes} bytes)"
                raise Unsupported(
                    f"assign {tensor.key} to a rank: ranks {holders[tensor.key][0]} and {rank} hold different tensors"
                    + (sizes if tensor.size_bytes != known.size_bytes else ""),
                    hint="a tensor that differs between ranks must be a DTensor, or belong to extra",
                )
    owned: list[set[str]] = [set() for _ in held]
    load_bytes = [0] * len(held)

    def candidates(key: str) -> list[int]:
        # Buffers may differ between ranks. DDP broadcasts rank 0's before each forward, so the lowest rank writes them.
        return holders[key][:1] if first[key].is_buffer else holders[key]

    # Keys with one candidate come first, then the largest: this greedy order balances well.
    for key in sorted(holders, key=lambda key: (len(candidates(key)) > 1, -first[key].size_bytes, key)):
        rank = min(candidates(key), key=lambda rank: (load_bytes[rank], rank))
        owned[rank].add(key)
        load_bytes[rank] += first[key].size_bytes
    return owned
