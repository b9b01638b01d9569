"""Answers to peers that ask for a checkpoint: always one, bounded in number, and never a descriptor too many."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.support.rooms import RUN, Rooms, rooms_at
from tierd.api import handover as finding
from tierd.api.handover import Finder
from tierd.api.packets import PacketConnection, receive_packet
from tierd.api.session import TrainerSession
from tierd.errors import TierdError
from tierd.format import wire
from tierd.format.ids import CheckpointId, Generation, Rank, Run
from tierd.workers.restorer import Handover, Restorer


async def nobody_knows(checkpoint: CheckpointId) -> bool | None:
    return None


class Slow(Restorer):
    """Waits before it looks, and then may meet a bug."""

    may_go: asyncio.Event
    bug: Exception | None = None

    async def find(self, run: Run, find: wire.Find, on_progress: Callable[[int, int], None]) -> Handover:
        on_progress(1, 3)
        await self.may_go.wait()
        if self.bug is not None:
            raise self.bug
        return await super().find(run, find, on_progress)


class Asked:
    """A session with its peer, and a finder that is slow."""

    def __init__(self, rooms: Rooms) -> None:
        ours, self.peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.peer.settimeout(10)
        self.session = TrainerSession(PacketConnection(ours), RUN, Rank(0), Generation(1))
        self.tasks: set[asyncio.Task[None]] = set()
        self.restorer = Slow(
            rooms.memory,
            rooms.catalog,
            rooms.hot,
            rooms.hot_store,
            rooms.cold,
            [],
            metrics=rooms.metrics,
            incidents=rooms.incidents,
            judge=nobody_knows,
        )
        self.restorer.may_go = asyncio.Event()
        self.finder = Finder(self.restorer, rooms.incidents, self.spawn)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self.tasks.add(asyncio.ensure_future(coroutine))

    def ask(self, request: int = 1) -> None:
        self.finder.ask(
            self.session,
            wire.Find(request=request, step=None, generation=None, milestone=None, tier="memory", exclude=[]),
        )

    async def answered(self) -> None:
        self.restorer.may_go.set()
        await asyncio.gather(*self.tasks)

    async def heard(self) -> list[wire.ToClient]:
        """All that was posted; descriptors are closed."""
        self.session.finish()
        await self.session.send_queued()
        found: list[wire.ToClient] = []
        while True:
            raw, descriptors, _ = receive_packet(self.peer)
            for descriptor in descriptors:
                os.close(descriptor)
            if not raw:
                return found
            found.append(wire.decode_to_client(raw))


@pytest.fixture
async def rooms(tmp_path: Path) -> AsyncIterator[Rooms]:
    async with rooms_at(tmp_path) as found:
        found.seal(7)
        yield found


@pytest.fixture
async def asked(rooms: Rooms) -> AsyncIterator[Asked]:
    before = len(os.listdir("/proc/self/fd"))
    found = Asked(rooms)
    yield found
    found.session.close()
    found.session.connection.close()
    found.peer.close()
    assert len(os.listdir("/proc/self/fd")) == before, "descriptors leak"


async def test_peer_hears_that_it_is_being_looked_for_and_then_gets_it(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind another rank's fetch it may wait for many minutes, and silence would look like a dead daemon."""
    monkeypatch.setattr(finding, "PROGRESS_INTERVAL_S", 0.01)
    asked.ask()
    async with asyncio.timeout(10):
        while asked.session._outbox.qsize() < 3:
            await asyncio.sleep(0.01)
    await asked.answered()
    heard = await asked.heard()
    assert heard[0] == wire.Progress(request=1, done_bytes=1, total_bytes=3)
    assert heard[-1] == wire.FoundReplica(request=1, tier="memory")
    await asyncio.sleep(0.03)
    assert asked.session._outbox.empty(), "no news after the answer"


async def test_bug_on_the_way_is_answered_and_recorded(asked: Asked, rooms: Rooms) -> None:
    for number, bug in enumerate((ZeroDivisionError("x"), OSError(24, "Too many open files"), TierdError("known"))):
        asked.restorer.bug = bug
        asked.ask(number)
        await asked.answered()
    refusals = [message for message in await asked.heard() if isinstance(message, wire.Refused)]
    assert [one.request for one in refusals] == [0, 1, 2]
    assert "ZeroDivisionError" in refusals[0].message
    assert [one["stage"] for one in rooms.incidents.recent()] == ["restore"] * 3


async def test_answer_to_a_peer_that_has_gone_closes_what_was_opened(asked: Asked) -> None:
    asked.ask()
    await asyncio.sleep(0)
    asked.session.close()
    await asked.answered()


async def test_more_questions_than_the_limit_are_turned_away(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "FINDS_MAX", 3)
    for request in range(1, 6):
        asked.ask(request)
    assert len(asked.tasks) == 3
    await asked.answered()
    asked.ask(6)
    await asked.answered()
    heard = await asked.heard()
    assert [one.request for one in heard if isinstance(one, wire.Refused)] == [4, 5]
    assert sorted(one.request for one in heard if isinstance(one, wire.FoundReplica)) == [1, 2, 3, 6]
