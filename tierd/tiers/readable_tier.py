"""Replicas that can be read: their manifests, node files and markers, checked with the keys. Writes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from tierd.config.sections import LimitsConfig
from tierd.errors import UNDECODABLE, Corrupt, TierdError
from tierd.format import layout
from tierd.format.health import MARKER_BYTES_MAX, Diagnosis
from tierd.format.ids import CheckpointId
from tierd.format.manifest import Manifest, decode
from tierd.format.node_file import decode_node_file
from tierd.format.signature import Keyring
from tierd.tiers.store import ReadableStore, conflict

DECODED_AT_ONCE_BYTES = 64 << 10  # of manifests, on the event loop: takes some milliseconds


@dataclass(frozen=True, eq=False)
class ReadableTier:
    """Replicas that can be restored, by checkpoint. The memory tier is one. `limits`: of the manifests.
    `keyring`: only what it has signed is read; None: everything."""

    name: str
    store: ReadableStore
    limits: LimitsConfig = field(default=LimitsConfig(), kw_only=True)
    keyring: Keyring | None = field(default=None, kw_only=True)

    @property
    def manifest_bytes_max(self) -> int:
        return self.limits.manifest_mib_max << 20

    async def manifest(self, checkpoint: CheckpointId) -> Manifest:
        """Raises NotFound when the checkpoint is not committed here, Corrupt, NewerFormat or Foreign when it cannot be
        used."""
        return (await self.read_manifest(layout.manifest_key(checkpoint)))[0]

    async def read_manifest(self, key: str) -> tuple[Manifest, bytes]:
        """A manifest or node file and its exact bytes. Raises as `manifest`."""
        raw = await self.store.get_bytes(key, size_max=self.manifest_bytes_max)
        manifest = (await self.decoded({key: raw}))[0]
        if isinstance(manifest, TierdError):
            raise manifest
        return manifest, raw

    async def decoded(self, raws: Mapping[str, bytes | TierdError]) -> list[Manifest | TierdError]:
        """In a thread if they are large: a manifest of 16 MiB takes seconds, in which the event loop goes on."""

        def decode_all() -> list[Manifest | TierdError]:
            manifests: list[Manifest | TierdError] = []
            for key, raw in raws.items():
                try:
                    manifests.append(self._decode(raw, key) if isinstance(raw, bytes) else raw)
                except TierdError as error:
                    manifests.append(error)
            return manifests

        if sum(len(raw) for raw in raws.values() if isinstance(raw, bytes)) <= DECODED_AT_ONCE_BYTES:
            return decode_all()
        return await asyncio.to_thread(decode_all)

    def _decode(self, raw: bytes, key: str) -> Manifest:
        checkpoint, name = layout.parse_key(key), key.rpartition("/")[2]
        assert checkpoint is not None
        if self.keyring is not None:
            self.keyring.check(key, raw, where=self.name)
        if name == layout.MANIFEST:
            return decode(raw, where=self.name, expect=checkpoint)
        return decode_node_file(raw, name=name, where=self.name, expect=checkpoint)

    async def manifest_bytes(self, manifest: Manifest) -> bytes:
        """The exact bytes of the manifest here. Raises Corrupt when it differs from `manifest`."""
        committed, raw = await self.read_manifest(manifest.key)
        if committed != manifest:
            raise self.conflict(manifest.id)
        return raw

    async def diagnosis(self, checkpoint: CheckpointId, *, is_healthy: bool) -> Diagnosis:
        """What the marker here says; without details where it cannot be read, or no key has signed it."""
        try:
            raw = await self.marker_bytes(layout.diagnosis_key(checkpoint, is_healthy=is_healthy))
            diagnosis = msgspec.json.decode(raw, type=Diagnosis)
        except (TierdError, *UNDECODABLE):
            return Diagnosis(healthy=is_healthy)
        return diagnosis if diagnosis.healthy == is_healthy else Diagnosis(healthy=is_healthy)

    async def marker_bytes(self, key: str) -> bytes:
        """The exact bytes of a marker. Raises Foreign where the keyring has not signed it, NotFound, Corrupt."""
        raw = await self.store.get_bytes(key, size_max=MARKER_BYTES_MAX)
        if self.keyring is not None:
            self.keyring.check(key, raw, where=self.name)
        return raw

    def conflict(self, checkpoint: CheckpointId) -> Corrupt:
        return conflict(f"commit {checkpoint} in {self.name}: another checkpoint is committed there under this name")
