"""Which rank writes which tensor, when several hold the same one. A pure function: every rank gets the same answer.

Each key is written by exactly one rank that holds it, and the bytes are spread evenly.
"""

from __future__ import annotations

from collections.abc import Sequence

from tierd.errors import Unsupported


def owner_of(held: Sequence[Sequence[tuple[str, int]]]) -> list[set[str]]:
    """From every rank's (key, size in bytes) list, the keys that each rank writes.

    Raises Unsupported when ranks hold different sizes under one key: that is no replica, and writing one of
    them would lose the others.
    """
    holders: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    for rank, tensors in enumerate(held):
        for key, size_bytes in tensors:
            if sizes.setdefault(key, size_bytes) != size_bytes:
                raise Unsupported(
                    f"share out {key}: {sizes[key]} bytes on rank {holders[key][0]}, {size_bytes} on rank {rank}",
                    hint="a tensor that differs between ranks must be a DTensor, or belong to extra",
                )
            holders.setdefault(key, []).append(rank)
    owned: list[set[str]] = [set() for _ in held]
    load_bytes = [0] * len(held)
    # What only one rank holds is settled first, then the largest first: the greedy order that balances well.
    for key in sorted(holders, key=lambda key: (len(holders[key]) > 1, -sizes[key], key)):
        rank = min(holders[key], key=lambda rank: (load_bytes[rank], rank))
        owned[rank].add(key)
        load_bytes[rank] += sizes[key]
    return owned
