"""One conversation on the trainers' door: who the peer is, and the messages that wait to be sent to it.

bounded: a peer that does not read is dropped when its outbox is full, and one that is being sent away has a few
seconds to hear why. Nobody else waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
from dataclasses import dataclass

from tierd.api.packets import PacketConnection
from tierd.format import wire
from tierd.format.ids import Generation, Rank, Run
from tierd.workers.restorer import close_all

log = logging.getLogger("tierd")

OUTBOX_MAX = 256  # messages a peer may leave unread before it is dropped; it re-attaches and asks again
FINISH_TIMEOUT_S = 5.0  # how long what is queued may take to be sent at the end
FIRST = Rank(0)  # it speaks for all ranks of its run
NO_RANK = Rank(-1)  # of a session that only asks


class TrainerSession:
    """`rank` is NO_RANK for one that only asks."""

    def __init__(self, connection: PacketConnection, run: Run, rank: Rank, generation: Generation) -> None:
        self.connection = connection
        self.run = run
        self.rank = rank
        self.generation = generation
        self._outbox: asyncio.Queue[tuple[wire.ToClient, list[int]] | None] = asyncio.Queue(OUTBOX_MAX)
        self._is_closed = False

    def post(self, message: wire.ToClient, descriptors: list[int] | None = None) -> None:
        """Queue a message; takes the descriptors over. To one that has gone, it does nothing."""
        if self._is_closed:
            close_all(descriptors or [])
            return
        try:
            self._outbox.put_nowait((message, descriptors or []))
        except asyncio.QueueFull:
            close_all(descriptors or [])
            log.warning("dropping %s rank %d: it has left %d messages unread", self.run, self.rank, OUTBOX_MAX)
            self.connection.shutdown()

    def finish(self) -> None:
        """End the connection after what is queued has been sent, or could not be in time."""
        try:
            self._outbox.put_nowait(None)
        except asyncio.QueueFull:
            self.connection.shutdown()
        asyncio.get_running_loop().call_later(FINISH_TIMEOUT_S, self.connection.shutdown)

    async def send_queued(self) -> None:
        """Sends until `finish`. Ends quietly when the peer has gone."""
        while (queued := await self._outbox.get()) is not None:
            message, descriptors = queued
            try:
                await self.connection.send(wire.encode(message), descriptors)
            except OSError:
                break
            finally:
                close_all(descriptors)
        self.connection.shutdown()

    def close(self) -> None:
        """Gives back what was not sent. The connection is its owner's to close."""
        self._is_closed = True
        while not self._outbox.empty():
            queued = self._outbox.get_nowait()
            close_all(queued[1] if queued else [])


@dataclass(frozen=True, slots=True)
class Writer:
    """The process that has a rank's slots mapped. `pidfd` is None when it cannot be seen (another PID namespace)."""

    pid: int
    pidfd: int | None

    @classmethod
    def open(cls, pid: int) -> Writer:
        try:
            return cls(pid, os.pidfd_open(pid) if pid > 0 else None)
        except OSError:
            return cls(pid, None)

    @property
    def is_dead(self) -> bool:
        """Dead for certain: a descriptor of it that a child still holds open tells nothing, the kernel does."""
        if self.pidfd is None:
            return False
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        if self.pidfd is not None:
            os.close(self.pidfd)
