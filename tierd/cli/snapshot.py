"""`tierd snapshot`: asks a run for a snapshot at the end of its step, and waits until it is durable."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from tierd.cli import options
from tierd.cli.console import answer, answer_json
from tierd.cli.opened_tiers import settings_of
from tierd.format.ids import check_run, checkpoint_id


class Taken(msgspec.Struct, kw_only=True):
    """What `tierd snapshot --json` prints."""

    run: str
    step: int
    generation: int
    milestone: str | None
    path: str


def snapshot(
    context: typer.Context,
    run: Annotated[str, typer.Option("--run", metavar="RUN", help="The run whose trainers are attached here.")],
    milestone: Annotated[
        str | None, typer.Option("--milestone", metavar="NAME", help="Keep it for ever, under this name.")
    ] = None,
    wait_s: options.Wait = 300.0,
    json: options.Json = False,
) -> None:
    """Have a run take a snapshot now, beside those that are due anyway; training goes on."""
    from tierd.api.operator_socket import take_snapshot

    config = settings_of(context).config()
    agreed = take_snapshot(config.socket_path, check_run(run), milestone, wait_s=wait_s)
    checkpoint = checkpoint_id(run, agreed.step, agreed.generation)
    path = str(config.hot_path / checkpoint.run / checkpoint.name)
    found = Taken(run=run, step=agreed.step, generation=agreed.generation, milestone=milestone, path=path)
    if json:
        answer_json(found)
    else:
        named = f" as {milestone}" if milestone is not None else ""
        answer(f"{run} step {found.step} (generation {found.generation}){named} is durable in {path}")
