"""Copies a committed checkpoint, or one file of it, from one tier to another.

commit_last: the files first, then the markers, then the manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from os.path import commonprefix
from typing import Any

from tierd.errors import TierdError, TierUnreachable
from tierd.failpoints import failpoint
from tierd.format import layout
from tierd.format.ids import CheckpointId
from tierd.format.manifest import FileEntry, Manifest
from tierd.format.node_file import NodeFile
from tierd.tiers.pool import for_each
from tierd.tiers.readable_tier import ReadableTier
from tierd.tiers.store import Progress, conflict
from tierd.tiers.tier import Tier


async def copy_checkpoint(
    manifest: Manifest,
    source: ReadableTier,
    target: Tier,
    *,
    milestones: Collection[str] = (),
    is_healthy: bool | None = None,
    progress: Progress | None = None,
) -> bool:
    """Copies a committed checkpoint: its files, several at once, then the markers, then the manifest's exact bytes.

    Safe to kill and to repeat. False, and nothing is committed, when a daemon is deleting it in the target. Raises
    Corrupt, and commits nothing, when a byte differs from the manifest, and TierUnreachable when a file was deleted
    meanwhile.
    """
    raw = await source.manifest_bytes(manifest)
    is_new = not await target.is_committed(manifest, raw=raw)
    if is_new:
        options: dict[str, Any] = {"progress": progress, "is_lasting": bool(milestones)}
        copy = partial(copy_file, manifest.id, source=source, target=target, **options)
        await for_each(target.store.puts_at_once, manifest.files, copy)
    listing = await target.listing(layout.checkpoint_prefix(manifest.id))
    if manifest.id in listing.gone:
        return False
    if is_new:
        _check_whole(manifest, target, listing.files.get(manifest.id, {}))
    diagnosis = None if is_healthy is None else await source.diagnosis(manifest.id, is_healthy=is_healthy)
    await target.commit(manifest, raw=raw, milestones=milestones, diagnosis=diagnosis)
    return True


async def copy_part(
    part: NodeFile,
    source: ReadableTier,
    target: Tier,
    make_node_file: Callable[[], NodeFile],
    *,
    progress: Progress | None = None,
) -> None:
    """Copies one node's part of a checkpoint: its files, then what `make_node_file` returns then: it says the same as
    `part`, and has the verdict on it as far as that is known by then. A node file that is there already stays.

    Raises Corrupt when a byte differs from the node file, or when the target has another part under its name, and
    TierUnreachable when a file was deleted meanwhile.
    """
    options: dict[str, Any] = {"progress": progress, "is_lasting": bool(part.milestone)}
    copy = partial(copy_file, part.id, source=source, target=target, **options)
    await for_each(target.store.puts_at_once, part.files, copy)
    # Only shards near its own are listed: over many nodes, a listing of the folder has many pages, and every node would
    # ask for all.
    common = commonprefix([entry.name for entry in part.files])  # noqa: RUF071  # also of a part of a name
    objects = await target.store.list(layout.checkpoint_prefix(part.id) + common)
    _check_whole(part, target, {stored.key.rpartition("/")[2]: stored.size_bytes for stored in objects})
    failpoint("cold.node_file")
    node_file = make_node_file()
    if await target.store.put_bytes(node_file.key, node_file.encode(), if_absent=True):
        return
    (existing,) = await target.decode_many([node_file.key])
    if isinstance(existing, TierdError):
        raise existing
    if not isinstance(existing, NodeFile) or existing.claim != part.claim or existing.contradiction(part):
        raise conflict(f"copy {node_file.name} of {part.id} to {target.name}: there is another one")


def _check_whole(manifest: Manifest, target: Tier, sizes: Mapping[str, int]) -> None:
    """`sizes`: of the files in the target, in bytes. Raises TierUnreachable unless every file is there: files that this
    copy found, and did not send, may have been deleted since."""
    if missing := manifest.missing_file(sizes):
        raise TierUnreachable(
            f"copy {manifest.id} to {target.name}: {missing}, and was there before",
            hint="another daemon is deleting it; the copy is tried again",
        )


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
