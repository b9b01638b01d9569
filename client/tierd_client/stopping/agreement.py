"""The ranks agree on the step at which a wish comes true (stop, take a snapshot), and no rank passes it unaware.

With nothing wished for it costs a lock. A rank with a wish has the daemon call all ranks to a meeting; a thread of
each then takes part, so that the training goes on meanwhile. First all come together and hear each other's wishes:
a rank that was never called costs nobody a wait. Only then does each promise not to pass its next step, and one
maximum of the promised steps is where all act. From the promise on a meeting needs the ranks alone, no daemon.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from enum import IntEnum

from tierd.errors import TierdError, Transient
from tierd_client.ranks import Ranks

log = logging.getLogger("tierd_client")

CLOSE_TIMEOUT_S = 1.0
PROMISE_TIMEOUT_S = 300.0  # it takes milliseconds, unless a rank is stopped in the middle of it


class Wish(IntEnum):
    """What a rank may wish for, as an index of what is exchanged. All but the first mean: stop."""

    SNAPSHOT = 0
    SIGNAL = 1
    DEADLINE = 2
    STOP_FILE = 3
    OPERATOR = 4


class _Nudge:
    """Has the thread look whether it is over."""


class Agreement:
    """`wish` may be called anywhere, in a signal handler too; `at` on the training thread.

    A point is a step at which a rank has asked. Points are counted, not steps: all ranks ask at the same steps.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        # Its put() may interrupt a put() of the same thread: the only way out of a signal handler that never blocks.
        self._inbox: queue.SimpleQueue[Wish | int | _Nudge] = queue.SimpleQueue()
        self._convene: Callable[[int], None] = lambda meeting: None
        self._changed = threading.Condition()
        self._step: int | None = None
        self._points = 0
        self._ceiling: int | None = None
        self._agreed: list[tuple[int, frozenset[Wish]]] = []
        self._met = 0
        self._called = 0  # meetings that somebody has called, by the highest number
        self._asked = -1  # the meeting that we have had called
        self._is_over = False
        self._thread: threading.Thread | None = None

    def start(self, convene: Callable[[int], None], look: Callable[[], float | None]) -> None:
        """`convene` has the daemon call all ranks to that meeting. `look` is called on the thread, before anything
        else after so many seconds as it has returned (None: only when there is a word)."""
        self._convene = convene
        if self._ranks.world_size > 1:
            self._thread = threading.Thread(target=self._run, args=(look,), name="tierd-agreement", daemon=True)
            self._thread.start()

    def wish(self, wish: Wish) -> None:
        self._inbox.put(wish)

    def hear(self, meeting: int) -> None:
        """All ranks are called to this meeting. Hearing it twice, or too late, does nothing."""
        self._inbox.put(meeting)

    def on_attach(self) -> None:
        """Another daemon, or the same again, may not have heard of the meeting that we wait for."""
        if self._asked == self._met or self._called > self._met:
            self._convene(self._met)

    def at(self, step: int) -> frozenset[Wish]:
        """The wishes that come true at this step, on all ranks; each is told once.

        Raises Transient when a rank that has promised says nothing for five minutes."""
        with self._changed:
            if step != self._step:
                self._step = step
                self._points += 1
            if self._ranks.world_size == 1:
                return self.now()
            if not self._changed.wait_for(lambda: not self._is_held_up, PROMISE_TIMEOUT_S):
                raise Transient(
                    f"agree with the other ranks at step {step}: no answer for {PROMISE_TIMEOUT_S:.0f} s",
                    hint="is one of them stopped, or stuck?",
                )
            if not self._agreed:
                return frozenset()
            true = [wishes for point, wishes in self._agreed if point <= self._points]
            self._agreed = [one for one in self._agreed if one[0] > self._points]
            return frozenset[Wish]().union(*true)

    @property
    def _is_held_up(self) -> bool:
        return self._ceiling is not None and self._points >= self._ceiling

    def now(self) -> frozenset[Wish]:
        """What a single rank has wished for: it has nobody to agree with."""
        found: set[Wish] = set()
        while self._ranks.world_size == 1 and not self._inbox.empty():
            word = self._inbox.get_nowait()
            if isinstance(word, Wish):
                found.add(word)
        return frozenset(found)

    def close(self) -> None:
        self._is_over = True
        self._inbox.put(_Nudge())
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)

    # ── the thread ──

    def _run(self, look: Callable[[], float | None]) -> None:
        wishes: set[Wish] = set()
        try:
            while not self._is_over:
                try:
                    word = self._inbox.get(timeout=look())
                except queue.Empty:
                    continue
                if isinstance(word, Wish):
                    wishes.add(word)
                elif isinstance(word, int):
                    self._called = max(self._called, word + 1)
                if wishes and self._called <= self._met and self._asked != self._met:
                    self._asked = self._met
                    self._convene(self._met)
                while self._called > self._met:
                    self._meet(frozenset(wishes))
                    wishes.clear()
        except TierdError as error:
            # A rank has ended or died. Who depends on it hears of it in the next exchange of the training.
            if not self._is_over:
                log.warning("tierd: the ranks can no more agree on a step to stop at: %s", error)
        except Exception:
            log.exception("tierd: the thread that agrees with the other ranks ended: a bug in tierd, please report it")
        finally:
            self._ranks.leave_apart()
            with self._changed:
                self._ceiling = None
                self._changed.notify_all()

    def _meet(self, wishes: frozenset[Wish]) -> None:
        everyone = self._ranks.maximum_apart([wish in wishes for wish in Wish], self._has_ended)
        with self._changed:
            ceiling = self._ceiling = self._points + 1
        (point,) = self._ranks.maximum_apart([ceiling], self._has_ended)
        with self._changed:
            self._agreed.append((point, frozenset(wish for wish in Wish if everyone[wish])))
            self._ceiling = None
            self._met += 1
            self._changed.notify_all()

    def _has_ended(self) -> bool:
        return self._is_over
