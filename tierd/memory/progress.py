"""When the trainers of a run last showed that they train, and after which silence they probably hang.

A sign is what only a training loop sends: a step time, a slot that is being filled, a snapshot. The longest pause so
far, such as an evaluation, says what is normal for the run. No clock: callers give the monotonic time.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierd.format.ids import Run

SILENT_MIN_S = 30.0  # trainers report their step times once a second
SILENT_FACTOR = 3.0  # times the longest pause so far
START_S = 600.0  # until the first sign: a trainer restores, compiles, and fills caches before its first step


@dataclass(slots=True)
class _Signs:
    last_s: float
    longest_s: float | None = None  # None: there was no sign since a rank has connected
    step_s: float | None = None


@dataclass(frozen=True, slots=True)
class Pause:
    """Seconds since the last sign; from `limit_s` on, the trainers probably hang."""

    seconds: float
    limit_s: float

    @property
    def is_too_long(self) -> bool:
        return self.seconds > self.limit_s


class RunProgress:
    def __init__(self) -> None:
        self._runs: dict[Run, _Signs] = {}

    def entered(self, run: Run, now_s: float) -> None:
        """A rank has connected."""
        self._runs.setdefault(run, _Signs(now_s)).last_s = now_s

    def sign(self, run: Run, now_s: float, *, step_s: float | None = None) -> None:
        """`step_s`: how long its recent steps took, where the sign says so."""
        signs = self._runs.get(run)
        if signs is None:
            return
        pause_s = 0.0 if signs.longest_s is None else now_s - signs.last_s
        signs.last_s, signs.longest_s = now_s, max(signs.longest_s or 0.0, pause_s)
        if step_s is not None:
            signs.step_s = step_s

    def left(self, run: Run) -> None:
        """The last rank has disconnected."""
        self._runs.pop(run, None)

    def pause(self, run: Run, now_s: float) -> Pause | None:
        """None: no trainer is connected."""
        signs = self._runs.get(run)
        if signs is None:
            return None
        limit_s = START_S if signs.longest_s is None else max(SILENT_MIN_S, SILENT_FACTOR * signs.longest_s)
        return Pause(max(0.0, now_s - signs.last_s), limit_s)

    def step_s(self, run: Run) -> float | None:
        """How long its recent steps took; None: it has not told."""
        signs = self._runs.get(run)
        return None if signs is None else signs.step_s
