from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from tierd.errors import TierUnreachable
from tierd.tiers.pool import Buffers, ThreadPool, for_each


@pytest.fixture
def pool() -> Iterator[ThreadPool]:
    found = ThreadPool(2, "test")
    yield found
    found.close()


async def test_cancelled_caller_waits_for_its_thread(pool: ThreadPool) -> None:
    """The thread uses its buffer and its descriptor until it ends."""
    loop = asyncio.get_running_loop()
    begun, may_end, ended = asyncio.Event(), threading.Event(), threading.Event()

    def work() -> None:
        loop.call_soon_threadsafe(begun.set)
        may_end.wait()
        ended.set()

    caller = asyncio.ensure_future(pool.run(work))
    await begun.wait()
    for _ in range(3):
        caller.cancel()
        await asyncio.sleep(0)
        assert not caller.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended.is_set()


async def test_caller_of_a_call_without_an_answer_continues_at_the_deadline(pool: ThreadPool) -> None:
    may_end = threading.Event()
    with pytest.raises(TierUnreachable, match="no answer within 0 s"):
        await pool.run(may_end.wait, timeout_s=0.01)
    assert await pool.query(divmod, 7, 2) == (3, 1), "the other thread is free"
    with pytest.raises(TierUnreachable, match="may still take effect"):
        pool.check_settled()
    may_end.set()
    await settled(pool)


async def test_calls_fail_at_once_while_every_thread_waits_and_succeed_later(pool: ThreadPool) -> None:
    may_end = threading.Event()
    for _ in range(2):
        with pytest.raises(TierUnreachable, match="no answer within"):
            await pool.query(may_end.wait, timeout_s=0.01)
    pool.check_settled()  # queries change nothing
    begun: list[int] = []
    with pytest.raises(TierUnreachable, match="no answer to 2 earlier calls"):
        await pool.run(begun.append, 1)
    may_end.set()
    while True:
        try:
            await pool.run(begun.append, 2)
            break
        except TierUnreachable:
            await asyncio.sleep(0.001)
    assert begun == [2]


async def test_call_that_is_in_the_queue_at_its_deadline_never_begins(pool: ThreadPool) -> None:
    may_end, begun = threading.Event(), list[int]()
    busy = [asyncio.ensure_future(pool.run(may_end.wait)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(TierUnreachable):
        await pool.run(begun.append, 1, timeout_s=0.01)
    may_end.set()
    await asyncio.gather(*busy)
    await settled(pool)
    await asyncio.gather(*(pool.run(divmod, 7, 2) for _ in range(4)))
    assert begun == []


async def test_cancelled_query_is_left_behind_at_once(pool: ThreadPool) -> None:
    may_end = threading.Event()
    caller = asyncio.ensure_future(pool.query(may_end.wait))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert not may_end.is_set()
    may_end.set()


async def test_cancelled_caller_waits_no_longer_than_the_deadline(pool: ThreadPool) -> None:
    may_end = threading.Event()
    caller = asyncio.ensure_future(pool.run(may_end.wait, timeout_s=0.05))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    may_end.set()
    await settled(pool)


async def test_cleaning_up_waits_for_no_call_that_was_left_behind(pool: ThreadPool) -> None:
    may_end, cleaned = threading.Event(), threading.Event()
    for _ in range(2):
        with pytest.raises(TierUnreachable):
            await pool.run(may_end.wait, timeout_s=0.01)
    await pool.clean_up(cleaned.set)
    assert not cleaned.is_set(), "no thread is free"
    may_end.set()
    assert await asyncio.to_thread(cleaned.wait, 60)


async def settled(pool: ThreadPool) -> None:
    while True:
        try:
            return pool.check_settled()
        except TierUnreachable:
            await asyncio.sleep(0.001)


async def test_exception_of_a_call_reaches_the_caller(pool: ThreadPool) -> None:
    with pytest.raises(ZeroDivisionError):
        await pool.run(lambda: 1 // 0)
    assert await pool.run(divmod, 7, 2) == (3, 1)


@pytest.mark.parametrize("limit", [1, 3, 100])
async def test_each_item_runs_once_within_the_concurrency_limit(limit: int) -> None:
    done: list[int] = []
    running = most = 0

    async def act(item: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        done.append(item)

    await for_each(limit, range(20), act)
    assert sorted(done) == list(range(20))
    assert most == min(limit, 20)


async def test_first_error_cancels_the_others_and_is_raised_alone() -> None:
    cancelled: list[int] = []

    async def act(item: int) -> None:
        if item == 1:
            raise LookupError(item) from ValueError("why")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(item)
            raise

    with pytest.raises(LookupError) as error:
        await for_each(3, range(10), act)
    assert isinstance(error.value.__cause__, ValueError)
    assert set(cancelled) <= {0, 2}


async def test_item_cancelled_from_within_raises_instead_of_being_skipped() -> None:
    """A thread may raise the CancelledError of something else, which a task group ignores."""

    async def act(item: int) -> None:
        if item == 1:
            raise asyncio.CancelledError

    with pytest.raises(RuntimeError, match="not done"):
        await for_each(3, range(3), act)


async def test_buffers_are_limited_in_number_and_reused() -> None:
    buffers = Buffers(usual_bytes=8, count=2)
    async with buffers.borrow(8) as first, buffers.borrow(3) as small:
        assert (len(first), len(small)) == (8, 3)
        third = asyncio.ensure_future(buffers.borrow(8).__aenter__())
        await asyncio.sleep(0)
        assert not third.done()
        third.cancel()
    async with buffers.borrow(3) as other:
        assert other is not small
    async with buffers.borrow(8) as again:
        assert again is first
    with pytest.raises(LookupError):
        async with buffers.borrow(8):
            raise LookupError
    async with buffers.borrow(8) as other:
        assert other is not first, "a call that was left behind may still write into it"
    buffers.close()
    async with buffers.borrow(8) as fresh:
        assert fresh is not first
    buffers.close()
