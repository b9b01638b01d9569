"""An asyncio event loop with virtual time, a seeded order of ready callbacks, and processes that can be killed.

Modelled: time jumps to the next timer, so nothing sleeps. Of the callbacks that are ready at the same instant, the seed
decides which runs first. A job of an executor runs on the loop, at one instant, after a simulated latency; its result
arrives after a second one. Code that runs in the context of a killed process never runs again, its `finally` blocks
included.

Not modelled: threads that run at the same time, the limit of a pool's threads, sockets, signals, blocked callbacks.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

STEPS_MAX = 2_000_000  # callbacks of one simulation: more means that it does not end
DURATION_S_MAX = 10 * 86400.0


class Process:
    """What is killed as one: everything that is started in a context where `OWNER` is this process. Until
    `sleeps_until_s` nothing of it runs, while the clocks go on."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_alive = True
        self.sleeps_until_s = 0.0


OWNER: contextvars.ContextVar[Process | None] = contextvars.ContextVar("owner", default=None)


class Deadlock(Exception):
    """Nothing is ready and no timer is set, but the simulation has not ended."""


class _Task(asyncio.Task[Any]):
    """A task whose place in a set does not depend on its address: task groups cancel in the order of a set."""

    serial = 0

    def __init__(self, coroutine: Coroutine[Any, Any, Any], **options: Any) -> None:
        _Task.serial += 1
        self._serial = _Task.serial
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self._serial


class SimulatedLoop(asyncio.AbstractEventLoop):
    """`latency_s`: name of an executor → seconds until a job runs, and from then until its result arrives.
    `before_job` and `after_job`: called around each job, with that name; `after_job` also with the function's name.
    `connect`: as create_connection. `is_stopped`: end at once. `errors`: exceptions that nobody handled."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.latency_s: Callable[[str], tuple[float, float]] = lambda name: (0.001, 0.0)
        self.before_job: Callable[[str], None] = lambda name: None
        self.after_job: Callable[[str, str], None] = lambda name, function: None
        self.connect: Callable[..., Awaitable[Any]]
        self.result_at_s = 0.0  # when the result of the job that runs now arrives
        self.is_stopped = False
        self.errors: list[dict[str, Any]] = []
        self.tasks: list[_Task] = []
        self.steps = 0
        self._now_s = 0.0
        self._serial = 0
        self._ready: list[asyncio.Handle] = []
        self._timers: list[tuple[float, int, asyncio.Handle]] = []
        self._dropped: list[asyncio.Handle] = []  # of killed processes
        self._is_running = False
        self._is_unwinding = False
        _Task.serial = 0

    # ── running ──

    def run_until_complete(self, future: Any) -> Any:
        """The result, or None when the loop was stopped before."""
        main = self.create_task(future) if asyncio.iscoroutine(future) else future
        self._is_running = True
        asyncio._set_running_loop(self)
        try:
            while not main.done() and not self.is_stopped:
                self._run_one()
        finally:
            asyncio._set_running_loop(None)
            self._is_running = False
        return main.result() if main.done() else None

    def _run_one(self) -> None:
        if not self._ready:
            while self._timers and self._timers[0][2].cancelled():
                heapq.heappop(self._timers)
            if not self._timers:
                waiting = [f"{task.get_name()}: {task.get_coro()!r}" for task in self.tasks if not task.done()]
                raise Deadlock("nothing is ready and no timer is set; these tasks wait:\n" + "\n".join(waiting))
            self._now_s = max(self._now_s, self._timers[0][0])
            while self._timers and self._timers[0][0] <= self._now_s:
                self._ready.append(heapq.heappop(self._timers)[2])
        # The last one takes the place of the chosen one: removal from the middle of a list would cost its length.
        if (count := len(self._ready)) > 1:
            index = int(self.random.random() * count)
            self._ready[index], self._ready[-1] = self._ready[-1], self._ready[index]
        handle = self._ready.pop()
        if handle.cancelled():
            return
        owner = handle._context.get(OWNER)
        if owner is not None and not owner.is_alive and not self._is_unwinding:
            self._dropped.append(handle)
            return
        if owner is not None and owner.sleeps_until_s > self._now_s and not self._is_unwinding:
            self._serial += 1
            heapq.heappush(self._timers, (owner.sleeps_until_s, self._serial, handle))
            return
        self.steps += 1
        if self.steps > STEPS_MAX or self._now_s > DURATION_S_MAX:
            raise RuntimeError(f"the simulation does not end: {self.steps} callbacks in {self._now_s:.0f} s")
        handle._run()

    def unwind(self) -> None:
        """After the simulation: cancel every task, those of killed processes too, so that files are closed."""
        self._is_unwinding = True
        self._ready += self._dropped
        self._dropped = []

        async def end() -> None:
            this = asyncio.current_task()
            for _ in range(100):
                left = [task for task in self.tasks if not task.done() and task is not this]
                if not left:
                    return
                for task in left:
                    task.cancel()
                await asyncio.sleep(60.0)

        self.run_until_complete(end())

    # ── what asyncio asks of a loop ──

    def time(self) -> float:
        return self._now_s

    def call_soon(self, callback: Any, *args: Any, context: contextvars.Context | None = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._serial += 1
        heapq.heappush(self._timers, (when, self._serial, handle))
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coroutine: Any, *, name: str | None = None, context: Any = None) -> Any:
        task = _Task(coroutine, loop=self, name=name or "task", context=context)
        self.tasks.append(task)
        if len(self.tasks) > 500:
            self.tasks = [each for each in self.tasks if not each.done()]
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        name = getattr(executor, "_thread_name_prefix", "default")
        until_run_s, until_result_s = self.latency_s(name)
        future = self.create_future()

        def deliver(result: Any, error: BaseException | None) -> None:
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        def run() -> None:
            result, error = None, None
            self.result_at_s = self._now_s + until_result_s
            try:
                self.before_job(name)
                result = func(*args)
            except Exception as raised:
                error = raised
            self.after_job(name, getattr(getattr(func, "func", func), "__name__", ""))
            self.call_later(until_result_s, deliver, result, error)

        self.call_later(until_run_s, run)
        return future

    async def create_connection(self, *arguments: Any, **options: Any) -> Any:
        return await self.connect(*arguments, **options)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(context)

    def is_running(self) -> bool:
        return self._is_running

    def is_closed(self) -> bool:
        return False

    def get_debug(self) -> bool:
        return False

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass
