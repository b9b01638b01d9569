"""What is wished for from outside the loop: signals, the walltime, a stop file, an operator's request.

All of it comes to one Agreement, so that every rank stops or takes a snapshot at the same step. Rank 0 looks at the
clocks and at the file, at most once a second, and hears the operator; a signal is heard by whichever rank gets it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, Literal

from tierd.errors import BadConfig, TierdError
from tierd.format import wire
from tierd_client.ranks import Ranks
from tierd_client.stopping.agreement import Agreement, Wish
from tierd_client.stopping.deadline import Deadline, Pace

log = logging.getLogger("tierd_client")

Meaning = Literal["stop", "snapshot"]
SIGNALS: dict[int, Meaning] = {signal.SIGTERM: "stop", signal.SIGINT: "stop", signal.SIGUSR1: "snapshot"}
LOOK_S = 1.0
MESSAGE_CHARS_MAX = 4096
ECHO_S = 0.5  # one Ctrl-C comes twice below torchrun: from the terminal, and passed on by torchrun
REASONS = {
    Wish.SIGNAL: "a signal",
    Wish.DEADLINE: "the walltime",
    Wish.STOP_FILE: "the stop file",
    Wish.OPERATOR: "tierd stop",
}


class StopRequests:
    """Made before the session is, for a request may come with its first message."""

    def __init__(
        self, ranks: Ranks, *, signals: Mapping[int, Meaning], deadline: Deadline | None, stop_file: str | None
    ) -> None:
        self.reason = ""
        """Why the ranks stop at the last step they have come to; empty while they go on."""
        self.pace = Pace()
        self._deadline = deadline
        self._ranks = ranks
        self._signals = signals
        self._stop_file = stop_file
        self._agreement = Agreement(ranks)
        self._send: Callable[[wire.ToDaemon], None] = lambda message: None
        self._former: dict[int, Any] = {}
        self._pid = os.getpid()
        self._interrupted_s: float | None = None
        self._is_forced = False
        self._wished: set[Wish] = set()  # by looking: once is enough
        self._given_s = deadline.at_s - time.time() if deadline is not None else 0.0
        self._every_s = 0.0
        self._timed_s = time.monotonic()  # the last snapshot, or the wish for one: `every_s` counts from here
        self._next_look_s = 0.0
        self._step: int | None = None
        self._snapshot_step: int | None = None
        self._heard: queue.SimpleQueue[wire.Requested] = queue.SimpleQueue()  # on the session's thread
        self._asked: list[wire.Requested] = []  # by operators; the snapshots they ask for are `ripe` once agreed on
        self._ripe: list[wire.Requested] = []

    def start(self, send: Callable[[wire.ToDaemon], None], every_s: float) -> None:
        self._send = send
        self._every_s = every_s
        self._agreement.start(lambda meeting: send(wire.Convene(meeting=meeting)), self._look)
        self._warn_of_little_time()

    def close(self) -> None:
        """Whoever still waits for the run to stop has what they want: it ends."""
        self._take_heard()
        self._answer_stops()
        self._agreement.close()

    # ── the training thread ──

    @property
    def last_step(self) -> int | None:
        """The step that the loop has come to."""
        return self._step

    def at(self, step: int) -> bool:
        """Whether a snapshot of this step was wished for. Whatever was wished for has come true when it returns."""
        now_s = time.monotonic()
        if step != self._step:
            self._step = step
            self.pace.stepped(now_s)
        if self._ranks.world_size == 1 and now_s >= self._next_look_s:
            self._look()
        self._come_true(self._agreement.at(step))
        return step == self._snapshot_step

    def look(self) -> None:
        """A rank by itself need not wait for the end of a step to see that it should stop."""
        if self._ranks.world_size == 1:
            if time.monotonic() >= self._next_look_s:
                self._look()
            wishes = self._agreement.now()
            self._come_true(wishes - {Wish.SNAPSHOT})
            if Wish.SNAPSHOT in wishes:
                self._agreement.wish(Wish.SNAPSHOT)  # that is for the next step: this one may have been asked for

    def grace_s(self, told_s: float) -> float:
        """How long the last snapshot may take: what is told, but near the walltime all that is left of it."""
        if self._deadline is None or REASONS[Wish.DEADLINE] not in self.reason:
            return told_s
        return max(told_s, self._deadline.at_s - time.time())

    def _come_true(self, wishes: frozenset[Wish]) -> None:
        if not wishes:
            return
        reasons = [REASONS[wish] for wish in sorted(wishes) if wish in REASONS]
        if reasons and not self.reason:
            self.reason = " and ".join(reasons)
            if self._ranks.rank == 0:
                log.warning("tierd: stopping at step %s: %s", self._step, self.reason)
        self._take_heard()
        if Wish.SNAPSHOT in wishes:
            self._snapshot_step = self._step
            self._ripe += [one for one in self._asked if one.kind == "snapshot"]
            self._asked = [one for one in self._asked if one.kind != "snapshot"]
        if self.reason and self._ranks.rank == 0:
            self._consume_stop_file()
            self._answer_stops()

    def _take_heard(self) -> None:
        while not self._heard.empty():
            self._asked.append(self._heard.get_nowait())

    def _consume_stop_file(self) -> None:
        """Else the resumed run would stop at once."""
        if self._stop_file is not None:
            try:
                os.unlink(self._stop_file)
            except FileNotFoundError:
                pass
            except OSError as error:
                log.error("tierd: remove %s, or the next start stops at once: %s", self._stop_file, error)

    def _answer_stops(self) -> None:
        for one in [one for one in self._asked if one.kind == "stop"]:
            self._asked.remove(one)
            self._answer(one, self._step or 0)

    def _answer(self, request: wire.Requested, step: int) -> None:
        self._send(wire.Answer(request=request.request, step=step))

    # ── snapshots ──

    def milestone(self, given: str | None) -> str | None:
        """The name that the next snapshot gets: the loop's own, else one that an operator asked for."""
        if given is not None:
            return given
        return next((one.milestone for one in self._ripe if one.milestone is not None), None)

    def taken(self, step: int, stall_s: float, milestone: str | None) -> None:
        """A snapshot was sealed: the operators who asked for it are told."""
        self._timed_s = time.monotonic()
        self.pace.staged(stall_s)
        ripe, self._ripe = self._ripe, []
        for one in ripe:
            if one.milestone in (None, milestone):
                self._answer(one, step)
            else:  # it has got another name: one more snapshot
                self._asked.append(one)
                self._agreement.wish(Wish.SNAPSHOT)

    def not_taken(self, error: BaseException) -> None:
        self._timed_s = float("-inf")  # by time it is still due
        told = error if isinstance(error, TierdError) else TierdError(f"take a snapshot: {error!r}")
        for one in self._ripe:
            self._send(
                wire.Answer(
                    request=one.request,
                    step=self._step or 0,
                    kind=told.kind,
                    message=told.message[:MESSAGE_CHARS_MAX],
                    hint=told.hint,
                )
            )
        self._ripe = []

    # ── clocks and the file: rank 0, on the agreement's thread or, where there is none, on the training's ──

    def _look(self) -> float | None:
        """In how many seconds to look again; None where nobody needs to."""
        if self._ranks.rank != 0:
            return None
        now_s = time.monotonic()
        next_s = now_s + LOOK_S
        if self._every_s > 0:
            if now_s - self._timed_s >= self._every_s:
                self._timed_s = now_s
                self._agreement.wish(Wish.SNAPSHOT)
            next_s = min(next_s, self._timed_s + self._every_s)
        self._next_look_s = next_s
        if self._deadline is not None and self._deadline.at_s - time.time() <= self.pace.reserve_s(self._given_s):
            self._wish_once(Wish.DEADLINE)
        if self._stop_file is not None and os.path.exists(self._stop_file):
            self._wish_once(Wish.STOP_FILE)
        return max(0.0, next_s - now_s)

    def _wish_once(self, wish: Wish) -> None:
        if wish not in self._wished:
            self._wished.add(wish)
            self._agreement.wish(wish)

    def _warn_of_little_time(self) -> None:
        if self._deadline is not None and self._ranks.rank == 0:
            reserve_s = self.pace.reserve_s(self._given_s)
            if self._given_s <= reserve_s:
                log.error(
                    "tierd: only %.0f s are left until %s, and stopping in good order takes %.0f s: the run stops at "
                    "its first step",
                    self._given_s,
                    self._deadline.source,
                    reserve_s,
                )

    # ── the session's thread ──

    def on_message(self, message: wire.ToClient) -> None:
        match message:
            case wire.Convened():
                self._agreement.hear(message.meeting)
            case wire.Persisted() if message.seconds > 0:  # 0: it was found committed, and nobody measured
                self.pace.persisted(message.seconds)
            case wire.Requested():
                self._hear(message)
            case _:
                pass

    def on_attach(self) -> None:
        self._agreement.on_attach()

    def _hear(self, request: wire.Requested) -> None:
        if request.kind == "force":
            self._is_forced = True
            if self._ranks.rank == 0:
                self._answer(request, self._step or 0)
            # To that thread, so that a system call it sleeps in ends.
            with contextlib.suppress(ProcessLookupError):
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        elif request.kind == "stop" and self.reason:
            self._answer(request, self._step or 0)
        else:
            self._heard.put(request)
            self._agreement.wish(Wish.OPERATOR if request.kind == "stop" else Wish.SNAPSHOT)

    # ── signals ──

    def catch_signals(self) -> None:
        """Only the main thread can; anywhere else signals stay as they are."""
        if threading.current_thread() is threading.main_thread():
            for number in self._signals.keys() - self._former.keys():
                self._former[number] = signal.signal(number, self._on_signal)

    def release_signals(self) -> None:
        for number, former in self._former.items():
            signal.signal(number, signal.SIG_DFL if former is None else former)
        self._former.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """It interrupts the main thread anywhere: no lock, no log."""
        if os.getpid() != self._pid:
            # A child that was forked with our handlers, a worker of a pool perhaps: it must end when it is told to.
            self.release_signals()
            signal.raise_signal(number)
            return
        if number == signal.SIGINT:
            now_s = time.monotonic()
            if self._is_forced or (self._interrupted_s is not None and now_s - self._interrupted_s >= ECHO_S):
                raise KeyboardInterrupt
            if self._interrupted_s is None:
                self._interrupted_s = now_s
        self._agreement.wish(Wish.SNAPSHOT if self._signals[number] == "snapshot" else Wish.SIGNAL)


def signals_of(changes: Mapping[int, Meaning | None] | None) -> dict[int, Meaning]:
    """The default with `changes` made: None leaves a signal alone. Raises BadConfig for what cannot be caught."""
    found: dict[int, Meaning | None] = {**SIGNALS, **(changes or {})}
    for number, meaning in found.items():
        if number in (signal.SIGKILL, signal.SIGSTOP) or number not in signal.valid_signals():
            raise BadConfig(f"connect with signals={{{number!r}: {meaning!r}}}: it cannot be caught")
        if meaning not in ("stop", "snapshot", None):
            raise BadConfig(f'connect with signals={{{number!r}: {meaning!r}}}: expected "stop", "snapshot" or None')
    return {int(number): meaning for number, meaning in found.items() if meaning is not None}
