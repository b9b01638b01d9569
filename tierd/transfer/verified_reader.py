"""Reads any bytes of a checkpoint's files from its replicas, verified, without writing them anywhere.

A checksum covers a whole chunk, so whole chunks are read; the last few are kept. It suits readers that go through files
in sequence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from tierd.errors import BadRequest, TierdError
from tierd.format import layout
from tierd.format.manifest import FileEntry, Manifest
from tierd.format.shard import Shard, header_length, parse_header, round_up
from tierd.tiers.chunks import ChunkSums
from tierd.tiers.direct_io import page_aligned
from tierd.tiers.store import Progress
from tierd.tiers.tier import ReadableTier

CHUNKS_KEPT = 4

NextReplica = Callable[[Mapping[str, TierdError]], Awaitable[ReadableTier]]
"""Returns the nearest replica that is not in the mapping of failed tiers. Raises the gravest error when all are."""


class VerifiedReader:
    """Files of one checkpoint. One caller at a time. `progress`: called for what was read and verified."""

    progress: Progress | None = None

    def __init__(self, manifest: Manifest, next_replica: NextReplica) -> None:
        self.manifest = manifest
        self._entries = {entry.name: entry for entry in manifest.files}
        self._next_replica = next_replica
        self._chunks: dict[tuple[str, int], memoryview] = {}  # the last used at the end

    async def fill(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fills the whole buffer from `offset` of the file. Raises BadRequest beyond its end, and the gravest error
        when no replica gives a chunk that verifies."""
        entry = self._entries[name]
        if not 0 <= offset <= offset + len(buffer) <= entry.size_bytes:
            raise BadRequest(f"read {self.manifest.id}/{name} at byte {offset}: it has {entry.size_bytes} bytes")
        done = 0
        while done < len(buffer):
            index, skipped = divmod(offset + done, entry.chunk_bytes)
            chunk = await self._chunk(entry, index)
            piece = chunk[skipped : skipped + len(buffer) - done]
            buffer[done : done + len(piece)] = piece
            done += len(piece)

    async def shard(self, name: str) -> Shard:
        """The header of a shard. Raises Corrupt or NewerFormat, and as `fill`."""
        size_bytes, where = self._entries[name].size_bytes, f"{self.manifest.id}/{name}"
        first = bytearray(min(8, size_bytes))
        await self.fill(name, 0, memoryview(first))
        header = bytearray(header_length(bytes(first), size_bytes, where=where))
        await self.fill(name, 0, memoryview(header))
        return await asyncio.to_thread(parse_header, bytes(header), size_bytes, where=where)

    async def _chunk(self, entry: FileEntry, index: int) -> memoryview:
        key = (entry.name, index)
        chunk = self._chunks.pop(key, None)
        if chunk is None:
            while len(self._chunks) >= CHUNKS_KEPT:
                del self._chunks[next(iter(self._chunks))]
            chunk = await self._read(entry, index)
        self._chunks[key] = chunk
        return chunk

    async def _read(self, entry: FileEntry, index: int) -> memoryview:
        begin = index * entry.chunk_bytes
        length = min(entry.chunk_bytes, entry.size_bytes - begin)
        chunk = page_aligned(round_up(length))[:length]
        failed: dict[str, TierdError] = {}
        while True:
            tier = await self._next_replica(failed)
            try:
                await tier.store.read(layout.file_key(self.manifest.id, entry.name), begin, chunk)
                sums = ChunkSums(length, entry.chunk_bytes, entry.algorithm, has_crc=not entry.algorithm)
                await asyncio.to_thread(sums.add, 0, chunk)
                sums.check(entry, first=index, action=f"read {self.manifest.id}/{entry.name} in {tier.name}")
            except TierdError as error:
                failed[tier.name] = error
                continue
            if self.progress is not None:
                self.progress(length)
            return chunk
