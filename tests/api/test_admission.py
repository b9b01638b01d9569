"""Admission of trainers: claims of generations in several tiers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.rooms import rooms_at
from tests.support.wire_peer import HELLO
from tierd.api.admission import Admission
from tierd.api.packets import PacketConnection
from tierd.api.quotas import Quotas
from tierd.errors import Full
from tierd.format.claim import Claim
from tierd.format.ids import Generation, Rank, Run
from tierd.workers.restorer import Restorer


async def judge_nothing(checkpoint: object) -> bool | None:
    return None


Connected = tuple[PacketConnection, socket.socket]


@pytest.fixture
def connected() -> Iterator[Connected]:
    """The daemon's end of a connection, and the trainer's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection = PacketConnection(ours)
    yield connection, theirs
    connection.close()
    theirs.close()


async def test_a_cold_tier_that_does_not_answer_is_named_in_the_log(
    tmp_path: Path, connected: Connected, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """asyncio's TimeoutError has no text of its own."""
    monkeypatch.setattr("tierd.api.admission.COLD_CLAIM_TIMEOUT_S", 0.01)
    async with rooms_at(tmp_path) as rooms:
        await rooms.look()

        async def hang(key: str, *arguments: Any, **options: Any) -> bool:
            return await asyncio.Event().wait()

        rooms.cold["cold"].store.put_bytes = hang  # type: ignore[method-assign]
        clock = rooms.context.monotonic_s
        quotas = Quotas(rooms.context.config.limits, rooms.memory, has_checkpoint=lambda run: False, now_s=clock)
        admission = Admission(rooms.context, Restorer(rooms.context, judge_nothing), {}, quotas)
        await admission._claim(connected[0], Run("run"), Rank(0), HELLO)  # pyright: ignore[reportPrivateUsage]
    assert "claim generation 1 of run in cold: no answer in time" in caplog.text


async def test_slow_claim_of_a_run_does_not_delay_another_run(tmp_path: Path, connected: Connected) -> None:
    async with rooms_at(tmp_path) as rooms:
        await rooms.look()
        store = rooms.cold["cold"].store
        real_put_bytes, is_begun, is_answering = store.put_bytes, asyncio.Event(), asyncio.Event()

        async def put_bytes(key: str, *arguments: Any, **options: Any) -> bool:
            if key.startswith("slow/"):
                is_begun.set()
                await is_answering.wait()
            return await real_put_bytes(key, *arguments, **options)

        store.put_bytes = put_bytes  # type: ignore[method-assign]
        clock = rooms.context.monotonic_s
        quotas = Quotas(rooms.context.config.limits, rooms.memory, has_checkpoint=lambda run: False, now_s=clock)
        admission = Admission(rooms.context, Restorer(rooms.context, judge_nothing), {}, quotas)
        async with asyncio.TaskGroup() as group:
            slow = group.create_task(admission._claim(connected[0], Run("slow"), Rank(0), HELLO))  # pyright: ignore[reportPrivateUsage]
            await is_begun.wait()
            async with asyncio.timeout(10):
                assert (await admission._claim(connected[0], Run("other"), Rank(0), HELLO))[0] == 1  # pyright: ignore[reportPrivateUsage]
            assert not slow.done()
            is_answering.set()
        assert slow.result()[0] == 1


async def test_a_generation_that_cold_refused_is_not_claimed_in_hot(tmp_path: Path) -> None:
    """The claim in hot says that this node holds the generation. Without it, a checkpoint of that generation, restored
    from cold, may be copied to another cold tier."""
    async with rooms_at(tmp_path) as rooms:
        await rooms.look()
        run, taken = Run("run42"), Generation(1)
        assert await rooms.cold["cold"].claim_generation(run, taken, Claim.new("elsewhere"))
        clock = rooms.context.monotonic_s
        quotas = Quotas(rooms.context.config.limits, rooms.memory, has_checkpoint=lambda run: False, now_s=clock)
        admission = Admission(rooms.context, Restorer(rooms.context, judge_nothing), {}, quotas)
        cold, claim = [rooms.cold["cold"]], Claim.new("here")
        assert not await admission._claim_in(cold, run, taken, claim, spans_nodes=False)  # pyright: ignore[reportPrivateUsage]
        assert await rooms.hot.claim(run, taken) is None


async def test_a_generation_that_a_failed_attempt_left_in_hot_is_not_claimed_in_cold_alone(
    tmp_path: Path, connected: Connected
) -> None:
    """The disk reported an error after it had written the claim. Then hot was full. Two claims of one generation would
    keep the checkpoints of the start out of cold, and fence its trainers."""
    async with rooms_at(tmp_path) as rooms:
        await rooms.look()
        run, left = Run("run42"), Generation(1)
        assert await rooms.hot.claim_generation(run, left, Claim.new("here", hot="hot-1"))

        async def put_bytes(key: str, *arguments: Any, **options: Any) -> bool:
            raise Full(f"write {key}: No space left on device")

        rooms.hot.store.put_bytes = put_bytes  # type: ignore[method-assign]
        clock = rooms.context.monotonic_s
        quotas = Quotas(rooms.context.config.limits, rooms.memory, has_checkpoint=lambda run: False, now_s=clock)
        admission = Admission(rooms.context, Restorer(rooms.context, judge_nothing), {}, quotas)
        assert (await admission._claim(connected[0], run, Rank(0), HELLO))[0] == 2  # pyright: ignore[reportPrivateUsage]


async def test_a_trainer_that_has_died_before_its_claim_does_not_fence_the_next_start(
    tmp_path: Path, connected: Connected
) -> None:
    """Its Hello waited for a listing, longer than that of the start after it."""
    async with rooms_at(tmp_path) as rooms:
        await rooms.look()
        run, (connection, trainer) = Run("run42"), connected
        clock = rooms.context.monotonic_s
        quotas = Quotas(rooms.context.config.limits, rooms.memory, has_checkpoint=lambda run: False, now_s=clock)
        admission = Admission(rooms.context, Restorer(rooms.context, judge_nothing), {}, quotas)
        trainer.close()
        with pytest.raises(ConnectionResetError):
            await admission._claim(connection, run, Rank(0), HELLO)  # pyright: ignore[reportPrivateUsage]
        assert rooms.catalog.generation_max(run) == 0
        assert await rooms.hot.claim(run, Generation(1)) is None
