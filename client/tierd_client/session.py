"""The conversation with the daemon: one thread that reads, and re-attaches by itself when the daemon comes back.

Sending never blocks and never raises: what was not sent is sent again at the next re-attach, by the owner's
`on_attach`, under the lock that the owner and the session share. Asking waits for an answer, and the wait is bounded.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import tierd
from tierd.errors import BadRequest, DaemonUnreachable, Stale, TierdError, from_kind
from tierd.format import wire

log = logging.getLogger("tierd_client")

ANSWER_TIMEOUT_S = 60.0  # silence for longer than this is a hung daemon
RETRY_MIN_S, RETRY_MAX_S = 0.1, 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who we are to the daemon. `generation` None: rank 0 asks for a new one."""

    run: str
    rank: int
    world_size: int
    generation: int | None


@dataclass(slots=True)
class _Question:
    """A Find under way."""

    answered: threading.Event = field(default_factory=threading.Event)
    heard_s: float = field(default_factory=time.monotonic)
    tier: str = ""
    descriptors: list[int] = field(default_factory=list)
    error: TierdError | None = None


class Session:
    """Connected when constructed. `on_message` runs on the session's thread. So does `on_attach`, with `lock` held,
    whenever the daemon has come back: it must offer the slots and send again what was not acknowledged.

    Raises DaemonUnreachable, or what the daemon answers to our Hello.
    """

    def __init__(
        self,
        path: str,
        identity: Identity,
        *,
        timeout_s: float,
        lock: threading.RLock,
        on_message: Callable[[wire.ToClient], None],
        on_attach: Callable[[], None],
    ) -> None:
        self._path = path
        self._on_message = on_message
        self._on_attach = on_attach
        self._lock = lock
        self._questions: dict[int, _Question] = {}
        self._numbers = itertools.count(1)
        self._closed = threading.Event()
        self._socket, self.welcome, self.kept_descriptors = _greet(path, identity, timeout_s)
        self._identity = Identity(
            run=identity.run,
            rank=identity.rank,
            world_size=identity.world_size,
            generation=self.welcome.generation,
        )
        self._attached = True
        self.ended_by: TierdError | None = None
        """Why the conversation ended for good: this generation is fenced."""
        self._thread = threading.Thread(target=self._listen, name="tierd-session", daemon=True)

    def start(self) -> None:
        """Begin to listen: from here on the callbacks are called."""
        self._thread.start()

    @property
    def is_attached(self) -> bool:
        return self._attached

    def send(self, message: wire.ToDaemon, descriptors: Sequence[int] = ()) -> None:
        """Send if the daemon is there; else the next re-attach sends what still matters."""
        with self._lock:
            if not self._attached:
                return
            try:
                _send(self._socket, message, descriptors)
            except OSError:
                # Gone, or hung with its buffer full: the listening thread hears of it and re-attaches.
                self._detach()

    def find(self, find: Callable[[int], wire.Find]) -> tuple[str, list[int]]:
        """(tier, descriptors: the manifest, then its files). `find` makes the message from a request number.

        Raises DaemonUnreachable after 60 s without a word, or what the daemon answers.
        """
        number = next(self._numbers)
        question = self._questions[number] = _Question()
        try:
            self.send(find(number))
            while not question.answered.wait(0.25):
                if self.ended_by is not None:
                    raise self.ended_by
                if not self._attached:
                    raise self.unreachable("the connection broke while it was asked for a checkpoint")
                if time.monotonic() - question.heard_s > ANSWER_TIMEOUT_S:
                    raise self.unreachable(
                        f"it was asked for a checkpoint and said nothing for {ANSWER_TIMEOUT_S:.0f} s"
                    )
        finally:
            with self._lock:
                del self._questions[number]
        if question.error is not None:
            raise question.error
        return question.tier, question.descriptors

    def unreachable(self, found: str) -> DaemonUnreachable:
        return DaemonUnreachable(
            f"reach the daemon at {self._path}: {found}",
            hint="is `tierd serve` running? Training may go on; it re-attaches by itself",
        )

    def close(self) -> None:
        """Say goodbye, if anyone listens, and end the thread."""
        self.send(wire.Goodbye())
        self._closed.set()
        with self._lock:
            self._detach()
        self._thread.join(timeout=5.0)
        self._socket.close()

    # ── the listening thread ──

    def _listen(self) -> None:
        while not self._closed.is_set() and self.ended_by is None:
            try:
                raw, descriptors, flags, _ = socket.recv_fds(
                    self._socket, wire.MESSAGE_BYTES_MAX, wire.DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC
                )
            except OSError:
                raw, descriptors, flags = b"", [], 0
            if not raw or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                _close_all(descriptors)
                self._reattach()
                continue
            try:
                self._dispatch(wire.decode_to_client(raw), list(descriptors))
            except BadRequest as error:
                log.error("tierd: %s", error)

    def _dispatch(self, message: wire.ToClient, descriptors: list[int]) -> None:
        if isinstance(message, wire.Found | wire.Progress | wire.Refused) and message.request:
            with self._lock:
                question = self._questions.get(message.request)
            if question is None:
                _close_all(descriptors)  # its asker has given up
                return
            question.heard_s = time.monotonic()
            if isinstance(message, wire.Found):
                question.tier, question.descriptors = message.tier, descriptors
                question.answered.set()
            elif isinstance(message, wire.Refused):
                question.error = from_kind(message.kind, message.message, message.hint)
                question.answered.set()
            return
        _close_all(descriptors)
        if isinstance(message, wire.Fenced):
            self.ended_by = Stale(
                f"train {self._identity.run} as generation {self._identity.generation}: "
                f"generation {message.generation} has taken over",
                hint="another trainer of this run was started later; stop this one",
            )
            log.error("tierd: %s", self.ended_by)
        elif isinstance(message, wire.Refused):
            error = from_kind(message.kind, message.message, message.hint)
            log.error("tierd: the daemon refused: %s", error)
            if isinstance(error, Stale):
                self.ended_by = error
        self._on_message(message)

    def _reattach(self) -> None:
        """Until the daemon is back, the session is closed, or a newer generation has taken over."""
        with self._lock:
            self._detach()
            if self.ended_by is not None or self._closed.is_set():
                return
        log.warning("tierd: the daemon at %s is gone; training goes on, re-attaching when it is back", self._path)
        delay_s = RETRY_MIN_S
        while not self._closed.wait(delay_s):
            delay_s = min(RETRY_MAX_S, delay_s * 2)
            try:
                sock, self.welcome, descriptors = _greet(self._path, self._identity, RETRY_MAX_S)
            except Stale as error:
                log.error("tierd: %s", error)
                self.ended_by = error
                return
            except TierdError as error:
                if not isinstance(error, DaemonUnreachable):
                    log.error("tierd: re-attach: %s", error)
                continue
            _close_all(descriptors)  # our own slots are mapped already
            with self._lock:
                self._socket.close()
                self._socket = sock
                self._attached = True
                self._on_attach()
            log.warning("tierd: re-attached to the daemon at %s", self._path)
            return

    def _detach(self) -> None:
        self._attached = False
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it was not connected any more


