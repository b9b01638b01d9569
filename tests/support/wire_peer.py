"""Both ends of a trainer's socket, spoken by hand: messages that a real trainer or daemon never sends, or not then.

A `Peer` is a trainer, or an operator, for a real daemon. A `DaemonPeer` is a daemon for a real trainer's session.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tierd_client.session import DaemonSession

from tests.support.slots import PAGE_BYTES, make_memfd, make_sealed
from tests.support.waiting import DEADLINE_S
from tierd.format import wire

M = TypeVar("M", bound=wire.ToClient)
HELLO = wire.Hello(protocol=wire.PROTOCOL_VERSION, version="0", run="run", rank=0, world_size=1, generation=None)


class Connection:
    """Sends and receives whole messages with their descriptors."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._socket.settimeout(DEADLINE_S)

    def send(self, raw: bytes, descriptors: Sequence[int]) -> None:
        socket.send_fds(self._socket, [raw], list(descriptors))

    def receive(self) -> tuple[bytes, list[int]]:
        """A message, empty at the end of the conversation, and its descriptors."""
        raw, descriptors, _, _ = socket.recv_fds(self._socket, wire.MESSAGE_BYTES_MAX, wire.DESCRIPTORS_MAX)
        return raw, list(descriptors)

    def close(self) -> None:
        self._socket.close()


