"""Answers to Find: every request gets one, pending requests are bounded, and no descriptor leaks."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.support.descriptors import no_descriptor_leaks
from tests.support.rooms import RUN, Rooms, rooms_at
from tierd.api import restore_requests
from tierd.api.packets import PacketConnection, receive_packet
from tierd.api.restore_requests import RestoreRequests
from tierd.api.session import TrainerSession
from tierd.errors import TierdError
from tierd.format import wire
from tierd.format.ids import CheckpointId, Generation, Rank, Run
from tierd.workers.restorer import OpenCheckpoint, Restorer


async def not_examined(checkpoint: CheckpointId) -> bool | None:
    return None


class Slow(Restorer):
    """Waits before it looks for a checkpoint, and may then raise `bug`."""

    may_go: asyncio.Event
    bug: Exception | None = None

    async def find(self, run: Run, find: wire.Find, on_progress: Callable[[int, int], None]) -> OpenCheckpoint:
        on_progress(1, 3)
        await self.may_go.wait()
        if self.bug is not None:
            raise self.bug
        return await super().find(run, find, on_progress)


class Requester:
    """A session with its peer, and a slow restorer."""

    def __init__(self, rooms: Rooms) -> None:
        ours, self.peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.peer.settimeout(10)
        self.session = TrainerSession(PacketConnection(ours), RUN, Rank(0), Generation(1))
        self.tasks: set[asyncio.Task[None]] = set()
        self.restorer = Slow(rooms.context, not_examined)
        self.restorer.may_go = asyncio.Event()
        self.requests = RestoreRequests(self.restorer, rooms.context, self.spawn)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self.tasks.add(asyncio.ensure_future(coroutine))

    def ask(self, request: int = 1) -> None:
        self.requests.answer(
            self.session,
            wire.Find(request=request, step=None, generation=None, milestone=None, tier="memory", exclude=[]),
        )

    async def wait_answers(self) -> None:
        self.restorer.may_go.set()
        await asyncio.gather(*self.tasks)

    async def received(self) -> list[wire.ToClient]:
        """All messages that were posted. Their descriptors are closed."""
        self.session.finish()
        await self.session.send_queued()
        messages: list[wire.ToClient] = []
        while True:
            raw, descriptors, _ = await asyncio.to_thread(receive_packet, self.peer)
            for descriptor in descriptors:
                os.close(descriptor)
            if not raw:
                return messages
            messages.append(wire.decode_to_client(raw))


@pytest.fixture
async def rooms(tmp_path: Path) -> AsyncIterator[Rooms]:
    async with rooms_at(tmp_path) as rooms:
        rooms.seal(7)
        yield rooms


@pytest.fixture
async def requester(rooms: Rooms) -> AsyncIterator[Requester]:
    with no_descriptor_leaks():
        requester = Requester(rooms)
        yield requester
        requester.session.close()
        requester.session.connection.close()
        requester.peer.close()


async def test_a_peer_receives_progress_until_the_answer(requester: Requester, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch may take many minutes, and a daemon that sends nothing looks dead."""
    monkeypatch.setattr(restore_requests, "PROGRESS_INTERVAL_S", 0.01)
    requester.ask()
    async with asyncio.timeout(10):
        while requester.session._outbox.qsize() < 3:
            await asyncio.sleep(0.01)
    await requester.wait_answers()
    received = await requester.received()
    assert received[0] == wire.Progress(request=1, done_bytes=1, total_bytes=3)
    assert received[-1] == wire.FoundReplica(request=1, tier="memory")
    await asyncio.sleep(0.03)
    assert requester.session._outbox.empty(), "no progress after the answer"


async def test_an_unexpected_error_is_answered_and_recorded(requester: Requester, rooms: Rooms) -> None:
    for number, bug in enumerate((ZeroDivisionError("x"), OSError(24, "Too many open files"), TierdError("known"))):
        requester.restorer.bug = bug
        requester.ask(number)
        await requester.wait_answers()
    refusals = [message for message in await requester.received() if isinstance(message, wire.Refused)]
    assert [refusal.request for refusal in refusals] == [0, 1, 2]
    assert "ZeroDivisionError" in refusals[0].message
    assert [incident.stage for incident in rooms.incidents.recent()] == ["restore"] * 3


async def test_the_descriptors_for_a_peer_that_has_disconnected_are_closed(requester: Requester) -> None:
    requester.ask()
    await asyncio.sleep(0)
    requester.session.close()
    await requester.wait_answers()


async def test_requests_of_one_run_leave_others_theirs(
    requester: Requester, rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hostile trainer asks for parts on a node that never answers."""
    monkeypatch.setattr(restore_requests, "FINDS_OF_RUN_MAX", 3)
    for request in range(1, 6):
        requester.ask(request)
    assert len(requester.tasks) == 3
    requester.session.run = Run("other")
    requester.ask(7)
    assert len(requester.tasks) == 4
    requester.session.run = RUN
    await requester.wait_answers()
    requester.ask(6)
    await requester.wait_answers()
    assert len(requester.tasks) == 5


async def test_requests_beyond_the_limit_are_refused(requester: Requester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restore_requests, "FINDS_MAX", 3)
    for request in range(1, 6):
        requester.ask(request)
    assert len(requester.tasks) == 3
    await requester.wait_answers()
    requester.ask(6)
    await requester.wait_answers()
    received = await requester.received()
    assert [message.request for message in received if isinstance(message, wire.Refused)] == [4, 5]
    assert sorted(message.request for message in received if isinstance(message, wire.FoundReplica)) == [1, 2, 3, 6]
