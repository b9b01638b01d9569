"""`tierd drill`: proves that checkpoints can be restored, by restoring one of each tier into scratch space.

A random checkpoint unless one is named. The scratch space is empty again afterwards, however the drill ends.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tierd.catalog.selectable import selectable_replicas
from tierd.cli import options
from tierd.cli.console import duration, print_report, print_result, progress_bar, size, table
from tierd.cli.opened_tiers import OpenedTiers, exit_code, open_tiers
from tierd.cli.options import check_one_place, parse_query, settings_of
from tierd.errors import NotFound, TierdError
from tierd.format.ids import CheckpointId
from tierd.lifecycle.selection import CheckpointQuery, select
from tierd.transfer.drill import drill as drill_replica


class Drill(msgspec.Struct, kw_only=True):
    """One tier. `error` None: the checkpoint was restored from it, verified, and read back."""

    tier: str
    run: str | None = None
    step: int | None = None
    generation: int | None = None
    size_bytes: int | None = None
    seconds: float | None = None
    bytes_per_s: int | None = None
    is_verified: bool = False
    error: str | None = None


async def drill(
    context: typer.Context,
    tier: options.TierName = None,
    run: Annotated[str | None, typer.Option("--run", metavar="RUN", help="Only of this run.")] = None,
    step: Annotated[
        str | None,
        typer.Option("--step", metavar="STEP", help="A number, latest, or milestone:NAME; default: a random one."),
    ] = None,
    generation: options.GenerationNumber = None,
    place: options.From = None,
    scratch: Annotated[
        Path | None, typer.Option("--scratch", metavar="DIR", help="Where to; default: drill.scratch of the config.")
    ] = None,
    json: options.Json = False,
) -> int:
    """Restore one checkpoint of each tier into scratch space, verify it, delete it."""
    check_one_place(place, tier)
    settings = settings_of(context)
    folder = scratch.absolute() if scratch else settings.config().drill_path
    query = parse_query(run, step or "latest", generation)
    drills: list[Drill] = []
    errors: list[TierdError] = []
    async with open_tiers(settings, place=place, only=tier) as tiers:
        for name in tiers.by_name:
            drills.append(Drill(tier=name))
            try:
                checkpoint = _select(replace(query, tier=name), tiers, is_random=step is None)
                await _restore(tiers, drills[-1], checkpoint, folder)
            except TierdError as error:
                drills[-1].error = error.message
                errors.append(error)
    print_report(drills, as_json=json, text=_print)
    return exit_code(errors, of=len(drills))


def _print(drills: list[Drill]) -> None:
    table(
        ["TIER", "RUN", "STEP", "GEN", "SIZE", "TIME", "RATE", "VERIFIED"],
        [
            [
                each.tier,
                each.run or "",
                "" if each.step is None else str(each.step),
                "" if each.generation is None else str(each.generation),
                "" if each.size_bytes is None else size(each.size_bytes),
                "" if each.seconds is None else duration(each.seconds),
                "" if each.bytes_per_s is None else f"{size(each.bytes_per_s)}/s",
                "every chunk" if each.is_verified else "NO",
            ]
            for each in drills
        ],
        right=("STEP", "GEN", "SIZE", "TIME", "RATE"),
    )
    for each in drills:
        if each.error is not None:
            print_result(f"not proven: {each.tier}: {each.error}")


def _select(query: CheckpointQuery, tiers: OpenedTiers, *, is_random: bool) -> CheckpointId:
    """A healthy checkpoint of the query's tier."""
    inventory = selectable_replicas(tiers.catalog)
    healthy = [
        candidate
        for candidate in inventory.candidates
        if query.tier in candidate.tiers and candidate.is_healthy is not False
    ]
    matching = [each.id for each in healthy if query.matches(each.id, each.milestones)]
    if matching and is_random:
        return random.choice(matching)
    try:
        return select(query, replace(inventory, candidates=healthy)).candidate.id
    except NotFound as error:
        if not healthy:
            raise NotFound(f"find a checkpoint in {query.tier}: it holds none that is whole and healthy") from error
        raise


async def _restore(tiers: OpenedTiers, report: Drill, checkpoint: CheckpointId, scratch: Path) -> None:
    report.run, report.step, report.generation = checkpoint.run, checkpoint.step, checkpoint.generation
    tier = tiers.by_name[report.tier]
    manifest = await tier.manifest(checkpoint)
    report.size_bytes = manifest.size_bytes
    with progress_bar(f"step {checkpoint.step} from {report.tier}", manifest.size_bytes) as progress:
        seconds = await drill_replica(tier, manifest, scratch, progress=progress)
    report.seconds = round(seconds, 6)
    report.bytes_per_s = round(manifest.size_bytes / max(seconds, 1e-6))
    report.is_verified = True
