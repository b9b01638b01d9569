"""Looks at some checkpoints of a cold tier: what a node does that leaves the listing to the daemon of rank 0.

2,048 nodes that each list a tier of 240,000 objects every ten minutes would make some 800 requests a second. A look
costs one to three requests for each checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from tierd.catalog.catalog import Catalog
from tierd.catalog.entry import Entry
from tierd.catalog.identity import Identities
from tierd.catalog.listing import newest_claim, refresh_run
from tierd.format import layout
from tierd.format.ids import CheckpointId, Generation, Run
from tierd.tiers.pool import for_each
from tierd.tiers.tier import Tier
from tierd.tiers.tier_listing import Listing

AT_ONCE = 4
PAGE_FILES = 900  # of a checkpoint: so many fit into one page of a listing, with its markers


async def look_at(
    catalog: Catalog, tier: Tier, identities: Identities, *, runs: Collection[Run], held: Iterable[CheckpointId]
) -> bool:
    """Look at these checkpoints in the tier, and at the newest claim of these runs, and enter what has changed.
    Returns False if something differs that only a listing of the tier can enter: a checkpoint is gone without a
    tombstone, has lost a file or has another manifest, or its tombstone was cleared. Raises as the tier's store, and
    TierUnreachable when the tier is not the right place."""
    await identities.check(tier)
    differing: list[CheckpointId] = []

    async def compare(checkpoint: CheckpointId) -> None:
        if not await _agrees(catalog, tier, identities, checkpoint):
            differing.append(checkpoint)

    for run in sorted(runs):
        await _look_for_claim(catalog, tier, run)
    await for_each(AT_ONCE, list(held), compare)
    if not differing:
        catalog.looked(tier.name)
    return not differing


async def _look_for_claim(catalog: Catalog, tier: Tier, run: Run) -> None:
    known = catalog.generation_max(run)
    if (newest := await newest_claim(catalog, tier, run, above=known)) > known:
        catalog.saw_generation(run, Generation(newest))


async def _agrees(catalog: Catalog, tier: Tier, identities: Identities, checkpoint: CheckpointId) -> bool:
    """Whether the catalog agrees with the tier about one checkpoint, after what has changed was entered."""
    known = catalog.in_tier(tier.name).get(checkpoint)
    is_small = known is not None and len(known.manifest.files) <= PAGE_FILES
    listing = await _markers(tier, checkpoint, with_shards=is_small)
    files = listing.files.get(checkpoint, {})
    if catalog.in_tier(tier.name).get(checkpoint) is not known:
        return True  # this daemon has committed or deleted it meanwhile
    if checkpoint in listing.committed:
        if known is None:  # if it cannot be read, that is known then
            await refresh_run(catalog, tier, checkpoint.run, identities, prefix=layout.checkpoint_prefix(checkpoint))
            return True
        is_torn = is_small and known.manifest.missing_file(files)
        return not is_torn and await _has_entered(catalog, tier, known, listing)
    knowledge = catalog.tiers[tier.name]
    is_known_to_be_there = known is not None or checkpoint in knowledge.unreadable
    is_missing = checkpoint in knowledge.missing
    if layout.GONE in files and (is_known_to_be_there or is_missing or knowledge.gone.get(checkpoint) is None):
        save = (await tier.buried([checkpoint])).get(checkpoint)
        if catalog.in_tier(tier.name).get(checkpoint) is known:
            if is_known_to_be_there or is_missing:
                catalog.drop(checkpoint, tier.name)
            catalog.saw_gone(tier.name, checkpoint, save)
    # False if a tombstone was cleared: the tier is listed before the policy decides whether to send it again.
    return layout.GONE in files or not (is_known_to_be_there or checkpoint in knowledge.gone)


async def _markers(tier: Tier, checkpoint: CheckpointId, *, with_shards: bool) -> Listing:
    """A listing of one checkpoint that has all its markers. Without the shards, of which there may be thousands, it
    takes a request for the first names, and one for each kind of markers that sort after the shards."""
    prefix = layout.checkpoint_prefix(checkpoint)
    listing = await tier.listing(prefix, until="" if with_shards else f"{prefix}{layout.MARKERS_END}")
    if not with_shards and checkpoint in listing.committed:
        for kind in layout.LATE_MARKERS:
            late = await tier.listing(f"{prefix}{kind}")
            listing.files[checkpoint] |= late.files.get(checkpoint, {})
    return listing


async def _has_entered(catalog: Catalog, tier: Tier, known: Entry, listing: Listing) -> bool:
    """Enter the markers that the catalog lacks. False if the manifest differs from the catalog's. It is read only if
    its size or ETag is not as listed last; the folder, which may have many pages, is not listed again."""
    checkpoint, manifest = known.id, known.held(tier.name)
    if catalog.tiers[tier.name].fingerprints.get(checkpoint) != listing.fingerprints[checkpoint]:
        (read,) = await tier.manifests([checkpoint])
        if catalog.in_tier(tier.name).get(checkpoint) is not known:
            return True
        if read != manifest:
            return False
    diagnosis = listing.diagnosis(checkpoint)
    catalog.enter_run(
        tier.name,
        {checkpoint: (manifest, listing.marks(checkpoint))},
        {},
        diagnoses={} if diagnosis is None else {checkpoint: diagnosis},
        newer_format=(),
        foreign=listing.foreign,
        fingerprints=listing.fingerprints,
    )
    return True
