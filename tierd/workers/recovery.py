"""Lists a tier and updates the catalog; at start, also deletes incomplete files from the hot tier.

halt, not guess: a manifest that cannot be read, or a checkpoint without one of its files, is reported and not deleted.
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

PARTIAL_DOWNLOADS_KEPT_S = 86400.0  # one day for the trainer to start again and continue its restore
BATCH = 64  # manifests read at once: bounds how long decoding them blocks the event loop
BATCH_BYTES = MANIFEST_BYTES_MAX  # of the manifests read at once: bounds the memory


async def recover(catalog: Catalog, hot: Tier, store: DirectoryStore, *, now_s: float) -> None:
    """Delete incomplete checkpoints from the hot tier and fill the catalog. Runs once, before the daemon accepts peers.

    The directory is locked, so a killed daemon was writing every checkpoint without a manifest. The trainer still has
    it and sends it again. Partial downloads stay, so that a restore can continue. `now_s`: Unix time.
    """

    await store.sweep_partials(is_given_up=lambda path, touched_s: touched_s < now_s - PARTIAL_DOWNLOADS_KEPT_S)
    listing = await hot.listing()
    for checkpoint in listing.partial:
        await hot.delete(checkpoint)
        del listing.files[checkpoint]
        log.info("deleted %s from hot: incomplete when the former daemon ended", checkpoint)
    await _learn(catalog, hot, listing, catalog.moment())


async def clear_uncommitted(tier: Tier, checkpoint: CheckpointId) -> None:
    """Delete what a failed copy has left, unless it is committed: it may be what fills the disk."""
    files = await _files(tier, checkpoint)
    if layout.MANIFEST not in files:
        await tier.store.delete([layout.file_key(checkpoint, name) for name in files])


async def is_listed(tier: Tier, checkpoint: CheckpointId) -> bool:
    """Whether the tier has a manifest of the checkpoint, readable or not."""
    return layout.MANIFEST in await _files(tier, checkpoint)


async def _files(tier: Tier, checkpoint: CheckpointId) -> dict[str, int]:
    prefix = layout.checkpoint_prefix(checkpoint)
    return {stored.key.removeprefix(prefix): stored.size_bytes for stored in await tier.store.list(prefix)}


async def refresh(catalog: Catalog, tier: Tier) -> None:
    """List a tier once. If it is unreachable, the catalog notes that; no error is raised."""
    moment = catalog.moment()
    try:
        await _learn(catalog, tier, await tier.listing(), moment)
    except TierdError as error:
        catalog.lost_tier(tier.name, str(error))


async def _learn(catalog: Catalog, tier: Tier, listing: Listing, moment: int) -> None:
    manifests, unreadable = await _manifests(catalog, tier, listing)
    entries = {checkpoint: (manifest, listing.milestones(checkpoint)) for checkpoint, manifest in manifests.items()}
    for run, generation in listing.generations.items():
        catalog.saw_generation(run, generation)
    used = sum(size for files in listing.files.values() for size in files.values())
    diagnoses = {
        checkpoint: diagnosis for checkpoint in entries if (diagnosis := listing.diagnosis(checkpoint)) is not None
    }
    catalog.saw_tier(
        tier.name,
        entries,
        unreadable,
        used,
        since=moment,
        diagnoses=diagnoses,
        fingerprints={checkpoint: listing.fingerprints[checkpoint] for checkpoint in entries},
        partial=listing.partial,
    )


async def _manifests(
    catalog: Catalog, tier: Tier, listing: Listing
) -> tuple[dict[CheckpointId, Manifest], dict[CheckpointId, str]]:
    """(manifests, reasons why not) of the committed checkpoints. A manifest is read where this tier lists it for the
    first time, or with another size or ETag: the manifest in hot proves nothing about the replica in cold."""
    manifests: dict[CheckpointId, Manifest] = {}
    unreadable: dict[CheckpointId, str] = {}
    read_before = catalog.tiers[tier.name].fingerprints
    unread: list[CheckpointId] = []
    for checkpoint in listing.committed:
        known = catalog.get(checkpoint)
        if known and tier.name in known.tiers and read_before.get(checkpoint) == listing.fingerprints[checkpoint]:
            manifests[checkpoint] = known.manifest
        else:
            unread.append(checkpoint)
    if tier.cache is not None and len(unread) > BATCH:
        manifests |= await tier.cache.read({checkpoint: listing.fingerprints[checkpoint] for checkpoint in unread})
        unread = [checkpoint for checkpoint in unread if checkpoint not in manifests]
    for batch in _batches(unread, listing):
        for checkpoint, manifest in zip(batch, await tier.manifests(batch), strict=True):
            if isinstance(manifest, Manifest):
                manifests[checkpoint] = manifest
            elif not isinstance(manifest, NotFound):  # NotFound: deleted since the listing
                unreadable[checkpoint] = str(manifest)
    if tier.cache is not None and len(unread) > BATCH:
        await tier.cache.write(manifests, listing.fingerprints)
    for checkpoint, manifest in list(manifests.items()):
        reason = _conflict(catalog.get(checkpoint), tier, manifest)
        if _missing(manifest, listing.files[checkpoint]):
            # A listing is not atomic: list the folder again, because the checkpoint may have been deleted meanwhile.
            listing.files[checkpoint] = await _files(tier, checkpoint)
            reason = reason or _missing(manifest, listing.files[checkpoint])
        if layout.MANIFEST not in listing.files[checkpoint]:
            del manifests[checkpoint]
        elif reason:
            del manifests[checkpoint]
            unreadable[checkpoint] = f"{checkpoint} in {tier.name}: {reason}"
    return manifests, unreadable


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


def _missing(manifest: Manifest, files: dict[str, int]) -> str:
    """Which file of the manifest is missing or has another size; empty if none."""
    for entry in manifest.files:
        if files.get(entry.name) != entry.size_bytes:
            return f"{entry.name} is missing or has another size"
    return ""


def _conflict(known: Entry | None, tier: Tier, manifest: Manifest) -> str:
    """Whether another tier has a different manifest of this checkpoint, as text; empty if not."""
    others = known.tiers - {tier.name} if known else frozenset()
    if known is None or not others or known.manifest is manifest or known.manifest == manifest:
        return ""
    return f"its manifest differs from the one in {', '.join(sorted(others))}"


class Lister:
    """Lists one tier: at an interval, and when it may have changed."""

    name = "list"
    is_urgent = True

    def __init__(self, catalog: Catalog, tier: Tier, interval_s: float) -> None:
        self.interval_s = interval_s
        self._catalog = catalog
        self._tier = tier
        self.has_listed = asyncio.Event()

    async def run_once(self) -> bool:
        try:
            if not self.has_listed.is_set() and isinstance(self._tier.store, DirectoryStore):
                await self._tier.store.sweep_partials()  # left by killed writers; live writers hold a lock
            await refresh(self._catalog, self._tier)
        finally:
            self.has_listed.set()
        knowledge = self._catalog.tiers[self._tier.name]
        if not knowledge.is_known:
            raise TierUnreachable(knowledge.error)
        return True
