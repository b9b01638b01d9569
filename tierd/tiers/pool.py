"""How a store waits and how much it holds: a bounded pool of threads, bounded work in flight, bounded buffers.

Blocking calls of the outside world (files, boto3) run here and never on the event loop. A cancelled caller
still waits for the call that a thread has begun: until it ends, its buffer and its descriptor are in use.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import ParamSpec, TypeVar

import aiofiles.os

from tierd.tiers.direct_io import page_aligned

P = ParamSpec("P")
T = TypeVar("T")

BUFFERS_KEPT_S = 10.0
"""First touch of fresh memory was measured at 0.3 GB/s on a VM, so buffers outlive the gap between two files."""


class Pool:
    """At most `threads` blocking calls at once; the others queue."""

    def __init__(self, threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.run_until(_nothing, function, *args, **kwargs)

    async def run_until(
        self, cut: Callable[[], None], function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """As `run`; `cut` makes the call end early, and is called when the caller is cancelled."""
        call: asyncio.Task[T] = asyncio.ensure_future(
            aiofiles.os.wrap(function)(*args, executor=self._threads, **kwargs)
        )
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            cut()
            while not call.done():
                try:
                    await asyncio.wait([call])
                except asyncio.CancelledError:
                    continue
            if not call.cancelled():
                call.exception()  # looked at, so that asyncio does not report it as forgotten
            raise

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


async def each(limit: int, items: Iterable[T], act: Callable[[T], Awaitable[object]]) -> None:
    """`act` on every item, at most `limit` at once. The first error stops the rest and is raised alone.

    Returns only when every item is done: a task group holds a member that was cancelled from within for one that ended
    well, and its item would be left out in silence. Raises RuntimeError then.
    """
    waiting = iter(items)

    async def work() -> None:
        for item in waiting:
            await act(item)

    try:
        async with asyncio.TaskGroup() as group:
            members = [group.create_task(work()) for _ in range(limit)]
    except BaseExceptionGroup as errors:
        first: BaseException = errors.exceptions[0]
        raise first from first.__cause__
    if any(member.cancelled() for member in members):
        raise RuntimeError("work was cancelled from within, and is not done")


class Buffers:
    """At most `count` page-aligned buffers lent at once, all users together. Those of the usual size are reused."""

    def __init__(self, *, usual_bytes: int, count: int) -> None:
        self._usual_bytes = usual_bytes
        self._lent = asyncio.Semaphore(count)
        self._kept: list[memoryview] = []
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def lend(self, size_bytes: int) -> AsyncGenerator[memoryview]:
        async with self._lent:
            self._stop_timer()
            is_usual = size_bytes == self._usual_bytes
            buffer = self._kept.pop() if is_usual and self._kept else page_aligned(size_bytes)
            try:
                yield buffer
            finally:
                if is_usual:
                    self._kept.append(buffer)
                self._stop_timer()
                self._timer = asyncio.get_running_loop().call_later(BUFFERS_KEPT_S, self._kept.clear)

    def close(self) -> None:
        self._stop_timer()
        self._kept.clear()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _nothing() -> None:
    pass
