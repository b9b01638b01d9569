"""One connection on the trainers' socket: the identity of the peer, and the messages that wait to be sent to it.

bounded: a peer that does not read is disconnected when its outbox is full. A session that is closed by the daemon has
a few seconds to send what is queued. No other session waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tierd.api.packets import PacketConnection
from tierd.api.quotas import Rate
from tierd.audit import Who
from tierd.descriptors import close_all
from tierd.errors import TierdError
from tierd.failpoints import failpoint
from tierd.format import wire
from tierd.format.ids import Generation, Rank, Run
from tierd.format.text import printable

log = logging.getLogger("tierd")

OUTBOX_MAX = 256  # unread messages before the peer is disconnected; it may reconnect and ask again
FINISH_TIMEOUT_S = 5.0  # for sending what is queued when a session ends
FIRST = Rank(0)  # reports and answers for all ranks of its run
NO_RANK = Rank(-1)  # of a peer that is not a trainer


class TrainerSession:
    """`rank` is NO_RANK for a peer that is not a trainer: it sends only Find, Inventory and Request. `unlisted`: why a
    tier could not be listed when it was admitted, by tier. `lines`: of the log, that its messages may cause.
    `protocol`: the version that the peer speaks. `proof`: as of Hello. `is_start`: it begins a generation.
    `speaks_for_node`: the one rank of this node that answers operators and reports step times."""

    def __init__(
        self,
        connection: PacketConnection,
        run: Run,
        rank: Rank,
        generation: Generation,
        unlisted: Mapping[str, str] = MappingProxyType({}),
        *,
        lines: Rate | None = None,
        hello: wire.Hello | None = None,
    ) -> None:
        self.connection = connection
        self.run = run
        self.rank = rank
        self.proof = "" if hello is None else hello.proof
        self.generation = generation
        self.unlisted = unlisted
        self.protocol = wire.PROTOCOL_VERSION if hello is None else hello.protocol
        self.is_start = hello is not None and hello.generation is None
        node = None if hello is None or rank == NO_RANK else hello.node
        self.speaks_for_node = rank == (FIRST if node is None else node.ranks[0])
        self._outbox: asyncio.Queue[tuple[wire.ToClient, list[int]] | None] = asyncio.Queue(OUTBOX_MAX)
        self._is_closed = False
        self._lines = lines
        self._lines_left_out = 0

    def may_log(self) -> bool:
        """Whether one more event of this peer is logged. The first one that is left out is noted."""
        if self._lines is None or self._lines.try_spend():
            return True
        if self._lines_left_out == 0:
            log.warning("%s rank %d: it reports too much, further reports are counted but not logged", *self._who)
        self._lines_left_out += 1
        return False

    @property
    def peer(self) -> Who:
        """Who events are attributed to, for the audit trail."""
        by = "operator" if self.rank == NO_RANK else "trainer"
        return Who(by, self.connection.peer_uid, self.connection.peer_pid)

    @property
    def _who(self) -> tuple[Run, Rank]:
        return self.run, self.rank

    def post(self, message: wire.ToClient, descriptors: list[int] | None = None) -> None:
        """Queue a message, and close its descriptors when it was sent. After `close`, only closes the descriptors."""
        if self._is_closed:
            close_all(descriptors or [])
            return
        try:
            self._outbox.put_nowait((message, descriptors or []))
        except asyncio.QueueFull:
            close_all(descriptors or [])
            log.warning("disconnect %s rank %d: it has not read %d messages", self.run, self.rank, OUTBOX_MAX)
            self.connection.shutdown()

    def finish(self) -> None:
        """End the connection after the queued messages are sent, at the latest after FINISH_TIMEOUT_S."""
        try:
            self._outbox.put_nowait(None)
        except asyncio.QueueFull:
            self.connection.shutdown()
        asyncio.get_running_loop().call_later(FINISH_TIMEOUT_S, self.connection.shutdown)

    async def send_queued(self) -> None:
        """Send queued messages until `finish`, or until the peer has disconnected."""
        while (queued := await self._outbox.get()) is not None:
            message, descriptors = queued
            failpoint("trainer.send")
            try:
                await self.connection.send(wire.encode(message), descriptors)
                failpoint("trainer.sent")
            except OSError:
                break
            finally:
                close_all(descriptors)
        self.connection.shutdown()

    def close(self) -> None:
        """Discard what was not sent. Does not close the connection."""
        self._is_closed = True
        while not self._outbox.empty():
            queued = self._outbox.get_nowait()
            close_all(queued[1] if queued else [])


def refused(request: int, error: TierdError) -> wire.Refused:
    message, hint = printable(error.message), printable(error.hint)
    return wire.Refused(request=request, kind=error.kind, message=message, hint=hint)


@dataclass(frozen=True, slots=True)
class SlotWriter:
    """The process that has a rank's slots mapped. `pidfd` is None if it is not visible (another PID namespace)."""

    pid: int
    pidfd: int | None

    @classmethod
    def open(cls, pid: int) -> SlotWriter:
        try:
            return cls(pid, os.pidfd_open(pid) if pid > 0 else None)
        except OSError:
            return cls(pid, None)

    @property
    def is_dead(self) -> bool:
        """Whether the process has certainly exited. Its socket cannot tell: a child may hold it open."""
        if self.pidfd is None:
            return False
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        if self.pidfd is not None:
            os.close(self.pidfd)
