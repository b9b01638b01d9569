"""`tierd lifecycle`: what the lifecycle would copy and delete now, and why; what it will hold, and what that costs.

It only says so: the daemon does it.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
import typer

from tierd.cli import options
from tierd.cli.console import answer, answer_json, duration, say, table
from tierd.cli.opened_tiers import PARTIAL, Settings, look, settings_of
from tierd.format.ids import check_run
from tierd.lifecycle.forecast import Forecast
from tierd.lifecycle.policy import HOT, Decision, Verdict
from tierd.workers.reaper import decisions, forecasts, halted


class Planned(msgspec.Struct, kw_only=True):
    """What becomes of one checkpoint in one tier. `action` is replicate, evict, expire; also keep or wait."""

    run: str
    step: int
    generation: int
    tier: str
    action: str
    reason: str


class Lifecycle(msgspec.Struct, kw_only=True):
    planned: list[Planned]
    forecast: list[Forecast]


def lifecycle(
    context: typer.Context,
    run: options.RunName = None,
    is_explained: Annotated[
        bool, typer.Option("--explain", help="Also what stays and why, and what it will hold.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Always so: this verb never deletes anything.")] = True,
    json: options.Json = False,
) -> None:
    """Say what would be copied and deleted now, and why. Never does it."""
    only = None if run is None else check_run(run)
    decisions, forecasts, is_whole, reasons = asyncio.run(_look(settings_of(context)))
    planned = [
        _planned(one)
        for one in decisions
        if only in (None, one.checkpoint.id.run) and (is_explained or one.verdict is not Verdict.KEEP)
    ]
    forecasts = [one for one in forecasts if only in (None, one.run)]
    if json:
        answer_json(Lifecycle(planned=planned, forecast=forecasts))
    elif planned:
        rows = [[one.action, one.tier, one.run, str(one.step), str(one.generation), one.reason] for one in planned]
        table(["WOULD", "TIER", "RUN", "STEP", "GEN", "WHY"], rows, right=("STEP", "GEN"))
    else:
        answer("nothing to copy, nothing to delete")
    if is_explained and not json and forecasts:
        _print(forecasts)
    for reason in reasons:
        say(f"tierd: deletion is halted: {reason}")
    say("this is a plan only; a running daemon carries it out")
    if not is_whole:
        raise typer.Exit(PARTIAL)


def _planned(decision: Decision) -> Planned:
    checkpoint = decision.checkpoint.id
    return Planned(
        run=checkpoint.run,
        step=checkpoint.step,
        generation=checkpoint.generation,
        tier=decision.tier,
        action=decision.verdict.value,
        reason=decision.reason,
    )


def _print(forecasts: list[Forecast]) -> None:
    """A blank where it cannot be told."""

    def number(value: float | None) -> str:
        return "" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"

    answer("")
    gib = ("GIB NOW", "STEADY", "+ A MONTH", "COST A MONTH", "+ A MONTH LATER")
    table(
        ["TIER", "RUN", "EVERY", *gib],
        [
            [
                one.tier,
                one.run,
                "?" if one.interval_s is None else duration(one.interval_s),
                *map(number, (one.held_gib, one.steady_gib, one.growth_gib, one.steady_cost, one.growth_cost)),
            ]
            for one in sorted(forecasts, key=lambda one: one.tier != HOT)
        ],
        right=gib,
    )
    say("a forecast, if each run goes on as it has: steady is what comes to rest; what is kept for ever adds to it")


async def _look(settings: Settings) -> tuple[list[Decision], list[Forecast], bool, list[str]]:
    config = settings.config()
    async with look(settings) as places:
        is_whole = places.check_reachable()
        catalog = places.catalog
        return decisions(catalog, config), forecasts(catalog, config), is_whole, halted(catalog)
