"""A tier: a store and the commit protocol on top of it. The manifest is written last and deleted first.

So a checkpoint is listed in a tier if and only if it is whole there, whenever a writer was killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tierd.errors import Foreign, NotFound, Retained, TierdError, TierUnreachable, Unsupported
from tierd.failpoints import failpoint
from tierd.format import layout, tombstone
from tierd.format.claim import Claim, decode_claim
from tierd.format.health import MARKER_BYTES_MAX, Diagnosis
from tierd.format.ids import HOT, CheckpointId, Generation, Run
from tierd.format.manifest import Manifest, encode_marker
from tierd.format.signature import Keyring
from tierd.tiers.cache import Fingerprint, ManifestCache
from tierd.tiers.deletion import Deletion
from tierd.tiers.readable_tier import ReadableTier
from tierd.tiers.store import Store, StoredObject
from tierd.tiers.tier_listing import OBJECTS_AT_ONCE, Listing

MARKERS_AT_ONCE = 256  # read in one call; each has 64 KiB at most
CLAIMS_KEPT = 16  # more than daemons that may claim at once, each from the same listing


@dataclass(frozen=True, eq=False)
class Tier(ReadableTier):
    """`cache`: manifests that were read here before; None: not cached. `deleting`: deletions by this process that have
    begun and not ended, or failed: a listing may lack these checkpoints. `verified`: markers whose signature was found
    to be right, and those where it was not, with the reason. `foreign`: manifests that the keyring has not signed, as
    they were, with the reason; they are read again when they have changed. `claimed`: the generation of each run whose
    claim was confirmed last; see `deferred_claim`. `deletes`: False where another program deletes, with a credential
    that this one lacks: then no worker calls `delete`."""

    store: Store
    cache: ManifestCache | None = None
    deleting: dict[CheckpointId, Deletion] = field(default_factory=dict)
    verified: dict[str, tuple[tuple[int, str, float], str]] = field(default_factory=dict)
    claimed: dict[Run, Generation] = field(default_factory=dict)
    foreign: dict[CheckpointId, tuple[Fingerprint, str]] = field(default_factory=dict)
    deletes: bool = field(default=True, kw_only=True)

    async def listing(self, prefix: str = "", *, until: str = "") -> Listing:
        """Everything in the tier below `prefix`, from one listing of the store and without reading a manifest. With a
        keyring, markers that have changed are read, and those that it has not signed are left out. `until`: as of
        `Store.list`."""
        return await self._listing_of(await self.store.list(prefix, until=until), is_whole=not prefix)

    async def _listing_of(self, objects: Iterable[StoredObject], *, is_whole: bool) -> Listing:
        listing, folders = Listing(), dict[str, CheckpointId]()  # a folder has many files, and its name is parsed once
        newest_s: dict[CheckpointId, float] = {}
        for count, stored in enumerate(objects, start=1):
            if count % OBJECTS_AT_ONCE == 0:
                await asyncio.sleep(0)  # other tasks go on
            folder, _, name = stored.key.rpartition("/")
            if folder not in folders:
                parsed = layout.parse_key(stored.key)
                if parsed is None:
                    if claimed := layout.parse_generation_key(stored.key):
                        listing.add_claim(*claimed)
                        listing.add_number(*claimed)
                        listing.markers[stored.key] = (stored.size_bytes, stored.etag, stored.written_at_s)
                    elif identity := layout.parse_tier_marker(stored.key):
                        listing.identities.add(identity)
                    continue
                folders[folder] = parsed
                listing.files[parsed] = {}
            listing.files[folders[folder]][name] = stored.size_bytes
            newest_s[folders[folder]] = max(stored.written_at_s, newest_s.get(folders[folder], stored.written_at_s))
            if layout.is_marker(name):
                listing.markers[stored.key] = (stored.size_bytes, stored.etag, stored.written_at_s)
            if name == layout.MANIFEST or (self.name == HOT and layout.parse_node_file(name)):
                listing.add_number(folders[folder].run, folders[folder].generation)
                if self.keyring is None:  # else the manifests that are signed show theirs
                    listing.add_generation(folders[folder].run, folders[folder].generation)
                if name == layout.MANIFEST or folders[folder] not in listing.fingerprints:
                    listing.fingerprints[folders[folder]] = (stored.size_bytes, stored.etag)
                    listing.written_at_s[folders[folder]] = stored.written_at_s
        if self.keyring is not None:  # first: a tombstone that it has not signed deletes nothing
            await self._leave_out_foreign_markers(listing, self.keyring, is_whole=is_whole)
        for checkpoint, files in listing.files.items():
            if layout.MANIFEST not in files and (names := layout.node_files(files)):
                listing.node_files[checkpoint] = names
            is_committed = layout.MANIFEST in files or (self.name == HOT and checkpoint in listing.node_files)
            if is_committed and layout.GONE not in files:
                listing.committed.add(checkpoint)
            else:
                listing.partial[checkpoint] = newest_s[checkpoint]
            if layout.GONE in files:
                listing.gone.add(checkpoint)
        return listing

    async def _leave_out_foreign_markers(self, listing: Listing, keyring: Keyring, *, is_whole: bool) -> None:
        gone: list[str] = []
        changed = [key for key, mark in listing.markers.items() if self.verified.get(key, (None, ""))[0] != mark]
        for begin in range(0, len(changed), MARKERS_AT_ONCE):
            batch = changed[begin : begin + MARKERS_AT_ONCE]
            raws = await self.store.get_many(batch, size_max=MARKER_BYTES_MAX)
            for key, raw in zip(batch, raws, strict=True):
                if isinstance(raw, NotFound):  # deleted since it was listed
                    gone.append(key)
                    del listing.markers[key]
                    continue
                why = "" if isinstance(raw, bytes) else raw.message
                try:
                    if isinstance(raw, bytes):
                        keyring.check(key, raw, where=self.name)
                except Foreign as error:
                    why = error.message
                self.verified[key] = (listing.markers[key], why)
        if is_whole:
            for key in self.verified.keys() - listing.markers.keys():
                del self.verified[key]
            for checkpoint in self.foreign.keys() - listing.fingerprints.keys():
                del self.foreign[checkpoint]
        listing.foreign.update({key: why for key in listing.markers if (why := self.verified[key][1])})
        listing.generations.clear()
        for key in (*listing.foreign, *gone):
            if (checkpoint := layout.parse_key(key)) is not None:
                listing.files[checkpoint].pop(key.rpartition("/")[2])
            elif (claimed := layout.parse_generation_key(key)) is not None:
                listing.claims[claimed[0]].discard(claimed[1])
        for run, generations in listing.claims.items():
            for generation in generations:
                listing.add_generation(run, generation)

    async def identities(self) -> set[str]:
        """The identities of the tier, without a listing of its checkpoints."""
        return (await self.listing(layout.TIER_MARKERS)).identities

    async def mark_identity(self, identity: str, content: Mapping[str, Any]) -> None:
        """Give the tier an identity, besides those that it may have."""
        await self.store.put_bytes(layout.tier_marker_key(identity), encode_marker(content), if_absent=True)

    async def manifests(
        self,
        checkpoints: Sequence[CheckpointId],
        *,
        size_max: int | None = None,
        record: Callable[[CheckpointId], str] = lambda checkpoint: layout.MANIFEST,
    ) -> list[Manifest | TierdError]:
        """For each checkpoint its manifest, or the error that `manifest` would raise. Raises TierUnreachable.
        `size_max`: of each in bytes, if less than the limit: one may have been replaced since it was listed. `record`:
        the names of the files, where they are node files."""
        keys = [layout.file_key(checkpoint, record(checkpoint)) for checkpoint in checkpoints]
        return await self.decode_many(keys, size_max=size_max)

    async def decode_many(self, keys: Sequence[str], *, size_max: int | None = None) -> list[Manifest | TierdError]:
        """For each key of a manifest or node file what it holds, or why it cannot be used. Raises TierUnreachable."""
        size_max = self.manifest_bytes_max if size_max is None else min(size_max, self.manifest_bytes_max)
        raws = await self.store.get_many(keys, size_max=size_max)
        return await self.decoded(dict(zip(keys, raws, strict=True)))

    async def commit(
        self,
        manifest: Manifest,
        *,
        raw: bytes | None = None,
        milestones: Iterable[str] = (),
        diagnosis: Diagnosis | None = None,
    ) -> None:
        """Makes the checkpoint exist here, with its markers. Repeating it is harmless. `raw`: the manifest's bytes,
        where they exist.

        Raises Corrupt when another checkpoint is already committed under this id.
        """
        self.deleting.pop(manifest.id, None)
        # The markers are written before the commit, so a committed milestone always has its marker.
        for milestone in milestones:
            await self.mark_milestone(manifest.id, milestone, manifest.created_at)
        if diagnosis is not None:
            await self.mark_diagnosis(manifest.id, diagnosis)
        content = manifest.encode() if raw is None else raw
        if len(content) > self.manifest_bytes_max:
            message = f"commit {manifest.id} in {self.name}: its manifest has {len(content)} bytes"
            raise Unsupported(message, hint="raise limits.manifest_mib_max of every daemon that reads it")
        failpoint("tier.commit")
        if await self.store.put_bytes(manifest.key, content, if_absent=True):
            failpoint("tier.committed")
            return
        # It exists: another writer made it, or we did and the response was lost, or this daemon was killed.
        if not await self.is_committed(manifest, raw=content):
            raise TierUnreachable(
                f"commit {manifest.id} in {self.name}: the manifest existed and was deleted meanwhile",
                hint="someone is deleting it; the commit is tried again",
            )

    async def is_committed(self, manifest: Manifest, *, raw: bytes) -> bool:
        """Raises Corrupt when another checkpoint is committed under this id."""
        try:
            committed = await self.store.get_bytes(manifest.key, size_max=self.manifest_bytes_max)
        except NotFound:
            return False
        if committed != raw:
            raise self.conflict(manifest.id)
        return True

    async def delete(
        self, checkpoint: CheckpointId, *, confirm: Callable[[Collection[str]], bool] = lambda names: True
    ) -> bool:
        """The manifest first: killed at any instant, this leaves no checkpoint that lacks a file. In a cold tier
        then a tombstone, which stays: another daemon that has just found the files there may still write a manifest.
        Where there are node files, it comes before the manifest: as long as they are there, a daemon may commit again.

        `confirm`: called with the names of its files directly before the deletion, without markers that the keyring has
        not signed. If it returns False, nothing is deleted, and this returns False. It also returns False, and the
        manifest is put back, if another process has set a milestone since the listing. Raises NotFound if another
        process has deleted the manifest since then, or is deleting the other files.
        """
        if checkpoint in self.deleting and await self.keep_marked(checkpoint):
            return False
        names, keys = await self._files(checkpoint)
        if not confirm(names):
            return False
        if not keys - {layout.file_key(checkpoint, layout.GONE)}:
            self.deleting.pop(checkpoint, None)
            return True
        nodes = [layout.file_key(checkpoint, name) for name in layout.node_files(names)]
        key = layout.manifest_key(checkpoint)
        if nodes and self.name == HOT and key not in keys:
            key = nodes[0]
        found = (await self.store.get_many([key], size_max=self.manifest_bytes_max))[0] if key in keys else None
        if isinstance(found, NotFound):
            raise found
        raw = found if isinstance(found, bytes) else None
        deletion = self.deleting.get(checkpoint) or Deletion(checkpoint, key, raw, frozenset(names))
        self.deleting[checkpoint] = deletion
        is_own = not nodes or self.name == HOT or await self._bury(deletion)
        failpoint("tier.delete")
        try:
            await self.store.delete([key])
        except Retained:
            self.deleting.pop(checkpoint, None)
            raise
        if not nodes and self.name != HOT:
            is_own = await self._bury(deletion)
        if deletion.raw is not None:
            # `tierd milestone` writes its marker and then looks for the manifest. This deletes the manifest and then
            # looks for markers. So at least one of the two sees the other.
            names, keys = await self._files(checkpoint)
            if await self._keep_marked(deletion, names):
                return False
        if not is_own:
            self.deleting.pop(checkpoint, None)
            raise NotFound(f"delete {checkpoint} in {self.name}: another daemon is deleting it")
        try:
            left = keys - {key, layout.file_key(checkpoint, layout.GONE)}
            await self.store.delete(sorted(left, key=lambda key: (key not in nodes, key)))
        except TierdError as error:
            error.message += f"; {checkpoint} has no manifest in {self.name} any more, but some of its files are left"
            raise
        self.deleting.pop(checkpoint, None)
        return True

    async def _files(self, checkpoint: CheckpointId) -> tuple[Collection[str], set[str]]:
        """The names of its files, without markers that the keyring has not signed, and the keys of all."""
        objects = await self.store.list(layout.checkpoint_prefix(checkpoint))
        listing = await self._listing_of(objects, is_whole=False)
        return listing.files.get(checkpoint, {}).keys(), {stored.key for stored in objects}

    async def keep_marked(self, checkpoint: CheckpointId) -> bool:
        """Give up a deletion that has failed, if another process has set a milestone since it began and no file but the
        manifest is deleted: that is put back."""
        names, _ = await self._files(checkpoint)
        return await self._keep_marked(self.deleting[checkpoint], names)

    async def _keep_marked(self, deletion: Deletion, names: Collection[str]) -> bool:
        """As `keep_marked`. The tombstone of another deletion stays: that one may be deleting the files now. If it has
        ended, whoever clears the leftovers finds them all."""
        checkpoint = deletion.checkpoint
        milestones = deletion.milestones_set_since(names)
        if deletion.raw is None or not milestones:
            return False
        try:
            await self.store.put_bytes(deletion.key, deletion.raw, if_absent=True)
            if layout.GONE in names and await self._is_own(deletion):
                await self.store.delete([layout.file_key(checkpoint, layout.GONE)])
        except TierdError as error:
            error.message = (
                f"keep {checkpoint} in {self.name}: {', '.join(sorted(milestones))} was set while it was being "
                f"deleted, and its manifest could not be put back: {error.message}"
            )
            raise
        self.deleting.pop(checkpoint, None)
        return True

    async def _bury(self, deletion: Deletion) -> bool:
        """Write the tombstone. True if it is that of this deletion now, or if one is there that counts for nothing."""
        return await self.bury(deletion.checkpoint, deletion.save, deletion.token) or await self._is_own(deletion)

    async def _is_own(self, deletion: Deletion) -> bool:
        with suppress(Foreign):
            found = tombstone.decode(await self._marker(layout.file_key(deletion.checkpoint, layout.GONE)))
            return found is not None and found.deletion == deletion.token
        return False

    async def bury(self, checkpoint: CheckpointId, save: str = "", token: str = "") -> bool:
        """Write a tombstone: from now on the folder holds no checkpoint, whatever is written there. `save`: the digest
        of what is deleted; empty if it is not known. `token`: see Deletion. False if there was a tombstone."""
        content = encode_marker(tombstone.Tombstone(save=save, deletion=token))
        with suppress(Foreign):  # one that somebody else has put there counts for nothing, and delays nothing
            return await self.put_marker(layout.file_key(checkpoint, layout.GONE), content)
        return True

    async def unbury(self, checkpoint: CheckpointId, *, is_dry_run: bool = False) -> bool:
        """Delete the tombstone of a checkpoint that is whole: its deletion was given up after another one had written a
        tombstone, or was killed before it deleted a file. What no policy keeps is deleted again. Only for tombstones so
        old that no daemon is deleting the checkpoint now. False, and nothing is deleted, if it is not whole."""
        listing = await self.listing(layout.checkpoint_prefix(checkpoint))
        files = listing.files.get(checkpoint, {})
        if checkpoint not in listing.gone or layout.MANIFEST not in files:
            return False
        (manifest,) = await self.manifests([checkpoint])
        if not isinstance(manifest, Manifest) or manifest.missing_file(files):
            return False
        if not is_dry_run:
            await self.store.delete([layout.file_key(checkpoint, layout.GONE)])
        return True

    async def buried(self, checkpoints: Sequence[CheckpointId]) -> dict[CheckpointId, str]:
        """By checkpoint the save digest of what was deleted, from its tombstone; "" if that was not known. Without
        tombstones that are gone by now or cannot be read."""
        found: dict[CheckpointId, str] = {}
        for begin in range(0, len(checkpoints), MARKERS_AT_ONCE):
            batch = checkpoints[begin : begin + MARKERS_AT_ONCE]
            keys = [layout.file_key(checkpoint, layout.GONE) for checkpoint in batch]
            raws = await self.store.get_many(keys, size_max=MARKER_BYTES_MAX)
            for checkpoint, raw in zip(batch, raws, strict=True):
                if isinstance(raw, bytes) and (decoded := tombstone.decode(raw)) is not None:
                    found[checkpoint] = decoded.save
        return found

    async def mark_milestone(self, checkpoint: CheckpointId, milestone: str, created_at: str) -> None:
        await self._mark(checkpoint, layout.milestone_file(milestone), milestone=milestone, created_at=created_at)

    async def unmark_milestone(self, checkpoint: CheckpointId, milestone: str, removed_at: str) -> None:
        """The marker of the milestone stays: a removal is a marker of its own, which nothing takes back."""
        file = layout.removed_milestone_file(milestone)
        await self._mark(checkpoint, file, removed_milestone=milestone, removed_at=removed_at)

    async def _mark(self, checkpoint: CheckpointId, file: str, **content: str) -> None:
        failpoint("tier.mark")
        await self.put_marker(layout.file_key(checkpoint, file), encode_marker(content))

    async def mark_diagnosis(self, checkpoint: CheckpointId, diagnosis: Diagnosis) -> None:
        failpoint("tier.diagnose")
        key = layout.diagnosis_key(checkpoint, is_healthy=diagnosis.healthy)
        await self.put_marker(key, encode_marker(diagnosis))

    async def put_marker(self, key: str, content: bytes) -> bool:
        """Signed where there is a key. Whether it was absent. Raises as `_marker` for one that exists, which is not
        overwritten."""
        is_new = await self.store.put_bytes(key, self._signed(key, content), if_absent=True)
        if self.keyring is not None and not is_new:
            await self._marker(key)
        return is_new

    async def _marker(self, key: str) -> bytes:
        """Raises Foreign when it is not there, cannot be read, or is not signed by the keyring."""
        raw = (await self.store.get_many([key], size_max=MARKER_BYTES_MAX))[0]
        if isinstance(raw, TierdError):
            raise Foreign(raw.message, hint=raw.hint)
        if self.keyring is not None:
            self.keyring.check(key, raw, where=self.name)
        return raw

    def _signed(self, key: str, content: bytes) -> bytes:
        return content if self.keyring is None else self.keyring.sign(key, content)

    async def claim_generation(self, run: Run, generation: Generation, claim: Claim) -> bool:
        """False when another start has claimed it. Repeating it is harmless. Keeps the last CLAIMS_KEPT claims of a
        run, where this process deletes: only the highest counts."""
        key = layout.generation_key(run, generation)
        if not await self.store.put_bytes(key, self._signed(key, encode_marker(claim)), if_absent=True):
            existing = await self.claim(run, generation)
            if existing is None or not existing.is_of_same_start(claim):
                return False
        if generation > CLAIMS_KEPT and self.deletes:
            with suppress(TierdError):  # the claim is made; a marker that stays does no harm
                await self.store.delete([layout.generation_key(run, Generation(generation - CLAIMS_KEPT))])
        return True

    async def replace_claim(self, run: Run, generation: Generation, claim: Claim) -> None:
        """Write again what this start has claimed here, before a trainer has it."""
        key = layout.generation_key(run, generation)
        await self.store.put_bytes(key, self._signed(key, encode_marker(claim)))

    async def claim(self, run: Run, generation: Generation) -> Claim | None:
        """None: nobody has claimed the generation here, or the marker is archived, damaged, or foreign."""
        try:
            return decode_claim(await self._marker(layout.generation_key(run, generation)))
        except Foreign:
            return None
