"""Looks at a tier and tells the catalog what is there; at start, also clears what a crash left in the hot tier.

halt, not guess: a manifest that cannot be read, or a checkpoint with a file missing, is reported and left alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

from tierd.catalog import Catalog, Entry
from tierd.errors import NotFound, TierdError, TierUnreachable
from tierd.format import layout
from tierd.format.ids import CheckpointId
from tierd.format.manifest import MANIFEST_BYTES_MAX, Manifest
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.tier import Listing, Tier

log = logging.getLogger("tierd")

ARRIVING_KEPT_S = 86400.0  # a trainer that has not asked again after a day will not
BATCH = 64  # manifests read at once: bounds how long a look keeps the event loop
BATCH_BYTES = MANIFEST_BYTES_MAX  # and what they may have together: bounds what a look holds


async def recover(catalog: Catalog, hot: Tier, store: DirectoryStore, *, now_s: float) -> None:
    """Once, before the doors open: nothing half-written stays in the hot tier, and the catalog knows it.

    The directory is locked, so whatever has no manifest now is what a killed daemon was writing; the trainer
    still holds it and sends it again. What it was fetching stays for the trainer that asks again. `now_s`: Unix time.
    """

    await store.sweep_partials(is_given_up=lambda path, touched_s: touched_s < now_s - ARRIVING_KEPT_S)
    listing = await hot.listing()
    for checkpoint in listing.partial:
        await hot.delete(checkpoint)
        del listing.files[checkpoint]
        log.info("cleared %s from hot: it was being written when the daemon ended", checkpoint)
    await _learn(catalog, hot, listing, catalog.moment())


async def clear_uncommitted(tier: Tier, checkpoint: CheckpointId) -> None:
    """Removes what a copy that went wrong has left, so that a full disk does not stay full of it."""
    files = await _files(tier, checkpoint)
    if layout.MANIFEST not in files:
        await tier.store.delete([layout.file_key(checkpoint, name) for name in files])


async def is_listed(tier: Tier, checkpoint: CheckpointId) -> bool:
    """Whether a manifest lies there, readable or not."""
    return layout.MANIFEST in await _files(tier, checkpoint)


async def _files(tier: Tier, checkpoint: CheckpointId) -> dict[str, int]:
    prefix = layout.checkpoint_prefix(checkpoint)
    return {stored.key.removeprefix(prefix): stored.size_bytes for stored in await tier.store.list(prefix)}


async def refresh(catalog: Catalog, tier: Tier) -> None:
    """One look at a tier. An unreachable one is noted in the catalog as not known; nothing is raised for it."""
    moment = catalog.moment()
    try:
        await _learn(catalog, tier, await tier.listing(), moment)
    except TierdError as error:
        catalog.lost_tier(tier.name, str(error))


async def _learn(catalog: Catalog, tier: Tier, listing: Listing, moment: int) -> None:
    manifests, unreadable = await _manifests(catalog, tier, listing)
    found = {one: (manifest, listing.milestones(one)) for one, manifest in manifests.items()}
    for run, generation in listing.generations.items():
        catalog.saw_generation(run, generation)
    used = sum(size for files in listing.files.values() for size in files.values())
    diagnoses = {one: diagnosis for one in found if (diagnosis := listing.diagnosis(one)) is not None}
    catalog.saw_tier(
        tier.name,
        found,
        unreadable,
        used,
        since=moment,
        diagnoses=diagnoses,
        fingerprints={one: listing.fingerprints[one] for one in found},
        partial=listing.partial,
    )


async def _manifests(
    catalog: Catalog, tier: Tier, listing: Listing
) -> tuple[dict[CheckpointId, Manifest], dict[CheckpointId, str]]:
    """(manifests, why not) of the committed. Read where this tier shows one for the first time, or in another size or
    with another ETag: what hot says of a checkpoint proves nothing about the replica in cold."""
    found: dict[CheckpointId, Manifest] = {}
    unreadable: dict[CheckpointId, str] = {}
    read_before = catalog.tiers[tier.name].fingerprints
    unread: list[CheckpointId] = []
    for checkpoint in listing.committed:
        known = catalog.get(checkpoint)
        if known and tier.name in known.tiers and read_before.get(checkpoint) == listing.fingerprints[checkpoint]:
            found[checkpoint] = known.manifest
        else:
            unread.append(checkpoint)
    if tier.cache is not None and len(unread) > BATCH:
        found |= await tier.cache.read({one: listing.fingerprints[one] for one in unread})
        unread = [one for one in unread if one not in found]
    for batch in _batches(unread, listing):
        for checkpoint, manifest in zip(batch, await tier.manifests(batch), strict=True):
            if isinstance(manifest, Manifest):
                found[checkpoint] = manifest
            elif not isinstance(manifest, NotFound):  # deleted since it was listed
                unreadable[checkpoint] = str(manifest)
    if tier.cache is not None and len(unread) > BATCH:
        await tier.cache.write(found, listing.fingerprints)
    for checkpoint, manifest in list(found.items()):
        why = _why_another(catalog.get(checkpoint), tier, manifest)
        if _why_not_whole(manifest, listing.files[checkpoint]):
            # A listing is no snapshot: look once more at one that may just have been deleted.
            listing.files[checkpoint] = await _files(tier, checkpoint)
            why = why or _why_not_whole(manifest, listing.files[checkpoint])
        if layout.MANIFEST not in listing.files[checkpoint]:
            del found[checkpoint]
        elif why:
            del found[checkpoint]
            unreadable[checkpoint] = f"{checkpoint} in {tier.name}: {why}"
    return found, unreadable


def _batches(checkpoints: list[CheckpointId], listing: Listing) -> Iterator[list[CheckpointId]]:
    batch: list[CheckpointId] = []
    size_bytes = 0
    for checkpoint in checkpoints:
        size_bytes += listing.fingerprints[checkpoint][0]
        if batch and (len(batch) == BATCH or size_bytes > BATCH_BYTES):
            yield batch
            batch, size_bytes = [], listing.fingerprints[checkpoint][0]
        batch.append(checkpoint)
    if batch:
        yield batch


def _why_not_whole(manifest: Manifest, files: dict[str, int]) -> str:
    for entry in manifest.files:
        if files.get(entry.name) != entry.size_bytes:
            return f"{entry.name} is missing or has another size"
    return ""


def _why_another(known: Entry | None, tier: Tier, manifest: Manifest) -> str:
    if known is None or known.manifest is manifest or not known.tiers - {tier.name} or known.manifest == manifest:
        return ""
    return f"its manifest says something else than the one in {', '.join(sorted(known.tiers - {tier.name}))}"


class Lister:
    """Looks at one tier again from time to time, and when it is told that something changed."""

    name = "list"
    is_urgent = True

    def __init__(self, catalog: Catalog, tier: Tier, interval_s: float) -> None:
        self.interval_s = interval_s
        self._catalog = catalog
        self._tier = tier
        self.has_looked = asyncio.Event()

    async def run_once(self) -> bool:
        try:
            await refresh(self._catalog, self._tier)
        finally:
            self.has_looked.set()
        knowledge = self._catalog.tiers[self._tier.name]
        if not knowledge.is_known:
            raise TierUnreachable(knowledge.error)
        return True
