"""Verifies that a replica is what its manifest says: by reading every byte, or by the checksums that the store keeps.

Changes nothing. A replica that is deleted meanwhile is not a problem; an unreachable tier raises TierUnreachable.
"""

from __future__ import annotations

import errno
from collections.abc import Container
from dataclasses import dataclass, field
from enum import Enum

from tierd.errors import Corrupt, Foreign, NotFound, TierUnreachable
from tierd.format import layout
from tierd.format.ids import HOT, CheckpointId
from tierd.format.manifest import FileEntry, Manifest
from tierd.tiers.chunks import differences, measure
from tierd.tiers.rate_limit import Bandwidth
from tierd.tiers.store import Progress
from tierd.tiers.tier import Tier


class Proof(Enum):
    """What a verification is based on, from strong to weak."""

    DEEP = "deep"  # every byte was read
    CHECKSUM = "checksum"  # the store's own checksum of every file is the manifest's; nothing was read
    SIZE = "size"  # every file has its size; the store keeps no checksum of at least one


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """`manifest`: None when it cannot be read. `problems`: sentences by file name; empty when the replica is good.
    `missing`: the files among them that are absent. `proof`: the weakest of any file. `has_read_error`: the disk could
    not read one of them, which may be a failure of the moment."""

    manifest: Manifest | None
    problems: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    missing: frozenset[str] = frozenset()
    proof: Proof = Proof.DEEP
    has_read_error: bool = False

    @property
    def sentences(self) -> list[str]:
        return [sentence for sentences in self.problems.values() for sentence in sentences]


async def verify_replica(
    tier: Tier,
    checkpoint: CheckpointId,
    *,
    is_deep: bool = True,
    progress: Progress | None = None,
    bandwidth: Bandwidth | None = None,
) -> Verification | None:
    """None when there is no such replica, or it was deleted meanwhile. Raises NewerFormat, Foreign or TierUnreachable
    where it cannot be verified."""
    try:
        manifest = await _held(tier, checkpoint)
    except NotFound:
        return None
    except Corrupt as error:
        return Verification(manifest=None, problems={layout.MANIFEST: [error.message]})
    verification = await verify_files(tier, manifest, is_deep=is_deep, progress=progress, bandwidth=bandwidth)
    if verification.problems:
        try:
            await _held(tier, checkpoint)
        except NotFound:
            return None
        except (Corrupt, Foreign):
            pass
    return verification


async def _held(tier: Tier, checkpoint: CheckpointId) -> Manifest:
    """The manifest, or in hot the node file of this node's part. Raises as `Tier.manifest`."""
    try:
        return await tier.manifest(checkpoint)
    except NotFound:
        node_files = (await tier.listing(layout.checkpoint_prefix(checkpoint))).node_files.get(checkpoint)
        if tier.name != HOT or not node_files:
            raise
        return (await tier.read_manifest(layout.file_key(checkpoint, node_files[0])))[0]


async def verify_files(
    tier: Tier,
    manifest: Manifest,
    *,
    is_deep: bool = True,
    only: Container[str] | None = None,
    progress: Progress | None = None,
    bandwidth: Bandwidth | None = None,
) -> Verification:
    """Compares the files, or those named in `only`, with `manifest`; the manifest in the tier is not read.
    `bandwidth`: limits a deep read, to one piece at a time. Raises TierUnreachable."""
    stored = await tier.store.list(layout.checkpoint_prefix(manifest.id))
    sizes = {file.key: file.size_bytes for file in stored}
    problems: dict[str, list[str]] = {}
    missing: set[str] = set()
    has_checksums, has_read_error = True, False

    async def compare(entry: FileEntry) -> list[str]:
        nonlocal has_checksums
        key = layout.file_key(manifest.id, entry.name)
        if key not in sizes:
            raise NotFound("the file is missing")
        if sizes[key] != entry.size_bytes:
            return [f"{sizes[key]} bytes, expected {entry.size_bytes}"]
        if is_deep:
            source, size = tier.store.source(key), entry.size_bytes
            actual = await measure(
                source,
                entry.name,
                size,
                entry.chunk_bytes,
                bandwidth=bandwidth,
                progress=progress,
                algorithm=entry.algorithm,
            )
            return differences(entry, actual)
        checksum = await tier.store.stored_checksum(key)
        has_checksums = has_checksums and checksum is not None
        if progress is not None:
            progress(entry.size_bytes)
        if checksum in (None, entry.crc64nvme):
            return []
        return [f"the store's crc64nvme is {checksum}, expected {entry.crc64nvme}"]

    for entry in manifest.files:
        if only is not None and entry.name not in only:
            continue
        try:
            sentences = await compare(entry)
        except (NotFound, Corrupt, TierUnreachable) as error:
            if isinstance(error, NotFound):
                missing.add(entry.name)
            elif isinstance(error, TierUnreachable):
                if not _is_read_error(error):
                    raise
                has_read_error = True
            sentences = [error.message]
        if sentences:
            where = f"{manifest.id}/{entry.name} in {tier.name}"
            problems[entry.name] = [f"{where}: {sentence}" for sentence in sentences]
    proof = Proof.DEEP if is_deep else Proof.CHECKSUM if has_checksums else Proof.SIZE
    return Verification(
        manifest=manifest,
        problems=problems,
        missing=frozenset(missing),
        proof=proof,
        has_read_error=has_read_error,
    )


def _is_read_error(error: TierUnreachable) -> bool:
    """The disk cannot read the file, although it lists it. A new file uses other sectors."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EIO
