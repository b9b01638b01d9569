"""Requests from outside the loop to stop or to take a snapshot: signals, the walltime, a stop file, an operator.

All of them go to one Agreement, so that every rank acts at the same step. Rank 0 checks the clocks and the file, at
most once a second. A signal counts on whichever rank receives it. Operators are answered by rank 0, and on other nodes
by the lowest rank there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import msgspec

from tierd.errors import BadConfig, TierdError
from tierd.format import wire
from tierd_client.log import log
from tierd_client.ranks import Ranks
from tierd_client.stopping.agreement import Agreement, RequestKind
from tierd_client.stopping.deadline import Deadline, Pace
from tierd_client.stopping.node_calls import CallStore, NodeCalls

Meaning = Literal["stop", "snapshot"]
SIGNALS: dict[int, Meaning] = {signal.SIGTERM: "stop", signal.SIGINT: "stop", signal.SIGUSR1: "snapshot"}
POLL_S = 1.0
ECHO_S = 0.5  # under torchrun one Ctrl-C arrives twice: from the terminal, and forwarded by torchrun
REASONS = {
    RequestKind.SIGNAL: "a signal",
    RequestKind.DEADLINE: "the walltime",
    RequestKind.STOP_FILE: "the stop file",
    RequestKind.OPERATOR: "tierd stop",
}


class StopRequests:
    """A Listener of the session, made before it: a request may come with the first message."""

    def __init__(
        self,
        ranks: Ranks,
        send: Callable[[wire.ToDaemon], None],
        *,
        signals: Mapping[int, Meaning],
        deadline: Deadline | None,
        stop_file: str | None,
        answers_operators: Callable[[], bool],
    ) -> None:
        self.reason = ""
        """Why the run stops; empty while it continues."""
        self.last_step: int | None = None
        """The newest step that was passed to `at`."""
        self.pace = Pace()
        self._ranks = ranks
        self._send = send
        self._signals = signals
        self._deadline = deadline
        self._total_s = deadline.at_s - time.time() if deadline is not None else 0.0
        self._stop_file = stop_file
        self._answers_operators = answers_operators
        self._agreement = Agreement(ranks, send)
        self._node_calls = NodeCalls(self._repeat_call, self._repeat_force)
        self._former_handlers: dict[int, Any] = {}
        self._is_catching = False
        self._pid = os.getpid()
        self._interrupted_s: float | None = None
        self._is_forced = False
        self._grace_used_s = 0.0  # by snapshots since the stop request
        self._is_asked = False  # by `due`, for a step of which no snapshot was taken yet
        self._is_decided = False  # a check between steps has answered for that step, on a single rank
        self._is_last_due = False  # the run stops, and no snapshot was taken since
        self._made: set[RequestKind] = set()  # by a check of clock or file: each is made once
        self._every_s = 0.0
        self._follows_daemon = False
        self._interval_started_s = time.monotonic()  # at the last snapshot, or the last request for one
        self._next_poll_s = 0.0
        self._snapshot_step: int | None = None
        # Of operators. Appended on the session's thread, taken on the training thread.
        self._stop_requests: deque[wire.Requested] = deque()
        self._snapshot_requests: deque[wire.Requested] = deque()
        self._agreed_requests: list[wire.Requested] = []  # answered by the next snapshot

    def start(
        self,
        every_s: float,
        node: wire.NodeRanks | None = None,
        store: CallStore | None = None,
        *,
        follows_daemon: bool = False,
    ) -> None:
        """`every_s`: request a snapshot so often; 0: never. `node` and its `store`: of a run over several nodes.
        `follows_daemon`: the daemon's messages change the interval."""
        self._every_s = every_s
        self._follows_daemon = follows_daemon
        self._agreement.start(self._poll)
        if node is not None and store is not None and self._ranks.rank == node.ranks[0]:
            self._node_calls.start(store, self._ranks.rank, node.lowest)
        reserve_s = self.pace.reserve_s(self._total_s)
        if self._deadline is not None and self._ranks.rank == 0 and self._total_s <= reserve_s:
            text = "tierd: only %.0f s are left until %s, and a stop needs %.0f s: the run stops at its first step"
            log.error(text, self._total_s, self._deadline.source, reserve_s)

    def close(self) -> None:
        self._answer_stops()  # the run ends, as they asked
        self._node_calls.close()
        self._agreement.close()

    # ── the training thread ──

    def due(self, step: int) -> bool:
        """As `at`, for a loop that asks after each step. True also if the run stops and no snapshot was taken since: a
        loop may read `stopping` before or after this call, and takes its last snapshot in both orders."""
        is_requested = self.at(step)
        self._is_asked = True
        return is_requested or self._is_last_due

    def at(self, step: int) -> bool:
        """Apply the requests that take effect at this step. True when a snapshot of it was requested."""
        now_s = time.monotonic()
        self._is_decided = False
        if step != self.last_step:
            self.last_step = step
            self.pace.stepped(now_s)
        if self._ranks.world_size > 1:
            kinds = self._agreement.agreed_at(step)
        else:
            if now_s >= self._next_poll_s:
                self._poll()
            kinds = self._agreement.take_requests()
        if kinds:
            self._apply(kinds)
        return step == self._snapshot_step

    def check_between_steps(self) -> None:
        """On a single rank, apply a stop between two steps, so that it does not wait for the end of a step. After
        `due`, only the first check does so until the next step or snapshot. Otherwise `if due(step) or stopping:
        snapshot(); if stopping: break` could find a stop at its second check only, and leave without a snapshot."""
        if self._ranks.world_size == 1 and not self._is_decided:
            self._is_decided = self._is_asked
            if time.monotonic() >= self._next_poll_s:
                self._poll()
            kinds = self._agreement.take_requests()
            self._apply(kinds - {RequestKind.SNAPSHOT})
            if RequestKind.SNAPSHOT in kinds:
                self._agreement.request(RequestKind.SNAPSHOT)  # for the next step: `at` has answered for this one

    def grace_left_s(self, configured_s: float) -> float:
        """How long the last snapshot may still take, the wait for its slot included: as configured; when the walltime
        stops the run, all that is left until then."""
        left_s = max(0.0, configured_s - self._grace_used_s)
        if self._deadline is None or REASONS[RequestKind.DEADLINE] not in self.reason:
            return left_s
        return max(left_s, self._deadline.at_s - time.time())

    def _apply(self, kinds: frozenset[RequestKind]) -> None:
        reasons = [REASONS[kind] for kind in sorted(kinds) if kind in REASONS]
        if reasons and not self.reason:
            self.reason = " and ".join(reasons)
            self._is_last_due = True
            if self._ranks.rank == 0:
                log.warning("tierd: stopping at step %s: %s", self.last_step, self.reason)
        if RequestKind.SNAPSHOT in kinds:
            self._snapshot_step = self.last_step
            while self._snapshot_requests:
                self._agreed_requests.append(self._snapshot_requests.popleft())
        if self.reason and self._ranks.rank == 0 and self._stop_file is not None:
            try:
                Path(self._stop_file).unlink(missing_ok=True)  # otherwise the resumed run would stop at once
            except OSError as error:
                log.error("tierd: remove %s, or the next start stops at once: %s", self._stop_file, error)
        if self.reason:
            self._answer_stops()

    def _answer_stops(self) -> None:
        while self._stop_requests:
            self._answer(self._stop_requests.popleft(), self.last_step or 0)

    def _answer(self, request: wire.Requested, step: int, error: TierdError | None = None) -> None:
        answer = wire.Answer(request=request.request, step=step)
        if error is not None:
            message = error.message[: wire.TEXT_CHARS_MAX]
            answer = msgspec.structs.replace(answer, kind=error.kind, message=message, hint=error.hint)
        self._send(answer)

    def milestone(self, given: str | None) -> str | None:
        """The milestone name of the next snapshot: the loop's own, else one that an operator asked for."""
        if given is not None:
            return given
        return next((request.milestone for request in self._agreed_requests if request.milestone is not None), None)

    def taken(self, step: int, stall_s: float, milestone: str | None) -> None:
        """A snapshot was taken: answer the operators who asked for it."""
        self._is_asked = self._is_decided = self._is_last_due = False  # a stop loses nothing now
        self._interval_started_s = time.monotonic()
        self.pace.stages_s.append(stall_s)
        self._use_grace(stall_s)
        requests, self._agreed_requests = self._agreed_requests, []
        for request in requests:
            if request.milestone in (None, milestone):
                self._answer(request, step)
            else:  # the snapshot has another name: take one more
                self._snapshot_requests.append(request)
                self._agreement.request(RequestKind.SNAPSHOT)

    def not_taken(self, error: BaseException, stall_s: float) -> None:
        self._is_decided = self._is_asked  # the next step stops, with a snapshot that may wait longer for a slot
        self._use_grace(stall_s)
        self._interval_started_s = float("-inf")  # by time, a snapshot is still due
        if not isinstance(error, TierdError):
            error = TierdError(f"take a snapshot: {error!r}")
        requests, self._agreed_requests = self._agreed_requests, []
        for request in requests:
            self._answer(request, self.last_step or 0, error)

    def _use_grace(self, stall_s: float) -> None:
        if self.reason:
            self._grace_used_s += stall_s

    # ── clocks and the file: on rank 0, on the agreement's thread, or on the training thread of a single rank ──

    def _poll(self) -> float | None:
        """Seconds until the next poll; None on the other ranks."""
        if self._ranks.rank != 0:
            return None
        now_s = time.monotonic()
        next_s = now_s + POLL_S
        if self._every_s > 0:
            if now_s - self._interval_started_s >= self._every_s:
                self._interval_started_s = now_s
                self._agreement.request(RequestKind.SNAPSHOT)
            next_s = min(next_s, self._interval_started_s + self._every_s)
        self._next_poll_s = next_s
        if self._deadline is not None and self._deadline.at_s - time.time() <= self.pace.reserve_s(self._total_s):
            self._request_once(RequestKind.DEADLINE)
        if self._stop_file is not None and os.path.exists(self._stop_file):
            self._request_once(RequestKind.STOP_FILE)
        return max(0.0, next_s - now_s)

    def _request_once(self, kind: RequestKind) -> None:
        if kind not in self._made:
            self._made.add(kind)
            self._agreement.request(kind)

    # ── the session's thread ──

    def on_message(self, message: wire.ToClient) -> None:
        match message:
            case wire.Convened() if message.is_forced:
                if not self._is_forced:  # once: a second interrupt would end what the first has begun
                    self._interrupt()
            case wire.Convened():
                self._agreement.join_round(message.meeting)
                self._node_calls.called(message.meeting)
            case wire.Persisted():
                if message.seconds > 0:  # 0: it was committed before, and not timed
                    self.pace.persists_s.append(message.seconds)
                if self._follows_daemon and message.every_s > 0:
                    self._every_s = message.every_s  # `_poll` sees it within POLL_S
            case wire.Requested():
                self._receive(message)
            case _:
                pass

    def on_attach(self) -> None:
        self._agreement.on_attach()
        self._node_calls.on_attach()

    def _receive(self, request: wire.Requested) -> None:
        if request.kind == "force":
            if self._answers_operators():
                self._answer(request, self.last_step or 0)
            self._node_calls.forced()
            self._interrupt()
        elif request.kind == "snapshot":
            self._snapshot_requests.append(request)
            self._agreement.request(RequestKind.SNAPSHOT)
        elif self.reason:
            self._answer(request, self.last_step or 0)
        else:
            self._stop_requests.append(request)
            self._agreement.request(RequestKind.OPERATOR)

    def _interrupt(self) -> None:
        self._is_forced = True
        # Sent to the main thread, so that a system call in which it sleeps ends.
        with contextlib.suppress(ProcessLookupError):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    # ── calls of other nodes, on the thread of `NodeCalls`; after a reconnect on the session's ──

    def _repeat_call(self, number: int) -> None:
        self._agreement.join_round(number)  # even if the daemon is absent: when it is back, it is sent the call
        self._send(wire.Convene(meeting=number))

    def _repeat_force(self) -> None:
        is_first, self._is_forced = not self._is_forced, True  # before the daemon calls this rank, too
        self._send(wire.Convene(meeting=0, is_forced=True))
        if is_first:
            self._interrupt()

    def catch_signals(self) -> None:
        """Install the handlers, if this is the main thread: Python allows it nowhere else."""
        if threading.current_thread() is threading.main_thread():
            self._is_catching = True
            for number in self._signals.keys() - self._former_handlers.keys():
                self._former_handlers[number] = signal.signal(number, self._on_signal)

    def release_signals(self) -> None:
        """Remove the handlers. One that another client has installed above these stays in place."""
        self._is_catching = False
        for number, former in list(self._former_handlers.items()):
            installed = signal.getsignal(number)
            if installed != self._on_signal and _client_of(installed) is not None:
                continue  # it calls `_on_signal`, which passes the signal on
            while (client := _client_of(former)) is not None and not client._is_catching:
                former = client._former_handlers.get(number)
            signal.signal(number, signal.SIG_DFL if former is None else former)
            del self._former_handlers[number]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """It interrupts the main thread anywhere: take no lock, write no log."""
        if os.getpid() != self._pid:
            # A forked child has inherited our handlers, a worker of a pool perhaps: a signal must end it.
            self.release_signals()
            signal.raise_signal(number)
            return
        if (outer := _client_of(self._former_handlers.get(number))) is not None:
            outer._on_signal(number, frame)  # of `with outer, inner:` both stop
        if not self._is_catching:
            return
        if number == signal.SIGINT:
            now_s = time.monotonic()
            if self._is_forced or (self._interrupted_s is not None and now_s - self._interrupted_s >= ECHO_S):
                raise KeyboardInterrupt
            if self._interrupted_s is None:
                self._interrupted_s = now_s
        self._agreement.request(RequestKind.SNAPSHOT if self._signals[number] == "snapshot" else RequestKind.SIGNAL)


def _client_of(handler: object) -> StopRequests | None:
    """Whose `_on_signal` a signal handler is; None when it is no client's."""
    owner = getattr(handler, "__self__", None)
    return owner if isinstance(owner, StopRequests) else None


def signals_of(changes: Mapping[int, Meaning | None] | None) -> dict[int, Meaning]:
    """SIGNALS with `changes` made; None leaves a signal alone. Raises BadConfig for a signal that cannot be caught."""
    meanings: dict[int, Meaning | None] = {**SIGNALS, **(changes or {})}
    for number, meaning in meanings.items():
        if number in (signal.SIGKILL, signal.SIGSTOP) or number not in signal.valid_signals():
            raise BadConfig(f"connect with signals={{{number!r}: {meaning!r}}}: it cannot be caught")
        if meaning not in ("stop", "snapshot", None):
            raise BadConfig(f'connect with signals={{{number!r}: {meaning!r}}}: expected "stop", "snapshot" or None')
    return {int(number): meaning for number, meaning in meanings.items() if meaning is not None}
