"""The parts of a checkpoint on several nodes as one store for reading: each shard is read from a holder of its part.

A holder that cannot be read once is not tried again; the next one takes its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tierd.errors import NotFound, TierdError
from tierd.format import layout
from tierd.format.manifest import Manifest
from tierd.tiers.readable_tier import ReadableTier
from tierd.tiers.store import ReadableStore, Source


@dataclass(slots=True, eq=False)
class Holder:
    """A node or folder that has the part of these ranks, or a copy of it. `healthy` None: not examined. `lost`: why it
    is not read any more."""

    tier: ReadableTier
    ranks: Sequence[int]
    healthy: bool | None
    lost: TierdError | None = None


class JoinedParts:
    """`raw`: of the manifest. `holders`: of each shard, by its key, in the order in which they are read. `hot`: has the
    markers."""

    def __init__(
        self, raw: bytes, manifest: Manifest, holders: Mapping[str, Sequence[Holder]], hot: ReadableStore
    ) -> None:
        self._raw, self._manifest, self._holders, self._hot = raw, manifest, holders, hot

    async def get_bytes(self, key: str, *, size_max: int) -> bytes:
        """The manifest, or the marker of a milestone. Health markers count as absent: they are of this node's part
        only."""
        if key == self._manifest.key:
            return self._raw
        if layout.mark_of(key.rpartition("/")[2]) is None:
            raise NotFound(f"read {key} on the nodes: it belongs to one part only")
        return await self._hot.get_bytes(key, size_max=size_max)

    async def read(self, key: str, offset: int, buffer: memoryview) -> None:
        """Raises NotFound when no holder of this shard can be read: other shards may still be."""
        lost: TierdError | None = None
        for holder in self._holders.get(key, ()):
            if holder.lost is None:
                try:
                    await holder.tier.store.read(key, offset, buffer)
                    return
                except TierdError as error:
                    holder.lost = error
            lost = holder.lost
        why = "no other node has it" if lost is None else lost.message
        raise NotFound(f"read {key} on the nodes: {why}")

    def source(self, key: str) -> Source:
        return Source(partial(self.read, key))

    async def close(self) -> None:
        """The caller that opened the stores closes them."""
