"""A tier: a store and the commit protocol on top of it. The manifest is written last and deleted first.

So a checkpoint is listed in a tier if and only if it is whole there, whenever a writer was killed. Copies between
tiers are here too; every byte is checked against the manifest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from tierd.config import LimitsConfig
from tierd.errors import Corrupt, NotFound, TierdError, TierUnreachable, Unsupported
from tierd.failpoints import failpoint
from tierd.format import layout
from tierd.format.health import MARKER_BYTES_MAX, Diagnosis
from tierd.format.ids import GENERATION_SEEN_MAX, CheckpointId, Generation, Run
from tierd.format.manifest import FileEntry, Manifest, decode, encode_marker
from tierd.tiers.cache import Fingerprint, ManifestCache
from tierd.tiers.pool import for_each
from tierd.tiers.store import Progress, ReadableStore, Store, conflict

DECODED_AT_ONCE_BYTES = 64 << 10  # of manifests, on the event loop: takes some milliseconds
CLAIMS_KEPT = 16  # more than daemons that may claim at once, each from the same listing


@dataclass(frozen=True, slots=True)
class Listing:
    """One listing of a tier. `files`: sizes by file name, of every checkpoint, committed or not. `fingerprints` and
    `written_at_s`, Unix times: of the manifests. `generations`: the highest of each run. `identities`: those that the
    markers at the root give it."""

    committed: set[CheckpointId] = field(default_factory=set)
    partial: set[CheckpointId] = field(default_factory=set)
    files: dict[CheckpointId, dict[str, int]] = field(default_factory=dict)
    generations: dict[Run, Generation] = field(default_factory=dict)
    fingerprints: dict[CheckpointId, Fingerprint] = field(default_factory=dict)
    identities: set[str] = field(default_factory=set)
    written_at_s: dict[CheckpointId, float] = field(default_factory=dict)

    def add_generation(self, run: Run, generation: Generation) -> None:
        """A generation that a manifest or a claim shows. Any other file of that name proves nothing."""
        if generation <= GENERATION_SEEN_MAX:
            self.generations[run] = max(generation, self.generations.get(run, generation))

    def milestones(self, checkpoint: CheckpointId) -> frozenset[str]:
        names = map(layout.milestone_of, self.files.get(checkpoint, ()))
        return frozenset(name for name in names if name is not None)

    def diagnosis(self, checkpoint: CheckpointId) -> bool | None:
        """Whether the checkpoint is healthy; None when it was not examined. If both markers exist, it is unhealthy."""
        names = self.files.get(checkpoint, ())
        return False if layout.UNHEALTHY in names else True if layout.HEALTHY in names else None


@dataclass(frozen=True, eq=False)
class ReadableTier:
    """Replicas that can be restored, by checkpoint. The memory tier is one. `limits`: of the manifests."""

    name: str
    store: ReadableStore
    limits: LimitsConfig = field(default=LimitsConfig(), kw_only=True)

    @property
    def manifest_bytes_max(self) -> int:
        return self.limits.manifest_mib_max << 20

    async def manifest(self, checkpoint: CheckpointId) -> Manifest:
        """Raises NotFound when the checkpoint is not committed here, Corrupt or NewerFormat when it cannot be used."""
        return (await self.read_manifest(checkpoint))[0]

    async def read_manifest(self, checkpoint: CheckpointId) -> tuple[Manifest, bytes]:
        """The manifest and its exact bytes. Raises as `manifest`."""
        raw = await self.store.get_bytes(layout.manifest_key(checkpoint), size_max=self.manifest_bytes_max)
        manifest = (await self._decoded({checkpoint: raw}))[0]
        if isinstance(manifest, TierdError):
            raise manifest
        return manifest, raw

    async def _decoded(self, raws: Mapping[CheckpointId, bytes | TierdError]) -> list[Manifest | TierdError]:
        """In a thread if they are large: a manifest of 16 MiB takes seconds, in which the event loop goes on."""

        def decode_all() -> list[Manifest | TierdError]:
            manifests: list[Manifest | TierdError] = []
            for checkpoint, raw in raws.items():
                try:
                    is_read = isinstance(raw, bytes)
                    manifests.append(decode(raw, where=self.name, expect=checkpoint) if is_read else raw)
                except TierdError as error:
                    manifests.append(error)
            return manifests

        if sum(len(raw) for raw in raws.values() if isinstance(raw, bytes)) <= DECODED_AT_ONCE_BYTES:
            return decode_all()
        return await asyncio.to_thread(decode_all)

    async def manifest_bytes(self, manifest: Manifest) -> bytes:
        """The exact bytes of the manifest here. Raises Corrupt when it differs from `manifest`."""
        committed, raw = await self.read_manifest(manifest.id)
        if committed != manifest:
            raise self._conflict(manifest.id)
        return raw

    async def diagnosis(self, checkpoint: CheckpointId, *, is_healthy: bool) -> Diagnosis:
        """What the marker here says; without details where it cannot be read."""
        key = layout.diagnosis_key(checkpoint, is_healthy=is_healthy)
        try:
            return msgspec.json.decode(await self.store.get_bytes(key, size_max=MARKER_BYTES_MAX), type=Diagnosis)
        except (TierdError, msgspec.DecodeError, ValueError, RecursionError):
            return Diagnosis(healthy=is_healthy)

    def _conflict(self, checkpoint: CheckpointId) -> Corrupt:
        return conflict(f"commit {checkpoint} in {self.name}: another checkpoint is committed there under this name")


@dataclass(frozen=True, eq=False)
class Tier(ReadableTier):
    """`cache`: manifests that were read here before; None: not cached. `deleting`: deletions by this process that have
    begun and not ended, or failed: a listing may lack these checkpoints."""

    store: Store
    cache: ManifestCache | None = None
    deleting: set[CheckpointId] = field(default_factory=set)

    async def listing(self, prefix: str = "") -> Listing:
        """Everything in the tier below `prefix`, from one listing of the store and without reading a manifest."""
        listing = Listing()
        folders: dict[str, CheckpointId] = {}  # a folder has many files, and its name is parsed once
        for stored in await self.store.list(prefix):
            folder, _, name = stored.key.rpartition("/")
            if folder not in folders:
                parsed = layout.parse_key(stored.key)
                if parsed is None:
                    if claimed := layout.parse_generation_key(stored.key):
                        listing.add_generation(*claimed)
                    elif identity := layout.parse_tier_marker(stored.key):
                        listing.identities.add(identity)
                    continue
                if parsed.generation > GENERATION_SEEN_MAX:
                    continue
                folders[folder] = parsed
                listing.files[parsed] = {}
            listing.files[folders[folder]][name] = stored.size_bytes
            if name == layout.MANIFEST:
                listing.add_generation(folders[folder].run, folders[folder].generation)
                listing.fingerprints[folders[folder]] = (stored.size_bytes, stored.etag)
                listing.written_at_s[folders[folder]] = stored.written_at_s
        for checkpoint, files in listing.files.items():
            (listing.committed if layout.MANIFEST in files else listing.partial).add(checkpoint)
        return listing

    async def identities(self) -> set[str]:
        """The identities of the tier, without a listing of its checkpoints."""
        return (await self.listing(layout.TIER_MARKERS)).identities

    async def mark_identity(self, identity: str, content: Mapping[str, Any]) -> None:
        """Give the tier an identity, besides those that it may have."""
        await self.store.put_bytes(layout.tier_marker_key(identity), encode_marker(content), if_absent=True)

    async def manifests(
        self, checkpoints: Sequence[CheckpointId], *, size_max: int | None = None
    ) -> list[Manifest | TierdError]:
        """For each checkpoint its manifest, or the error that `manifest` would raise. Raises TierUnreachable.
        `size_max`: of each in bytes, if less than the limit: one may have been replaced since it was listed."""
        keys = [layout.manifest_key(checkpoint) for checkpoint in checkpoints]
        size_max = self.manifest_bytes_max if size_max is None else min(size_max, self.manifest_bytes_max)
        raws = await self.store.get_many(keys, size_max=size_max)
        return await self._decoded(dict(zip(checkpoints, raws, strict=True)))

    async def commit(
        self,
        manifest: Manifest,
        *,
        raw: bytes | None = None,
        milestones: Iterable[str] = (),
        diagnosis: Diagnosis | None = None,
    ) -> None:
        """Makes the checkpoint exist here, with its markers. Repeating it is harmless. `raw`: the manifest's bytes,
        where they exist.

        Raises Corrupt when another checkpoint is already committed under this id.
        """
        self.deleting.discard(manifest.id)
        # The markers are written before the commit, so a committed milestone always has its marker.
        for milestone in milestones:
            await self.mark_milestone(manifest.id, milestone, manifest.created_at)
        if diagnosis is not None:
            await self.mark_diagnosis(manifest.id, diagnosis)
        content = manifest.encode() if raw is None else raw
        if len(content) > self.manifest_bytes_max:
            message = f"commit {manifest.id} in {self.name}: its manifest has {len(content)} bytes"
            raise Unsupported(message, hint="raise limits.manifest_mib_max of every daemon that reads it")
        failpoint("tier.commit")
        if await self.store.put_bytes(layout.manifest_key(manifest.id), content, if_absent=True):
            failpoint("tier.committed")
            return
        # It exists: another writer made it, or we did and the response was lost, or this daemon was killed.
        if not await self.is_committed(manifest, raw=content):
            raise TierUnreachable(
                f"commit {manifest.id} in {self.name}: the manifest existed and was deleted meanwhile",
                hint="someone is deleting it; the commit is tried again",
            )

    async def is_committed(self, manifest: Manifest, *, raw: bytes) -> bool:
        """Raises Corrupt when another checkpoint is committed under this id."""
        try:
            committed = await self.store.get_bytes(layout.manifest_key(manifest.id), size_max=self.manifest_bytes_max)
        except NotFound:
            return False
        if committed != raw:
            raise self._conflict(manifest.id)
        return True

    async def delete(
        self, checkpoint: CheckpointId, *, confirm: Callable[[Collection[str]], bool] = lambda names: True
    ) -> bool:
        """The manifest first: killed at any instant, this leaves no checkpoint that lacks a file.

        `confirm`: called with the names of its files directly before the deletion. If it returns False, nothing is
        deleted, and this returns False.
        """
        prefix, manifest = layout.checkpoint_prefix(checkpoint), layout.manifest_key(checkpoint)
        keys = {stored.key for stored in await self.store.list(prefix)}
        if not confirm({key.removeprefix(prefix) for key in keys}):
            return False
        if keys:
            self.deleting.add(checkpoint)
            failpoint("tier.delete")
            await self.store.delete([manifest, *sorted(keys - {manifest})])
            self.deleting.discard(checkpoint)
        return True

    async def mark_milestone(self, checkpoint: CheckpointId, milestone: str, created_at: str) -> None:
        failpoint("tier.mark")
        content = encode_marker({"milestone": milestone, "created_at": created_at})
        key = layout.file_key(checkpoint, layout.milestone_file(milestone))
        await self.store.put_bytes(key, content, if_absent=True)

    async def mark_diagnosis(self, checkpoint: CheckpointId, diagnosis: Diagnosis) -> None:
        failpoint("tier.diagnose")
        key = layout.diagnosis_key(checkpoint, is_healthy=diagnosis.healthy)
        await self.store.put_bytes(key, encode_marker(diagnosis), if_absent=True)

    async def claim_generation(self, run: Run, generation: Generation, content: Mapping[str, Any]) -> bool:
        """False when it is claimed already. Keeps the last CLAIMS_KEPT claims of a run: only the highest counts."""
        key = layout.generation_key(run, generation)
        if not await self.store.put_bytes(key, encode_marker(content), if_absent=True):
            return False
        if generation > CLAIMS_KEPT:
            with suppress(TierdError):  # the claim is made; a marker that stays does no harm
                await self.store.delete([layout.generation_key(run, Generation(generation - CLAIMS_KEPT))])
        return True


async def copy_checkpoint(
    manifest: Manifest,
    source: ReadableTier,
    target: Tier,
    *,
    milestones: Collection[str] = (),
    is_healthy: bool | None = None,
    progress: Progress | None = None,
) -> None:
    """Copies a committed checkpoint: its files, several at once, then the markers, then the manifest's exact bytes.

    Safe to kill and to repeat. Raises Corrupt, and commits nothing, when a byte differs from the manifest.
    """
    raw = await source.manifest_bytes(manifest)
    if not await target.is_committed(manifest, raw=raw):
        options: dict[str, Any] = {"progress": progress, "is_lasting": bool(milestones)}
        copy = partial(copy_file, manifest.id, source=source, target=target, **options)
        await for_each(target.store.puts_at_once, manifest.files, copy)
    diagnosis = None if is_healthy is None else await source.diagnosis(manifest.id, is_healthy=is_healthy)
    await target.commit(manifest, raw=raw, milestones=milestones, diagnosis=diagnosis)


async def copy_file(
    checkpoint: CheckpointId,
    entry: FileEntry,
    source: ReadableTier,
    target: Tier,
    *,
    progress: Progress | None = None,
    is_lasting: bool = False,
    replace: bool = False,
) -> None:
    """Copies one file of a checkpoint. Options and errors as of `Store.put`."""
    key = layout.file_key(checkpoint, entry.name)
    await target.store.put(
        key,
        source.store.source(key),
        size_bytes=entry.size_bytes,
        chunk_bytes=entry.chunk_bytes,
        expect=entry,
        progress=progress,
        is_lasting=is_lasting,
        replace=replace,
    )
