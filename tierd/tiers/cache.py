"""What the manifests of a bucket said when they were last read on this machine: one file for each bucket.

A manifest is taken from it only where the listing still shows the same size and ETag, and is checked as if it came
from the bucket. Absent, damaged, or not writable, it costs the requests that it would have saved, and nothing else.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from tierd.errors import TierdError
from tierd.format import layout
from tierd.format.ids import CheckpointId
from tierd.format.manifest import Manifest, decode
from tierd.tiers.directory import DirectoryStore

CACHE_BYTES_MAX = 128 << 20  # 10,000 manifests of 13 KB; what is beyond is read from the bucket each time


class _Kept(msgspec.Struct, frozen=True, array_like=True):
    checkpoint: str
    size_bytes: int
    etag: str
    manifest: msgspec.Raw


class ManifestCache:
    """In `folder`, which only its owner may look into; with None, nothing is kept. `place`: which bucket it is."""

    def __init__(self, folder: Path | None, place: str) -> None:
        self._folder = folder
        self._key = f"manifests-{hashlib.sha256(place.encode()).hexdigest()[:32]}.json"

    async def read(self, wanted: Mapping[CheckpointId, tuple[int, str]]) -> dict[CheckpointId, Manifest]:
        """Those of `wanted` that were read with this very size and ETag. Empty for whatever reason."""
        if self._folder is None or not self._folder.is_dir():
            return {}
        store = DirectoryStore(self._folder, create=False)
        try:
            raw = await store.get_bytes(self._key, size_max=CACHE_BYTES_MAX)
            return await asyncio.to_thread(_decode, raw, wanted)
        except (TierdError, msgspec.DecodeError, ValueError, RecursionError):
            return {}
        finally:
            await store.close()

    async def write(
        self, manifests: Mapping[CheckpointId, Manifest], fingerprints: Mapping[CheckpointId, tuple[int, str]]
    ) -> None:
        """In place of what was kept before. A store that has no ETags cannot be told to have changed: nothing then."""
        if self._folder is None:
            return
        store = DirectoryStore(self._folder)
        try:
            raw = await asyncio.to_thread(_encode, manifests, fingerprints)
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with suppress(TierdError):
                await store.sweep_partials()
                await store.put_bytes(self._key, raw)
        except OSError:
            return
        finally:
            await store.close()


def _encode(manifests: Mapping[CheckpointId, Manifest], fingerprints: Mapping[CheckpointId, tuple[int, str]]) -> bytes:
    kept: list[msgspec.Raw] = []
    size_bytes = 0
    for checkpoint in sorted(manifests, key=lambda one: one.recency, reverse=True):
        size, etag = fingerprints[checkpoint]
        if not etag:
            continue
        name = layout.checkpoint_prefix(checkpoint)
        raw = msgspec.json.encode(_Kept(name, size, etag, msgspec.Raw(msgspec.json.encode(manifests[checkpoint]))))
        size_bytes += len(raw) + 1
        if size_bytes > CACHE_BYTES_MAX - 2:
            break
        kept.append(msgspec.Raw(raw))
    return msgspec.json.encode(kept)


def _decode(raw: bytes, wanted: Mapping[CheckpointId, tuple[int, str]]) -> dict[CheckpointId, Manifest]:
    kept = {
        (one.checkpoint, one.size_bytes, one.etag): one.manifest for one in msgspec.json.decode(raw, type=list[_Kept])
    }
    found: dict[CheckpointId, Manifest] = {}
    for checkpoint, (size_bytes, etag) in wanted.items():
        manifest = kept.get((layout.checkpoint_prefix(checkpoint), size_bytes, etag))
        if manifest is not None:
            with suppress(TierdError):
                found[checkpoint] = decode(bytes(manifest), where=f"{checkpoint} in the cache", expect=checkpoint)
    return found
