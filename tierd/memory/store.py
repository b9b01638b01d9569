"""A snapshot set as a store for reading: the files of one checkpoint in the slots, and its manifest.

So a copy from memory is the same copy, with the same checks, as one from the hot tier. The slots must stay as they are
while it is used.
"""

from __future__ import annotations

import asyncio

from tierd.errors import Corrupt, NotFound
from tierd.format import layout
from tierd.format.manifest import Manifest, encode_marker
from tierd.memory.snapshot_set import SnapshotSet
from tierd.tiers.store import Source


class SnapshotStore:
    """`manifest`: of the set, with the checksums of its files."""

    def __init__(self, snapshot_set: SnapshotSet, manifest: Manifest) -> None:
        checkpoint = snapshot_set.id
        self._files = {
            layout.file_key(checkpoint, layout.shard_name(rank, snapshot_set.world_size)): snapshot.view
            for rank, snapshot in snapshot_set.snapshots.items()
        }
        self._small = {manifest.key: manifest.encode()}
        if snapshot_set.diagnosis is not None:
            key = layout.diagnosis_key(checkpoint, is_healthy=snapshot_set.diagnosis.healthy)
            self._small[key] = encode_marker(snapshot_set.diagnosis)

    async def get_bytes(self, key: str, *, size_max: int) -> bytes:
        """The manifest, or the marker of the diagnosis."""
        if key not in self._small:
            raise NotFound(f"read {key} in memory: there is no such file")
        return self._small[key]

    async def read(self, key: str, offset: int, buffer: memoryview) -> None:
        await asyncio.to_thread(self._read, key, offset, buffer)

    def source(self, key: str) -> Source:
        return Source(
            lambda offset, buffer: self.read(key, offset, buffer),
            lambda offset, buffer: self._read(key, offset, buffer),
        )

    async def close(self) -> None:
        """Does nothing: the slots belong to the memory tier."""

    def _read(self, key: str, offset: int, buffer: memoryview) -> None:
        if key not in self._files:
            raise NotFound(f"read {key} in memory: there is no such file")
        piece = self._files[key][offset : offset + len(buffer)]
        if len(piece) < len(buffer):
            raise Corrupt(f"read {key} in memory: it ends {len(buffer) - len(piece)} bytes early")
        buffer[:] = piece
