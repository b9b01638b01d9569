"""Looks at a tier and tells the catalog what is there; at start, also clears what a crash left in the hot tier.

halt, not guess: a manifest that cannot be read, or a checkpoint with a file missing, is reported and left alone.
"""

from __future__ import annotations

import asyncio

from tierd.catalog import Catalog
from tierd.errors import Corrupt, NewerFormat, NotFound, TierUnreachable
from tierd.format import layout
from tierd.format.ids import CheckpointId
from tierd.format.manifest import Manifest
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.tier import Listing, Tier

READS_IN_FLIGHT = 16  # manifests read at once on a first look


async def recover(catalog: Catalog, hot: Tier, store: DirectoryStore) -> None:
    """Once, before the doors open: nothing half-written stays in the hot tier, and the catalog knows it.

    The directory is locked, so whatever has no manifest now is what a killed daemon was writing; the trainer
    still holds it and sends it again.
    """
    await store.sweep_partials()
    for checkpoint in (await hot.listing()).partial:
        await hot.delete(checkpoint)
    await refresh(catalog, hot)


async def refresh(catalog: Catalog, tier: Tier) -> None:
    """One look at a tier. An unreachable one is noted in the catalog as not known; nothing is raised for it."""
    moment = catalog.moment()
    try:
        listing = await tier.listing()
        found, unreadable = await _read_manifests(catalog, tier, listing)
    except TierUnreachable as error:
        catalog.lost_tier(tier.name, str(error))
        return
    for run, generation in listing.generations.items():
        catalog.saw_generation(run, generation)
    used = sum(size for files in listing.files.values() for size in files.values())
    catalog.saw_tier(tier.name, found, unreadable, used, since=moment)


async def _read_manifests(
    catalog: Catalog, tier: Tier, listing: Listing
) -> tuple[dict[CheckpointId, tuple[Manifest, frozenset[str]]], dict[CheckpointId, str]]:
    """Committed checkpoints with their manifests, read only where no tier has shown it before: they never change."""
    found: dict[CheckpointId, tuple[Manifest, frozenset[str]]] = {}
    unreadable: dict[CheckpointId, str] = {}
    gate = asyncio.Semaphore(READS_IN_FLIGHT)

    async def read(checkpoint: CheckpointId) -> None:
        try:
            async with gate:
                manifest = catalog.manifest(checkpoint) or await tier.manifest(checkpoint)
        except (Corrupt, NewerFormat) as error:
            unreadable[checkpoint] = str(error)
            return
        except NotFound:
            return  # deleted since it was listed
        files = listing.files[checkpoint]
        missing = [entry.name for entry in manifest.files if files.get(entry.name) != entry.size_bytes]
        if missing:
            unreadable[checkpoint] = f"{checkpoint} in {tier.name}: {missing[0]} is missing or has another size"
        else:
            marked = (layout.milestone_of(name) for name in files)
            found[checkpoint] = manifest, frozenset(name for name in marked if name)

    await asyncio.gather(*(read(checkpoint) for checkpoint in listing.committed))
    return found, unreadable


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
