"""`tierd milestone`: marks a checkpoint as exempt from retention, in every tier that holds it. Needs no daemon."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Annotated

import msgspec
import typer

from tierd.cli import options
from tierd.cli.console import answer, answer_json
from tierd.cli.opened_tiers import PARTIAL, Settings, look, settings_of
from tierd.cli.selection import Wanted, candidates, choose, wanted
from tierd.format import layout


class Marked(msgspec.Struct, kw_only=True):
    """What `tierd milestone --json` prints."""

    run: str
    step: int
    generation: int
    milestone: str
    tiers: list[str]
    is_dry_run: bool


def milestone(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Letters, digits, dots, dashes, underscores.")],
    step: options.StepName,
    run: options.RunName = None,
    generation: options.GenerationNumber = None,
    dry_run: options.DryRun = False,
    json: options.Json = False,
) -> None:
    """Keep a checkpoint for ever, under a name."""
    wish = wanted(run, step, generation)
    marked, is_whole = asyncio.run(_mark(settings_of(context), wish, name, is_dry_run=dry_run))
    if json:
        answer_json(marked)
    else:
        verb = "would mark" if dry_run else "marked"
        where = ", ".join(marked.tiers)
        answer(f"{verb} {marked.run} step {marked.step} (generation {marked.generation}) as {name} in {where}")
    if not is_whole:
        raise typer.Exit(PARTIAL)


async def _mark(settings: Settings, wish: Wanted, name: str, *, is_dry_run: bool) -> tuple[Marked, bool]:
    async with look(settings) as places:
        is_whole = places.check_reachable()
        chosen = choose(wish, candidates(places.catalog), "any tier")
        layout.milestone_key(chosen.id, name)  # refuses a bad name before the first marker is written
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        for tier in chosen.tiers:
            if not is_dry_run:
                await places.tiers[tier].mark_milestone(chosen.id, name, now)
        marked = Marked(
            run=chosen.id.run,
            step=chosen.id.step,
            generation=chosen.id.generation,
            milestone=name,
            tiers=list(chosen.tiers),
            is_dry_run=is_dry_run,
        )
        return marked, is_whole
