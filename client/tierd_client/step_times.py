"""How long the steps of a training loop take, without the time inside calls of tierd.

A step lasts from the end of the last call of one step to the first call of a later one. The daemon compares these
times to see whether its own work slows training down, so steps that waited for a snapshot or copied one are left out.
"""

from __future__ import annotations

import operator
import statistics
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager

from tierd.errors import BadRequest

STEPS_REMEMBERED = 1024  # between two reports


class StepTimes:
    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._step: int | None = None
        self._call_ended_s = 0.0
        self.is_skipped = False
        """Set to leave out the step that is in progress, or is next."""
        self._steps_s: deque[float] = deque(maxlen=STEPS_REMEMBERED)
        self._reported_s = now_s()

    @contextmanager
    def outside_steps(self, step: int) -> Generator[None]:
        """A call that the loop makes after this step: its time belongs to no step."""
        former, self._step = self._step, step
        if former is not None and step != former:
            if step > former and not self.is_skipped:
                self._steps_s.append((self._now_s() - self._call_ended_s) / (step - former))
            self.is_skipped = False
        try:
            yield
        finally:
            self._call_ended_s = self._now_s()

    def report(self, every_s: float) -> float | None:
        """The median step since the last report, in seconds; None before `every_s` has passed (0: never report) and
        when there was no step."""
        now_s = self._now_s()
        if every_s <= 0 or now_s - self._reported_s < every_s or not self._steps_s:
            return None
        self._reported_s = now_s
        seconds = statistics.median(self._steps_s)
        self._steps_s.clear()
        return seconds


def as_step(step: int) -> int:
    """Raises BadRequest for anything but a whole number. Accepts numpy's integers and tensors of one integer."""
    try:
        if isinstance(step, bool):
            raise TypeError
        return operator.index(step)
    except (TypeError, ValueError, RuntimeError):
        raise BadRequest(f"take step {step!r}: a step is a whole number", hint="pass an int") from None
