"""Lists a tier and enters what it holds into the catalog: manifests, markers, and which checkpoints are unreadable.

halt, not guess: a manifest that cannot be read, or a checkpoint with a file missing, is reported and left alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest

from tierd.catalog.catalog import Catalog
from tierd.catalog.entry import NOT_LISTED_YET, SentParts
from tierd.catalog.identity import Identities
from tierd.errors import Corrupt, Foreign, NewerFormat, NotFound, TierdError, TierUnreachable
from tierd.format import layout
from tierd.format.ids import GENERATION_SEEN_MAX, HOT, CheckpointId, Generation, Run
from tierd.format.manifest import Manifest
from tierd.tiers.pool import for_each
from tierd.tiers.tier import CLAIMS_KEPT, Tier
from tierd.tiers.tier_listing import OBJECTS_AT_ONCE, Listing

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


async def refresh_run(catalog: Catalog, tier: Tier, run: Run, identities: Identities, *, prefix: str = "") -> None:
    """List one run in the tier and enter what is new: a few requests, where a whole tier may take minutes. `prefix`: of
    the keys, where less than the run is listed. Raises TierUnreachable, also when the tier is not the right place."""
    await identities.check(tier)
    listing = await tier.listing(prefix or f"{run}/")
    if prefix:
        listing.numbers.setdefault(run, set()).update(map(Generation, catalog.claims.names(run, tier.name)))
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

    A cold tier may have newer checkpoints than hot, because hot was full, or was replaced while the trainers went on.
    So the run is first listed, once, in each cold tier that was not listed since the start of this daemon; if no
    checkpoint of the run is known, also in each whose listing failed. A tier that does not answer in time is left out.
    """

    async def list_in(tier: Tier) -> None:
        try:
            async with asyncio.timeout(SEQUENCE_TIMEOUT_S):
                await refresh_run(catalog, tier, run, identities)
        except Exception as error:  # broad: whatever the cause, hot does not wait for a cold tier
            log.warning("commit a checkpoint of %s without a listing of %s: %s", run, tier.name, error)

    is_new = catalog.sequence_max(run) == 0
    unknown = [tier for tier in cold if not catalog.tiers[tier.name].is_known]
    not_yet = {tier.name for tier in unknown if catalog.tiers[tier.name].error == NOT_LISTED_YET}
    asked_before = catalog.asked_for_sequence.setdefault(run, set())
    unlisted = [tier for tier in unknown if is_new or tier.name in not_yet - asked_before]
    await asyncio.gather(*map(list_in, unlisted))
    asked_before |= not_yet  # only now, so that a second caller meanwhile waits, too
    return max(catalog.sequence_max(run), in_memory(run)) + 1


async def enter_listing(
    catalog: Catalog, tier: Tier, listing: Listing, *, since: int, is_read_only: bool = False
) -> None:
    """Enter a listing of the whole tier that was begun when the catalog had `since` changes: it replaces what was
    known. Raises TierUnreachable when the manifests cannot be read."""
    listed = await _read(catalog, tier, listing, is_read_only=is_read_only)
    gone = await _deleted_saves(catalog, tier, listing)
    catalog.enter_listing(
        tier.name,
        listed.replicas,
        listed.unreadable,
        since=since,
        diagnoses=listed.diagnoses,
        fingerprints={checkpoint: listing.fingerprints[checkpoint] for checkpoint in listed.replicas},
        partial=listing.partial,
        sent={c: SentParts(*sent) for c in listing.partial if (sent := listing.sent_ranks(c)) is not None},
        gone=gone,
        newer_format=listed.newer_format,
        foreign=listed.foreign,
    )


async def _deleted_saves(catalog: Catalog, tier: Tier, listing: Listing) -> dict[CheckpointId, str | None]:
    """The checkpoints with a tombstone, and what it says; see TierKnowledge. It is read once, and only where another
    tier has a checkpoint of this id: that may be another save."""
    former = catalog.tiers[tier.name].gone
    gone = {checkpoint: former.get(checkpoint) for checkpoint in listing.gone}
    unread = [checkpoint for checkpoint, save in gone.items() if save is None and catalog.get(checkpoint)]
    return gone | await tier.buried(unread)


