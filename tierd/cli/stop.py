"""`tierd stop`: asks a run to finish its step, take a last snapshot and end; waits until it has, and says how."""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
import typer

from tierd.cli import daemon_http, options
from tierd.cli.console import answer, answer_json
from tierd.cli.daemon_http import RunStatus
from tierd.cli.opened_tiers import settings_of
from tierd.config import Config
from tierd.errors import EXIT_HALTED, Transient
from tierd.format.ids import check_run

LOOK_S = 0.2
EXIT_CODES = {"finished": 0, "stopped": 0, "halted": EXIT_HALTED}  # any other: 1


class Stopped(msgspec.Struct, kw_only=True):
    """What `tierd stop --json` prints."""

    run: str
    generation: int
    step: int
    state: str
    reason: str


def stop(
    context: typer.Context,
    run: Annotated[str, typer.Option("--run", metavar="RUN", help="The run whose trainers are attached here.")],
    force: Annotated[bool, typer.Option("--force", help="Interrupt the trainers at once; no snapshot.")] = False,
    wait_s: options.Wait = 300.0,
    json: options.Json = False,
) -> None:
    """Stop a run at the end of its step, with a snapshot that the same command resumes from."""
    from tierd.api.operator_socket import stop_run

    config = settings_of(context).config()
    deadline_s = time.monotonic() + wait_s
    agreed = stop_run(config.socket_path, check_run(run), is_forced=force, wait_s=wait_s)
    if not json:
        when = "is being interrupted after" if force else "stops at"
        answer(f"{run} {when} step {agreed.step} (generation {agreed.generation})")
    ended = _wait_ended(config, run, agreed.generation, deadline_s)
    found = Stopped(
        run=run, generation=agreed.generation, step=agreed.step, state=ended.state or "", reason=ended.reason
    )
    if json:
        answer_json(found)
    else:
        answer(f"{run} is {found.state}" + (f": {found.reason}" if found.reason else ""))
    raise typer.Exit(EXIT_CODES.get(found.state, 1) if not force else 0)


def _wait_ended(config: Config, run: str, generation: int, deadline_s: float) -> RunStatus:
    """The run as it ended. A newer generation means that it has ended too, and was started again."""
    while True:
        status = next((one for one in daemon_http.find(config).status.runs if one.run == run), None)
        if status is not None and (status.state != "running" or status.generation > generation):
            return status
        if time.monotonic() >= deadline_s:
            raise Transient(
                f"wait for {run} to end: its trainers are still attached",
                hint="does the loop leave when client.stopping is true? `tierd stop --force` interrupts it",
            )
        time.sleep(LOOK_S)
