"""The ranks agree on the step at which a request (stop, take a snapshot) takes effect, the same on all ranks.

Without requests, a step only acquires a lock. A rank with a request has the daemon call all ranks to a round. A thread
on each rank takes part in it while training goes on. First the threads exchange the requests. If a rank was not called,
the others wait in this exchange, but their training does not. Then each rank stops its training from passing its next
step, and all act at the maximum of these steps. After the first exchange a round needs only the ranks, no daemon.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from enum import IntEnum

from tierd.errors import TierdError, Transient
from tierd.format import wire
from tierd_client.log import log
from tierd_client.ranks import Ranks

CLOSE_TIMEOUT_S = 1.0
ROUND_TIMEOUT_S = 300.0  # it takes milliseconds, unless a rank is stopped in the middle of it


class RequestKind(IntEnum):
    """Index of a request in what the ranks exchange. All but the first ask the run to stop."""

    SNAPSHOT = 0
    SIGNAL = 1
    DEADLINE = 2
    STOP_FILE = 3
    OPERATOR = 4


class Agreement:
    """`request` may be called anywhere, in a signal handler too; `agreed_at` on the training thread.

    Calls of `agreed_at` with a new step are counted, and the ranks agree on a count: all ask at the same steps.
    """

    def __init__(self, ranks: Ranks, send: Callable[[wire.ToDaemon], None]) -> None:
        self._ranks = ranks
        self._send = send
        # Its put() is safe in a signal handler: it may interrupt a put() of the same thread, and never blocks.
        # An int is the number of a round that all ranks are called to; None only wakes the thread.
        self._inbox: queue.SimpleQueue[RequestKind | int | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._step: int | None = None
        self._steps = 0
        self._last_step: int | None = None  # the count that training may not pass while a round goes on
        self._agreed: list[tuple[int, frozenset[RequestKind]]] = []
        self._rounds = 0  # that are done
        self._called = 0  # rounds that all ranks were called to
        self._asked = -1  # the round that this rank asked the daemon to call
        self._is_over = False
        self._thread: threading.Thread | None = None

    def start(self, poll: Callable[[], float | None]) -> None:
        """With several ranks, start the thread. It calls `poll` now, and again after as many seconds as that returned
        or when something arrives (None: only then)."""
        if self._ranks.world_size > 1:
            self._thread = threading.Thread(target=self._run, args=(poll,), name="tierd-agreement", daemon=True)
            self._thread.start()

    def request(self, kind: RequestKind) -> None:
        self._inbox.put(kind)

    def join_round(self, number: int) -> None:
        """The daemon calls all ranks to this round. A repeated or late call does nothing."""
        self._inbox.put(number)

    def on_attach(self) -> None:
        """The daemon may not have received the call to the round that we wait for: send it again."""
        if self._asked == self._rounds or self._called > self._rounds:
            self._send(wire.Convene(meeting=self._rounds))

    def agreed_at(self, step: int) -> frozenset[RequestKind]:
        """The requests that take effect at this step, on all ranks; each is returned once.

        Raises Transient when another rank does not complete a round within five minutes."""
        with self._changed:
            if step != self._step:
                self._step = step
                self._steps += 1
            if not self._changed.wait_for(
                lambda: self._last_step is None or self._steps < self._last_step, ROUND_TIMEOUT_S
            ):
                raise Transient(
                    f"agree with the other ranks at step {step}: no answer for {ROUND_TIMEOUT_S:.0f} s",
                    hint="is one of them stopped, or stuck?",
                )
            if not self._agreed:
                return frozenset()
            due = [kinds for count, kinds in self._agreed if count <= self._steps]
            self._agreed = [(count, kinds) for count, kinds in self._agreed if count > self._steps]
            return frozenset[RequestKind]().union(*due)

    def take_requests(self) -> frozenset[RequestKind]:
        """A single rank only: its requests, which take effect at once."""
        kinds: set[RequestKind] = set()
        while not self._inbox.empty():
            received = self._inbox.get_nowait()
            if isinstance(received, RequestKind):
                kinds.add(received)
        return frozenset(kinds)

    def close(self) -> None:
        self._is_over = True
        self._inbox.put(None)
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)

    # ── the thread ──

    def _run(self, poll: Callable[[], float | None]) -> None:
        requested: set[RequestKind] = set()
        try:
            while not self._is_over:
                try:
                    received = self._inbox.get(timeout=poll())
                except queue.Empty:
                    continue
                if isinstance(received, RequestKind):
                    requested.add(received)
                elif received is not None:
                    self._called = max(self._called, received + 1)
                if requested and self._called <= self._rounds and self._asked != self._rounds:
                    self._asked = self._rounds
                    self._send(wire.Convene(meeting=self._rounds))
                while self._called > self._rounds:
                    self._run_round(frozenset(requested))
                    requested.clear()
        except TierdError as error:
            # A rank has ended or died: the next exchange of the training raises that error, if it matters.
            if not self._is_over:
                log.warning("tierd: the ranks can no longer agree on a step to stop at: %s", error)
        finally:
            self._ranks.close_background()
            with self._changed:
                self._last_step = None
                self._changed.notify_all()

    def _run_round(self, requested: frozenset[RequestKind]) -> None:
        on_any = self._ranks.background_maximum([kind in requested for kind in RequestKind], lambda: self._is_over)
        with self._changed:
            last_step = self._last_step = self._steps + 1
        (count,) = self._ranks.background_maximum([last_step], lambda: self._is_over)
        with self._changed:
            self._agreed.append((count, frozenset(kind for kind in RequestKind if on_any[kind])))
            self._last_step = None
            self._rounds += 1
            self._changed.notify_all()
