"""The connection to the daemon: a socket, and a thread that reads from it and reconnects when the daemon is back.

Sending never blocks and never raises: after a reconnect the listeners' `on_attach` sends again what may be lost, with
the session's lock held. `find` waits for an answer, and the wait is bounded.
"""

from __future__ import annotations

import itertools
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from tierd.backoff import backoff_s
from tierd.descriptors import close_all, receive_packet, send_packet
from tierd.errors import BadRequest, DaemonUnreachable, Stale, TierdError, from_kind
from tierd.format import wire
from tierd.peer import connect_to_daemon
from tierd_client.log import log

ANSWER_TIMEOUT_S = 60.0  # a daemon that is silent for longer counts as hung
ANSWER_POLL_S = 0.25
RETRY_MIN_S, RETRY_MAX_S = 0.1, 2.0

_connected: weakref.WeakSet[DaemonSession] = weakref.WeakSet()


class Listener(Protocol):
    """Called on the session's thread. `on_attach`: the daemon is back, perhaps a new process; send again what it may
    not have. The session's lock is held."""

    def on_message(self, message: wire.ToClient) -> None: ...
    def on_attach(self) -> None: ...


_Answer = wire.FoundReplica | wire.Held


@dataclass(slots=True)
class _Question:
    """A request that waits for its answer and the descriptors. `heard_s`: when the daemon last reported progress."""

    answer: Future[tuple[_Answer, list[int]]] = field(default_factory=Future[tuple[_Answer, list[int]]])
    heard_s: float = field(default_factory=time.monotonic)


