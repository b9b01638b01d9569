"""Whether a tier has a checkpoint whole at this moment: asked before a deletion that rests on it.

The last listing of the tier may be minutes old. What is found to be wrong enters the catalog, so that the next plan is
another one.
"""

from __future__ import annotations

from tierd.catalog.entry import Entry
from tierd.catalog.listing import files_of
from tierd.context import DaemonContext
from tierd.errors import Corrupt, TierdError
from tierd.format import layout
from tierd.format.ids import CheckpointId, Run

_HINT = "this replica stays, and the scrub or `tierd verify --repair` repairs the other one"


async def whole_files(
    context: DaemonContext, entry: Entry, tier: str, failed_tiers: set[str], *, action: str, worker: str
) -> dict[str, int] | None:
    """The files of a checkpoint in a tier with their sizes, listed now; None if one is missing or has another size, or
    the tier does not answer: then the tier is added to `failed_tiers`. `action`: what rests on it, for an error."""
    catalog, notify = context.catalog, context.notify
    try:
        files = await files_of(context.tiers[tier], entry.id)
    except TierdError as error:
        catalog.listing_failed(tier, str(error))
        notify.relist(tier, is_wrong=False)
        failed_tiers.add(tier)
        return None
    if layout.MANIFEST not in files or layout.GONE in files:
        catalog.disappeared(entry.id, tier)
        notify.relist(tier)  # then its loss is reported
        return None
    if why := entry.manifest.missing_file(files) or await _forged(context, entry, tier):
        context.incidents.record(worker, Corrupt(f"{action}: in {tier}, {why}", hint=_HINT), entry.id)
        notify.relist(tier)  # then it counts as unreadable, until it is repaired
        return None
    return files


async def _forged(context: DaemonContext, entry: Entry, tier: str) -> str:
    """Why the manifest in `tier` is not the signed one of the catalog: it may have been replaced since the listing.
    Empty if it is, or without a key."""
    if context.keyring is not None:
        try:
            await context.tiers[tier].manifest_bytes(entry.manifest)
        except TierdError as error:
            return error.message
    return ""


async def is_newest_there(
    context: DaemonContext, run: Run, least: CheckpointId, failed_tiers: set[str], *, action: str, worker: str
) -> bool:
    """fresh: whether a cold tier has the newest checkpoint of the run that the catalog knows in cold, it is not older
    than `least`, and it was not found unhealthy since the last listing."""
    newest = context.catalog.newest_in_cold(run)
    entry = context.catalog.get(newest) if newest is not None else None
    if entry is None or entry.id.recency < least.recency:
        return False
    for tier in sorted(context.catalog.known_cold(run) & entry.tiers):
        files = await whole_files(context, entry, tier, failed_tiers, action=action, worker=worker)
        if files is not None and layout.diagnosis_of(files) is False:
            context.catalog.diagnosed(entry.id, tier, is_healthy=False)
            return False
        if files is not None:
            return True
    return False
