"""Deletes incomplete checkpoints: at start those in the hot tier, before the catalog is filled; later, failed copies.

halt, not guess: a manifest that cannot be read, or a checkpoint without one of its files, is reported and not deleted.
"""

from __future__ import annotations

import logging
import math

from tierd.catalog import Catalog
from tierd.failpoints import failpoint
from tierd.format import layout
from tierd.format.ids import CheckpointId
from tierd.listing import enter_listing
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.tier import Tier

log = logging.getLogger("tierd")

PARTIAL_DOWNLOADS_KEPT_S = 86400.0  # one day for the trainer to start again and continue its restore


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


async def clear_uncommitted(tier: Tier, checkpoint: CheckpointId, *, written_before_s: float = math.inf) -> None:
    """Delete the files of a failed copy, unless it is committed: they may fill the disk.

    `written_before_s`: only if all were written before this Unix time. Raises as `Store.list` and `Store.delete`.
    """
    files = await tier.store.list(layout.checkpoint_prefix(checkpoint))
    manifest = layout.manifest_key(checkpoint)
    is_old = all(file.written_at_s <= written_before_s for file in files)
    if files and is_old and manifest not in (file.key for file in files):
        failpoint("leftover.delete")
        # A former deletion of the manifest may not be on the disk yet. As the first key, its absence is synced before
        # a shard is deleted: without that, a loss of power could bring the manifest back without its shards.
        await tier.store.delete([manifest, *(file.key for file in files)])
