"""Deletes incomplete checkpoints: at start those in the hot tier, before the catalog is filled; later, failed copies.

halt, not guess: a manifest that cannot be read, or a checkpoint without one of its files, is reported and not deleted.
"""

from __future__ import annotations

import logging
import math
from heapq import nlargest

from tierd.catalog.catalog import Catalog
from tierd.catalog.listing import enter_listing
from tierd.errors import BadConfig
from tierd.failpoints import failpoint
from tierd.format import layout
from tierd.format.ids import CheckpointId
from tierd.format.manifest import Manifest
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.tier import Tier

log = logging.getLogger("tierd")

SIGNED_LOOKED_AT = 8  # of the checkpoints in hot, the last written
PARTIAL_DOWNLOADS_KEPT_S = 86400.0  # one day for the trainer to start again and continue its restore


async def refuse_signed(hot: Tier) -> None:
    """Raises BadConfig when the hot tier was written with a key and there is none now: what is written without it would
    be foreign to every reader that has the key."""
    if hot.keyring is not None:
        return
    listing = await hot.listing()
    newest = nlargest(SIGNED_LOOKED_AT, listing.committed, key=lambda checkpoint: listing.written_at_s[checkpoint])
    for manifest in await hot.manifests(newest, record=listing.record):
        if isinstance(manifest, Manifest) and manifest.signature:
            raise BadConfig(
                f"serve {hot.store.url}: {manifest.id} there is signed, and there is no key file",
                hint="set [security] key_file or TIERD_KEY_FILE; to go on without a key, use another hot.path",
            )


async def recover(catalog: Catalog, hot: Tier, store: DirectoryStore, *, now_s: float) -> None:
    """Delete incomplete checkpoints from the hot tier and fill the catalog. Runs once, before the daemon accepts peers.

    The directory is locked, so a killed daemon was writing every checkpoint without a manifest. The trainer still has
    it and sends it again. Partial downloads stay, so that a restore can continue. `now_s`: Unix time.

    Raises TierUnreachable when the directory cannot be read or written.
    """
    await store.sweep_partials(is_given_up=lambda path, touched_s: touched_s < now_s - PARTIAL_DOWNLOADS_KEPT_S)
    listing = await hot.listing()
    for checkpoint in listing.partial:
        failpoint("recover.delete")
        await hot.delete(checkpoint)
        del listing.files[checkpoint]
        log.info("deleted the files of %s from hot: they had no manifest when the former daemon ended", checkpoint)
    await enter_listing(catalog, hot, listing, since=catalog.changes)


async def clear_uncommitted(
    tier: Tier, checkpoint: CheckpointId, *, written_before_s: float = math.inf, is_dry_run: bool = False
) -> list[str]:
    """Delete the files of a failed copy, unless it is committed: they may fill the disk. Returns their keys. What is
    whole beneath a tombstone is committed again; see `Tier.unbury`.

    Raises as `Store.list` and `Store.delete`.
    """
    keys = await uncommitted_files(tier, checkpoint, written_before_s=written_before_s)
    manifest, tombstone = layout.manifest_key(checkpoint), layout.file_key(checkpoint, layout.GONE)
    if tombstone in keys and await tier.unbury(checkpoint, is_dry_run=is_dry_run):
        log.info("keep %s in %s: it is whole beneath its tombstone", checkpoint, tier.name)
        return []
    if keys and not is_dry_run:
        failpoint("leftover.delete")
        # A former deletion of the manifest may not be on the disk yet. As the first key, its absence is synced before
        # a shard is deleted: without that, a loss of power could bring the manifest back without its shards.
        await tier.store.delete([manifest, *(key for key in keys if key not in (manifest, tombstone))])
        if tombstone in keys:
            await tier.store.delete([tombstone])
    return keys


async def uncommitted_files(tier: Tier, checkpoint: CheckpointId, *, written_before_s: float) -> list[str]:
    """The keys of its files; empty if it is committed or one was written after this Unix time. With a tombstone it is
    not committed: the daemon that was deleting it has ended."""
    files = await tier.store.list(layout.checkpoint_prefix(checkpoint))
    if not files or any(file.written_at_s > written_before_s for file in files):
        return []
    listing = await tier.listing(layout.checkpoint_prefix(checkpoint))
    return [] if checkpoint in listing.committed else [file.key for file in files]
