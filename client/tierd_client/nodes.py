"""Finds the nodes of a run. A node is the ranks that connect to the same daemon.

Each start of a daemon has a random identifier, `boot`. All ranks exchange it before they join; host names are not used.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec

from tierd.errors import TierdError, Unsupported, from_kind
from tierd.format import wire
from tierd_client.ranks import Ranks

# Where these differ between the daemons' configs, rank 0's count: all ranks take the same snapshots, at the same steps.
SHARED_SETTINGS = (
    "every_steps", "every_s", "slots_per_rank", "slot_wait_s", "when_busy", "staging", "stop_grace_s", "cadence",
)  # fmt: skip


class _DaemonOfRank(msgspec.Struct, frozen=True, kw_only=True):
    boot: str
    version: str
    seen: int | None


def find_node(ranks: Ranks, greet: Callable[[], wire.Welcome]) -> tuple[wire.NodeRanks | None, int]:
    """All ranks, before they join. Returns (the node of this rank, None if all are on one node; the highest generation
    that a daemon has seen, 0 on one node). `greet` greets this rank's daemon as a peer that is no trainer, and returns
    its Welcome.

    Raises what `greet` raises on any rank, and Unsupported when a daemon knows nothing of several nodes."""
    if ranks.world_size == 1:
        return None, 0
    daemons = _ask_all(ranks, greet)
    while len({daemon.boot for daemon in daemons}) > 1:
        former, daemons = daemons, _ask_all(ranks, greet)
        if [daemon.boot for daemon in daemons] == [daemon.boot for daemon in former]:
            break  # else one of them has restarted in between, and was counted as two
    by_boot: dict[str, list[int]] = {}
    for rank, daemon in enumerate(daemons):
        by_boot.setdefault(daemon.boot, []).append(rank)
    if len(by_boot) == 1:
        return None, 0
    seen = [0]
    for rank, daemon in enumerate(daemons):
        if daemon.seen is None:
            raise Unsupported(
                f"join as rank {ranks.rank} of {ranks.world_size}: the ranks are on {len(by_boot)} nodes, and the "
                f"daemon of rank {rank} (tierd {daemon.version}) supports one node only",
                hint="start the daemons of all nodes again with the trainer's version of tierd",
            )
        seen.append(daemon.seen)
    lowest = sorted(on_node[0] for on_node in by_boot.values())
    return wire.NodeRanks(ranks=by_boot[daemons[ranks.rank].boot], lowest=lowest), max(seen)


def _ask_all(ranks: Ranks, greet: Callable[[], wire.Welcome]) -> list[_DaemonOfRank]:
    def ask() -> bytes:
        welcome = greet()
        return msgspec.json.encode(_DaemonOfRank(boot=welcome.boot, version=welcome.version, seen=welcome.seen))

    return [msgspec.json.decode(raw, type=_DaemonOfRank) for raw in ranks.gather(ranks.run_on_all(ask))]


def is_lowest_of_node(hello: wire.Hello) -> bool:
    """Whether the rank is the one that speaks for its node: rank 0 if all ranks are on one node."""
    return hello.rank == (0 if hello.node is None else hello.node.ranks[0])


def with_place(error: TierdError, ranks: Ranks, run: str) -> TierdError:
    """The error of a rank that could not join: it also tells the ranks of other nodes where it happened."""
    place = f"join {run} as rank {ranks.rank} of {ranks.world_size} on {os.uname().nodename}"
    return from_kind(error.kind, f"{place}: {error.message}", error.hint)
