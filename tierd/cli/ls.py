"""`tierd ls`: every checkpoint, newest first, with the tiers that hold it.

A running daemon answers, since only it knows the memory tier, and lists the tiers for it; without one, they are listed
directly.
"""

from __future__ import annotations

from typing import Annotated

import typer
from msgspec import UNSET

from tierd.checkpoint_report import CheckpointRow, checkpoint_rows
from tierd.cli import daemon_http, options
from tierd.cli.console import age, duration, metrics_line, print_json, print_note, size, table
from tierd.cli.opened_tiers import PARTIAL, open_tiers
from tierd.cli.options import check_tier, settings_of
from tierd.format.ids import check_run
from tierd.lifecycle.selection import MEMORY, CheckpointQuery
from tierd.report import LOOK_S, tiers_text


async def ls(
    context: typer.Context,
    place: Annotated[
        str | None, typer.Argument(metavar="PLACE", help="A directory or s3:// URL: listed without daemon and config.")
    ] = None,
    run: options.RunName = None,
    tier: Annotated[
        str | None, typer.Option("--tier", metavar="TIER", help="Only what this tier holds: memory, hot, …")
    ] = None,
    json: options.Json = False,
) -> int:
    """List checkpoints, newest first."""
    settings = settings_of(context)
    only_run = None if run is None else check_run(run)
    daemon = None
    if not place:
        config = settings.config()
        check_tier(tier, config, MEMORY)
        # Only a daemon can list the memory tier.
        daemon = daemon_http.find(config) if tier == MEMORY else daemon_http.find_or_none(config, is_fresh=True)
    if daemon is not None:
        unlisted = [report for report in daemon.status.tiers if not report.is_known and tier in (None, report.name)]
        for report in unlisted:
            print_note(f"tierd: {report.name} is shown as last known, it cannot be listed: {report.error}")
        for report in daemon.status.tiers:
            if report.is_known and report.listed_age_s is not None and report.listed_age_s > LOOK_S:
                ago = duration(report.listed_age_s)
                print_note(f"tierd: {report.name} is shown as it was {ago} ago: no new listing within {LOOK_S:.0f} s")
        for lost in daemon.status.lost:
            if run in (None, lost.run) and tier in (None, lost.tier):
                print_note(f"tierd: lost: {lost.id} disappeared from {lost.tier}: docs/RUNBOOK.md#checkpoints-lost")
        for reason in daemon.status.foreign:
            print_note(f"tierd: foreign: {reason}")
        rows, code = daemon.rows(), PARTIAL if unlisted else 0
    else:
        async with open_tiers(settings, place=place, only=None if place else tier) as tiers:
            code = tiers.check_reachable()
            tiers.report_unreadable(CheckpointQuery(run=only_run))
            rows = checkpoint_rows(tiers.catalog, only_run)
    rows = [row for row in rows if run in (None, row.run) and (tier is None or _is_in(tier, row))]
    if json:
        print_json(rows)
    elif rows:
        _print(rows)
    else:
        tiers_listed = "any tier that could be listed" if code else "any tier"
        print_note(f"no checkpoints{f' of run {run}' if run else ''} in {place or tier or tiers_listed}")
    return code


def _is_in(tier: str, row: CheckpointRow) -> bool:
    return tier in row.tiers or (row.parts is not UNSET and tier in row.parts)


def _print(rows: list[CheckpointRow]) -> None:
    table(
        ["RUN", "STEP", "GEN", "TIERS", "MILESTONE", "SIZE", "AGE", "METRICS"],
        [
            [
                row.run,
                str(row.step),
                str(row.generation),
                tiers_text(row.tiers, row.parts),
                row.milestone or "",
                size(row.size_bytes),
                age(row.created_at),
                metrics_line(row.metrics) + (" unhealthy" if row.healthy is False else ""),
            ]
            for row in rows
        ],
        right=("STEP", "GEN", "SIZE", "AGE"),
    )
