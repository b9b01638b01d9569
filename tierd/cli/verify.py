"""`tierd verify`: compares every replica with the checksums of its manifest, and on request mends what is damaged.

What costs no egress by itself: a directory is read whole, a bucket is asked for the checksums that it keeps. Without
`--repair` it changes nothing. A replica that the lifecycle deletes meanwhile is no finding.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Annotated

import msgspec
import typer

from tierd.cli import options
from tierd.cli.console import answer, answer_json, progress_bar, say, size
from tierd.cli.opened_tiers import PARTIAL, Places, Settings, exit_code, look, settings_of, tier_names
from tierd.cli.selection import Wanted, candidates, choose, wanted
from tierd.errors import BadConfig, Corrupt, NewerFormat, NotFound, TierdError, TierUnreachable
from tierd.format.ids import CheckpointId
from tierd.tiers.store import Progress
from tierd.tiers.tier import Tier
from tierd.transfer.repair import Repair, repair_replica
from tierd.transfer.verify import Proof, Verification, verify_replica

_HOW = {Proof.DEEP: "read whole", Proof.CHECKSUM: "by the bucket's checksums", Proof.SIZE: "size only"}


class Verified(msgspec.Struct, kw_only=True):
    """One replica. `problems`: what was found wrong, a sentence each. `how`: what the verdict stands on: deep, checksum
    or size. `repaired`: by file name, the tier it was taken from. `refused`: why something stayed as it was. `unread`:
    why it could not be judged."""

    run: str
    step: int
    generation: int
    tier: str
    size_bytes: int
    how: str | None
    is_whole: bool
    problems: list[str]
    repaired: dict[str, str] = {}
    refused: list[str] = []
    unread: str | None = None


def verify(
    context: typer.Context,
    run: options.RunName = None,
    step: Annotated[
        str | None,
        typer.Option("--step", metavar="STEP", help="Only that: a number, latest, or milestone:NAME; else all."),
    ] = None,
    generation: options.GenerationNumber = None,
    tier: options.TierName = None,
    place: options.From = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every byte in buckets too, instead of asking for their checksums.")
    ] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Replace damaged files by whole ones out of another tier.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Compare every replica with its checksums."""
    if repair and place is not None:
        raise BadConfig(
            "--repair takes whole files out of other tiers, and --from names one place alone",
            hint="give --config, and --tier for the one to be repaired",
        )
    wish = wanted(run, step or "latest", generation)
    verifying = _verify(
        settings_of(context), wish, tier, place, is_newest_only=step == "latest", is_deep=deep, is_repair=repair
    )
    replicas, unread, is_complete = asyncio.run(verifying)
    if json:
        answer_json(replicas)
    else:
        _print(replicas)
    if any(not one.is_whole and one.unread is None for one in replicas):
        raise typer.Exit(Corrupt.exit_code)
    if code := exit_code(unread, of=len(replicas)) or (0 if is_complete else PARTIAL):
        raise typer.Exit(code)


def _print(replicas: list[Verified]) -> None:
    for one in replicas:
        for problem in one.problems:
            answer(f"damaged: {problem}")
        for name, source in one.repaired.items():
            answer(f"repaired: step {one.step} {name} in {one.tier}, from {source}")
        for why in one.refused:
            answer(f"not repaired: {why}")
        if one.unread:
            say(f"tierd: not verified: {one.unread}")
    whole = [one for one in replicas if one.is_whole]
    counts = Counter(one.how for one in whole)
    told = ", ".join(f"{counts[proof.value]} {text}" for proof, text in _HOW.items() if counts[proof.value])
    answer(
        f"{len(whole)} of {len(replicas)} replicas are whole: {size(sum(one.size_bytes for one in whole))} verified"
        + (f" ({told})" if counts.keys() - {Proof.DEEP.value} else "")
    )
    for name in sorted({one.tier for one in whole if one.how == Proof.SIZE.value}):
        say(f"tierd: {name} keeps no checksums: files and sizes were compared, no byte; --deep reads them")


