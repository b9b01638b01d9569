"""`tierd ls`: every checkpoint, newest first, with the tiers that hold it.

A running daemon answers, since only it knows the memory tier; without one, the tiers are listed directly.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from tierd.cli import daemon_http, options
from tierd.cli.console import age, metrics_line, print_json, print_note, size, table
from tierd.cli.opened_tiers import PARTIAL, open_tiers
from tierd.cli.options import Settings, check_tier, settings_of
from tierd.format.ids import Run, check_run
from tierd.lifecycle.selection import MEMORY, CheckpointQuery
from tierd.report import CheckpointRow, checkpoint_rows

Place = Annotated[
    str | None, typer.Argument(metavar="PLACE", help="A directory or s3:// URL: listed without daemon and config.")
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
    rows = None if place else _rows_of_daemon(settings, only_run, tier)
    rows, is_complete = rows or asyncio.run(_list(settings, place, None if place else tier, only_run))
    if tier is not None:
        rows = [row for row in rows if tier in row.tiers]
    if json:
        print_json(rows)
    elif rows:
        headings = ["RUN", "STEP", "GEN", "TIERS", "MILESTONE", "SIZE", "AGE", "METRICS"]
        table(headings, [_cells(row) for row in rows], right=("STEP", "GEN", "SIZE", "AGE"))
    else:
        print_note(f"no checkpoints{f' of run {run}' if run else ''} in {place or tier or 'any tier'}")
    if not is_complete:
        raise typer.Exit(PARTIAL)


def _cells(row: CheckpointRow) -> list[str]:
    unhealthy = " unhealthy" if row.healthy is False else ""
    return [
        row.run,
        str(row.step),
        str(row.generation),
        ",".join(row.tiers),
        row.milestone or "",
        size(row.size_bytes),
        age(row.created_at),
        metrics_line(row.metrics) + unhealthy,
    ]


def _rows_of_daemon(settings: Settings, run: Run | None, tier: str | None) -> tuple[list[CheckpointRow], bool] | None:
    """(rows, whether every tier could be listed); None without a daemon."""
    config = settings.config()
    check_tier(tier, config, MEMORY)
    daemon = daemon_http.find(config) if tier == MEMORY else daemon_http.find_or_none(config)
    if daemon is None:
        return None
    unlisted = [report for report in daemon.status.tiers if not report.is_known and tier in (None, report.name)]
    for report in unlisted:
        print_note(f"tierd: {report.name} is shown as last known, it cannot be listed: {report.error}")
    return [row for row in daemon.rows() if run in (None, row.run)], not unlisted


async def _list(
    settings: Settings, place: str | None, only: str | None, run: Run | None
) -> tuple[list[CheckpointRow], bool]:
    async with open_tiers(settings, place=place, only=only) as tiers:
        is_complete = tiers.check_reachable()
        tiers.report_unreadable(CheckpointQuery(run=run))
        return checkpoint_rows(tiers.catalog, run), is_complete
