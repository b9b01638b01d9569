"""Repairs a damaged replica, file by file, from the replicas of other tiers.

A good file replaces a bad one in one step, and only after every chunk of it was compared with the manifest. Nothing is
deleted first: when the repair is killed, or finds no good file, the replica stays as it was. A file for which no
replica has the right bytes stays too. Where the manifest has digests, they decide, not the CRCs.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from tierd.errors import BadRequest, Corrupt, Foreign, NewerFormat, NotFound, TierdError, TierUnreachable
from tierd.format import layout
from tierd.format.ids import CheckpointId
from tierd.format.manifest import FileEntry, Manifest
from tierd.tiers.checkpoint_copy import copy_file
from tierd.tiers.chunks import differences, measure
from tierd.tiers.tier import Tier
from tierd.transfer.verify import Proof, Verification, verify_files

log = logging.getLogger("tierd")

_SOURCE_FAULTS = (Corrupt, NewerFormat, Foreign, NotFound, TierUnreachable, BadRequest)
"""Errors of one source, after which the next one is tried."""


@dataclass(slots=True)
class Repair:
    """`manifest`: what the files were compared with. `repaired`: by file name, the tier that had it whole. `refused`:
    why files were not repaired. `is_for_later`: it may succeed once a tier can be reached again."""

    manifest: Manifest | None = None
    repaired: dict[str, str] = field(default_factory=dict[str, str])
    refused: list[str] = field(default_factory=list[str])
    is_for_later: bool = False


async def repair_replica(
    tier: Tier,
    checkpoint: CheckpointId,
    damage: Verification,
    sources: Sequence[Tier],
) -> Repair:
    """Replaces the files that `damage` names. Raises Full or TierUnreachable where `tier` itself cannot be written."""
    repair = Repair(damage.manifest)
    others = [source for source in sources if source.name != tier.name]
    if damage.manifest is None:
        await _rebuild(tier, checkpoint, others, repair)
    else:
        is_deep = damage.proof is Proof.DEEP
        await _replace(tier, damage.manifest, damage.problems, others, repair, is_deep=is_deep)
    return repair


async def _replace(
    tier: Tier,
    manifest: Manifest,
    names: Collection[str],
    sources: Sequence[Tier],
    repair: Repair,
    *,
    is_deep: bool,
) -> None:
    for entry in manifest.files:
        if entry.name not in names:
            continue
        failures: dict[str, TierdError] = {}
        for source in sources:
            try:
                if entry.algorithm:
                    await _check_digests(manifest, entry, source)
                await copy_file(manifest.id, entry, source, tier, replace=True)
            except _SOURCE_FAULTS as error:
                failures[source.name] = error
                continue
            repair.repaired[entry.name] = source.name
            log.info("repaired %s/%s in %s from %s", manifest.id, entry.name, tier.name, source.name)
            break
        else:
            why = "; ".join(f"{name}: {error.message}" for name, error in failures.items()) or "no other tier has it"
            repair.refused.append(f"{manifest.id}/{entry.name} in {tier.name} is left as it is: {why}")
            repair.is_for_later |= any(isinstance(error, TierUnreachable) for error in failures.values())
    # A file counts as repaired only when the verification that found the damage passes, and its digests are right.
    has_digests = any(entry.algorithm for entry in manifest.files)
    again = await verify_files(tier, manifest, is_deep=is_deep or has_digests, only=repair.repaired)
    for name, sentences in again.problems.items():
        del repair.repaired[name]
        repair.refused += [f"written again, and still wrong: {sentence}" for sentence in sentences]


async def _check_digests(manifest: Manifest, entry: FileEntry, source: Tier) -> None:
    """Raises Corrupt where a digest differs: a copy compares CRCs only, and a writer to the tier can keep those."""
    content = source.store.source(layout.file_key(manifest.id, entry.name))
    size, chunk = entry.size_bytes, entry.chunk_bytes
    actual = await measure(content, entry.name, size, chunk, algorithm=entry.algorithm)
    if problems := differences(entry, actual):
        raise Corrupt(f"read {manifest.id}/{entry.name} in {source.name}: {problems[0]}")


async def _rebuild(tier: Tier, checkpoint: CheckpointId, sources: Sequence[Tier], repair: Repair) -> None:
    """Replaces an unreadable manifest by that of another tier, when every file beside it is the one which that manifest
    describes. Otherwise the files may be those of another checkpoint with the same name."""
    where = f"{layout.manifest_key(checkpoint)} in {tier.name} is left as it is"
    failures: list[str] = []
    for source in sources:
        try:
            manifest, raw = await source.read_manifest(layout.manifest_key(checkpoint))
        except _SOURCE_FAULTS as error:
            failures.append(f"{source.name}: {error.message}")
            repair.is_for_later |= isinstance(error, TierUnreachable)
            continue
        beside = await verify_files(tier, manifest)
        if other := beside.problems.keys() - beside.missing:
            failures.append(f"{source.name}: its {', '.join(sorted(other))} has other bytes")
            continue
        repair.manifest = manifest
        await _replace(tier, manifest, beside.missing, sources, repair, is_deep=True)
        if beside.missing <= repair.repaired.keys():
            await tier.store.put_bytes(layout.manifest_key(checkpoint), raw)
            repair.repaired[layout.MANIFEST] = source.name
            log.info("repaired the manifest of %s in %s from %s", checkpoint, tier.name, source.name)
        return
    repair.refused.append(f"{where}: {'; '.join(failures) or 'no other tier has it'}")
