"""Decides which rank writes a tensor that several ranks hold, and checks that these ranks hold the same values.

`assign_owners` is a pure function: every rank gets the same answer. Each key is written by exactly one rank that holds
it, and the bytes are spread evenly.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tierd.errors import Unsupported
from tierd_client.state.tensors import CapturedTensor, sample_of

COMPARED_PER_SNAPSHOT = 8
COPIED_BYTES_MAX = 64 << 10  # of a tensor that each node writes: an optimizer's step, a norm's weight
ABSENT = -(1 << 62)
"""Stands for a sample that this rank cannot take: lower than every sample."""

HINT = (
    "a tensor that differs between ranks must be a DTensor, or belong to extra; if it differs on purpose, name it in "
    "TrainingState(per_rank=[…])"
)


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
                    hint=HINT,
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


def copied_here(held: Sequence[Sequence[HeldTensor]], owned: Sequence[set[str]], node: Sequence[int]) -> dict[str, int]:
    """What a node writes besides what its ranks own: small tensors that one of them holds and that a rank of another
    node owns. For each key the rank that writes it. So the ranks of a node restore from the part of their own node,
    if no large tensor is the same on several nodes. `node`: its ranks.
    """
    written = set[str]().union(*(owned[rank] for rank in node))
    copied: dict[str, int] = {}
    for rank in node:
        for tensor in held[rank]:
            if tensor.size_bytes <= COPIED_BYTES_MAX and tensor.key not in written:
                copied.setdefault(tensor.key, rank)
    return copied


def keys_written(held: Sequence[Sequence[HeldTensor]], rank: int, node: Sequence[int]) -> set[str]:
    """The keys that a rank writes, from the tensors that each rank holds. `node`: in a run over several nodes the ranks
    of its node, else empty."""
    owned = assign_owners(held)
    return owned[rank] | {key for key, writer in copied_here(held, owned, node).items() if writer == rank}


def has_stages(held: Sequence[Sequence[HeldTensor]]) -> bool:
    """Whether ranks hold different tensors of the model, as pipeline stages do. A part of a tensor counts as the
    tensor."""
    models: set[frozenset[str]] = set()
    for rank, tensors in enumerate(held):
        of_rank = (tensor.key.partition("[")[0] for tensor in tensors if tensor.key.startswith("model."))
        models.add(frozenset(name.removesuffix(f"@{rank:05d}") for name in of_rank))
    return len(models) > 1


class ReplicaComparison:
    """Compares a few of the tensors that several ranks hold at each snapshot, the next ones at the next snapshot.

    The ranks exchange `samples()` by the element-wise maximum and give the result to `check`.
    """

    def __init__(self, held: Sequence[Sequence[HeldTensor]], rank: int) -> None:
        """`held`: the tensors of all ranks, as for `assign_owners`."""
        positions = [{tensor.key: index for index, tensor in enumerate(tensors)} for tensors in held]
        compared = {tensor.key for tensors in held for tensor in tensors if tensor.sample is not None}
        self._keys = sorted(key for key in compared if sum(key in held_by for held_by in positions) > 1)
        self._position = positions[rank]  # of this rank's tensors, in the order of capture
        self._next = 0
        self._chosen: list[str] = []

    def samples(self, tensors: Sequence[CapturedTensor] | None) -> list[int]:
        """Two numbers for each tensor that is compared now. `tensors`: this rank's; None if they have
        changed or could not be captured. Chooses the same tensors until `check` is called."""
        count = min(COMPARED_PER_SNAPSHOT, len(self._keys))
        self._chosen = [self._keys[(self._next + index) % len(self._keys)] for index in range(count)]
        values: list[int] = []
        for key in self._chosen:
            position = self._position.get(key)
            if tensors is None or position is None:
                values += [ABSENT, ABSENT]
            else:
                sample = sample_of(tensors[position].tensor) >> 2
                values += [sample, -sample]
        return values

    def check(self, maxima: Sequence[int]) -> None:
        """Raises Unsupported, on all ranks, when ranks hold different values of a tensor. It is then compared again."""
        for key, highest, lowest in zip(self._chosen, maxima[::2], maxima[1::2], strict=True):
            if highest != -lowest and highest != ABSENT:
                raise Unsupported(
                    f"compare {key} between the ranks: they held the same values at an earlier snapshot, "
                    "now they hold different ones",
                    hint="average or broadcast it before the snapshot; " + HINT,
                )
        self._next += len(self._chosen)
