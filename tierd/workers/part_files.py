"""Opens what other nodes read of parts of checkpoints: node files, and pieces of shards.

This node's part is read from memory, otherwise from hot; then comes the copy of another node's part. Only names that
belong to a part are opened. The bytes are not verified here: the reader has the checksums, from the node file.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tierd.context import DaemonContext
from tierd.descriptors import close_all, read_all, reopen_read_only
from tierd.errors import Corrupt, NotFound, TierUnreachable
from tierd.format import layout
from tierd.format.ids import AUTO, HOT, CheckpointId
from tierd.format.node_file import NodeFile
from tierd.format.wire import Find
from tierd.workers.restorer import Restorer


@dataclass(frozen=True, slots=True)
class PartFile:
    """An open shard. `is_in_memory`: reading it waits for no disk."""

    name: str
    descriptor: int
    size_bytes: int
    is_in_memory: bool


class PartFiles:
    def __init__(self, context: DaemonContext, restorer: Restorer) -> None:
        self._context = context
        self._restorer = restorer

    async def node_file(self, checkpoint: CheckpointId, name: str, *, is_hot: bool = False) -> NodeFile:
        """Of the part with the node file `name`. `is_hot`: only where it is durable. Raises NotFound without one."""
        entry = self._context.catalog.get(checkpoint)
        for part in (entry.part if entry is not None and is_hot else None, self._copy(checkpoint)):
            if part is not None and part.name == name:
                return part
        found = None if is_hot else await self._own(checkpoint)
        if found is None or found.name != name:
            raise NotFound(f"open {name} of {checkpoint}: it is not here{' in hot' if is_hot else ''}")
        return found

    def _copy(self, checkpoint: CheckpointId) -> NodeFile | None:
        copies = self._context.part_copies
        return copies.get(checkpoint) if copies is not None else None

    async def _own(self, checkpoint: CheckpointId) -> NodeFile:
        find = Find(
            request=0,
            step=checkpoint.step,
            generation=checkpoint.generation,
            milestone=None,
            tier=AUTO,
            exclude=[],
            allow_unhealthy=True,
        )
        opened = await self._restorer.find_part(checkpoint.run, find)
        close_all(opened.descriptors)
        assert isinstance(opened.manifest, NodeFile)
        return self._context.signed(opened.manifest)  # one in memory has no signature yet

    @asynccontextmanager
    async def open(self, checkpoint: CheckpointId, name: str, *, is_hot: bool = False) -> AsyncGenerator[PartFile]:
        """A shard of a part. `is_hot`: not from memory. Raises NotFound without it, TierUnreachable."""
        file = None if is_hot else self._open_in_memory(checkpoint, name)
        file = file or await self._open_in_hot(checkpoint, name)
        try:
            yield file
        finally:
            os.close(file.descriptor)

    async def read(self, file: PartFile, offset: int, buffer: memoryview) -> None:
        """Fills the whole buffer. Raises Corrupt when the file ends early."""
        if file.is_in_memory:
            missing = await asyncio.to_thread(read_all, file.descriptor, offset, buffer)
        else:
            missing = await self._context.hot_store.pool.query(read_all, file.descriptor, offset, buffer)
        if missing:
            raise Corrupt(f"read {file.name}: it ends {missing} bytes early")

    def _open_in_memory(self, checkpoint: CheckpointId, name: str) -> PartFile | None:
        snapshot_set = self._context.memory.find(checkpoint)
        if snapshot_set is None:
            return None
        for rank, snapshot in snapshot_set.snapshots.items():
            if layout.shard_name(rank, snapshot_set.world_size) == name:
                try:
                    descriptor = reopen_read_only(snapshot.slot.fd)
                except OSError as error:
                    raise TierUnreachable(f"open {checkpoint} in memory: {error.strerror}") from error
                return PartFile(name, descriptor, snapshot.sealed.size_bytes, is_in_memory=True)
        return None

    async def _open_in_hot(self, checkpoint: CheckpointId, name: str) -> PartFile:
        entry = self._context.catalog.get(checkpoint)
        held = entry.held(HOT) if entry is not None and HOT in entry.tiers else None
        for file in held.files if held is not None else ():
            if file.name == name:
                (descriptor,) = await self._context.hot_store.open_files([layout.file_key(checkpoint, name)])
                return PartFile(name, descriptor, file.size_bytes, is_in_memory=False)
        copies, copy = self._context.part_copies, self._copy(checkpoint)
        for file in copy.files if copies is not None and copy is not None else ():
            if copies is not None and copy is not None and file.name == name:
                (descriptor,) = await copies.open_files(copy, [name])
                return PartFile(name, descriptor, file.size_bytes, is_in_memory=False)
        raise NotFound(f"open {name} of {checkpoint}: it is in no part that is here")