async def _verify(
    settings: Settings,
    wish: Wanted,
    tier: str | None,
    place: str | None,
    *,
    is_newest_only: bool,
    is_deep: bool,
    is_repair: bool,
) -> tuple[list[Verified], list[TierdError], bool]:
    """(the replicas, why some could not be judged, whether every tier that was to be verified gave an answer)"""
    unread: list[TierdError] = []
    if is_repair and tier is not None and tier not in (names := tier_names(settings.config())):
        raise BadConfig(f"no tier is called {tier!r}", hint=f"the tiers of this config are {', '.join(names)}")
    async with look(settings, place=place, only=None if is_repair else tier) as places:
        judged = {name for name in places.tiers if tier in (None, name)}
        places.check_reachable()
        unreachable = judged & places.unreachable.keys()
        if unreachable == judged:
            raise TierUnreachable(f"look at {tier}: {places.unreachable[min(judged)]}")
        wish = _newest(wish, places, judged) if is_newest_only else wish
        found = [
            (name, entry.manifest.id, entry.manifest.size_bytes, "")
            for entry in places.catalog.entries()
            for name in places.tiers
            if name in entry.tiers & judged and wish.fits(entry.manifest.id, entry.all_milestones)
        ]
        found += [
            (name, checkpoint, 0, why)
            for (name, checkpoint), why in places.catalog.unreadable().items()
            if name in judged and wish.fits(checkpoint)
        ]
        if not found:
            where = place or tier or "any tier"
            raise NotFound(f"find {wish} to verify in {where}: there is none", hint="`tierd ls` shows what there is")
        replicas: list[Verified] = []
        with progress_bar("verifying", sum(size_bytes for _, _, size_bytes, _ in found)) as progress:
            for name, checkpoint, _, why in found:
                one = _unjudged(checkpoint, name)
                try:
                    is_there = await _judge(
                        one, places, checkpoint, why, is_deep=is_deep, is_repair=is_repair, progress=progress
                    )
                except (NewerFormat, TierUnreachable) as error:
                    one.unread, is_there = error.message, True
                    unread.append(error)
                replicas += [one] * is_there
        return replicas, unread, not unreachable


def _newest(wish: Wanted, places: Places, judged: set[str]) -> Wanted:
    among = [one for one in candidates(places.catalog) if judged.intersection(one.tiers)]
    newest = choose(wish, among, "any tier").id
    return Wanted(run=newest.run, step=newest.step, milestone=None, generation=newest.generation)


def _unjudged(checkpoint: CheckpointId, tier: str) -> Verified:
    return Verified(
        run=checkpoint.run,
        step=checkpoint.step,
        generation=checkpoint.generation,
        tier=tier,
        size_bytes=0,
        how=None,
        is_whole=False,
        problems=[],
    )


async def _judge(
    verified: Verified,
    places: Places,
    checkpoint: CheckpointId,
    why: str,
    *,
    is_deep: bool,
    is_repair: bool,
    progress: Progress,
) -> bool:
    """False when it was deleted under our eyes. `why`: what the look at the tier found wrong already. Raises
    NewerFormat or TierUnreachable where it cannot be judged."""
    tier = places.tiers[verified.tier]
    found = await verify_replica(tier, checkpoint, is_deep=is_deep or tier.store.is_local, progress=progress)
    if found is None:
        return False
    verified.size_bytes = found.manifest.size_bytes if found.manifest else 0
    verified.how = found.proof.value if found.manifest else None
    # Nothing wrong by its own manifest: then it disagrees with another tier's.
    verified.problems = found.sentences or [why] * bool(why)
    verified.is_whole = not verified.problems
    if found.problems and is_repair:
        await _repair(places, tier, checkpoint, found, verified)
    return True


async def _repair(
    places: Places, tier: Tier, checkpoint: CheckpointId, found: Verification, verified: Verified
) -> None:
    try:
        repair = await repair_replica(tier, checkpoint, found, list(places.tiers.values()))
    except TierUnreachable as error:
        repair = Repair(refused=[error.message])
    verified.repaired, verified.refused, verified.is_whole = repair.repaired, repair.refused, not repair.refused
    if found.manifest is None and repair.manifest is not None:
        verified.size_bytes, verified.how = repair.manifest.size_bytes, Proof.DEEP.value