async def _enter_run(catalog: Catalog, tier: Tier, listing: Listing) -> None:
    """Enter a listing of one run: it only adds to what is known. Raises as `enter_listing`."""
    listed = await _read(catalog, tier, listing, is_read_only=False)
    catalog.enter_run(
        tier.name,
        listed.replicas,
        listed.unreadable,
        diagnoses=listed.diagnoses,
        newer_format=listed.newer_format,
        foreign=listed.foreign,
        fingerprints=listing.fingerprints,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listed:
    """What a listing and its manifests say. `replicas`: (manifest, milestones). `unreadable`: why. `diagnoses`: whether
    healthy, of the replicas that have a marker. `newer_format`: the unreadable ones that a later tierd wrote.
    `foreign`: why, by key."""

    replicas: dict[CheckpointId, tuple[Manifest, frozenset[str]]]
    unreadable: dict[CheckpointId, str]
    diagnoses: dict[CheckpointId, bool]
    newer_format: set[CheckpointId]
    foreign: dict[str, str]


async def _read(catalog: Catalog, tier: Tier, listing: Listing, *, is_read_only: bool) -> _Listed:
    """Read the manifests of a listing. Generations only grow, so they enter the catalog at once."""
    _leave_out_forged_generations(catalog, tier, listing)
    manifests, unreadable, newer_format, foreign = await _manifests(catalog, tier, listing, is_read_only=is_read_only)
    for run, generation in listing.generations.items():
        catalog.saw_generation(run, generation)
    for checkpoint in newer_format:
        catalog.saw_generation(checkpoint.run, checkpoint.generation)
    replicas: dict[CheckpointId, tuple[Manifest, frozenset[str]]] = {}
    for count, (checkpoint, manifest) in enumerate(manifests.items(), start=1):
        replicas[checkpoint] = manifest, listing.marks(checkpoint)
        if count % OBJECTS_AT_ONCE == 0:
            await asyncio.sleep(0)
    return _Listed(
        replicas=replicas,
        unreadable=unreadable,
        diagnoses={c: diagnosis for c in manifests if (diagnosis := listing.diagnosis(c)) is not None},
        newer_format=newer_format,
        foreign=foreign | listing.foreign,
    )


def _leave_out_forged_generations(catalog: Catalog, tier: Tier, listing: Listing) -> None:
    """Remove from the listing the generations that no start of the run can have reached: to count one would leave no
    numbers to claim. Those that are signed or in hot count as reached. Enters the claims that are left."""
    claims, is_here, now_s = catalog.claims, tier.name == HOT, time.time()
    claims.are_signed = tier.keyring is not None
    is_trusted = is_here or claims.are_signed
    runs = {checkpoint.run for checkpoint in listing.files} | listing.generations.keys() | listing.numbers.keys()
    limits = {run: GENERATION_SEEN_MAX if is_trusted else claims.generation_limit(run, now_s) for run in runs}
    for checkpoint in [checkpoint for checkpoint in listing.files if checkpoint.generation > limits[checkpoint.run]]:
        if checkpoint in listing.committed:
            why = f"{checkpoint} in {tier.name}: no start of the run can have reached its generation"
            listing.foreign[layout.manifest_key(checkpoint)] = why
        listing.committed.discard(checkpoint)
        listing.partial.pop(checkpoint, None)
        del listing.files[checkpoint]
    for run, limit in limits.items():
        claimed = {generation for generation in listing.claims.get(run, ()) if generation <= limit}
        for forged in listing.claims.get(run, set()) - claimed:
            key = layout.generation_key(run, forged)
            listing.foreign[key] = f"{key} in {tier.name}: no start of the run can have reached this generation"
        manifests = {c.generation for c in listing.committed if c.run == run and tier.keyring is None}
        listing.generations[run] = max([*claimed, *manifests], default=Generation(0))
        claims.saw(run, claimed, tier.name, is_here=is_here)
        claims.saw_names(run, listing.numbers.get(run, ()), tier.name)


async def newest_claim(catalog: Catalog, tier: Tier, run: Run, *, above: int) -> int:
    """The highest generation above `above` that a start of the run has claimed in the tier; `above` if there is none.
    Generations that no start can have reached do not count. One LIST, and GETs of at most CLAIMS_KEPT newer claims."""
    is_trusted = tier.keyring is not None
    limit = GENERATION_SEEN_MAX if is_trusted else catalog.claims.generation_limit(run, time.time())
    found = [layout.parse_generation_key(stored.key) for stored in await tier.store.list(layout.generation_prefix(run))]
    newer = sorted((each[1] for each in found if each is not None and above < each[1] <= limit), reverse=True)
    for generation in newer[:CLAIMS_KEPT]:
        claim = await tier.claim(run, generation)
        if claim is not None and claim.claim:
            return generation
    return above


async def _manifests(
    catalog: Catalog, tier: Tier, listing: Listing, *, is_read_only: bool
) -> tuple[dict[CheckpointId, Manifest], dict[CheckpointId, str], set[CheckpointId], dict[str, str]]:
    """Of the committed: (manifests, errors of the others, those in a newer format, why others are foreign, by key).

    Read where this tier lists one for the first time, or with another size or ETag: the manifest in hot proves nothing
    about the replica in cold."""
    readable: dict[CheckpointId, Manifest] = {}
    unreadable: dict[CheckpointId, str] = {}
    newer_format: set[CheckpointId] = set()
    foreign: dict[str, str] = {}
    read_before = catalog.tiers[tier.name].fingerprints
    unread: list[CheckpointId] = []
    for count, checkpoint in enumerate(listing.committed, start=1):
        if count % OBJECTS_AT_ONCE == 0:
            await asyncio.sleep(0)
        known = catalog.in_tier(tier.name).get(checkpoint)
        if known and read_before.get(checkpoint) == listing.fingerprints[checkpoint]:
            readable[checkpoint] = known.held(tier.name)
        else:
            unread.append(checkpoint)
    # Small ones come first, so that a few large ones, which anyone who can write to a bucket can put there, displace no
    # other.
    unread.sort(key=lambda checkpoint: listing.fingerprints[checkpoint][0])
    memory = _ManifestMemory(catalog, tier, listing)
    if tier.keyring is None:
        refused = {checkpoint: why for checkpoint in unread if (why := memory.refusal(checkpoint))}
        unreadable |= refused
    else:
        refused = _known_foreign(tier, unread, listing)
        foreign |= {layout.manifest_key(checkpoint): why for checkpoint, why in refused.items()}
    unread = [checkpoint for checkpoint in unread if checkpoint not in refused]

    def enter(checkpoint: CheckpointId, manifest: Manifest) -> None:
        # What is not signed takes no space from what is.
        if tier.keyring is not None and (why := memory.refusal(checkpoint)):
            unreadable[checkpoint] = why
        else:
            readable[checkpoint] = manifest

    if tier.cache is not None and len(unread) > BATCH:
        cached = await tier.cache.read({c: listing.fingerprints[c] for c in unread}, tier.keyring)
        for checkpoint in unread:
            if checkpoint in cached:
                enter(checkpoint, cached[checkpoint])
        unread = [c for c in unread if c not in cached]
    if not is_read_only:
        # A killed daemon may have committed one without an fsync of its folder. Make these durable before one of them
        # can be the reason to delete another replica.
        newest = nlargest(UNSYNCED_MAX, unread, key=lambda checkpoint: listing.written_at_s.get(checkpoint, 0.0))
        await tier.store.make_durable(
            [layout.file_key(checkpoint, listing.record(checkpoint)) for checkpoint in newest]
        )
    for batch in _batches(unread, listing):
        size_max = max(listing.fingerprints[checkpoint][0] for checkpoint in batch)
        manifests = await tier.manifests(batch, size_max=size_max, record=listing.record)
        for checkpoint, manifest in zip(batch, manifests, strict=True):
            tier.foreign.pop(checkpoint, None)
            if isinstance(manifest, Manifest):
                enter(checkpoint, manifest)
            elif isinstance(manifest, Foreign):
                foreign[layout.manifest_key(checkpoint)] = manifest.message
                tier.foreign[checkpoint] = (listing.fingerprints[checkpoint], manifest.message)
            elif not isinstance(manifest, NotFound):  # deleted since it was listed
                unreadable[checkpoint] = str(manifest)
                if isinstance(manifest, NewerFormat):
                    newer_format.add(checkpoint)
    if tier.cache is not None and len(unread) > BATCH:
        await tier.cache.write(readable, listing.fingerprints)
    for count, (checkpoint, manifest) in enumerate(list(readable.items()), start=1):
        if count % OBJECTS_AT_ONCE == 0:
            await asyncio.sleep(0)
        known, why = catalog.get(checkpoint), ""
        others = known.tiers - {tier.name} if known else None
        if known and others and (contradiction := known.contradiction(manifest)):
            why = f"{contradiction}, compared with {', '.join(sorted(others))}"
        if manifest.missing_file(listing.files[checkpoint]):
            # The listing took a while: list it again, for it may just have been deleted.
            listing.files[checkpoint] = await files_of(tier, checkpoint)
            why = why or manifest.missing_file(listing.files[checkpoint])
        if listing.record(checkpoint) not in listing.files[checkpoint]:
            del readable[checkpoint]
        elif why:
            del readable[checkpoint]
            unreadable[checkpoint] = f"{checkpoint} in {tier.name}: {why}"
    return readable, unreadable, newer_format, foreign


def _known_foreign(tier: Tier, unread: Iterable[CheckpointId], listing: Listing) -> dict[CheckpointId, str]:
    """Of the manifests, with a key, those that are not read: why they are foreign. One that is too large was not signed
    by a daemon with these limits."""
    foreign: dict[CheckpointId, str] = {}
    for checkpoint in unread:
        size_bytes = listing.fingerprints[checkpoint][0]
        fingerprint, why = tier.foreign.get(checkpoint, (None, ""))
        if size_bytes > tier.manifest_bytes_max:
            foreign[checkpoint] = _too_large(checkpoint, tier, size_bytes)
        elif fingerprint == listing.fingerprints[checkpoint]:
            foreign[checkpoint] = why
    return foreign


def _too_large(checkpoint: CheckpointId, tier: Tier, size_bytes: int) -> str:
    return (
        f"{checkpoint} in {tier.name}: its manifest of {size_bytes} bytes is not read: limits.manifest_mib_max is "
        f"{tier.limits.manifest_mib_max}"
    )


class _ManifestMemory:
    """What the known manifests of all tiers take of limits.manifests_mib_max."""

    def __init__(self, catalog: Catalog, tier: Tier, listing: Listing) -> None:
        self._tier = tier
        self._listing = listing
        self._sizes: dict[CheckpointId, int] = {}
        for knowledge in catalog.tiers.values():
            self._sizes |= {checkpoint: size_bytes for checkpoint, (size_bytes, _) in knowledge.fingerprints.items()}
        self._total_bytes = sum(self._sizes.values())

    def refusal(self, checkpoint: CheckpointId) -> str:
        """Why the manifest is not kept in memory. Empty: it is counted now."""
        size_bytes = self._listing.fingerprints[checkpoint][0]
        added_bytes = max(0, size_bytes - self._sizes.get(checkpoint, 0))
        if size_bytes > self._tier.manifest_bytes_max:
            return _too_large(checkpoint, self._tier, size_bytes)
        if self._total_bytes + added_bytes > self._tier.limits.manifests_mib_max << 20:
            return (
                f"{checkpoint} in {self._tier.name}: its manifest of {size_bytes} bytes is not read: with the others "
                "it exceeds limits.manifests_mib_max"
            )
        self._total_bytes += added_bytes
        return ""


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


async def check_sizes(manifest: Manifest, tier: Tier) -> None:
    """Raises Corrupt unless the tier has every file in the size that the manifest says, before space is reserved for
    them: a forged manifest must not fill a disk."""
    if problem := manifest.missing_file(await files_of(tier, manifest.id)):
        raise Corrupt(f"read {manifest.id} in {tier.name}: {problem}", hint="docs/RUNBOOK.md#unreadable-manifest")


async def files_of(tier: Tier, checkpoint: CheckpointId, *, until: str = "") -> dict[str, int]:
    """The sizes by name of a checkpoint's files in the tier, committed or not. With a key, without the markers that it
    has not signed. `until`: files whose names sort after it may be left out, where that saves requests."""
    prefix = layout.checkpoint_prefix(checkpoint)
    listing = await tier.listing(prefix, until=until and f"{prefix}{until}")
    return listing.files.get(checkpoint, {})


async def is_listed(tier: Tier, checkpoint: CheckpointId) -> bool:
    """Whether the checkpoint, or in hot a part of it, is committed in the tier, readable or not."""
    return checkpoint in (await tier.listing(layout.checkpoint_prefix(checkpoint))).committed
