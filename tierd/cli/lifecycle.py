"""`tierd lifecycle`: what the lifecycle would copy and delete now, and why. It only says so: the daemon does it."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
import typer

from tierd.cli import options
from tierd.cli.console import answer, answer_json, say, table
from tierd.cli.places import PARTIAL, Settings, look, settings_of
from tierd.format.ids import check_run
from tierd.lifecycle.policy import Decision, Verdict
from tierd.workers.reaper import decisions, halted


class Planned(msgspec.Struct, kw_only=True):
    """What becomes of one checkpoint in one tier. `action` is replicate, evict, expire; also keep or wait."""

    run: str
    step: int
    generation: int
    tier: str
    action: str
    reason: str


def lifecycle(
    context: typer.Context,
    run: options.RunName = None,
    is_explained: Annotated[bool, typer.Option("--explain", help="Also what stays where it is, and why.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Always so: this verb never deletes anything.")] = True,
    json: options.Json = False,
) -> None:
    """Say what would be copied and deleted now, and why. Never does it."""
    only = None if run is None else check_run(run)
    decisions, is_whole, reasons = asyncio.run(_decisions(settings_of(context)))
    planned = [
        _planned(one)
        for one in decisions
        if only in (None, one.checkpoint.id.run) and (is_explained or one.verdict is not Verdict.KEEP)
    ]
    if json:
        answer_json(planned)
    elif planned:
        rows = [[one.action, one.tier, one.run, str(one.step), str(one.generation), one.reason] for one in planned]
        table(["WOULD", "TIER", "RUN", "STEP", "GEN", "WHY"], rows, right=("STEP", "GEN"))
    else:
        answer("nothing to copy, nothing to delete")
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


async def _decisions(settings: Settings) -> tuple[list[Decision], bool, list[str]]:
    config = settings.config()
    async with look(settings) as places:
        is_whole = places.check_reachable()
        return decisions(places.catalog, config), is_whole, halted(places.catalog)
