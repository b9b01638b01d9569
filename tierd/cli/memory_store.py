"""The memory tier, reached through the daemon: a checkpoint whose files are descriptors that it handed over.

A store for reading only, so that a restore from memory is the same copy, with the same checks, as from any tier.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from tierd.errors import BadRequest, Corrupt, NotFound, TierdError
from tierd.format import layout
from tierd.format.ids import CheckpointId
from tierd.format.manifest import FileEntry, decode
from tierd.tiers.store import Progress, Source, StoredObject


def ask_memory(socket_path: Path, checkpoint: CheckpointId) -> DescriptorStore:
    """The checkpoint's files in the memory tier. Raises DaemonUnreachable, NotFound when it is gone by now, Corrupt."""
    from tierd.api.operator_socket import find_in_memory

    raw, descriptors = find_in_memory(
        socket_path, checkpoint.run, step=checkpoint.step, generation=checkpoint.generation
    )
    try:
        return DescriptorStore(raw, descriptors, checkpoint)
    except TierdError:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


class DescriptorStore:
    """Owns the descriptors from here on. Raises Corrupt when they do not fit the manifest."""

    url = "memory:"
    puts_at_once = 1

    def __init__(self, raw: bytes, descriptors: Sequence[int], checkpoint: CheckpointId) -> None:
        self.manifest = decode(raw, where=f"{checkpoint} in memory", expect=checkpoint)
        if len(descriptors) != len(self.manifest.files):
            raise Corrupt(f"read {checkpoint} in memory: {len(descriptors)} of {len(self.manifest.files)} files came")
        self._raw = raw
        self._files = {
            layout.file_key(checkpoint, entry.name): (entry, descriptor)
            for entry, descriptor in zip(self.manifest.files, descriptors, strict=True)
        }

    async def read(self, key: str, offset: int, buffer: memoryview) -> None:
        _, descriptor = self._file(key)
        await asyncio.to_thread(_fill, descriptor, offset, buffer, key)

    async def get_bytes(self, key: str, *, size_max: int) -> bytes:
        if key == layout.manifest_key(self.manifest.id):
            return self._raw
        entry, _ = self._file(key)
        if entry.size_bytes > size_max:
            raise Corrupt(f"read {key} in memory: {entry.size_bytes} bytes, more than {size_max}")
        content = bytearray(entry.size_bytes)
        await self.read(key, 0, memoryview(content))
        return bytes(content)

    async def get_many(self, keys: Sequence[str], *, size_max: int) -> list[bytes | TierdError]:
        return [await self.get_bytes(key, size_max=size_max) for key in keys]

    async def kept_checksum(self, key: str) -> str | None:
        self._file(key)
        return None

    async def list(self, prefix: str = "") -> list[StoredObject]:
        found = {key: entry.size_bytes for key, (entry, _) in self._files.items()}
        found[layout.manifest_key(self.manifest.id)] = len(self._raw)
        return [StoredObject(key, size_bytes) for key, size_bytes in found.items() if key.startswith(prefix)]

    async def free_bytes(self) -> int | None:
        return None

    def limit_writes(self, mib_s: float) -> None:
        pass

    async def abort_uploads(self, is_abandoned: Callable[[str], bool], *, grace_s: float) -> int:
        return 0

    async def close(self) -> None:
        for _, descriptor in self._files.values():
            os.close(descriptor)
        self._files = {}

    async def put(
        self,
        key: str,
        source: memoryview | Source,
        *,
        size_bytes: int,
        chunk_bytes: int,
        expect: FileEntry | None = None,
        progress: Progress | None = None,
        is_lasting: bool = False,
        replace: bool = False,
    ) -> FileEntry:
        _refuse(key)

    async def put_bytes(self, key: str, content: bytes, *, if_absent: bool = False) -> bool:
        _refuse(key)

    async def delete(self, keys: Sequence[str]) -> None:
        _refuse(", ".join(keys))

    def _file(self, key: str) -> tuple[FileEntry, int]:
        if key not in self._files:
            raise NotFound(f"read {key} in memory: there is no such file")
        return self._files[key]


def _refuse(what: str) -> NoReturn:
    raise BadRequest(f"write {what} into memory: the CLI only reads it")


def _fill(descriptor: int, offset: int, buffer: memoryview, key: str) -> None:
    while buffer:
        count = os.preadv(descriptor, [buffer], offset)
        if count == 0:
            raise Corrupt(f"read {key} in memory: it ends at {offset}, {len(buffer)} bytes early")
        buffer, offset = buffer[count:], offset + count
