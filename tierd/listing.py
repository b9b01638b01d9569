"""Lists a tier and enters what it holds into the catalog: manifests, markers, and which checkpoints are unreadable.

halt, not guess: a manifest that cannot be read, or a checkpoint with a file missing, is reported and left alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest

from tierd.catalog import Catalog
from tierd.errors import Corrupt, NewerFormat, NotFound, TierdError, TierUnreachable
from tierd.format import layout
from tierd.format.ids import CheckpointId, Run
from tierd.format.manifest import Manifest
from tierd.identity import Identities
from tierd.tiers.pool import for_each
from tierd.tiers.tier import Listing, Tier

log = logging.getLogger("tierd")

BATCH = 64  # manifests read at once: bounds how long the event loop is busy
BATCH_BYTES = 4 << 20  # of manifests that are read at once, except for a larger one, which is read alone
UNSYNCED_MAX = 64  # the last written: a daemon fsyncs each checkpoint before it begins the next, few at once

CONFIRMED_MAX = 64  # of checkpoints that disappeared, the newest are looked for again one by one
CONFIRMED_AT_ONCE = 4
SEQUENCE_TIMEOUT_S = 5.0  # how long the first commit of a run on a new hot disk waits for the cold tiers


async def refresh(
    catalog: Catalog, tier: Tier, identities: Identities | None = None, *, is_read_only: bool = False
) -> None:
    """List the tier once. If that fails, or the tier is not the right place, the catalog notes it as not known, and
    nothing is raised.

    `identities`: None where any place will do. `is_read_only`: nothing will be deleted, copied or reported as durable
    because of this listing.
    """
    since = catalog.changes
    try:
        listing = await tier.listing()
        if identities is not None:
            await identities.check(tier, listing)
        if absent := catalog.absent(tier.name, listing.committed, since=since):
            await _confirm_absence(tier, absent[:CONFIRMED_MAX])
            if identities is not None:  # an unmounted disk takes checkpoints and markers with it
                await identities.check(tier)
        await enter_listing(catalog, tier, listing, since=since, is_read_only=is_read_only)
    except TierdError as error:
        catalog.listing_failed(tier.name, str(error))
    except Exception as error:  # broad: whatever the cause, the former listing must not justify a deletion
        log.exception("list %s", tier.name)
        catalog.listing_failed(tier.name, f"{type(error).__name__}: {error}")


async def refresh_run(catalog: Catalog, tier: Tier, run: Run, identities: Identities) -> None:
    """List one run in the tier and enter what is new: a few requests, where a whole tier may take minutes.

    Raises TierUnreachable, also when the tier is not the right place.
    """
    await identities.check(tier)
    listing = await tier.listing(f"{run}/")
    if not listing.committed:
        await identities.check(tier)  # it may have been unmounted in between
    await _enter_run(catalog, tier, listing)


async def _confirm_absence(tier: Tier, checkpoints: Sequence[CheckpointId]) -> None:
    """Raises TierUnreachable when one of them is there although the listing lacks it: some servers list late."""

    async def confirm(checkpoint: CheckpointId) -> None:
        if await is_listed(tier, checkpoint):
            message = f"list {tier.name}: {checkpoint} is there, and a listing that has just ended lacks it"
            raise TierUnreachable(message, hint="the tier is listed again")

    await for_each(CONFIRMED_AT_ONCE, checkpoints, confirm)


async def next_sequence(
    catalog: Catalog, cold: Iterable[Tier], run: Run, identities: Identities, *, in_memory: Callable[[Run], int]
) -> int:
    """The sequence of the run's next checkpoint: one more than the highest in any tier. `in_memory`: the highest
    number of a snapshot that is being written; 0 when there is none.

    If no checkpoint of the run is known, the hot disk may be new while the trainers live on: then each cold tier that
    was not listed since the start is listed first. One that cannot be listed in time is left out.
    """

    async def list_in(tier: Tier) -> None:
        try:
            async with asyncio.timeout(SEQUENCE_TIMEOUT_S):
                await refresh_run(catalog, tier, run, identities)
        except Exception as error:  # broad: whatever the cause, hot does not wait for a cold tier
            log.warning("commit the first checkpoint of %s without a listing of %s: %s", run, tier.name, error)

    if catalog.sequence_max(run) == 0:
        await asyncio.gather(*(list_in(tier) for tier in cold if not catalog.tiers[tier.name].is_known))
    return max(catalog.sequence_max(run), in_memory(run)) + 1


async def enter_listing(
    catalog: Catalog, tier: Tier, listing: Listing, *, since: int, is_read_only: bool = False
) -> None:
    """Enter a listing of the whole tier that was begun when the catalog had `since` changes: it replaces what was
    known. Raises TierUnreachable when the manifests cannot be read."""
    listed = await _read(catalog, tier, listing, is_read_only=is_read_only)
    catalog.enter_listing(
        tier.name,
        listed.replicas,
        listed.unreadable,
        since=since,
        diagnoses=listed.diagnoses,
        fingerprints={checkpoint: listing.fingerprints[checkpoint] for checkpoint in listed.replicas},
        partial=listing.partial,
        newer_format=listed.newer_format,
    )


async def _enter_run(catalog: Catalog, tier: Tier, listing: Listing) -> None:
    """Enter a listing of one run: it only adds to what is known. Raises as `enter_listing`."""
    listed = await _read(catalog, tier, listing, is_read_only=False)
    catalog.enter_run(
        tier.name, listed.replicas, listed.unreadable, diagnoses=listed.diagnoses, newer_format=listed.newer_format
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listed:
    """What a listing and its manifests say. `replicas`: (manifest, milestones). `unreadable`: why. `diagnoses`: whether
    healthy, of the replicas that have a marker. `newer_format`: the unreadable ones that a later tierd wrote."""

    replicas: dict[CheckpointId, tuple[Manifest, frozenset[str]]]
    unreadable: dict[CheckpointId, str]
    diagnoses: dict[CheckpointId, bool]
    newer_format: set[CheckpointId]


async def _read(catalog: Catalog, tier: Tier, listing: Listing, *, is_read_only: bool) -> _Listed:
    """Read the manifests of a listing. Generations only grow, so they enter the catalog at once."""
    manifests, unreadable, newer_format = await _manifests(catalog, tier, listing, is_read_only=is_read_only)
    for run, generation in listing.generations.items():
        catalog.saw_generation(run, generation)
    return _Listed(
        replicas={checkpoint: (manifest, listing.milestones(checkpoint)) for checkpoint, manifest in manifests.items()},
        unreadable=unreadable,
        diagnoses={c: diagnosis for c in manifests if (diagnosis := listing.diagnosis(c)) is not None},
        newer_format=newer_format,
    )


async def _manifests(
    catalog: Catalog, tier: Tier, listing: Listing, *, is_read_only: bool
) -> tuple[dict[CheckpointId, Manifest], dict[CheckpointId, str], set[CheckpointId]]:
    """Of the committed: (manifests, errors of the others, those in a newer format). Read where this tier lists one for
    the first time, or with another size or ETag: the manifest in hot proves nothing about the replica in cold."""
    found: dict[CheckpointId, Manifest] = {}
    unreadable: dict[CheckpointId, str] = {}
    newer_format: set[CheckpointId] = set()
    read_before = catalog.tiers[tier.name].fingerprints
    unread: list[CheckpointId] = []
    for checkpoint in listing.committed:
        known = catalog.get(checkpoint)
        if known and tier.name in known.tiers and read_before.get(checkpoint) == listing.fingerprints[checkpoint]:
            found[checkpoint] = known.manifest
        else:
            unread.append(checkpoint)
    refused = _too_large(catalog, tier, unread, listing)
    unreadable |= refused
    unread = [checkpoint for checkpoint in unread if checkpoint not in refused]
    if tier.cache is not None and len(unread) > BATCH:
        found |= await tier.cache.read({c: listing.fingerprints[c] for c in unread})
        unread = [c for c in unread if c not in found]
    if not is_read_only:
        # A killed daemon may have committed one and not fsynced its folder. What is decided because of it, as a
        # deletion of another replica, must not outlast it.
        newest = nlargest(UNSYNCED_MAX, unread, key=lambda checkpoint: listing.written_at_s.get(checkpoint, 0.0))
        await tier.store.make_durable([layout.manifest_key(checkpoint) for checkpoint in newest])
    for batch in _batches(unread, listing):
        size_max = max(listing.fingerprints[checkpoint][0] for checkpoint in batch)
        for checkpoint, manifest in zip(batch, await tier.manifests(batch, size_max=size_max), strict=True):
            if isinstance(manifest, Manifest):
                found[checkpoint] = manifest
            elif not isinstance(manifest, NotFound):  # deleted since it was listed
                unreadable[checkpoint] = str(manifest)
                if isinstance(manifest, NewerFormat):
                    newer_format.add(checkpoint)
    if tier.cache is not None and len(unread) > BATCH:
        await tier.cache.write(found, listing.fingerprints)
    for checkpoint, manifest in list(found.items()):
        known, why = catalog.get(checkpoint), ""
        others = known.tiers - {tier.name} if known else None
        if known and others and known.manifest is not manifest and known.manifest != manifest:
            why = f"its manifest differs from the one in {', '.join(sorted(others))}"
        if missing_file(manifest, listing.files[checkpoint]):
            # The listing took a while: list it again, for it may just have been deleted.
            listing.files[checkpoint] = await files_of(tier, checkpoint)
            why = why or missing_file(manifest, listing.files[checkpoint])
        if layout.MANIFEST not in listing.files[checkpoint]:
            del found[checkpoint]
        elif why:
            del found[checkpoint]
            unreadable[checkpoint] = f"{checkpoint} in {tier.name}: {why}"
    return found, unreadable, newer_format


def _too_large(
    catalog: Catalog, tier: Tier, unread: Iterable[CheckpointId], listing: Listing
) -> dict[CheckpointId, str]:
    """Why each of these manifests is not read: it is too large, or all known manifests with it are. Small ones come
    first, so that a few large ones, which anyone who can write to a bucket can put there, displace no other."""
    sizes: dict[CheckpointId, int] = {}
    for knowledge in catalog.tiers.values():
        sizes |= {checkpoint: size_bytes for checkpoint, (size_bytes, _) in knowledge.fingerprints.items()}
    total_bytes, total_max = sum(sizes.values()), tier.limits.manifests_mib_max << 20
    refused: dict[CheckpointId, str] = {}
    for checkpoint in sorted(unread, key=lambda checkpoint: listing.fingerprints[checkpoint][0]):
        size_bytes = listing.fingerprints[checkpoint][0]
        added_bytes = max(0, size_bytes - sizes.get(checkpoint, 0))
        where = f"{checkpoint} in {tier.name}: its manifest of {size_bytes} bytes is not read"
        if size_bytes > tier.manifest_bytes_max:
            refused[checkpoint] = f"{where}: limits.manifest_mib_max is {tier.limits.manifest_mib_max}"
        elif total_bytes + added_bytes > total_max:
            refused[checkpoint] = f"{where}: with the others it exceeds limits.manifests_mib_max"
        else:
            total_bytes += added_bytes
    return refused


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


def missing_file(manifest: Manifest, files: dict[str, int]) -> str:
    """Which file of the manifest is missing or has another size; empty if none."""
    for entry in manifest.files:
        if files.get(entry.name) != entry.size_bytes:
            return f"{entry.name} is missing or has another size"
    return ""


async def check_sizes(manifest: Manifest, tier: Tier) -> None:
    """Raises Corrupt unless the tier has every file in the size that the manifest says, before space is reserved for
    them: a forged manifest must not fill a disk."""
    if problem := missing_file(manifest, await files_of(tier, manifest.id)):
        raise Corrupt(f"read {manifest.id} in {tier.name}: {problem}", hint="docs/RUNBOOK.md#unreadable-manifest")


async def files_of(tier: Tier, checkpoint: CheckpointId) -> dict[str, int]:
    """The sizes by name of a checkpoint's files in the tier, committed or not."""
    prefix = layout.checkpoint_prefix(checkpoint)
    return {stored.key.removeprefix(prefix): stored.size_bytes for stored in await tier.store.list(prefix)}


async def is_listed(tier: Tier, checkpoint: CheckpointId) -> bool:
    """Whether the tier has a manifest of the checkpoint, readable or not."""
    return layout.MANIFEST in await files_of(tier, checkpoint)
