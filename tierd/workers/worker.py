"""What a worker is, and the one loop around all of them: wake, interval, backoff.

A worker is one idempotent pass, `run_once()`, that makes one thing so. It raises what went wrong, or returns False
when that has been recorded where it happened; the loop backs off with jitter between limits, and never gives up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, cast

from tierd.backoff import backoff_s
from tierd.config import LimitsConfig


class Worker(Protocol):
    name: str
    """The stage it is, in metrics and status: persist, replicate, reap, list."""

    interval_s: float
    """How long it may rest with nothing to wake it."""

    is_urgent: bool
    """Whether new work wakes it while it backs off from old trouble (never sooner than retry_min_s)."""

    async def run_once(self) -> bool: ...


class Wake:
    """Lets others say that there may be work. Waking twice before a pass is one pass."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def __call__(self) -> None:
        self._event.set()

    async def wait(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return
        finally:
            self._event.clear()


async def run_forever(
    worker: Worker, wake: Wake, limits: LimitsConfig, on_error: Callable[[str, Exception], None]
) -> None:
    """Passes without end. Backoff is what protects the other side, so only an urgent worker is woken out of it."""
    failures = 0
    while True:
        is_well = False
        try:
            is_well = await worker.run_once()
        except asyncio.CancelledError:
            if cast("asyncio.Task[None]", asyncio.current_task()).cancelling():
                raise
            # Something within was cancelled, not this worker: it would end, and nobody would be told.
            on_error(worker.name, RuntimeError(f"a pass of {worker.name} was cancelled from within"))
        except Exception as error:  # the one broad catch: a bug in one worker must not end the daemon
            on_error(worker.name, error)
        failures = 0 if is_well else failures + 1
        if failures == 0:
            await wake.wait(worker.interval_s)
            continue
        pause_s = backoff_s(failures, min_s=limits.retry_min_s, max_s=limits.retry_max_s)
        if worker.is_urgent:
            await asyncio.sleep(limits.retry_min_s)
            await wake.wait(pause_s)
        else:
            await asyncio.sleep(pause_s)
