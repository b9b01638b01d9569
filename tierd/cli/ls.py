"""`tierd ls`: every checkpoint, newest first, with the tiers that hold it.

The daemon answers where one runs, since only it knows the memory tier; else the tiers are looked at directly.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from tierd.catalog import MEMORY
from tierd.cli import daemon_http, options
from tierd.cli.console import age, answer_json, metrics_line, say, size, table
from tierd.cli.opened_tiers import PARTIAL, Settings, look, settings_of, tier_names
from tierd.cli.selection import Wanted
from tierd.errors import BadConfig
from tierd.format.ids import Run, check_run

Rows = list[dict[str, Any]]
Place = Annotated[
    str | None, typer.Argument(metavar="PLACE", help="A directory or s3:// URL: listed with no daemon and no config.")
]
AnyTier = Annotated[
    str | None, typer.Option("--tier", metavar="TIER", help="Only what this tier holds: memory, hot, …")
]


def ls(
    context: typer.Context,
    place: Place = None,
    run: options.RunName = None,
    tier: AnyTier = None,
    json: options.Json = False,
) -> None:
    """List checkpoints, newest first."""
    settings = settings_of(context)
    only_run = None if run is None else check_run(run)
    rows, is_whole = _from_place(settings, place, only_run) if place else _from_config(settings, only_run, tier)
    if tier is not None:
        rows = [row for row in rows if tier in row["tiers"]]
    if json:
        answer_json(rows)
    elif rows:
        print_rows(rows)
    else:
        say(f"no checkpoints{f' of run {run}' if run else ''} in {place or tier or 'any tier'}")
    if not is_whole:
        raise typer.Exit(PARTIAL)


def print_rows(rows: Rows) -> None:
    headings = ["RUN", "STEP", "GEN", "TIERS", "MILESTONE", "SIZE", "AGE", "METRICS"]
    table(headings, [_cells(row) for row in rows], right=("STEP", "GEN", "SIZE", "AGE"))


def _cells(row: dict[str, Any]) -> list[str]:
    healthy = " unhealthy" if row["healthy"] is False else ""
    return [
        row["run"],
        str(row["step"]),
        str(row["generation"]),
        ",".join(row["tiers"]),
        row["milestone"] or "",
        size(row["size_bytes"]),
        age(row["created_at"]),
        metrics_line(row["metrics"]) + healthy,
    ]


def _from_place(settings: Settings, place: str, run: Run | None) -> tuple[Rows, bool]:
    return asyncio.run(_look(settings, place=place, only=None, run=run))


def _from_config(settings: Settings, run: Run | None, tier: str | None) -> tuple[Rows, bool]:
    config = settings.config()
    names = [MEMORY, *tier_names(config)]
    if tier is not None and tier not in names:
        raise BadConfig(f"no tier is called {tier!r}", hint=f"the tiers of this config are {', '.join(names)}")
    asked = daemon_http.find(config) if tier == MEMORY else daemon_http.find_or_none(config)
    if asked is None:
        return asyncio.run(_look(settings, place=None, only=tier, run=run))
    unknown = [one for one in asked.status.tiers if not one.is_known and tier in (None, one.name)]
    for one in unknown:
        say(f"tierd: {one.name} is listed as last known, it cannot be looked at: {one.error}")
    return [row for row in asked.rows() if run in (None, row["run"])], not unknown


async def _look(settings: Settings, *, place: str | None, only: str | None, run: Run | None) -> tuple[Rows, bool]:
    async with look(settings, place=place, only=only) as places:
        is_whole = places.check_reachable()
        places.tell_unreadable(Wanted(run=run))
        return places.catalog.facts(run=run), is_whole
