"""A tier: a store with the commit protocol on top. The manifest is written last and deleted first.

So a checkpoint is listed in a tier if and only if it is whole there, whoever was killed and when. Copying between tiers
lives here too: every byte is checked against the manifest on its way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tierd.errors import Corrupt, NotFound, TierdError, TierUnreachable
from tierd.format import health, layout
from tierd.format.health import Diagnosis
from tierd.format.ids import CheckpointId, Generation, Run
from tierd.format.manifest import MANIFEST_BYTES_MAX, FileEntry, Manifest, decode, encode_marker
from tierd.tiers.cache import ManifestCache
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.pool import each
from tierd.tiers.store import Progress, Source, Store


@dataclass(frozen=True, slots=True)
class Listing:
    """What one look at a tier gave. `files` has the sizes by file name of every checkpoint, committed or not;
    `fingerprints`, size and ETag of the manifests."""

    committed: set[CheckpointId] = field(default_factory=set)
    partial: set[CheckpointId] = field(default_factory=set)
    files: dict[CheckpointId, dict[str, int]] = field(default_factory=dict)
    generations: dict[Run, Generation] = field(default_factory=dict)
    fingerprints: dict[CheckpointId, tuple[int, str]] = field(default_factory=dict)

    def milestones(self, checkpoint: CheckpointId) -> frozenset[str]:
        marked = (layout.milestone_of(name) for name in self.files.get(checkpoint, ()))
        return frozenset(name for name in marked if name is not None)

    def diagnosis(self, checkpoint: CheckpointId) -> bool | None:
        """Whether it was found healthy; None when it was not judged."""
        return layout.diagnosis_of(self.files.get(checkpoint, ()))


class Tier:
    """`cache`: what its manifests said when they were last read here, where that is kept."""

    def __init__(self, name: str, store: Store, cache: ManifestCache | None = None) -> None:
        self.name = name
        self.store = store
        self.cache = cache

    async def listing(self) -> Listing:
        """Everything here, from one listing of the store and no manifest."""
        found = Listing()
        folders: dict[str, CheckpointId] = {}  # a folder has many files, and its name is parsed once
        for stored in await self.store.list():
            folder, _, name = stored.key.rpartition("/")
            if folder not in folders:
                if parsed := layout.parse_key(stored.key):
                    checkpoint = folders[folder] = parsed[0]
                    found.files[checkpoint] = {}
                    _raise_generation(found, checkpoint.run, checkpoint.generation)
                elif claimed := layout.parse_generation_key(stored.key):
                    _raise_generation(found, *claimed)
                    continue
                else:
                    continue
            found.files[folders[folder]][name] = stored.size_bytes
            if name == layout.MANIFEST:
                found.fingerprints[folders[folder]] = (stored.size_bytes, stored.etag)
        for checkpoint, files in found.files.items():
            (found.committed if layout.MANIFEST in files else found.partial).add(checkpoint)
        return found

    async def manifest(self, checkpoint: CheckpointId) -> Manifest:
        """Raises NotFound when it is not committed here, Corrupt or NewerFormat when it cannot be used."""
        raw = await self._manifest_bytes(checkpoint)
        return decode(raw, where=f"{checkpoint} in {self.name}", expect=checkpoint)

    async def manifests(self, checkpoints: Sequence[CheckpointId]) -> list[Manifest | TierdError]:
        """Of many checkpoints at once: each manifest, or what `manifest` would raise. Raises TierUnreachable."""
        keys = [layout.manifest_key(checkpoint) for checkpoint in checkpoints]
        found: list[Manifest | TierdError] = []
        for checkpoint, raw in zip(
            checkpoints, await self.store.get_many(keys, size_max=MANIFEST_BYTES_MAX), strict=True
        ):
            if isinstance(raw, TierdError):
                found.append(raw)
                continue
            try:
                found.append(decode(raw, where=f"{checkpoint} in {self.name}", expect=checkpoint))
            except TierdError as error:
                found.append(error)
        return found

    async def commit(self, manifest: Manifest, *, raw: bytes | None = None) -> None:
        """Makes the checkpoint exist here. Repeating it is harmless. `raw`: the manifest's bytes where they exist.

        Raises Corrupt when another checkpoint is already committed under this id.
        """
        content = manifest.encode() if raw is None else raw
        key = layout.manifest_key(manifest.id)
        if await self.store.put_bytes(key, content, if_absent=True):
            return
        # Taken: by ourselves, when an answer was lost or a daemon was killed after the write, or by someone else.
        try:
            await self._check_committed(manifest.id, content)
        except NotFound as error:
            raise TierUnreachable(
                f"commit {manifest.id} in {self.name}: the manifest was there, and is gone",
                hint="someone is deleting it; it is tried again",
            ) from error

    async def is_committed(self, manifest: Manifest, *, raw: bytes) -> bool:
        """Raises Corrupt when another checkpoint is committed under this id."""
        try:
            await self._check_committed(manifest.id, raw)
        except NotFound:
            return False
        return True

    async def delete(self, checkpoint: CheckpointId) -> None:
        """Manifest first: killed at any instant, what is left is no checkpoint."""
        manifest = layout.manifest_key(checkpoint)
        keys = {stored.key for stored in await self.store.list(layout.checkpoint_prefix(checkpoint))}
        if keys:
            await self.store.delete([manifest, *sorted(keys - {manifest})])

    async def mark_milestone(self, checkpoint: CheckpointId, milestone: str, created_at: str) -> None:
        content = encode_marker({"milestone": milestone, "created_at": created_at})
        await self.store.put_bytes(layout.milestone_key(checkpoint, milestone), content, if_absent=True)

    async def mark_diagnosis(self, checkpoint: CheckpointId, diagnosis: Diagnosis) -> None:
        key = layout.diagnosis_key(checkpoint, is_healthy=diagnosis.healthy)
        await self.store.put_bytes(key, health.encode(diagnosis), if_absent=True)

    async def diagnosis(self, checkpoint: CheckpointId, *, is_healthy: bool) -> Diagnosis:
        """What its marker here says, or the bare fact when that cannot be read: details are not worth a failure."""
        key = layout.diagnosis_key(checkpoint, is_healthy=is_healthy)
        try:
            raw = await self.store.get_bytes(key, size_max=health.MARKER_BYTES_MAX)
            return health.decode(raw, where=f"of {checkpoint} in {self.name}")
        except TierdError:
            return Diagnosis(healthy=is_healthy)

    async def claim_generation(self, run: Run, generation: Generation, content: Mapping[str, Any]) -> bool:
        """False when someone else has claimed it already."""
        key = layout.generation_key(run, generation)
        return await self.store.put_bytes(key, encode_marker(dict(content)), if_absent=True)

    def source(self, checkpoint: CheckpointId, entry: FileEntry) -> Source:
        """The bytes of one file of a checkpoint here."""
        return stored_file(self.store, layout.file_key(checkpoint, entry.name))

    async def manifest_bytes(self, manifest: Manifest) -> bytes:
        """The very bytes of the manifest here. Raises Corrupt when they say something else than `manifest`."""
        raw = await self._manifest_bytes(manifest.id)
        if decode(raw, where=f"{manifest.id} in {self.name}", expect=manifest.id) != manifest:
            raise _conflict(manifest.id, self.name)
        return raw

    async def _manifest_bytes(self, checkpoint: CheckpointId) -> bytes:
        return await self.store.get_bytes(layout.manifest_key(checkpoint), size_max=MANIFEST_BYTES_MAX)

    async def _check_committed(self, checkpoint: CheckpointId, content: bytes) -> None:
        if await self._manifest_bytes(checkpoint) != content:
            raise _conflict(checkpoint, self.name)


async def copy_checkpoint(
    manifest: Manifest,
    source: Tier,
    target: Tier,
    *,
    milestones: Iterable[str] = (),
    is_healthy: bool | None = None,
    progress: Progress | None = None,
) -> None:
    """Copies a committed checkpoint: files, several at once, then the markers, then the manifest's own bytes.

    Safe to kill and to repeat. Raises Corrupt, and commits nothing, when a byte differs from the manifest.
    """
    milestones = list(milestones)
    raw = await source.manifest_bytes(manifest)

    async def copy(entry: FileEntry) -> None:
        await copy_file(manifest.id, entry, source, target, progress=progress, is_lasting=bool(milestones))

    is_committed = await target.is_committed(manifest, raw=raw)
    if not is_committed:
        await each(target.store.puts_at_once, manifest.files, copy)
    for milestone in milestones:
        await target.mark_milestone(manifest.id, milestone, manifest.created_at)
    if is_healthy is not None:
        await target.mark_diagnosis(manifest.id, await source.diagnosis(manifest.id, is_healthy=is_healthy))
    if not is_committed:
        await target.commit(manifest, raw=raw)


async def copy_file(
    checkpoint: CheckpointId,
    entry: FileEntry,
    source: Tier,
    target: Tier,
    *,
    progress: Progress | None = None,
    is_lasting: bool = False,
    replace: bool = False,
) -> None:
    """One file of a checkpoint, to its place in `target`. Raises and means what `Store.put` does."""
    await target.store.put(
        layout.file_key(checkpoint, entry.name),
        source.source(checkpoint, entry),
        size_bytes=entry.size_bytes,
        chunk_bytes=entry.chunk_bytes,
        expect=entry,
        progress=progress,
        is_lasting=is_lasting,
        replace=replace,
    )


def stored_file(store: Store, key: str) -> Source:
    """The bytes of one object."""
    return _LocalFile(store, key) if isinstance(store, DirectoryStore) else _StoredFile(store, key)


@dataclass(frozen=True)
class _StoredFile:
    store: Store
    key: str

    async def fill(self, offset: int, buffer: memoryview) -> None:
        await self.store.read(self.key, offset, buffer)


@dataclass(frozen=True)
class _LocalFile:
    store: DirectoryStore
    key: str

    async def fill(self, offset: int, buffer: memoryview) -> None:
        await self.store.read(self.key, offset, buffer)

    def fill_now(self, offset: int, buffer: memoryview) -> None:
        self.store.read_now(self.key, offset, buffer)


def _raise_generation(listing: Listing, run: Run, generation: Generation) -> None:
    listing.generations[run] = max(generation, listing.generations.get(run, generation))


def _conflict(checkpoint: CheckpointId, tier: str) -> Corrupt:
    return Corrupt(
        f"commit {checkpoint} in {tier}: another checkpoint is committed there under this name",
        hint="do two jobs write one run into one place? Give one of them another run name; nothing was overwritten",
    )
