"""The daemon's end of a trainer's socket, spoken by hand: what a real daemon would never say, or not at that moment."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tierd_client.session import DaemonSession

from tierd.format import wire

DEADLINE_S = 60.0
HELLO = wire.Hello(protocol=wire.PROTOCOL_VERSION, version="0", run="run", rank=0, world_size=1, generation=None)


def welcome(boot: str = "first", **more: Any) -> wire.Welcome:
    told: dict[str, Any] = {"generation": 1, "slots": [], "every_steps": 10, "every_s": 0.0, "slots_per_rank": 2}
    told |= {"slot_wait_s": 1.0, "when_busy": "wait", "node": "n", "version": "0", "protocol": wire.PROTOCOL_VERSION}
    return wire.Welcome(boot=boot, **{**told, **more})


@dataclass
class Calls:
    """A listener of the session."""

    on_message: Callable[[wire.ToClient], None] = lambda message: None
    on_attach: Callable[[], None] = lambda: None


class Peer:
    """Listens when entered. Sends and receives on the newest connection that it has admitted."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="tierd-")
        self.path = f"{self._folder}/tierd.sock"
        self._pool = ThreadPoolExecutor(1)
        self._listener: socket.socket | None = None
        self._socket: socket.socket | None = None

    def __enter__(self) -> Peer:
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
        """A session is being opened, in a thread."""
        return self._pool.submit(DaemonSession, self.path, HELLO, timeout_s=timeout_s)

    def admit(self, message: wire.ToClient, descriptors: Sequence[int] = ()) -> wire.Hello:
        """Take the next connection and answer its Hello."""
        assert self._listener is not None
        self.drop()
        self._socket, _ = self._listener.accept()
        self._socket.settimeout(DEADLINE_S)
        hello = self.receive()
        assert isinstance(hello, wire.Hello)
        self.send(message, descriptors)
        return hello

    def open(self, **calls: Callable[..., None]) -> DaemonSession:
        """A session that has been welcomed and listens, with the `calls` of a listener."""
        opening = self.begin()
        self.admit(welcome())
        session = opening.result(DEADLINE_S)
        session.start(Calls(**calls))
        return session

    def send(self, message: wire.ToClient, descriptors: Sequence[int] = ()) -> None:
        self.send_raw(wire.encode(message), descriptors)

    def send_raw(self, raw: bytes, descriptors: Sequence[int] = ()) -> None:
        assert self._socket is not None
        socket.send_fds(self._socket, [raw], list(descriptors))

    def receive(self) -> wire.ToDaemon:
        assert self._socket is not None
        raw, descriptors, _, _ = socket.recv_fds(self._socket, wire.MESSAGE_BYTES_MAX, 8)
        for descriptor in descriptors:
            os.close(descriptor)
        assert raw, "the session has hung up"
        return wire.decode_to_daemon(raw)

    def receive_until(self, kind: type[wire.ToDaemon]) -> list[wire.ToDaemon]:
        """All messages up to the first of that kind."""
        found = [self.receive()]
        while not isinstance(found[-1], kind):
            found.append(self.receive())
        return found

    def drop(self) -> None:
        """Hang up."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def die(self) -> None:
        """Hang up, and listen no more."""
        self.drop()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            os.unlink(self.path)
