"""`tierd verify`: reads every byte of every replica and compares it with the checksums of its manifest.

Changes nothing. A replica that the lifecycle deletes while it is being read is no finding.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
import typer

from tierd.cli import options
from tierd.cli.choice import Wanted, candidates, choose, wanted
from tierd.cli.console import answer, answer_json, progress_bar, say, size
from tierd.cli.places import PARTIAL, Places, Settings, look, settings_of
from tierd.errors import Corrupt, NewerFormat, NotFound, TierUnreachable
from tierd.format.ids import CheckpointId
from tierd.tiers.store import Progress
from tierd.tiers.tier import Tier, verify_checkpoint


class Verified(msgspec.Struct, kw_only=True):
    """One replica. `problems` empty: every byte is as its manifest says. `unread`: why it could not be judged."""

    run: str
    step: int
    generation: int
    tier: str
    size_bytes: int
    problems: list[str]
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
    json: options.Json = False,
) -> None:
    """Read every replica and compare it with its checksums."""
    wish = wanted(run, step or "latest", generation)
    replicas, is_whole = asyncio.run(_verify(settings_of(context), wish, tier, place, is_newest_only=step == "latest"))
    if json:
        answer_json(replicas)
    else:
        _print(replicas)
    if any(one.problems for one in replicas):
        raise typer.Exit(Corrupt.exit_code)
    if not is_whole or any(one.unread for one in replicas):
        raise typer.Exit(PARTIAL)


def _print(replicas: list[Verified]) -> None:
    for one in replicas:
        for problem in one.problems:
            answer(f"damaged: {problem}")
        if one.unread:
            say(f"tierd: not verified: {one.unread}")
    whole = [one for one in replicas if not one.problems and not one.unread]
    answer(f"{len(whole)} of {len(replicas)} replicas are whole: {size(sum(one.size_bytes for one in whole))} verified")


async def _verify(
    settings: Settings, wish: Wanted, tier: str | None, place: str | None, *, is_newest_only: bool
) -> tuple[list[Verified], bool]:
    async with look(settings, place=place, only=tier) as places:
        is_whole = places.check_reachable()
        wish = _newest(wish, places) if is_newest_only else wish
        entries = [one for one in places.catalog.entries() if wish.fits(one.manifest.id, one.all_milestones)]
        unreadable = [at for at in places.catalog.unreadable() if wish.fits(at[1])]
        if not entries and not unreadable:
            where = place or tier or "any tier"
            raise NotFound(f"find {wish} to verify in {where}: there is none", hint="`tierd ls` shows what there is")
        replicas = [await _unreadable(places, name, checkpoint) for name, checkpoint in unreadable]
        total = sum(one.manifest.size_bytes * len(one.tiers) for one in entries)
        with progress_bar("verifying", total) as progress:
            for entry in entries:
                held_by = [tier for name, tier in places.tiers.items() if name in entry.tiers]
                replicas += [await _replica(tier, entry.manifest.id, progress) for tier in held_by]
        return [one for one in replicas if one is not None], is_whole


def _newest(wish: Wanted, places: Places) -> Wanted:
    newest = choose(wish, candidates(places.catalog), "any tier").id
    return Wanted(run=newest.run, step=newest.step, milestone=None, generation=newest.generation)


async def _replica(tier: Tier, checkpoint: CheckpointId, progress: Progress) -> Verified | None:
    """None when it was deleted under our eyes."""
    size_bytes, problems, unread = 0, list[str](), None
    try:
        # Read again, here: the catalog may know the manifest from another tier.
        manifest = await tier.manifest(checkpoint)
        size_bytes = manifest.size_bytes
        problems = await verify_checkpoint(tier, manifest, progress=progress)
    except NotFound as error:
        problems = [error.message]
    except Corrupt as error:
        problems = [error.message]
    except (NewerFormat, TierUnreachable) as error:
        unread = error.message
    if problems and not await _is_committed(tier, checkpoint):
        return None
    return Verified(
        run=checkpoint.run,
        step=checkpoint.step,
        generation=checkpoint.generation,
        tier=tier.name,
        size_bytes=size_bytes,
        problems=problems,
        unread=unread,
    )


async def _unreadable(places: Places, name: str, checkpoint: CheckpointId) -> Verified | None:
    """A manifest that the look could not read, or files that are missing: found again, and told as such."""
    found = await _replica(places.tiers[name], checkpoint, lambda size_bytes: None)
    if found and not found.problems and not found.unread:
        found.problems.append(places.catalog.unreadable()[name, checkpoint])
    return found


async def _is_committed(tier: Tier, checkpoint: CheckpointId) -> bool:
    try:
        await tier.manifest(checkpoint)
    except NotFound:
        return False
    except (Corrupt, NewerFormat, TierUnreachable):
        return True
    return True
