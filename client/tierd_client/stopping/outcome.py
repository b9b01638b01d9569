"""How a run ended, as the daemon records it, and the wait for the last snapshot after a stop."""

from __future__ import annotations

from tierd.errors import EXIT_HALTED, Full, TierdError, Transient
from tierd.format import wire
from tierd.format.run_state import RunState
from tierd_client.log import log
from tierd_client.snapshot.handle import Shot


class Halted(SystemExit):
    """Raised by `Client.halt`: ends the process with code 17. A person must decide before the run goes on."""

    def __init__(self, reason: str) -> None:
        super().__init__(EXIT_HALTED)
        self.reason = reason


def outcome_of(error: BaseException | None, stop_reason: str) -> wire.Goodbye:
    """The outcome of a `with client:` block that `error` has ended, or that ended without one.

    stopped: start the same command again. finished: the loop came to its end. halted: a person must decide, because of
    `Client.halt` or a KeyboardInterrupt, or because the same command would get the same error. failed: all else.
    """
    match error:
        case Halted():
            state, reason = RunState.HALTED, error.reason
        case KeyboardInterrupt():
            state, reason = RunState.HALTED, "interrupted at once"
        case TierdError() if not isinstance(error, Transient | Full):
            state, reason = RunState.HALTED, error.message
        case None:
            state, reason = (RunState.STOPPED, stop_reason) if stop_reason else (RunState.FINISHED, "")
        case SystemExit() if error.code in (None, 0):
            return outcome_of(None, stop_reason)
        case _:
            state, reason = RunState.FAILED, f"{type(error).__name__}: {error}"
    return wire.Goodbye(state=state, reason=reason[: wire.REASON_CHARS_MAX])


def wait_last_snapshot(step: int | None, shot: Shot | None, timeout_s: float) -> None:
    """After a stop at `step`, wait until the newest snapshot is durable. Raises Transient when it is not in time: the
    exit code must not claim that nothing was lost. Logs an error when there is no snapshot of `step`."""
    if shot is None or shot.step != step:
        newest = f"the newest is of step {shot.step}" if shot is not None else "none was taken"
        log.error("tierd: stopped at step %s without a snapshot of it: %s; the steps since are lost", step, newest)
    if shot is None:
        return
    shot.is_last = True
    try:
        shot.wait_persisted(timeout_s)
    except TierdError as error:
        late = Transient(
            f"stop at step {step}: the last snapshot was not durable {timeout_s:.0f} s after the loop: {error.message}",
            hint="a running daemon still persists it: see `tierd status`; snapshot.stop_grace_s sets the wait",
        )
        log.error("tierd: %s", late)
        raise late from error
