"""A file on this machine with the manifests of a bucket, so that a start does not read them all again.

A cached manifest is used only where the listing still shows the same size and ETag, and is checked like one from the
bucket. Where the file is absent, damaged or not writable, the manifests are read from the bucket.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from tierd.access import is_own_folder
from tierd.errors import UNDECODABLE, TierdError
from tierd.format import layout
from tierd.format.ids import CheckpointId
from tierd.format.manifest import Manifest, decode
from tierd.format.signature import Keyring
from tierd.tiers.directory import DirectoryStore

CACHE_BYTES_MAX = 128 << 20  # 10,000 manifests of 13 KB; further ones are not cached

Fingerprint = tuple[int, str]
"""Size in bytes and ETag of a manifest."""


class _CachedManifest(msgspec.Struct, frozen=True, array_like=True):
    checkpoint: str
    size_bytes: int
    etag: str
    manifest: msgspec.Raw


class ManifestCache:
    """In `folder`, readable by its owner only. `bucket`: which bucket's manifests. A folder in which another user can
    write is neither read nor written."""

    def __init__(self, folder: Path, bucket: str) -> None:
        self._folder = folder
        self._key = f"manifests-{hashlib.sha256(bucket.encode()).hexdigest()[:32]}.json"

    async def read(
        self, fingerprints: Mapping[CheckpointId, Fingerprint], keyring: Keyring | None = None
    ) -> dict[CheckpointId, Manifest]:
        """The cached manifests that have these fingerprints; with a keyring, those that it has signed. Never raises."""
        try:
            if not await asyncio.to_thread(is_own_folder, self._folder):
                return {}
            async with DirectoryStore(self._folder, create=False) as store:
                raw = await store.get_bytes(self._key, size_max=CACHE_BYTES_MAX)
            return await asyncio.to_thread(_decode, raw, fingerprints, keyring)
        except (OSError, TierdError, *UNDECODABLE):
            return {}

    async def write(
        self, manifests: Mapping[CheckpointId, Manifest], fingerprints: Mapping[CheckpointId, Fingerprint]
    ) -> None:
        """Replaces the cache. Manifests without an ETag are left out: a change of them would not be noticed."""
        raw = await asyncio.to_thread(_encode, manifests, fingerprints)
        with suppress(OSError, TierdError):
            await asyncio.to_thread(self._folder.mkdir, mode=0o700, parents=True, exist_ok=True)
            if not await asyncio.to_thread(is_own_folder, self._folder):
                return
            async with DirectoryStore(self._folder) as store:
                await store.sweep_partials()
                await store.put_bytes(self._key, raw)


def _encode(manifests: Mapping[CheckpointId, Manifest], fingerprints: Mapping[CheckpointId, Fingerprint]) -> bytes:
    cached: list[msgspec.Raw] = []
    size_bytes = 0
    for checkpoint in sorted(manifests, key=lambda checkpoint: checkpoint.recency, reverse=True):
        size, etag = fingerprints[checkpoint]
        if not etag:
            continue
        manifest = msgspec.Raw(msgspec.json.encode(manifests[checkpoint]))
        raw = msgspec.json.encode(_CachedManifest(layout.checkpoint_prefix(checkpoint), size, etag, manifest))
        size_bytes += len(raw) + 1
        if size_bytes > CACHE_BYTES_MAX - 2:
            break
        cached.append(msgspec.Raw(raw))
    return msgspec.json.encode(cached)


def _decode(
    raw: bytes, fingerprints: Mapping[CheckpointId, Fingerprint], keyring: Keyring | None
) -> dict[CheckpointId, Manifest]:
    cached = {
        (entry.checkpoint, entry.size_bytes, entry.etag): entry.manifest
        for entry in msgspec.json.decode(raw, type=list[_CachedManifest])
    }
    manifests: dict[CheckpointId, Manifest] = {}
    for checkpoint, fingerprint in fingerprints.items():
        manifest = cached.get((layout.checkpoint_prefix(checkpoint), *fingerprint))
        if manifest is not None:
            with suppress(TierdError):
                decoded = decode(bytes(manifest), where="the cache", expect=checkpoint)
                if keyring is not None:
                    keyring.check(layout.manifest_key(checkpoint), decoded.encode(), where="the cache")
                manifests[checkpoint] = decoded
    return manifests
