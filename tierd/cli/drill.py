"""`tierd drill`: proves that checkpoints can be restored, by restoring one of each tier into scratch space.

A random one unless it is named. Nothing of it stays, however the drill ends.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tierd.cli import options
from tierd.cli.console import answer, answer_json, duration, progress_bar, size, table
from tierd.cli.opened_tiers import Places, Settings, check_one_place, exit_code, look, settings_of
from tierd.cli.selection import Candidate, Wanted, candidates, choose, wanted
from tierd.errors import Corrupt, NotFound, TierdError, TierUnreachable
from tierd.transfer.drill import drill as drill_replica


class Drill(msgspec.Struct, kw_only=True):
    """One tier. `error` None: the checkpoint was restored from it, checked on the way, and read back."""

    tier: str
    run: str | None = None
    step: int | None = None
    generation: int | None = None
    size_bytes: int | None = None
    seconds: float | None = None
    bytes_per_s: int | None = None
    is_verified: bool = False
    error: str | None = None


def drill(
    context: typer.Context,
    tier: options.TierName = None,
    run: Annotated[str | None, typer.Option("--run", metavar="RUN", help="Only of this run.")] = None,
    step: Annotated[
        str | None,
        typer.Option("--step", metavar="STEP", help="A number, latest, or milestone:NAME; else one at random."),
    ] = None,
    generation: options.GenerationNumber = None,
    place: options.From = None,
    scratch: Annotated[
        Path | None, typer.Option("--scratch", metavar="DIR", help="Where to; else drill.scratch of the config.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Restore one checkpoint of each tier into scratch space, verify it, delete it."""
    check_one_place(place, tier)
    settings = settings_of(context)
    where = scratch.absolute() if scratch else settings.config().drill_path
    wish = wanted(run, step or "latest", generation)
    drills, errors = asyncio.run(_drill(settings, wish, tier, place, where, is_random=step is None))
    if json:
        answer_json(drills)
    else:
        _print(drills)
    if code := exit_code(errors, of=len(drills)):
        raise typer.Exit(code)


def _print(drills: list[Drill]) -> None:
    table(
        ["TIER", "RUN", "STEP", "GEN", "SIZE", "TIME", "RATE", "VERIFIED"],
        [
            [
                one.tier,
                one.run or "",
                "" if one.step is None else str(one.step),
                "" if one.generation is None else str(one.generation),
                "" if one.size_bytes is None else size(one.size_bytes),
                "" if one.seconds is None else duration(one.seconds),
                "" if one.bytes_per_s is None else f"{size(one.bytes_per_s)}/s",
                "every chunk" if one.is_verified else "NO",
            ]
            for one in drills
        ],
        right=("STEP", "GEN", "SIZE", "TIME", "RATE"),
    )
    for one in drills:
        if one.error is not None:
            answer(f"not proven: {one.tier}: {one.error}")


async def _drill(
    settings: Settings, wish: Wanted, tier: str | None, place: str | None, scratch: Path, *, is_random: bool
) -> tuple[list[Drill], list[TierdError]]:
    drills: list[Drill] = []
    errors: list[TierdError] = []
    async with look(settings, place=place, only=tier) as places:
        for name in places.tiers:
            one = Drill(tier=name)
            drills.append(one)
            try:
                chosen = _choose(wish, name, places, is_random=is_random)
                one.run, one.step, one.generation = chosen.id.run, chosen.id.step, chosen.id.generation
                await _restore(places, one, chosen, scratch)
            except TierdError as error:
                one.error = error.message
                errors.append(error)
    return drills, errors


def _choose(wish: Wanted, tier: str, places: Places, *, is_random: bool) -> Candidate:
    if tier in places.unreachable:
        raise TierUnreachable(f"look at {tier}: {places.unreachable[tier]}")
    held = [one for one in candidates(places.catalog) if tier in one.tiers and one.is_healthy is not False]
    fits = [one for one in held if wish.fits(one.id, one.milestones)]
    if fits and is_random:
        return random.choice(fits)
    for (name, checkpoint), why in places.catalog.unreadable().items():
        if name == tier and wish.fits(checkpoint) and not fits:
            raise Corrupt(why)
    if not held:
        raise NotFound(f"find a checkpoint in {tier}: it holds none that is healthy")
    return choose(wish, held, tier)


async def _restore(places: Places, one: Drill, chosen: Candidate, scratch: Path) -> None:
    tier = places.tiers[one.tier]
    manifest = await tier.manifest(chosen.id)
    one.size_bytes = manifest.size_bytes
    with progress_bar(f"step {chosen.id.step} from {one.tier}", manifest.size_bytes) as progress:
        done = await drill_replica(tier, manifest, scratch, progress=progress)
    one.seconds = round(done.seconds, 6)
    one.bytes_per_s = round(manifest.size_bytes / max(done.seconds, 1e-6))
    one.is_verified = True
