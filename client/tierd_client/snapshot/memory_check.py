"""The check, before slots are allocated, that the memory limits of the ranks' cgroups have room for them.

Beyond a limit the allocation would not fail: the kernel would kill a process, without a message of ours.
"""

from __future__ import annotations

import msgspec

from tierd.cgroup import MemoryLimit
from tierd.errors import Full
from tierd.format import text
from tierd_client.ranks import Ranks


class _Demand(msgspec.Struct, frozen=True):
    """What one rank will allocate. `cgroup`: the identity of its limit on its node; None without one."""

    size_bytes: int
    cgroup: tuple[int, int] | None
    node: int


def check_memory(ranks: Ranks, size_bytes: int, limit: MemoryLimit | None, *, node: int = 0) -> None:
    """All ranks, before any of them allocates. `size_bytes`: what this rank will allocate; `limit`: its own; `node`:
    a number of its node, because cgroups of two nodes may have the same identity.

    Ranks of one cgroup share its limit. Raises Full on all ranks when one of the limits has too little free memory.
    """
    own = _Demand(size_bytes, limit.identity if limit is not None else None, node)
    demands = [msgspec.json.decode(raw, type=_Demand) for raw in ranks.gather(msgspec.json.encode(own))]
    ranks.raise_on_all(
        _why_full([demand for demand in demands if (demand.cgroup, demand.node) == (own.cgroup, node)], limit)
    )


def _why_full(demands: list[_Demand], limit: MemoryLimit | None) -> Full | None:
    needed_bytes = sum(demand.size_bytes for demand in demands)
    if limit is None or needed_bytes <= limit.free_bytes:
        return None
    ranks = "this rank" if len(demands) == 1 else f"the {len(demands)} ranks of this cgroup"
    return Full(
        f"allocate the slots of {ranks}: they need {text.size(needed_bytes)} more shared memory, and "
        f"{text.size(limit.free_bytes)} are free of the memory limit of {text.size(limit.limit_bytes)} of {limit.path}",
        hint=f"raise the container's memory limit by {text.size(needed_bytes - limit.free_bytes)} or more: it must "
        "have room for snapshot.slots times the state of each rank, beside the training itself",
    )