class DaemonSession:
    """Connected when constructed; `start` starts the thread that reads.

    `hello` is what was sent to the daemon, with the generation and the claim that it answered. `lock` guards the
    connection, and what listeners keep in step with it. `daemon_uid`: as of `connect_to_daemon`. Raises
    DaemonUnreachable, WrongUser, or the error that the daemon answers to `hello`.
    """

    def __init__(self, path: str, hello: wire.Hello, *, timeout_s: float, daemon_uid: int | None = None) -> None:
        self.lock = threading.RLock()
        self.ended_by: TierdError | None = None
        """Why the session ended for good: a newer generation has taken over."""
        self.refusal: TierdError | None = None
        """Why the daemon has refused the last attempt to reconnect, for example because it speaks another protocol."""
        self.has_successor = False
        """Set while this process opens the session of its next generation: it is then expected that this one ends."""
        self.path = path
        self.daemon_uid = daemon_uid
        self._questions: dict[int, _Question] = {}
        self._numbers = itertools.count(1)
        self._closed = threading.Event()
        self._socket, self.welcome, self.kept_descriptors = _greet(path, hello, timeout_s, daemon_uid)
        node, welcome = hello.node, self.welcome
        if node is not None and hello.generation is None:
            node = msgspec.structs.replace(node, claim=welcome.claim, base=welcome.base)
        self.hello = msgspec.structs.replace(hello, generation=welcome.generation, node=node, continues=0)
        self.is_attached = True
        _connected.add(self)
        self._attached_s = self._detached_s = time.monotonic()
        self._failures = 0  # consecutive failed attempts to attach
        self._thread: threading.Thread | None = None

    def close_in_child(self) -> None:
        """Close the socket in a forked child: with this copy open, the daemon would not notice the trainer's death."""
        self.is_attached = False
        self._socket.close()

    def start(self, *listeners: Listener) -> None:
        self._thread = threading.Thread(target=self._run, args=(listeners,), name="tierd-session", daemon=True)
        self._thread.start()

    def is_there(self) -> bool:
        """Whether the daemon has its end open at this moment: the thread that reads notices a death a little later."""
        poll = select.poll()
        with self.lock:
            if not self.is_attached:
                return False
            poll.register(self._socket, 0)  # POLLHUP and POLLERR are always reported
            return not poll.poll(0)

    @property
    def absent_s(self) -> float:
        """How long the daemon has been gone; 0 while it is connected."""
        return 0.0 if self.is_attached else time.monotonic() - self._detached_s

    def send(self, message: wire.ToDaemon, descriptors: Sequence[int] = ()) -> None:
        """Send if the daemon is connected; otherwise drop the message."""
        with self.lock:
            if not self.is_attached:
                return
            try:
                send_packet(self._socket, wire.encode(message), descriptors)
            except OSError:
                # The daemon is gone, or hangs with its buffer full: the thread that reads notices and reconnects.
                self._detach()

    def report(
        self, outcome: str, step: int, *, run: str = "", tier: str = "", seconds: float = 0.0, detail: str = ""
    ) -> None:
        """Send an event of this process, for the daemon's metrics and incidents. `run`: that of the checkpoint, by
        default this session's."""
        detail = detail[: wire.TEXT_CHARS_MAX]
        self.send(wire.Report(outcome=outcome, step=step, tier=tier, seconds=seconds, detail=detail, run=run))

    def find(self, find: wire.Find | wire.FindElsewhere) -> tuple[wire.FoundReplica, list[int]]:
        """(answer, descriptors as of wire.FoundReplica; the caller closes them). The session numbers the
        request. Raises DaemonUnreachable after 60 s of silence, or the error that the daemon answers."""
        answer, descriptors = self._request(find)
        assert isinstance(answer, wire.FoundReplica)
        return answer, descriptors

    def inventory(self, inventory: wire.Inventory) -> wire.Held:
        """What the daemon has of the run. Numbers the request and raises as `find`."""
        answer, descriptors = self._request(inventory)
        close_all(descriptors)
        assert isinstance(answer, wire.Held)
        return answer

    def _request(self, message: wire.Find | wire.FindElsewhere | wire.Inventory) -> tuple[_Answer, list[int]]:
        number, question = next(self._numbers), _Question()
        with self.lock:
            if self.ended_by is not None:
                raise self.ended_by
            if not self.is_attached:
                raise self.unreachable("it is not connected")
            self._questions[number] = question
            self.send(msgspec.structs.replace(message, request=number))
        try:
            while True:
                try:
                    return question.answer.result(ANSWER_POLL_S)
                except TimeoutError:
                    with self.lock:  # so that an answer comes before the cancel, or is refused after it
                        if time.monotonic() - question.heard_s > ANSWER_TIMEOUT_S and question.answer.cancel():
                            why = f"no answer or progress for {ANSWER_TIMEOUT_S:.0f} s on a request for a checkpoint"
                            raise self.unreachable(why) from None
        finally:
            with self.lock:
                del self._questions[number]

    def unreachable(self, why: str) -> DaemonUnreachable:
        """The error of a daemon that does not answer, because of `why` or because it refuses this client."""
        refusal = self.refusal
        if refusal is not None:
            message = f"reach the daemon at {self.path}: it refuses this client: {refusal.message}"
            return DaemonUnreachable(message, hint=refusal.hint)
        return DaemonUnreachable(
            f"reach the daemon at {self.path}: {why}",
            hint="is `tierd serve` running? Training may go on; the client reconnects by itself",
        )

    def close(self, goodbye: wire.Goodbye | None = None) -> None:
        """Send the goodbye and end the thread."""
        self.send(goodbye or wire.Goodbye())
        self._closed.set()
        with self.lock:
            self._detach()
        if self._thread is not None:
            self._thread.join(timeout=3 * RETRY_MAX_S)  # it may be connecting to a daemon that does not answer
        with self.lock:
            self._socket.close()

    # ── the thread that reads ──

    def _run(self, listeners: Sequence[Listener]) -> None:
        """The client's only broad `except`: a bug in a listener must end the session with an error that the training
        thread raises, not leave it waiting for a thread that is gone."""
        try:
            while not self._closed.is_set() and self.ended_by is None:
                self._listen(listeners)
                self._reattach(listeners)
        except Exception as error:
            log.exception("tierd: the session's thread ended")
            self._end(TierdError(f"talk to the daemon: {error!r}", hint="a bug in tierd: please report it"))

    def _listen(self, listeners: Sequence[Listener]) -> None:
        """Reads messages until the connection ends."""
        while self.ended_by is None:
            try:
                raw, descriptors, is_whole = receive_packet(self._socket)
            except ConnectionResetError:
                continue  # reported once when the daemon died before it read all; its last messages can still be read
            except OSError:
                return
            if not raw or not is_whole:
                close_all(descriptors)
                return
            try:
                message = wire.decode_to_client(raw)
            except BadRequest as error:
                close_all(descriptors)
                log.error("tierd: %s", error)
                continue
            if isinstance(message, _Answer | wire.Progress | wire.Refused) and message.request:
                self._answer(message, descriptors)
            else:
                close_all(descriptors)
                self._check_fenced(message)
                for listener in listeners:
                    listener.on_message(message)

    def _answer(self, message: _Answer | wire.Progress | wire.Refused, descriptors: list[int]) -> None:
        with self.lock:
            question = self._questions.get(message.request)
            if question is None or question.answer.done():
                close_all(descriptors)  # `find` has given up
                return
            question.heard_s = time.monotonic()
            if isinstance(message, wire.Refused):
                question.answer.set_exception(from_kind(message.kind, message.message, message.hint))
            elif isinstance(message, _Answer):
                for why in message.passed_over if isinstance(message, wire.FoundReplica) else ():
                    log.error("tierd: a replica was passed over: %s", why)
                question.answer.set_result((message, descriptors))

    def _check_fenced(self, message: wire.ToClient) -> None:
        if isinstance(message, wire.Fenced):
            self._end(Stale.by(message.generation, f"train {self.hello.run}", self.welcome.generation))
        elif isinstance(message, wire.Refused):
            error = from_kind(message.kind, message.message, message.hint)
            log.error("tierd: the daemon refused: %s", error)
            if isinstance(error, Stale):
                self._end(error)

    def _reattach(self, listeners: Sequence[Listener]) -> None:
        """Retries until the daemon is back, the session is closed, or a newer generation has taken over."""
        with self.lock:
            self._detach()
            if self._detached_s - self._attached_s > RETRY_MAX_S:
                self._failures = 0  # a shorter attachment counts as one more failure
            if self.ended_by is not None or self._closed.is_set():
                return
        log.warning("tierd: the daemon at %s is gone; training goes on, reconnecting when it is back", self.path)
        while True:
            self._failures += 1
            if self._closed.wait(backoff_s(self._failures, min_s=RETRY_MIN_S, max_s=RETRY_MAX_S)):
                return
            try:
                sock, welcome, descriptors = _greet(self.path, self.hello, RETRY_MAX_S, self.daemon_uid)
            except Stale as error:
                self._end(error)
                return
            except TierdError as error:
                self._refused(None if isinstance(error, DaemonUnreachable) else error)
                continue
            close_all(descriptors)  # our own slots are mapped already
            with self.lock:
                if self._closed.is_set():
                    sock.close()
                    return
                self._socket.close()
                self._socket, self.welcome, self.refusal = sock, welcome, None
                self.is_attached, self._attached_s = True, time.monotonic()
                for listener in listeners:
                    listener.on_attach()
            log.warning("tierd: reconnected to the daemon at %s", self.path)
            return

    def _refused(self, refusal: TierdError | None) -> None:
        """Keeps why the daemon refuses this client, None if it does not answer; logs it once and goes on trying."""
        if refusal is not None and str(refusal) != str(self.refusal):
            log.error("tierd: reconnect: %s", refusal)
        self.refusal = refusal

    def _end(self, error: TierdError) -> None:
        """Ends the session permanently."""
        with self.lock:
            self.ended_by = error
            if not self.has_successor:
                log.error("tierd: %s", error)
            self._detach()

    def _detach(self) -> None:
        """The caller holds the lock."""
        if self.is_attached:
            self.is_attached, self._detached_s = False, time.monotonic()
        for question in self._questions.values():
            if not question.answer.done():
                gone = self.unreachable("the connection ended during a request for a checkpoint")
                question.answer.set_exception(self.ended_by or gone)
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it was not connected any more


