"""The memory tier, reached through the daemon: a checkpoint whose files are descriptors that it handed over.

A store for reading only, so that a restore from memory is the same copy, with the same checks, as from any tier.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from tierd.config.file import run_proof
from tierd.config.sections import Config
from tierd.descriptors import close_all, closed_on_error, read_all
from tierd.errors import Corrupt, NotFound
from tierd.format import layout
from tierd.format.ids import MEMORY, CheckpointId
from tierd.format.manifest import decode
from tierd.tiers.store import Source


def ask_memory(config: Config, checkpoint: CheckpointId) -> DescriptorStore:
    """The checkpoint's files in the memory tier. Raises DaemonUnreachable, NotFound when it is gone by now, Corrupt."""
    from tierd.api.operator_socket import find_in_memory

    raw, descriptors = find_in_memory(config.socket_path, checkpoint, daemon_uid=config.daemon_uid, proof=run_proof())
    with closed_on_error(descriptors):
        return DescriptorStore(raw, descriptors, checkpoint)


class DescriptorStore:
    """Owns the descriptors from here on. Raises Corrupt when they do not fit the manifest."""

    def __init__(self, raw: bytes, descriptors: Sequence[int], checkpoint: CheckpointId) -> None:
        self.manifest = decode(raw, where=MEMORY, expect=checkpoint)
        if len(descriptors) != len(self.manifest.files):
            raise Corrupt(f"read {checkpoint} in memory: {len(descriptors)} of {len(self.manifest.files)} files sent")
        self._raw = raw
        self._files = {
            layout.file_key(checkpoint, entry.name): descriptor
            for entry, descriptor in zip(self.manifest.files, descriptors, strict=True)
        }

    async def read(self, key: str, offset: int, buffer: memoryview) -> None:
        if key not in self._files:
            raise NotFound(f"read {key} in memory: there is no such file")
        if missing := await asyncio.to_thread(read_all, self._files[key], offset, buffer):
            raise Corrupt(f"read {key} in memory: it ends {missing} bytes early")

    async def get_bytes(self, key: str, *, size_max: int) -> bytes:
        """The manifest: a checkpoint in memory has no markers."""
        if key != layout.manifest_key(self.manifest.id):
            raise NotFound(f"read {key} in memory: there is no such file")
        return self._raw

    def source(self, key: str) -> Source:
        return Source(partial(self.read, key))

    async def close(self) -> None:
        close_all(self._files.values())
        self._files = {}
