"""The state in a checkpoint as one rank restores it: the input of `plan_restore`."""

from __future__ import annotations

from dataclasses import dataclass

from tierd_client.state.encoding import Json
from tierd_client.state.rank_local import RankLocal
from tierd_client.state.restore_plan import Available


@dataclass(frozen=True, slots=True)
class StoredState:
    """`tree`: the state tree that this rank saved. If another number of ranks saved the checkpoint, it is that of rank
    0, and `rank_local` has those of all ranks. `available`: the tensors of all shards."""

    tree: Json
    available: Available
    rank_local: RankLocal | None = None