def _close_in_child() -> None:
    for session in _connected:
        session.close_in_child()
    _connected.clear()


os.register_at_fork(after_in_child=_close_in_child)


def _greet(
    path: str, hello: wire.Hello, timeout_s: float, daemon_uid: int | None
) -> tuple[socket.socket, wire.Welcome, list[int]]:
    """A connected socket with the daemon's Welcome and the descriptors of the slots that it kept for us."""
    hint = "is `tierd serve` running? Give its socket as connect(socket=...) or $TIERD_SOCKET"
    with ExitStack() as on_error:
        sock = on_error.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        try:
            sock.settimeout(timeout_s)
            connect_to_daemon(sock, path, daemon_uid)
            send_packet(sock, wire.encode(hello))
            raw, descriptors, is_whole = receive_packet(sock)
            on_error.callback(close_all, descriptors)
            if not raw:
                raise ConnectionResetError("it closed the connection")
            sock.settimeout(None)
        except OSError as error:
            is_late = isinstance(error, TimeoutError)
            why = f"no answer within {timeout_s:g} s" if is_late else error.strerror or error
            if isinstance(error, PermissionError):
                hint = (
                    "run the trainer as the daemon's user, or put its user into the group security.trainer_group; "
                    "docs/guides/security.md#trainers-of-another-user"
                )
            raise DaemonUnreachable(f"greet the daemon at {path}: {why}", hint=hint) from error
        message = wire.decode_to_client(raw)
        if isinstance(message, wire.Refused):
            raise from_kind(message.kind, message.message, message.hint)
        if not isinstance(message, wire.Welcome):
            raise BadRequest(f"greet the daemon at {path}: it answered {type(message).__name__}")
        if not is_whole or len(descriptors) != len(message.slots):
            raise BadRequest(
                f"greet the daemon at {path}: {len(descriptors)} of {len(message.slots)} descriptors arrived",
                hint="has this process reached its limit of open files (ulimit -n)?",
            )
        on_error.pop_all()
    return sock, message, descriptors