class Peer:
    """One rank, or with `rank` None an operator. Sends only what the test sends."""

    def __init__(self, path: Path | str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection = Connection(self.socket)
        try:
            self.socket.connect(str(path))
        except OSError:  # the daemon has just been killed
            self.socket.close()
            raise
        self.heard: list[wire.ToClient] = []
        self.descriptors: list[int] = []
        self.slots: dict[int, int] = {}

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, message: wire.ToDaemon, *descriptors: int) -> None:
        self.send_raw(wire.encode(message), *descriptors)

    def send_raw(self, raw: bytes, *descriptors: int) -> None:
        self._connection.send(raw, descriptors)

    def hear(self, kind: type[M]) -> M:
        """The next message of this kind. Earlier messages are in `heard`, its descriptors in `descriptors`."""
        while True:
            raw, descriptors = self._connection.receive()
            assert raw, f"the daemon hung up before it sent {kind.__name__}; it sent: {self.heard}"
            message = wire.decode_to_client(raw)
            self.heard.append(message)
            if isinstance(message, kind):
                self.descriptors = descriptors
                return message
            for descriptor in descriptors:
                os.close(descriptor)
            assert not isinstance(message, wire.Refused), message

    def is_dropped(self) -> bool:
        """Reads to the end of the conversation."""
        while True:
            try:
                raw = self.socket.recv(wire.MESSAGE_BYTES_MAX)
            except ConnectionResetError:  # reported before the last messages, if the daemon left some of ours unread
                continue
            except TimeoutError:
                return False
            if not raw:
                return True
            self.heard.append(wire.decode_to_client(raw))

    def hello(
        self,
        run: str,
        *,
        rank: int | None = 0,
        world_size: int = 1,
        generation: int | None = None,
        proof: str = "",
    ) -> wire.Hello:
        return wire.Hello(
            protocol=wire.PROTOCOL_VERSION,
            version="test",
            run=run,
            rank=rank,
            world_size=world_size,
            generation=generation,
            proof=proof,
        )

    def greet(self, run: str, **fields: Any) -> Any:
        """`fields`: of Hello."""
        self.send(self.hello(run, **fields))
        return self.hear(wire.Welcome)

    def answer(self) -> wire.Refused | None:
        """None when the daemon answers a Hello with Welcome."""
        raw, descriptors = self._connection.receive()
        for descriptor in descriptors:
            os.close(descriptor)
        message = wire.decode_to_client(raw)
        self.heard.append(message)
        return message if isinstance(message, wire.Refused) else None

    def attach(self, index: int, *, size_bytes: int = 4 * PAGE_BYTES, descriptor: int | None = None) -> None:
        """Attaches a new slot, or an adopted one."""
        self.slots[index] = make_memfd(size_bytes) if descriptor is None else descriptor
        self.send(wire.AttachSlot(slot=index, capacity_bytes=size_bytes), self.slots[index])

    def fill(self, index: int, step: int, content: bytes) -> None:
        self.send(wire.Filling(slot=index, step=step))
        os.pwrite(self.slots[index], content, 0)

    def seal(self, index: int, step: int, content: bytes, **fields: Any) -> None:
        """Fills and seals a slot, and waits until the daemon has accepted it."""
        self.fill(index, step, content)
        self.send(make_sealed(step, len(content), slot=index, **fields))
        self.hear(wire.Accepted)

    def find(self, **fields: Any) -> wire.FoundReplica:
        defaults: dict[str, Any] = {
            "request": 7,
            "step": None,
            "generation": None,
            "milestone": None,
            "tier": "auto",
            "exclude": [],
        }
        self.send(wire.Find(**defaults | fields))
        return self.hear(wire.FoundReplica)

    def take_files(self) -> list[bytes]:
        """The contents of the descriptors of the last FoundReplica: the manifest, then the files."""
        contents: list[bytes] = []
        for descriptor in self.descriptors:
            contents.append(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
            os.close(descriptor)
        self.descriptors = []
        return contents

    def close(self) -> None:
        self._connection.close()
        for descriptor in (*self.slots.values(), *self.descriptors):
            os.close(descriptor)
        self.slots, self.descriptors = {}, []


def welcome(boot: str = "first", **fields: Any) -> wire.Welcome:
    defaults: dict[str, Any] = {
        "generation": 1,
        "slots": [],
        "every_steps": 10,
        "every_s": 0.0,
        "slots_per_rank": 2,
        "slot_wait_s": 1.0,
        "when_busy": "wait",
        "node": "n",
        "version": "0",
        "protocol": wire.PROTOCOL_VERSION,
    }
    return wire.Welcome(boot=boot, **defaults | fields)


@dataclass
class Calls:
    """A listener of the session."""

    on_message: Callable[[wire.ToClient], None] = lambda message: None
    on_attach: Callable[[], None] = lambda: None


class DaemonPeer:
    """Listens when entered. Sends and receives on the newest connection that it has admitted."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="tierd-")
        self.path = f"{self._folder}/tierd.sock"
        self._pool = ThreadPoolExecutor(1)
        self._listener: socket.socket | None = None
        self._connection: Connection | None = None

    def __enter__(self) -> DaemonPeer:
        self.listen()
        return self

    def __exit__(self, *_: object) -> None:
        self.die()
        self._pool.shutdown()
        shutil.rmtree(self._folder)

    def listen(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.settimeout(DEADLINE_S)
        self._listener.bind(self.path)
        self._listener.listen(16)

    def begin(self, timeout_s: float = DEADLINE_S) -> Future[DaemonSession]:
        """Opens a session in a thread."""
        return self._pool.submit(DaemonSession, self.path, HELLO, timeout_s=timeout_s)

    def admit(self, message: wire.ToClient, descriptors: Sequence[int] = ()) -> wire.Hello:
        """Accepts the next connection and answers its Hello."""
        assert self._listener is not None
        self.drop()
        self._connection = Connection(self._listener.accept()[0])
        hello = self.receive()
        assert isinstance(hello, wire.Hello)
        self.send(message, descriptors)
        return hello

    def open(self, **calls: Callable[..., None]) -> DaemonSession:
        """A started session that has received its Welcome, with the `calls` of a listener."""
        opening = self.begin()
        self.admit(welcome())
        session = opening.result(DEADLINE_S)
        session.start(Calls(**calls))
        return session

    def send(self, message: wire.ToClient, descriptors: Sequence[int] = ()) -> None:
        self.send_raw(wire.encode(message), descriptors)

    def send_raw(self, raw: bytes, descriptors: Sequence[int] = ()) -> None:
        assert self._connection is not None
        self._connection.send(raw, descriptors)

    def receive(self) -> wire.ToDaemon:
        assert self._connection is not None
        raw, descriptors = self._connection.receive()
        for descriptor in descriptors:
            os.close(descriptor)
        assert raw, "the session has hung up"
        return wire.decode_to_daemon(raw)

    def receive_until(self, kind: type[wire.ToDaemon]) -> list[wire.ToDaemon]:
        """All messages up to the first of that kind."""
        messages = [self.receive()]
        while not isinstance(messages[-1], kind):
            messages.append(self.receive())
        return messages

    def drop(self) -> None:
        """Closes the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def die(self) -> None:
        """Closes the connection and stops listening."""
        self.drop()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            os.unlink(self.path)
