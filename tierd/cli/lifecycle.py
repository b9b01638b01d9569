"""`tierd lifecycle`: what the lifecycle would copy and delete now, and why; what it will hold, and what that costs.

It only prints the plan: the daemon carries it out.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from tierd.cli import options
from tierd.cli.console import duration, print_json, print_note, print_result, table
from tierd.cli.opened_tiers import PARTIAL, open_tiers
from tierd.cli.options import Settings, settings_of
from tierd.decisions import halted
from tierd.format.ids import Run, check_run
from tierd.lifecycle.forecast import Forecast
from tierd.lifecycle.policy import HOT
from tierd.report import LifecycleReport, lifecycle_report


def lifecycle(
    context: typer.Context,
    run: options.RunName = None,
    is_explained: Annotated[
        bool, typer.Option("--explain", help="Also what is kept and why, and what it will hold.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Print what would be copied and deleted now, and why. Changes nothing."""
    only_run = None if run is None else check_run(run)
    report, is_complete = asyncio.run(_report(settings_of(context), only_run, is_explained=is_explained))
    if json:
        print_json(report)
    elif report.planned:
        rows = [
            [one.action, one.tier, one.run, str(one.step), str(one.generation), one.reason] for one in report.planned
        ]
        table(["ACTION", "TIER", "RUN", "STEP", "GEN", "WHY"], rows, right=("STEP", "GEN"))
    else:
        print_result("nothing to copy, nothing to delete")
    if is_explained and not json and report.forecast:
        _print_forecast(report.forecast)
    print_note("this is a plan only; a running daemon carries it out")
    if not is_complete:
        raise typer.Exit(PARTIAL)


async def _report(settings: Settings, run: Run | None, *, is_explained: bool) -> tuple[LifecycleReport, bool]:
    """(report, whether every tier could be listed)"""
    async with open_tiers(settings) as tiers:
        is_complete = tiers.check_reachable()
        for halt in halted(tiers.catalog):
            print_note(f"tierd: deletion is halted: {halt}")
        return lifecycle_report(tiers.catalog, settings.config(), run, is_explained=is_explained), is_complete


def _print_forecast(forecasts: list[Forecast]) -> None:
    def number(value: float | None) -> str:
        return "" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"

    print_result("")
    numbers = ("GIB NOW", "GIB STEADY", "GIB ADDED/MONTH", "COST/MONTH", "COST ADDED/MONTH")
    table(
        ["TIER", "RUN", "EVERY", *numbers],
        [
            [
                one.tier,
                one.run,
                "?" if one.interval_s is None else duration(one.interval_s),
                *map(number, (one.held_gib, one.steady_gib, one.growth_gib, one.steady_cost, one.growth_cost)),
            ]
            for one in sorted(forecasts, key=lambda one: one.tier != HOT)
        ],
        right=numbers,
    )
    print_note("a forecast, if each run continues at its pace: STEADY levels off; what is kept forever adds to it")
