"""`tierd stop` and `tierd snapshot`: ask the trainers of a run to stop, or for a snapshot, at the end of their step.

Both wait for the result: how the run ended, or that the snapshot is durable.
"""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
import typer

from tierd.cli import daemon_http, options
from tierd.cli.console import print_report, print_result
from tierd.cli.options import settings_of
from tierd.config.file import run_proof
from tierd.config.sections import Config
from tierd.errors import EXIT_HALTED, Transient
from tierd.format import wire
from tierd.format.ids import HOT, Run, check_run, checkpoint_id
from tierd.format.run_state import RunState
from tierd.status.report import RunReport

POLL_INTERVAL_S = 0.2
EXIT_CODES: dict[str, int] = {RunState.FINISHED: 0, RunState.STOPPED: 0, RunState.HALTED: EXIT_HALTED}  # any other: 1


def stop(
    context: typer.Context,
    run: options.AttachedRun,
    force: Annotated[bool, typer.Option("--force", help="Interrupt the trainers at once; no snapshot.")] = False,
    wait_s: options.Wait = 300.0,
    json: options.Json = False,
) -> int:
    """Stop a run at the end of its step, with a snapshot to resume from."""
    agreed, ended = stop_and_wait(
        settings_of(context).config(), check_run(run), is_forced=force, wait_s=wait_s, is_silent=json
    )
    state = ended.state or ""
    report = {"run": run, "generation": agreed.generation, "step": agreed.step, "state": state, "reason": ended.reason}
    print_report(report, as_json=json, text=f"{run} is {state}" + (f": {ended.reason}" if ended.reason else ""))
    return 0 if force else EXIT_CODES.get(state, 1)


def stop_and_wait(
    config: Config, run: Run, *, is_forced: bool = False, wait_s: float, is_silent: bool
) -> tuple[wire.Agreed, RunReport]:
    """The step at which the trainers have agreed to stop, and the run once it has ended. Raises Transient if it has not
    ended in time, NotFound if it has no trainers here, and as the connection. `is_silent`: prints nothing."""
    from tierd.api.operator_socket import stop_run

    deadline_s = time.monotonic() + wait_s
    uid, proof = config.daemon_uid, run_proof()
    agreed = stop_run(config.socket_path, run, is_forced=is_forced, wait_s=wait_s, daemon_uid=uid, proof=proof)
    if not is_silent:
        when = "is being interrupted after" if is_forced else "stops at"
        print_result(f"{run} {when} step {agreed.step} (generation {agreed.generation})")
    return agreed, _wait_ended(config, run, agreed.generation, deadline_s)


def _wait_ended(config: Config, run: str, generation: int, deadline_s: float) -> RunReport:
    """The run once it has ended. A newer generation means that it ended and was started again."""
    while True:
        report = daemon_http.find(config).status.find_run(run)
        if report is not None and (report.state != RunState.RUNNING or report.generation > generation):
            return report
        if time.monotonic() >= deadline_s:
            raise Transient(
                f"wait for {run} to end: its trainers are still attached",
                hint="does the loop end when client.stopping is true? `tierd stop --force` interrupts it",
            )
        time.sleep(POLL_INTERVAL_S)


def snapshot(
    context: typer.Context,
    run: options.AttachedRun,
    milestone: Annotated[
        str | None, typer.Option("--milestone", metavar="NAME", help="Keep it forever, under this name.")
    ] = None,
    wait_s: options.Wait = 300.0,
    json: options.Json = False,
) -> int:
    """Have a run take a snapshot now, in addition to its regular ones; training continues."""
    from tierd.api.operator_socket import take_snapshot

    config = settings_of(context).config()
    uid, proof = config.daemon_uid, run_proof()
    agreed, tier = take_snapshot(
        config.socket_path, check_run(run), milestone, wait_s=wait_s, daemon_uid=uid, proof=proof
    )
    checkpoint = checkpoint_id(run, agreed.step, agreed.generation)
    roots = {HOT: str(config.hot_path), **{cold.name: cold.url for cold in config.cold}}
    path = f"{roots[tier].rstrip('/')}/{checkpoint.run}/{checkpoint.name}"
    named = f" as {milestone}" if milestone is not None else ""
    text = f"{run} step {agreed.step} (generation {agreed.generation}){named} is durable in {path}"
    report = msgspec.to_builtins(checkpoint) | {"milestone": milestone, "path": path}
    print_report(report, as_json=json, text=text)
    return 0
