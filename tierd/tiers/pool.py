"""Bounded threads, bounded concurrency, bounded waits and bounded buffers of a store.

Blocking calls (files, boto3) run in these threads and never on the event loop. A thread that blocks in the kernel, as
on a dead NFS server, cannot be ended: at a deadline its caller leaves the call behind and continues.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar, TypeVarTuple

import aiofiles.os

from tierd.errors import TierUnreachable
from tierd.tiers.direct_io import page_aligned

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

BUFFERS_KEPT_S = 10.0
"""Buffers are kept between two files: first touch of fresh memory was measured at 0.3 GB/s on a VM."""


class ThreadPool:
    """At most `threads` blocking calls at once; further ones queue. `timeout_s`: how long a caller waits for a call.

    At the deadline the caller gets TierUnreachable, and the call is left behind: if it has begun, its thread is in use
    until it ends. Once as many calls are left behind as there are threads, every further one fails at once. `where`:
    what the calls wait for, for messages.
    """

    def __init__(self, threads: int, name: str, *, where: str = "", timeout_s: float = math.inf) -> None:
        self.timeout_s = timeout_s
        self.answered_s = -math.inf  # when the last call ended without an error, by the event loop's clock
        self._where = where
        self._size = threads
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._left_behind: dict[asyncio.Task[Any], bool] = {}  # calls that have not ended → whether it is a query

    async def run(
        self,
        function: Callable[[*Arguments], T],
        *arguments: *Arguments,
        abort: Callable[[], object] | None = None,
        timeout_s: float | None = None,
    ) -> T:
        """A cancelled caller waits until a call that has begun ends, or the deadline: until then, the call uses its
        buffer and its descriptor. When the caller is cancelled, `abort` is called and must make `function` end early.
        """
        return await self._run(function, arguments, is_query=False, abort=abort, discard=None, timeout_s=timeout_s)

    async def query(
        self,
        function: Callable[[*Arguments], T],
        *arguments: *Arguments,
        discard: Callable[[T], object] | None = None,
        timeout_s: float | None = None,
    ) -> T:
        """A call that changes nothing and whose result may be dropped: a cancelled caller leaves it behind at once.
        `discard`: called with a result that is dropped, such as a descriptor to close."""
        return await self._run(function, arguments, is_query=True, abort=None, discard=discard, timeout_s=timeout_s)

    async def clean_up(self, function: Callable[[], object]) -> None:
        """As `run`. But while calls are left behind, it returns at once, and `function` runs when a thread is free."""
        if not self._left_behind:
            await self.run(function)
        else:
            self._leave_behind(
                asyncio.ensure_future(aiofiles.os.wrap(function)(executor=self._threads)), is_query=False
            )

    def check_settled(self) -> None:
        """Raises TierUnreachable while a call that was left behind, and is no query, may still change something."""
        if not all(self._left_behind.values()):
            raise self._unreachable("an earlier call that got no answer may still take effect")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(
        self,
        function: Callable[[*Arguments], T],
        arguments: tuple[*Arguments],
        *,
        is_query: bool,
        abort: Callable[[], object] | None,
        discard: Callable[[T], object] | None,
        timeout_s: float | None,
    ) -> T:
        if len(self._left_behind) >= self._size:
            raise self._unreachable(f"no answer to {len(self._left_behind)} earlier calls")

        @functools.wraps(function)
        def unless_left_behind() -> T:
            if call in self._left_behind:
                raise TimeoutError  # seen by nobody: it was still in the queue at its deadline
            return function(*arguments)

        call: asyncio.Task[T] = asyncio.ensure_future(aiofiles.os.wrap(unless_left_behind)(executor=self._threads))
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        try:
            await _wait(call, deadline_s)
        except asyncio.CancelledError:
            if abort is not None:
                abort()
            while not is_query and not call.done() and loop.time() < deadline_s:
                with suppress(asyncio.CancelledError):
                    await _wait(call, deadline_s)
            self._leave_behind(call, is_query=is_query, discard=discard)
            raise
        if call.done():
            result = call.result()
            self.answered_s = loop.time()
            return result
        self._leave_behind(call, is_query=is_query, discard=discard)
        raise self._unreachable(f"no answer within {timeout_s:.0f} s")

    def _unreachable(self, problem: str) -> TierUnreachable:
        hint = "does `ls` hang there too? See docs/RUNBOOK.md#tier-unreachable"
        return TierUnreachable(f"use {self._where}: {problem}", hint=hint)

    def _leave_behind(
        self, call: asyncio.Task[T], *, is_query: bool, discard: Callable[[T], object] | None = None
    ) -> None:
        def ended(call: asyncio.Task[T]) -> None:
            self._left_behind.pop(call, None)
            if call.cancelled():
                return
            # Retrieve the exception: asyncio logs one that nobody retrieved.
            if call.exception() is None and discard is not None:
                discard(call.result())

        if not call.done():
            self._left_behind[call] = is_query
        call.add_done_callback(ended)


async def _wait(call: asyncio.Task[Any], deadline_s: float) -> None:
    """Wait until the call ends or the deadline passes. Cancelling the wait does not cancel the call."""
    is_endless = deadline_s == math.inf
    await asyncio.wait([call], timeout=None if is_endless else deadline_s - asyncio.get_running_loop().time())


async def while_answered(
    work: Coroutine[Any, Any, T],
    answered_s: Callable[[], float],
    *,
    silence_s: float,
    on_silence: Callable[[], object] = lambda: None,
) -> T:
    """The result of `work`, which makes any number of calls. Cancels it and raises TimeoutError when none was answered
    for `silence_s`. `answered_s`: when the last one was, by the event loop's clock. `on_silence`: called before that,
    because a call that has begun may end late."""
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            left_s = max(started_s, answered_s()) + silence_s - loop.time()
            if left_s <= 0:
                on_silence()
                raise TimeoutError
            await asyncio.wait([task], timeout=left_s)
        return task.result()
    finally:
        task.cancel()
        await asyncio.wait([task])


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
            yield buffer
            # Not after an error: a call that was left behind may still read from the buffer or write into it.
            if is_usual:
                self._kept.append(buffer)
            if self._timer is not None:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_later(BUFFERS_KEPT_S, self._kept.clear)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._kept.clear()
