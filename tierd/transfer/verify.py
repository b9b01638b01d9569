"""Whether a replica is what its manifest says: every byte read, or the store asked for what it knows by itself.

Changes nothing. A replica that is deleted under our eyes is no finding; a tier out of reach is none either.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Container
from dataclasses import dataclass, field
from enum import Enum

from tierd.errors import Corrupt, NotFound, TierUnreachable
from tierd.format import checksum, layout
from tierd.format.ids import CheckpointId
from tierd.format.manifest import FileEntry, Manifest
from tierd.tiers.chunks import ChunkSums, differences
from tierd.tiers.direct_io import page_aligned
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.pool import each
from tierd.tiers.rate_limit import Bandwidth
from tierd.tiers.store import Progress, Source
from tierd.tiers.tier import Tier

READ_BYTES = 16 << 20
READS_IN_FLIGHT = 4


class Proof(Enum):
    """What a verdict stands on, from strong to weak."""

    DEEP = "deep"  # every byte was read
    CHECKSUM = "checksum"  # the store's own checksum of every file is the manifest's; nothing was read
    SIZE = "size"  # every file is there with its size, and nothing else is known


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """`manifest` None: it cannot be read. `problems` by file name, sentences; empty when all is well. `missing`: the
    files among them that are not there at all. `proof`: the weakest that any file rests on."""

    manifest: Manifest | None
    problems: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    missing: frozenset[str] = frozenset()
    proof: Proof = Proof.DEEP

    @property
    def sentences(self) -> list[str]:
        return [one for found in self.problems.values() for one in found]


def is_read_for_nothing(tier: Tier) -> bool:
    """Whether reading it whole costs no egress."""
    return isinstance(tier.store, DirectoryStore)


async def verify_replica(
    tier: Tier,
    checkpoint: CheckpointId,
    *,
    is_deep: bool = True,
    progress: Progress | None = None,
    bandwidth: Bandwidth | None = None,
) -> Verification | None:
    """None: there is no such replica, or it was deleted meanwhile. Raises NewerFormat or TierUnreachable where it
    cannot be judged."""
    try:
        manifest = await tier.manifest(checkpoint)
    except NotFound:
        return None
    except Corrupt as error:
        return Verification(manifest=None, problems={layout.MANIFEST: [error.message]})
    found = await verify_files(tier, manifest, is_deep=is_deep, progress=progress, bandwidth=bandwidth)
    if found.problems:
        try:
            await tier.manifest(checkpoint)
        except NotFound:
            return None
        except Corrupt:
            pass
    return found


async def verify_files(
    tier: Tier,
    manifest: Manifest,
    *,
    is_deep: bool = True,
    only: Container[str] | None = None,
    progress: Progress | None = None,
    bandwidth: Bandwidth | None = None,
) -> Verification:
    """Compares the files, or those named in `only`, with `manifest`, whatever manifest lies beside them. `bandwidth`
    holds a deep reading down, to one piece at a time. Raises TierUnreachable."""
    stored = await tier.store.list(layout.checkpoint_prefix(manifest.id))
    sizes = {one.key: one.size_bytes for one in stored}
    problems: dict[str, list[str]] = {}
    missing: set[str] = set()
    is_all_kept = True
    for entry in manifest.files if only is None else [one for one in manifest.files if one.name in only]:
        key = layout.file_key(manifest.id, entry.name)
        found: list[str] = []
        try:
            if sizes.get(key) is None:
                raise NotFound("the file is missing")
            if sizes[key] != entry.size_bytes:
                found = [f"{sizes[key]} bytes, expected {entry.size_bytes}"]
            elif is_deep:
                read = await _read_entry(tier.source(manifest.id, entry), entry, progress, bandwidth)
                found = differences(entry, read)
            else:
                kept = await tier.store.kept_checksum(key)
                is_all_kept = is_all_kept and kept is not None
                if kept not in (None, entry.crc64nvme):
                    found = [f"the store's crc64nvme is {kept}, expected {entry.crc64nvme}"]
                if progress is not None:
                    progress(entry.size_bytes)
        except NotFound as error:
            missing.add(entry.name)
            found = [error.message]
        except Corrupt as error:
            found = [error.message]
        except TierUnreachable as error:
            if not _is_bad_sector(error):
                raise
            found = [error.message]
        if found:
            where = f"{manifest.id}/{entry.name} in {tier.name}"
            problems[entry.name] = [f"{where}: {one}" for one in found]
    proof = Proof.DEEP if is_deep else Proof.CHECKSUM if is_all_kept else Proof.SIZE
    return Verification(manifest=manifest, problems=problems, missing=frozenset(missing), proof=proof)


def _is_bad_sector(error: TierUnreachable) -> bool:
    """The disk lists the file and cannot read it: written anew it lies elsewhere."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EIO


async def _read_entry(
    source: Source, entry: FileEntry, progress: Progress | None, bandwidth: Bandwidth | None
) -> FileEntry:
    """What the file's entry is now."""
    sums = ChunkSums(entry.size_bytes, entry.chunk_bytes)
    buffers: list[memoryview] = []

    async def read(piece: tuple[int, int]) -> None:
        offset, length = piece
        if bandwidth is not None:
            await bandwidth.take(length)
        buffer = buffers.pop() if buffers else page_aligned(min(READ_BYTES, entry.size_bytes))
        view = buffer[:length]
        await source.fill(offset, view)
        await asyncio.to_thread(sums.add, offset, view)
        buffers.append(buffer)
        if progress is not None:
            progress(length)

    in_flight = READS_IN_FLIGHT if bandwidth is None else 1
    await each(in_flight, checksum.chunk_ranges(entry.size_bytes, READ_BYTES), read)
    return sums.entry(entry.name, None, "")
