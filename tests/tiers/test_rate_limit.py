"""The upload window adapts to throttling; the bandwidth cap limits bytes per second."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from tierd.tiers.rate_limit import MIB, Bandwidth, UploadWindow


async def test_parts_in_flight_stay_within_the_window() -> None:
    window = UploadWindow(3)
    in_flight = most = 0

    async def part() -> None:
        nonlocal in_flight, most
        async with window.part():
            in_flight += 1
            most = max(most, in_flight)
            await asyncio.sleep(0)
            in_flight -= 1

    await asyncio.gather(*(part() for _ in range(50)))
    assert most == 3
    window.shrink()
    most = 0
    await asyncio.gather(*(part() for _ in range(50)))
    assert most == 1


async def test_throttling_of_one_round_halves_the_window_once() -> None:
    window = UploadWindow(8)
    async with AsyncExitStack() as stack:
        for _ in range(8):
            await stack.enter_async_context(window.part())
        for _ in range(8):
            window.shrink()
        assert window.limit == 4
    window.shrink()
    assert window.limit == 2


async def test_window_grows_by_one_a_round_up_to_its_limit_and_is_at_least_one() -> None:
    window = UploadWindow(8)
    for _ in range(10):
        window.shrink()
    assert window.limit == 1
    grown = [window.limit]
    for _ in range(100):
        window.grow()
        grown.append(window.limit)
    assert grown == sorted(grown)
    assert set(grown) == set(range(1, 9))


async def test_cancelled_waiter_does_not_block_the_others() -> None:
    window = UploadWindow(1)
    async with window.part():
        waiting = [asyncio.ensure_future(window.part().__aenter__()) for _ in range(2)]
        await asyncio.sleep(0)
        waiting[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting[0]
    async with asyncio.timeout(5):
        await waiting[1]


async def test_rate_stays_below_the_cap() -> None:
    bandwidth = Bandwidth(1000 / MIB)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await asyncio.gather(*(bandwidth.take(100) for _ in range(4)))
    assert loop.time() - began >= 0.29, "the fourth begins after the time of the three before it"


@pytest.mark.parametrize("cap", [0.0, 1e12])
async def test_raised_cap_applies_to_pieces_that_already_wait(cap: float) -> None:
    bandwidth = Bandwidth(1 / MIB)
    await bandwidth.take(1 << 30)
    waiting = asyncio.gather(*(bandwidth.take(1 << 30) for _ in range(3)))
    await asyncio.sleep(0)
    bandwidth.limit(cap)
    async with asyncio.timeout(20):
        await waiting


async def test_lowered_cap_applies_to_later_pieces() -> None:
    bandwidth = Bandwidth(0.0)
    await bandwidth.take(1 << 30)
    bandwidth.limit(1 / MIB)
    await bandwidth.take(100)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await bandwidth.take(1)
