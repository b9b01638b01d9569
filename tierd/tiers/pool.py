"""Bounded threads, bounded concurrency and bounded buffers of a store.

Blocking calls (files, boto3) run in these threads and never on the event loop. A cancelled caller waits until a call
that has begun ends: until then, the call uses its buffer and its descriptor.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar, TypeVarTuple

import aiofiles.os

from tierd.tiers.direct_io import page_aligned

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

BUFFERS_KEPT_S = 10.0
"""Buffers are kept between two files: first touch of fresh memory was measured at 0.3 GB/s on a VM."""


class ThreadPool:
    """At most `threads` blocking calls at once; further ones queue."""

    def __init__(self, threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def run(
        self,
        function: Callable[[*Arguments], T],
        *arguments: *Arguments,
        abort: Callable[[], object] | None = None,
    ) -> T:
        """When the caller is cancelled, `abort` is called and must make `function` end early."""
        call: asyncio.Task[T] = asyncio.ensure_future(aiofiles.os.wrap(function)(*arguments, executor=self._threads))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            if abort is not None:
                abort()
            while not call.done():
                try:
                    await asyncio.wait([call])
                except asyncio.CancelledError:
                    continue
            if not call.cancelled():
                call.exception()  # retrieve it: asyncio logs an exception that nobody retrieved
            raise

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


async def for_each(limit: int, items: Iterable[T], act: Callable[[T], Awaitable[object]]) -> None:
    """Await `act` on every item, at most `limit` at once. The first error cancels the others and is raised alone.

    Raises RuntimeError when an `act` ended by an asyncio.CancelledError of its own: a task group takes that for
    success, and the item would be skipped silently.
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
        raise RuntimeError("an item was cancelled from within and is not done")


class Buffers:
    """At most `count` page-aligned buffers in use at once. Buffers of `usual_bytes` are reused."""

    def __init__(self, *, usual_bytes: int, count: int) -> None:
        self._usual_bytes = usual_bytes
        self._free = asyncio.Semaphore(count)
        self._kept: list[memoryview] = []
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def borrow(self, size_bytes: int) -> AsyncGenerator[memoryview]:
        async with self._free:
            is_usual = size_bytes == self._usual_bytes
            buffer = self._kept.pop() if is_usual and self._kept else page_aligned(size_bytes)
            try:
                yield buffer
            finally:
                if is_usual:
                    self._kept.append(buffer)
                if self._timer is not None:
                    self._timer.cancel()
                self._timer = asyncio.get_running_loop().call_later(BUFFERS_KEPT_S, self._kept.clear)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._kept.clear()
