"""When the trainers of a run last showed that they train, and after which silence they probably hang.

A sign is what only a training loop sends: a step time, a slot that is being filled, a snapshot. The longest pause so
far, such as an evaluation, says what is normal for the run. A loop that does not call `due` sends no step times: then
the interval between its snapshots is what is normal. No clock: callers give the monotonic time.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierd.format.ids import Run

SILENT_MIN_S = 30.0  # trainers report their step times once a second
SILENT_FACTOR = 3.0  # times the longest pause so far
START_S = 600.0  # until the first sign: a trainer restores, compiles, and fills caches before its first step
UNTIMED_S = 4 * 3600.0  # without step times, until two snapshots have shown their interval


@dataclass(slots=True)
class _Signs:
    """`began_s`: when the first rank has connected; `start_s`: when one that begins a generation has."""

    last_s: float
    began_s: float
    start_s: float | None = None
    longest_s: float | None = None  # None: there was no sign since a rank has connected
    step_s: float | None = None

    @property
    def limit_s(self) -> float:
        if self.longest_s is None:
            return START_S
        if self.step_s is not None:
            return max(SILENT_MIN_S, SILENT_FACTOR * self.longest_s)
        # A snapshot has several signs: shorter pauses are those between them.
        return max(START_S, SILENT_FACTOR * self.longest_s) if self.longest_s > SILENT_MIN_S else UNTIMED_S


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

    def entered(self, run: Run, now_s: float, *, is_start: bool = False) -> None:
        """A rank has connected. `is_start`: to begin a generation, and not because its connection was interrupted."""
        signs = self._runs.setdefault(run, _Signs(now_s, now_s))
        signs.last_s = now_s
        if is_start:
            signs.start_s = now_s

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
        return Pause(max(0.0, now_s - signs.last_s), signs.limit_s)

    def step_s(self, run: Run) -> float | None:
        """How long its recent steps took; None: it has not told."""
        signs = self._runs.get(run)
        return None if signs is None else signs.step_s

    def attached_s(self, run: Run, now_s: float) -> float | None:
        """How long a rank has been connected; None: none is."""
        signs = self._runs.get(run)
        return None if signs is None else now_s - signs.began_s

    def started_s(self, run: Run, now_s: float) -> float | None:
        """How long ago the generation of the connected trainers began; None: no rank has begun one here."""
        signs = self._runs.get(run)
        return None if signs is None or signs.start_s is None else now_s - signs.start_s
