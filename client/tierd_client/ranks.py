"""What the ranks of a run tell each other: small numbers and bytes over torch.distributed, on the CPU, no pickle.

A run of one process needs none of it, and every call is then free. A gloo group of our own keeps us out of the
training's NCCL streams.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
import torch.distributed as dist

from tierd.errors import BadConfig, Unsupported


class Ranks:
    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._group = cast("dist.ProcessGroup", dist.new_group(backend="gloo")) if world_size > 1 else None

    def maximum(self, values: Sequence[int]) -> list[int]:
        """Element by element the highest that any rank gave."""
        if self._group is None:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group)
        return [int(value) for value in tensor]

    def from_first(self, content: bytes | None) -> bytes | None:
        """What rank 0 gave; the others give nothing."""
        if self._group is None:
            return content
        length = torch.tensor([-1 if content is None else len(content)], dtype=torch.int64)
        dist.broadcast(length, 0, group=self._group)
        if int(length) < 0:
            return None
        buffer = torch.empty(int(length), dtype=torch.uint8)
        if self.rank == 0 and content:
            buffer.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        dist.broadcast(buffer, 0, group=self._group)
        return bytes(buffer.numpy())

    def gather(self, content: bytes) -> list[bytes]:
        """What every rank gave, by rank."""
        if self._group is None:
            return [content]
        longest = self.maximum([len(content)])[0]
        # Two of the same shape for all: the lengths, then the contents padded to the longest.
        mine = torch.zeros(8 + longest, dtype=torch.uint8)
        framed = len(content).to_bytes(8, "little") + content
        mine[: len(framed)] = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(everyone, mine, group=self._group)
        raws = [bytes(one.numpy()) for one in everyone]
        return [raw[8 : 8 + int.from_bytes(raw[:8], "little")] for raw in raws]


def find_ranks(rank: int | None, world_size: int | None, environ: Mapping[str, str]) -> Ranks:
    """This process among its peers: the arguments, else torch.distributed, else the launcher's environment.

    Raises BadConfig when there are peers and no way to speak to them, Unsupported when they span nodes.
    """
    initialized = dist.is_available() and dist.is_initialized()
    if rank is None or world_size is None:
        rank = dist.get_rank() if initialized else int(environ.get("RANK", "0"))
        world_size = dist.get_world_size() if initialized else int(environ.get("WORLD_SIZE", "1"))
    if not 0 <= rank < world_size:
        raise BadConfig(f"connect as rank {rank} of {world_size}", hint="check rank and world_size, or $RANK")
    if world_size > 1 and not initialized:
        raise BadConfig(
            f"connect as rank {rank} of {world_size}: torch.distributed is not initialized",
            hint="call torch.distributed.init_process_group() before tierd_client.connect()",
        )
    if int(environ.get("LOCAL_WORLD_SIZE", world_size)) < world_size:
        raise Unsupported(
            f"connect as rank {rank} of {world_size}: the ranks span several nodes",
            hint="this version commits the ranks of one node; run one tierd run per node, or wait for the next",
        )
    return Ranks(rank, world_size)
