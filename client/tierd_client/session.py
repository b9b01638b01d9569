"""The conversation with the daemon: one thread that reads, and re-attaches by itself when the daemon comes back.

Sending never blocks and never raises: what was not sent is sent again at the next re-attach, by the owner's
`on_attach`, under the session's lock. Asking waits for an answer, and the wait is bounded.
"""

from __future__ import annotations

import array
import itertools
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import tierd
from tierd.backoff import backoff_s
from tierd.errors import BadRequest, DaemonUnreachable, Stale, TierdError, from_kind
from tierd.format import wire

log = logging.getLogger("tierd_client")

ANSWER_TIMEOUT_S = 60.0  # silence for longer than this is a hung daemon
ANSWER_LOOK_S = 0.25
RETRY_MIN_S, RETRY_MAX_S = 0.1, 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who we are to the daemon. `generation` None: rank 0 asks for a new one; `starts_anew` as in Hello."""

    run: str
    rank: int
    world_size: int
    generation: int | None
    starts_anew: bool = False


@dataclass(slots=True)
class _Question:
    """A Find under way."""

    answered: threading.Event = field(default_factory=threading.Event)
    heard_s: float = field(default_factory=time.monotonic)
    found: wire.FoundReplica | None = None
    descriptors: list[int] = field(default_factory=list)
    error: TierdError | None = None


class DaemonSession:
    """Connected when constructed; `start` begins to listen.

    `lock` guards the connection, and whatever its owner keeps in step with it.
    Raises DaemonUnreachable, or what the daemon answers to our Hello.
    """

    def __init__(self, path: str, identity: Identity, *, timeout_s: float) -> None:
        self.lock = threading.RLock()
        self.ended_by: TierdError | None = None
        """Why the conversation ended for good: this generation is fenced."""
        self.has_successor = False
        """Set while its owner opens the session that takes over from this one: being fenced is then no news."""
        self._path = path
        self._questions: dict[int, _Question] = {}
        self._numbers = itertools.count(1)
        self._closed = threading.Event()
        self._socket, self.welcome, self.kept_descriptors = _greet(path, identity, timeout_s)
        self.identity = Identity(
            run=identity.run,
            rank=identity.rank,
            world_size=identity.world_size,
            generation=self.welcome.generation,
            starts_anew=identity.starts_anew,
        )
        self._attached = True
        self._attached_s = self._detached_s = time.monotonic()
        self._failures = 0  # attempts to attach in a row that came to nothing
        self._thread: threading.Thread | None = None

    def start(self, *, on_message: Callable[[wire.ToClient], None], on_attach: Callable[[], None]) -> None:
        """Begin to listen. `on_message` runs on the session's thread. So does `on_attach`, with `lock` held, whenever
        the daemon has come back: it must offer the slots and send again what was not acknowledged."""
        self._thread = threading.Thread(
            target=self._run, args=(on_message, on_attach), name="tierd-session", daemon=True
        )
        self._thread.start()

    @property
    def is_attached(self) -> bool:
        return self._attached

    def is_there(self) -> bool:
        """Whether the daemon has its end open at this moment: the listening thread hears of a death a little later."""
        poll = select.poll()
        with self.lock:
            if not self._attached:
                return False
            poll.register(self._socket, 0)  # POLLHUP and POLLERR always count
            return not poll.poll(0)

    @property
    def absent_s(self) -> float:
        """For how long the daemon has been gone; 0 while it is there."""
        return 0.0 if self._attached else time.monotonic() - self._detached_s

    def send(self, message: wire.ToDaemon, descriptors: Sequence[int] = ()) -> None:
        """Send if the daemon is there; else the next re-attach sends what still matters."""
        with self.lock:
            if not self._attached:
                return
            try:
                _send(self._socket, message, descriptors)
            except OSError:
                # Gone, or hung with its buffer full: the listening thread hears of it and re-attaches.
                self._detach()

    def find(self, find: Callable[[int], wire.Find]) -> tuple[wire.FoundReplica, list[int]]:
        """(answer, descriptors: the manifest, then its files; the taker closes them). `find` makes the message from a
        request number. Raises DaemonUnreachable after 60 s without a word, or what the daemon answers."""
        number = next(self._numbers)
        question = _Question()
        with self.lock:
            if self.ended_by is not None:
                raise self.ended_by
            if not self._attached:
                raise self.unreachable("it is gone")
            self._questions[number] = question
            self.send(find(number))
        try:
            while not question.answered.wait(ANSWER_LOOK_S):
                if time.monotonic() - question.heard_s > ANSWER_TIMEOUT_S:
                    raise self.unreachable(
                        f"it was asked for a checkpoint and said nothing for {ANSWER_TIMEOUT_S:.0f} s"
                    )
            if question.found is None:
                raise question.error or self.unreachable("it gave no answer")
            descriptors, question.descriptors = question.descriptors, []
            return question.found, descriptors
        finally:
            with self.lock:
                del self._questions[number]
            _close_all(question.descriptors)  # of an answer that nobody waits for any more

    def unreachable(self, found: str) -> DaemonUnreachable:
        return DaemonUnreachable(
            f"reach the daemon at {self._path}: {found}",
            hint="is `tierd serve` running? Training may go on; it re-attaches by itself",
        )

    def close(self, goodbye: wire.Goodbye | None = None) -> None:
        """Say goodbye, if anyone listens, and end the thread."""
        self.send(goodbye or wire.Goodbye())
        self._closed.set()
        with self.lock:
            self._detach()
        if self._thread is not None:
            self._thread.join(timeout=3 * RETRY_MAX_S)  # it may be greeting a daemon that does not answer
        with self.lock:
            self._socket.close()

    # ── the listening thread ──

    def _run(self, on_message: Callable[[wire.ToClient], None], on_attach: Callable[[], None]) -> None:
        try:
            while not self._closed.is_set() and self.ended_by is None:
                self._listen(on_message)
                self._reattach(on_attach)
        except Exception as error:
            # A bug here must be told: a thread that dies silently would be a daemon that never comes back.
            log.exception("tierd: the session's thread ended")
            with self.lock:
                self._end(TierdError(f"talk to the daemon: {error!r}", hint="a bug in tierd: please report it"))

    def _listen(self, on_message: Callable[[wire.ToClient], None]) -> None:
        """Until the connection ends."""
        while self.ended_by is None:
            try:
                raw, descriptors, is_whole = _receive(self._socket)
            except ConnectionResetError:
                continue  # said once when it died with messages of ours unread; what it had said before is still here
            except OSError:
                return
            if not raw or not is_whole:
                _close_all(descriptors)
                return
            try:
                message = wire.decode_to_client(raw)
            except BadRequest as error:
                _close_all(descriptors)
                log.error("tierd: %s", error)
                continue
            if isinstance(message, wire.FoundReplica | wire.Progress | wire.Refused) and message.request:
                self._answer(message, descriptors)
            else:
                _close_all(descriptors)
                self._hear(message)
                on_message(message)

    def _answer(self, message: wire.FoundReplica | wire.Progress | wire.Refused, descriptors: list[int]) -> None:
        with self.lock:
            question = self._questions.get(message.request)
            if question is None or question.answered.is_set():
                _close_all(descriptors)  # its asker has given up
                return
            question.heard_s = time.monotonic()
            match message:
                case wire.FoundReplica():
                    for why in message.passed_over:
                        log.error("tierd: a newer replica could not be used: %s", why)
                    question.found, question.descriptors = message, descriptors
                    question.answered.set()
                case wire.Refused():
                    question.error = from_kind(message.kind, message.message, message.hint)
                    question.answered.set()
                case wire.Progress():
                    pass

    def _hear(self, message: wire.ToClient) -> None:
        """What concerns the conversation itself."""
        error: TierdError | None = None
        if isinstance(message, wire.Fenced):
            error = Stale(
                f"train {self.identity.run} as generation {self.identity.generation}: "
                f"generation {message.generation} has taken over",
                hint="another trainer of this run was started later; stop this one",
            )
        elif isinstance(message, wire.Refused):
            error = from_kind(message.kind, message.message, message.hint)
            log.error("tierd: the daemon refused: %s", error)
        if isinstance(error, Stale):
            with self.lock:
                self._end(error)

    def _reattach(self, on_attach: Callable[[], None]) -> None:
        """Until the daemon is back, the session is closed, or a newer generation has taken over."""
        with self.lock:
            self._detach()
            if self._detached_s - self._attached_s > RETRY_MAX_S:
                self._failures = 0  # a shorter attachment counts as one more failure
            if self.ended_by is not None or self._closed.is_set():
                return
        log.warning("tierd: the daemon at %s is gone; training goes on, re-attaching when it is back", self._path)
        while True:
            self._failures += 1
            if self._closed.wait(backoff_s(self._failures, min_s=RETRY_MIN_S, max_s=RETRY_MAX_S)):
                return
            try:
                sock, welcome, descriptors = _greet(self._path, self.identity, RETRY_MAX_S)
            except Stale as error:
                with self.lock:
                    self._end(error)
                return
            except TierdError as error:
                if not isinstance(error, DaemonUnreachable):
                    log.error("tierd: re-attach: %s", error)
                continue
            _close_all(descriptors)  # our own slots are mapped already
            with self.lock:
                if self._closed.is_set():
                    sock.close()
                    return
                self._socket.close()
                self._socket, self.welcome = sock, welcome
                self._attached, self._attached_s = True, time.monotonic()
                on_attach()
            log.warning("tierd: re-attached to the daemon at %s", self._path)
            return

    def _end(self, error: TierdError) -> None:
        """For good. With the lock held."""
        self.ended_by = error
        if not self.has_successor:
            log.error("tierd: %s", error)
        self._detach()

    def _detach(self) -> None:
        """With the lock held."""
        if self._attached:
            self._attached, self._detached_s = False, time.monotonic()
        for question in self._questions.values():
            if not question.answered.is_set():
                question.error = self.ended_by or self.unreachable("it went away while it was asked for a checkpoint")
                question.answered.set()
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it was not connected any more


def _greet(path: str, identity: Identity, timeout_s: float) -> tuple[socket.socket, wire.Welcome, list[int]]:
    """A connected socket with the daemon's Welcome and the descriptors of the slots that it kept for us."""
    hint = "is `tierd serve` running? Give its socket as connect(socket=...) or $TIERD_SOCKET"
    descriptors: list[int] = []
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
            starts_anew=identity.starts_anew,
        )
        _send(sock, hello, ())
        raw, descriptors, is_whole = _receive(sock)
        if not raw:
            raise ConnectionResetError("it closed the connection")
        message = wire.decode_to_client(raw)
        if isinstance(message, wire.Refused):
            raise from_kind(message.kind, message.message, message.hint)
        if not isinstance(message, wire.Welcome):
            raise BadRequest(f"greet the daemon at {path}: it answered {type(message).__name__}")
        if not is_whole or len(descriptors) != len(message.slots):
            raise BadRequest(
                f"greet the daemon at {path}: {len(descriptors)} descriptors came of {len(message.slots)}",
                hint="may this process open more files (ulimit -n)?",
            )
        sock.settimeout(None)
    except BaseException as error:
        _close_all(descriptors)
        sock.close()
        if isinstance(error, TimeoutError):
            raise DaemonUnreachable(
                f"greet the daemon at {path}: no answer within {timeout_s:g} s", hint=hint
            ) from error
        if isinstance(error, OSError):
            raise DaemonUnreachable(f"greet the daemon at {path}: {error.strerror or error}", hint=hint) from error
        raise
    return sock, message, descriptors


# socket.send_fds and recv_fds drop the flags that they are given (seen in CPython 3.11): a send would block, and a
# received descriptor would be inherited by every program that the training starts.


def _send(sock: socket.socket, message: wire.ToDaemon, descriptors: Sequence[int]) -> None:
    beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    sock.sendmsg([wire.encode(message)], beside, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)


def _receive(sock: socket.socket) -> tuple[bytes, list[int], bool]:
    """A packet, its descriptors, and whether all of both has come. (b"", [], True): the peer has hung up."""
    room = socket.CMSG_LEN(wire.DESCRIPTORS_MAX * array.array("i").itemsize)
    raw, beside, flags, _ = sock.recvmsg(wire.MESSAGE_BYTES_MAX, room, socket.MSG_CMSG_CLOEXEC)
    found = array.array("i")
    for level, kind, content in beside:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(content[: len(content) - len(content) % found.itemsize])
    return raw, list(found), not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
