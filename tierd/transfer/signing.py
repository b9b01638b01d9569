"""Signs manifests and markers that exist already, after a key was introduced. Every byte is verified before.

`plan` lists what no key signed, and `sign` signs exactly that: a file that has changed since, or is new, stays as it
is. The replicas of a checkpoint get the same bytes: where one is signed, the others get its manifest. Killed at any
write and repeated, it ends with the same result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from tierd.errors import Corrupt, Foreign, NewerFormat, NotFound, TierdError, TierUnreachable
from tierd.format import layout
from tierd.format.digest import preferred
from tierd.format.health import MARKER_BYTES_MAX
from tierd.format.ids import HOT, CheckpointId, Run
from tierd.format.manifest import FileEntry, Manifest, decode
from tierd.format.signature import Keyring, without_signature
from tierd.tiers.chunks import differences, measure
from tierd.tiers.tier import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsignedFile:
    """A manifest or marker to sign. `sha256`: of its bytes in the plan. `checkpoint`: None for a claim. `reason`: why
    it does not count as signed."""

    tier: str
    key: str
    sha256: bytes
    checkpoint: CheckpointId | None
    reason: str

    @property
    def is_manifest(self) -> bool:
        return self.checkpoint is not None and self.key == layout.manifest_key(self.checkpoint)

    def __str__(self) -> str:
        return f"{self.key} in {self.tier}"


@dataclass(slots=True)
class Signing:
    """`tiers`: opened without a key, nearest first. `refused`: why a file is never signed, by (tier, key).
    `errors`: why files were not signed, by (tier, key or prefix)."""

    tiers: Mapping[str, Tier]
    keyring: Keyring
    refused: Mapping[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])
    errors: dict[tuple[str, str], TierdError] = field(default_factory=dict[tuple[str, str], TierdError])

    async def plan(self, run: Run, step: int | None = None) -> list[UnsignedFile]:
        """What to sign of the run, or of one step of it: claims, then the markers and the manifests of each checkpoint.
        Raises NotFound when there is nothing of it."""
        files: list[UnsignedFile] = []
        replicas: dict[CheckpointId, list[str]] = {}
        is_there = False
        for name, tier in self.tiers.items():
            try:
                listing = await tier.listing(f"{run}/")
                keys = [*listing.markers, *map(layout.manifest_key, listing.committed)]
                keys = [key for key in sorted(keys) if step is None or _step_of(key) == step]
                is_there = is_there or bool(keys)
                for key in keys:
                    checkpoint = layout.parse_key(key)
                    if why := self.refused.get((name, key)):
                        self.errors[name, key] = Foreign(why)
                    elif checkpoint is not None and key == layout.manifest_key(checkpoint):
                        replicas.setdefault(checkpoint, []).append(name)
                    elif (raw := await self._read(name, key)) is not None and not self._is_signed(key, raw):
                        files += self._to_sign(name, key, raw)
            except TierUnreachable as error:
                self.errors[name, f"{run}/"] = error
        for checkpoint, tiers in replicas.items():
            files += await self._unsigned_manifests(checkpoint, tiers)
        if not is_there and not self.errors:
            raise NotFound(f"sign {run}: no tier has such a checkpoint", hint="`tierd ls` shows what there is")
        return sorted(
            files, key=lambda file: (file.checkpoint.recency if file.checkpoint else (0, 0), file.is_manifest)
        )

    async def sign(self, file: UnsignedFile) -> bool:
        """Sign one file of the plan; in the order of the plan. False, with the reason in `errors`, where it cannot."""
        try:
            self._check_markers(file)
            raw = await self._planned(file)
            if file.checkpoint is not None and file.is_manifest:
                signed = await self._signed_manifest(file, file.checkpoint, raw)
            else:
                signed = self.keyring.sign(file.key, without_signature(raw))
            await self.tiers[file.tier].store.put_bytes(file.key, signed)
        except TierdError as error:
            self.errors[file.tier, file.key] = error
            return False
        return True

    def _check_markers(self, file: UnsignedFile) -> None:
        """Raises Foreign for a manifest whose markers could not be signed: without them, retention would delete a
        milestone."""
        if file.is_manifest and file.checkpoint is not None:
            prefix = layout.checkpoint_prefix(file.checkpoint)
            unsigned = [key for tier, key in self.errors if tier == file.tier and key.startswith(prefix)]
            if markers := [key for key in unsigned if key != file.key]:
                raise Foreign(f"sign {file}: {', '.join(markers)} could not be signed")

    async def _unsigned_manifests(self, checkpoint: CheckpointId, tiers: Sequence[str]) -> list[UnsignedFile]:
        """The manifests that differ from the one that all replicas should have."""
        key = layout.manifest_key(checkpoint)
        raws = {name: raw for name in tiers if (raw := await self._read(name, key)) is not None}
        source = self._signed_tier(key, raws)
        unsigned: list[UnsignedFile] = []
        for name, raw in raws.items():
            try:
                if source is None:
                    decode(raw, where=name, expect=checkpoint)
                    unsigned += self._to_sign(name, key, raw)
                elif raw != raws[source]:
                    self._check_equal(checkpoint, name, raw, source, raws[source])
                    unsigned.append(self._unsigned(name, key, raw))
            except (Corrupt, NewerFormat) as error:
                self.errors[name, key] = error
        return unsigned

    def _to_sign(self, tier: str, key: str, raw: bytes) -> list[UnsignedFile]:
        """The file, unless it was signed and then altered: to sign that again would hide it. The reason is in
        `errors`."""
        if not self.keyring.is_altered(key, raw):
            return [self._unsigned(tier, key, raw)]
        self.errors[tier, key] = Corrupt(
            f"sign {key} in {tier}: {self.keyring.problem(key, raw)}: it was changed after it was signed",
            hint="delete it, if another tier has it; docs/RUNBOOK.md#foreign-checkpoints",
        )
        return []

    def _unsigned(self, tier: str, key: str, raw: bytes) -> UnsignedFile:
        reason = self.keyring.problem(key, raw) or "its digests or signature differ from those of another replica"
        sha256 = hashlib.sha256(raw).digest()
        return UnsignedFile(tier=tier, key=key, sha256=sha256, checkpoint=layout.parse_key(key), reason=reason)

    async def _signed_manifest(self, file: UnsignedFile, checkpoint: CheckpointId, raw: bytes) -> bytes:
        """The bytes to write: those of a replica that is signed, or these with a signature. Raises Corrupt when a file
        of the checkpoint differs from them."""
        raws = {file.tier: raw}
        for name, tier in self.tiers.items():
            if name != file.tier:
                with suppress(NotFound, Corrupt):
                    raws[name] = await tier.store.get_bytes(file.key, size_max=tier.manifest_bytes_max)
        source = self._signed_tier(file.key, raws)
        if source is None:
            manifest = decode(raw, where=file.tier, expect=checkpoint)
        else:
            manifest = self._check_equal(checkpoint, file.tier, raw, source, raws[source])
        store = self.tiers[file.tier].store
        files: list[FileEntry] = []
        for entry in manifest.files:
            source_of_file = store.source(layout.file_key(checkpoint, entry.name))
            algorithm = entry.algorithm or preferred()
            size, chunk = entry.size_bytes, entry.chunk_bytes
            actual = await measure(source_of_file, entry.name, size, chunk, algorithm=algorithm)
            if problems := differences(entry, actual):
                raise Corrupt(f"sign {checkpoint} in {file.tier}: {entry.name}: {problems[0]}")
            files.append(actual)
        if source is not None:
            return raws[source]
        return self.keyring.sign_manifest(msgspec.structs.replace(manifest, files=files)).encode()

    def _signed_tier(self, key: str, raws: Mapping[str, bytes]) -> str | None:
        """The tier whose manifest all replicas get. A cold tier comes first: several nodes share it, but not hot."""
        names = sorted(raws, key=lambda name: name == HOT)
        return next((name for name in names if self._is_signed(key, raws[name])), None)

    def _check_equal(self, checkpoint: CheckpointId, tier: str, raw: bytes, source: str, signed: bytes) -> Manifest:
        """The manifest in `source`. Raises Corrupt where the one in `tier` differs in more than digests and
        signature."""
        manifest = decode(signed, where=source, expect=checkpoint)
        if _unsigned_content(decode(raw, where=tier, expect=checkpoint)) != _unsigned_content(manifest):
            raise Corrupt(
                f"sign {checkpoint} in {tier}: its manifest differs from the signed one in {source}",
                hint="delete the replica that you do not trust",
            )
        return manifest

    async def _read(self, tier: str, key: str) -> bytes | None:
        """The bytes of a manifest or marker. None, with the reason in `errors`, where it cannot be read."""
        checkpoint = layout.parse_key(key)
        is_manifest = checkpoint is not None and key == layout.manifest_key(checkpoint)
        size_max = self.tiers[tier].manifest_bytes_max if is_manifest else MARKER_BYTES_MAX
        try:
            return await self.tiers[tier].store.get_bytes(key, size_max=size_max)
        except TierdError as error:
            self.errors[tier, key] = error
            return None

    async def _planned(self, file: UnsignedFile) -> bytes:
        """The bytes of the file. Raises Foreign unless they are those of the plan."""
        raw = await self._read(file.tier, file.key)
        if raw is None:
            raise self.errors[file.tier, file.key]
        if hashlib.sha256(raw).digest() != file.sha256:
            raise Foreign(f"sign {file}: it has changed since it was shown", hint="the next `tierd key sign` shows it")
        return raw

    def _is_signed(self, key: str, raw: bytes) -> bool:
        return not self.keyring.problem(key, raw)


def _unsigned_content(manifest: Manifest) -> Manifest:
    """The manifest as it was before it was signed."""
    unset = msgspec.UNSET
    files = [msgspec.structs.replace(entry, digest=unset, digests=unset) for entry in manifest.files]
    return msgspec.structs.replace(manifest, files=files, signature=unset)


def _step_of(key: str) -> int | None:
    checkpoint = layout.parse_key(key)
    return None if checkpoint is None else checkpoint.step