def _greet(path: str, identity: Identity, timeout_s: float) -> tuple[socket.socket, wire.Welcome, list[int]]:
    """A connected socket with the daemon's Welcome and the descriptors of the slots that it kept for us."""
    hint = "is `tierd serve` running? Give its socket as connect(socket=...) or $TIERD_SOCKET"
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(timeout_s)
        sock.connect(path)
        hello = wire.Hello(
            protocol=wire.PROTOCOL_VERSION,
            version=tierd.__version__,
            run=identity.run,
            rank=identity.rank,
            world_size=identity.world_size,
            generation=identity.generation,
        )
        _send(sock, hello, ())
        raw, descriptors, _, _ = socket.recv_fds(
            sock, wire.MESSAGE_BYTES_MAX, wire.DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC
        )
        if not raw:
            raise ConnectionResetError("it closed the connection")
        message = wire.decode_to_client(raw)
        if isinstance(message, wire.Refused):
            raise from_kind(message.kind, message.message, message.hint)
        if not isinstance(message, wire.Welcome):
            raise BadRequest(f"greet the daemon at {path}: it answered {type(message).__name__}")
        sock.settimeout(None)
    except TimeoutError as error:
        sock.close()
        raise DaemonUnreachable(f"greet the daemon at {path}: no answer within {timeout_s:g} s", hint=hint) from error
    except OSError as error:
        sock.close()
        raise DaemonUnreachable(f"greet the daemon at {path}: {error.strerror or error}", hint=hint) from error
    except BaseException:
        sock.close()
        raise
    return sock, message, list(descriptors)


def _send(sock: socket.socket, message: wire.ToDaemon, descriptors: Sequence[int]) -> None:
    socket.send_fds(sock, [wire.encode(message)], descriptors, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
