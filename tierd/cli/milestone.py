"""`tierd milestone`: marks a checkpoint as exempt from retention, in every tier that holds it. Needs no daemon."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
import typer

from tierd.cli import options
from tierd.cli.console import now, print_json, print_result
from tierd.cli.opened_tiers import PARTIAL, open_tiers
from tierd.cli.options import Settings, parse_query, settings_of
from tierd.format import layout
from tierd.lifecycle.selection import CheckpointQuery, select


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
    """Keep a checkpoint forever, under a name."""
    query = parse_query(run, step, generation)
    marked, is_complete = asyncio.run(_mark(settings_of(context), query, name, is_dry_run=dry_run))
    if json:
        print_json(marked)
    else:
        checkpoint = f"{marked.run} step {marked.step} (generation {marked.generation})"
        print_result(f"{'would mark' if dry_run else 'marked'} {checkpoint} as {name} in {', '.join(marked.tiers)}")
    if not is_complete:
        raise typer.Exit(PARTIAL)


async def _mark(settings: Settings, query: CheckpointQuery, name: str, *, is_dry_run: bool) -> tuple[Marked, bool]:
    async with open_tiers(settings) as tiers:
        is_complete = tiers.check_reachable()
        chosen = select(query, tiers.catalog.inventory()).candidate
        layout.milestone_file(name)  # refuses a bad name before the first marker is written
        marked_at = now().isoformat(timespec="milliseconds")
        for tier in chosen.tiers:
            if not is_dry_run:
                await tiers.by_name[tier].mark_milestone(chosen.id, name, marked_at)
        marked = Marked(
            run=chosen.id.run,
            step=chosen.id.step,
            generation=chosen.id.generation,
            milestone=name,
            tiers=list(chosen.tiers),
            is_dry_run=is_dry_run,
        )
        return marked, is_complete
