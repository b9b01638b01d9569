"""The interface of a worker, and the loop that runs every worker: wake, interval, backoff.

A worker is one idempotent pass, `run_once()`. It raises an error, or returns False if it has recorded the error
itself. After an error the loop waits with exponential backoff and jitter, and it never gives up.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol, cast

from tierd.backoff import backoff_s
from tierd.config.sections import LimitsConfig


class Worker(Protocol):
    name: str
    """The stage in metrics and status: one of metrics.STAGES."""

    interval_s: float
    """The longest time between two passes that succeed."""

    is_urgent: bool
    """Whether new work ends the backoff after an error (never before retry_min_s)."""

    async def run_once(self) -> bool:
        """One pass. False: something failed, and the error is recorded."""
        ...


class Wake(asyncio.Event):
    """Set when there may be work. Setting it several times before a pass causes one pass."""

    def __init__(self) -> None:
        super().__init__()
        self.retry = asyncio.Event()
        """Set when a person wants the next pass now, also after an error."""

    def set_retry(self) -> None:
        self.set()
        self.retry.set()

    async def take(self, timeout_s: float) -> None:
        """Wait until it is set, at most `timeout_s`, and clear it."""
        await _wait(self, timeout_s)
        self.clear()


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()


async def run_forever(
    worker: Worker, wake: Wake, limits: LimitsConfig, on_error: Callable[[str, Exception], None]
) -> None:
    """Run passes until cancelled. Backoff protects the server, so only an urgent worker may be woken during it, or any
    one by a person. The backoff then begins anew."""
    failures = 0
    while True:
        is_well = False
        wake.retry.clear()
        try:
            is_well = await worker.run_once()
        except asyncio.CancelledError:
            if cast("asyncio.Task[None]", asyncio.current_task()).cancelling():
                raise
            # Not this task but a call in the pass was cancelled. Without this the worker would end silently.
            on_error(worker.name, RuntimeError(f"a pass of {worker.name} was cancelled from within"))
        except Exception as error:  # broad: a bug in one worker must not end the daemon
            on_error(worker.name, error)
        failures = 0 if is_well else failures + 1
        if failures == 0:
            await wake.take(worker.interval_s)
            continue
        pause_s = backoff_s(failures, min_s=limits.retry_min_s, max_s=limits.retry_max_s)
        if worker.is_urgent:
            await _wait(wake.retry, limits.retry_min_s)
            await wake.take(pause_s)
        else:
            await _wait(wake.retry, pause_s)
        if wake.retry.is_set():
            failures = 0
