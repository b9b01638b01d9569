"""Makes a damaged replica whole again, file by file, from the replicas of other tiers.

A good file takes the place of a bad one in one step, and only when every chunk of it has been checked against the
manifest on its way: nothing is deleted first, so that killed at any instant, or with no good file to be had, all is as
it was. What no other replica can prove is left alone.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from tierd.errors import BadRequest, Corrupt, NewerFormat, NotFound, TierdError, TierUnreachable
from tierd.format import layout
from tierd.format.ids import CheckpointId
from tierd.format.manifest import Manifest
from tierd.tiers.store import Progress
from tierd.tiers.tier import Tier, copy_file
from tierd.transfer.verify import Proof, Verification, verify_files

log = logging.getLogger("tierd")

_SOURCE_FAULTS = (Corrupt, NewerFormat, NotFound, TierUnreachable, BadRequest)
"""What another tier may do better."""


@dataclass(slots=True)
class Repair:
    """`manifest`: what it was judged by. `repaired`: by file name, the tier that had it whole. `refused`: what was not,
    and why. `is_for_later`: it may go better once a tier is in reach again."""

    manifest: Manifest | None = None

    repaired: dict[str, str] = field(default_factory=dict[str, str])
    refused: list[str] = field(default_factory=list[str])
    is_for_later: bool = False


async def repair_replica(
    tier: Tier,
    checkpoint: CheckpointId,
    found: Verification,
    sources: Sequence[Tier],
    *,
    progress: Progress | None = None,
) -> Repair:
    """Replaces what `found` calls bad. Raises Full or TierUnreachable where `tier` itself does not let it."""
    repair = Repair(found.manifest)
    others = [one for one in sources if one.name != tier.name]
    if found.manifest is None:
        await _rebuild(tier, checkpoint, others, repair, progress)
    else:
        is_deep = found.proof is Proof.DEEP
        await _replace(tier, found.manifest, found.problems, others, repair, progress, is_deep=is_deep)
    return repair


async def _replace(
    tier: Tier,
    manifest: Manifest,
    names: Collection[str],
    sources: Sequence[Tier],
    repair: Repair,
    progress: Progress | None,
    *,
    is_deep: bool,
) -> None:
    for entry in manifest.files:
        if entry.name not in names:
            continue
        failures: dict[str, TierdError] = {}
        for source in sources:
            try:
                await copy_file(manifest.id, entry, source, tier, progress=progress, replace=True)
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
    # Called repaired only when the look that found the damage finds none.
    again = await verify_files(tier, manifest, is_deep=is_deep, only=repair.repaired)
    for name, sentences in again.problems.items():
        del repair.repaired[name]
        repair.refused += [f"written again, and still wrong: {one}" for one in sentences]


async def _rebuild(
    tier: Tier, checkpoint: CheckpointId, sources: Sequence[Tier], repair: Repair, progress: Progress | None
) -> None:
    """A manifest that cannot be read, from a tier whose manifest can: when every file that lies beside it is the one
    which that manifest means. Else this may be the wreck of another checkpoint of the same name."""
    where = f"{layout.manifest_key(checkpoint)} in {tier.name} is left as it is"
    failures: list[str] = []
    for source in sources:
        try:
            manifest = await source.manifest(checkpoint)
            raw = await source.manifest_bytes(manifest)
        except _SOURCE_FAULTS as error:
            failures.append(f"{source.name}: {error.message}")
            repair.is_for_later |= isinstance(error, TierUnreachable)
            continue
        beside = await verify_files(tier, manifest)
        if other := beside.problems.keys() - beside.missing:
            failures.append(f"{source.name}: its {', '.join(sorted(other))} has other bytes")
            continue
        repair.manifest = manifest
        await _replace(tier, manifest, beside.missing, sources, repair, progress, is_deep=True)
        if beside.missing <= repair.repaired.keys():
            await tier.store.put_bytes(layout.manifest_key(checkpoint), raw)
            repair.repaired[layout.MANIFEST] = source.name
            log.info("repaired the manifest of %s in %s from %s", checkpoint, tier.name, source.name)
        return
    repair.refused.append(f"{where}: {'; '.join(failures) or 'no other tier has it'}")
