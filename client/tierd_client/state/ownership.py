"""Which rank writes which tensor, when several hold the same one. A pure function: every rank gets the same answer.

Each key is written by exactly one rank that holds it, and the bytes are spread evenly.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tierd.errors import Unsupported


class HeldTensor(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A tensor, or a part of one, that a rank holds. Ranks with the same key must have the same `sample`, if any."""

    key: str
    size_bytes: int
    sample: int | None = None
    is_buffer: bool = False


def owner_of(held: Sequence[Sequence[HeldTensor]]) -> list[set[str]]:
    """From what every rank holds, the keys that each rank writes.

    Raises Unsupported when ranks hold different tensors under one key: those are no replicas, and writing one of
    them would lose the others.
    """
    first: dict[str, HeldTensor] = {}
    holders: dict[str, list[int]] = {}
    for rank, tensors in enumerate(held):
        for one in tensors:
            known = first.setdefault(one.key, one)
            holders.setdefault(one.key, []).append(rank)
            if (one.size_bytes, one.sample) != (known.size_bytes, known.sample):
                raise Unsupported(
                    f"share out {one.key}: rank {rank} has another one than rank {holders[one.key][0]}"
                    + (f", {one.size_bytes} bytes and {known.size_bytes}" * (one.size_bytes != known.size_bytes)),
                    hint="a tensor that differs between ranks must be a DTensor, or belong to extra",
                )
    owned: list[set[str]] = [set() for _ in held]
    load_bytes = [0] * len(held)

    def candidates(key: str) -> list[int]:
        # Of different buffers the lowest rank's count: that is the one which DDP gives to all before each forward.
        return holders[key][:1] if first[key].is_buffer else holders[key]

    # What only one rank can write is settled first, then the largest first: the greedy order that balances well.
    for key in sorted(holders, key=lambda key: (len(candidates(key)) > 1, -first[key].size_bytes, key)):
        rank = min(candidates(key), key=lambda rank: (load_bytes[rank], rank))
        owned[rank].add(key)
        load_bytes[rank] += first[key].size_bytes
    return owned
