"""`tierd lifecycle`: what the lifecycle would copy and delete now, and why; what it will hold, and what that costs.

It only prints the plan: the daemon carries it out.
"""

from __future__ import annotations

from typing import Annotated

import typer

from tierd.catalog.decisions import halted
from tierd.cli import options
from tierd.cli.console import duration, print_json, print_note, print_result, size, table
from tierd.cli.opened_tiers import open_tiers
from tierd.cli.options import settings_of
from tierd.format.ids import HOT, check_run
from tierd.lifecycle.forecast import GIB, Forecast
from tierd.status.lifecycle_report import lifecycle_report


async def lifecycle(
    context: typer.Context,
    run: options.OnlyRun = None,
    is_explained: Annotated[
        bool, typer.Option("--explain", help="Also what is kept and why, and what it will hold.")
    ] = False,
    json: options.Json = False,
) -> int:
    """Print what would be copied and deleted now, and why. Changes nothing."""
    only_run = None if run is None else check_run(run)
    settings = settings_of(context)
    async with open_tiers(settings) as tiers:
        code = tiers.check_reachable()
        for halt in halted(tiers.catalog):
            print_note(f"tierd: deletion is halted: {halt}")
        if only_run is not None and only_run not in tiers.catalog.runs():
            print_note(f"tierd: no listed tier has a checkpoint of run {only_run}: `tierd runs` lists the runs")
        report = lifecycle_report(tiers.catalog, settings.config(), only_run, is_explained=is_explained)
    if json:
        print_json(report)
    elif report.planned:
        rows = [
            [planned.action, planned.tier, planned.run, str(planned.step), str(planned.generation), planned.reason]
            for planned in report.planned
        ]
        table(["ACTION", "TIER", "RUN", "STEP", "GEN", "WHY"], rows, right=("STEP", "GEN"))
    else:
        print_result("nothing to copy, nothing to delete")
    if is_explained and not json and report.forecast:
        _print_forecast(report.forecast)
    print_note("this is a plan only; a running daemon carries it out")
    return code


def _print_forecast(forecasts: list[Forecast]) -> None:
    def gib(value: float | None) -> str:
        return "" if value is None else size(value * GIB)

    def cost(value: float | None) -> str:
        return "" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"

    print_result("")
    numbers = ("NOW", "STEADY", "ADDED/MONTH", "COST/MONTH", "COST ADDED/MONTH")
    table(
        ["TIER", "RUN", "EVERY", *numbers],
        [
            [
                forecast.tier,
                forecast.run,
                "?" if forecast.interval_s is None else duration(forecast.interval_s),
                *map(gib, (forecast.held_gib, forecast.steady_gib, forecast.growth_gib)),
                *map(cost, (forecast.steady_cost, forecast.growth_cost)),
            ]
            for forecast in sorted(forecasts, key=lambda one: one.tier != HOT)
        ],
        right=numbers,
    )
    print_note("a forecast, if each run continues at its pace: STEADY levels off; what is kept forever adds to it")
