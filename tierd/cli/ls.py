"""`tierd ls`: every checkpoint, newest first, with the tiers that hold it.

A running daemon answers, since only it knows the memory tier, and lists the tiers for it; without one, they are listed
directly.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Annotated, Any

import typer

from tierd.cli import daemon_http, options
from tierd.cli.console import age, duration, metrics_line, print_json, print_note, size, table
from tierd.cli.opened_tiers import PARTIAL, open_tiers
from tierd.cli.options import check_tier, settings_of
from tierd.errors import BadConfig
from tierd.format.ids import MEMORY, check_run
from tierd.format.manifest import NOT_FINITE
from tierd.lifecycle.selection import CheckpointQuery
from tierd.status.checkpoint_report import CheckpointRow, checkpoint_rows
from tierd.status.report import LOOK_S, tiers_text

RUNS_SHOWN = 10
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "=": operator.eq, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
_CONDITION = re.compile(r"([^<>=!]+)(<=|>=|!=|==|<|>|=)([^<>=!].*)")


async def ls(
    context: typer.Context,
    place: Annotated[
        str | None, typer.Argument(metavar="PLACE", help="A directory or s3:// URL: listed without daemon and config.")
    ] = None,
    run: options.OnlyRun = None,
    tier: Annotated[
        str | None, typer.Option("--tier", metavar="TIER", help="Only what this tier holds: memory, hot, …")
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            "--where", metavar="CONDITION", help="Only where a metric fits, as 'loss < 3'; may be repeated: all must."
        ),
    ] = None,
    lowest: Annotated[
        str | None, typer.Option("--lowest", metavar="METRIC", help="Sorted by this metric, the lowest first.")
    ] = None,
    highest: Annotated[
        str | None, typer.Option("--highest", metavar="METRIC", help="Sorted by this metric, the highest first.")
    ] = None,
    json: options.Json = False,
) -> int:
    """List checkpoints, newest first."""
    settings = settings_of(context)
    only_run = None if run is None else check_run(run)
    conditions = [parse_condition(text) for text in where or ()]
    if lowest is not None and highest is not None:
        raise BadConfig("--lowest and --highest both sort the checkpoints", hint="give one of them")
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
        runs = sorted({row.run for row in rows})
    else:
        async with open_tiers(settings, place=place, only=None if place else tier) as tiers:
            code = tiers.check_reachable()
            tiers.report_unreadable(CheckpointQuery(run=only_run))
            rows, runs = checkpoint_rows(tiers.catalog, only_run), sorted(tiers.catalog.runs())
    rows = [row for row in rows if run in (None, row.run) and (tier is None or row.is_in(tier))]
    known = {name for row in rows for name in row.metrics}
    rows = [row for row in rows if all(fits(row) for fits in conditions)]
    if (metric := lowest or highest) is not None:
        measured, others = by_metric(rows, metric, is_highest_first=highest is not None)
        if rows and not measured:
            print_note(f"tierd: not sorted: no checkpoint here has a number {metric}; {_metrics_text(known)}")
        rows = measured + others
    if json:
        print_json(rows)
    elif rows:
        _print(rows)
    else:
        tiers_listed = "any tier that could be listed" if code else "any tier"
        fitting = f" where {' and '.join(where)}" if where else ""
        print_note(f"no checkpoints{f' of run {run}' if run else ''} in {place or tier or tiers_listed}{fitting}")
        if where:
            print_note(f"  {_metrics_text(known)}")
        elif run is not None and run not in runs and runs:
            print_note(f"  there are the runs {', '.join(runs[:RUNS_SHOWN])}{', …' if len(runs) > RUNS_SHOWN else ''}")
    return code


def by_metric(
    rows: list[CheckpointRow], metric: str, *, is_highest_first: bool
) -> tuple[list[CheckpointRow], list[CheckpointRow]]:
    """(those with a number of this metric, sorted by it; the others)."""
    numbers = [(value, row) for row in rows if isinstance(value := row.metrics.get(metric), float)]
    numbers.sort(key=lambda pair: pair[0], reverse=is_highest_first)
    return [row for _, row in numbers], [row for row in rows if not isinstance(row.metrics.get(metric), float)]


def _metrics_text(names: Collection[str]) -> str:
    return f"the metrics there are {', '.join(sorted(names)) or 'none: snapshot(metrics={...}) gives some'}"


def parse_condition(text: str) -> Callable[[CheckpointRow], bool]:
    """Whether a row fits `METRIC OPERATOR VALUE`. A row without the metric fits no condition; a number and a text, as
    which a metric that is not finite is stored, are not compared. Raises BadConfig."""
    match = _CONDITION.fullmatch(text)
    metric, value = (match[1].strip(), match[3].strip()) if match else ("", "")
    if match is None or not metric or not value:
        raise BadConfig(f"--where {text!r} is no condition", hint="as in 'loss < 3'; the operators: < <= > >= = !=")
    compare, expected = _OPERATORS[match[2]], value
    if value not in NOT_FINITE:
        with suppress(ValueError):
            expected = float(value)

    def fits(row: CheckpointRow) -> bool:
        value = row.metrics.get(metric)
        return value is not None and isinstance(value, str) == isinstance(expected, str) and compare(value, expected)

    return fits


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
