from __future__ import annotations

import asyncio
import contextvars

import pytest

from tests.support.simulation.loop import OWNER, Deadlock, Process, SimulatedLoop


def test_time_jumps_to_the_next_timer() -> None:
    loop = SimulatedLoop(1)

    async def wait() -> list[float]:
        times = [loop.time()]
        await asyncio.sleep(86400.0)
        times.append(loop.time())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await asyncio.Event().wait()
        return [*times, loop.time()]

    assert loop.run_until_complete(wait()) == [0.0, 86400.0, 86405.0]


def order_of(seed: int) -> list[int]:
    loop, order = SimulatedLoop(seed), list[int]()

    async def act(number: int) -> None:
        await asyncio.sleep(1.0)
        order.append(number)

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(8):
                group.create_task(act(number))

    loop.run_until_complete(run())
    return order


def test_the_seed_decides_the_order_of_what_is_ready() -> None:
    assert order_of(1) == order_of(1)
    assert len({tuple(order_of(seed)) for seed in range(20)}) > 10


def test_a_deadlock_is_an_error_that_lists_the_tasks() -> None:
    async def wait_for_nothing() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="wait_for_nothing"):
        SimulatedLoop(1).run_until_complete(wait_for_nothing())


def test_a_job_runs_after_its_latency_and_in_no_thread() -> None:
    loop = SimulatedLoop(1)
    loop.latency_s = lambda name: (3.0, 4.0)

    async def run() -> list[float]:
        return [await asyncio.to_thread(loop.time), loop.time()]

    assert loop.run_until_complete(run()) == [3.0, 7.0]


def test_the_error_of_a_job_is_raised_where_it_is_awaited() -> None:
    async def run() -> None:
        await asyncio.to_thread(int, "x")

    with pytest.raises(ValueError, match="x"):
        SimulatedLoop(1).run_until_complete(run())


def test_a_killed_process_runs_nothing_any_more_and_is_unwound_at_the_end() -> None:
    loop, process, events = SimulatedLoop(1), Process("node"), list[str]()

    async def work() -> None:
        try:
            while True:
                events.append("worked")
                await asyncio.sleep(1.0)
        finally:
            events.append("cleaned up")

    async def run() -> None:
        context = contextvars.copy_context()
        context.run(OWNER.set, process)
        context.run(loop.create_task, work())
        await asyncio.sleep(2.5)
        process.is_alive = False
        await asyncio.sleep(100.0)

    loop.run_until_complete(run())
    assert events == ["worked"] * 3
    loop.unwind()
    assert events[-1] == "cleaned up"
