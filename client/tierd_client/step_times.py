"""How long the steps of a training loop take, without what the calls of tierd take: what the daemon may disturb.

A step is from the end of the last call of one step to the first call of a later one. Steps that are known to be unlike
the others, because the loop waited for a snapshot or copied one, are left out.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager

STEPS_REMEMBERED = 1024  # between two reports


class StepTimes:
    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._step: int | None = None
        self._left_s = 0.0
        self._is_spoilt = False
        self._steps_s: deque[float] = deque(maxlen=STEPS_REMEMBERED)
        self._reported_s = now_s()

    @contextmanager
    def apart(self, step: int) -> Generator[None]:
        """A call that the loop makes after this step: no part of any step."""
        former, self._step = self._step, step
        if former is not None and step != former:
            if step > former and not self._is_spoilt:
                self._steps_s.append((self._now_s() - self._left_s) / (step - former))
            self._is_spoilt = False
        try:
            yield
        finally:
            self._left_s = self._now_s()

    def spoil(self) -> None:
        """What comes until the next step is not to be counted."""
        self._is_spoilt = True

    def report(self, every_s: float) -> float | None:
        """The median of the steps since the last report, once they are due and there are any. 0: never."""
        now_s = self._now_s()
        if every_s <= 0 or now_s - self._reported_s < every_s or not self._steps_s:
            return None
        self._reported_s = now_s
        seconds = statistics.median(self._steps_s)
        self._steps_s.clear()
        return seconds
