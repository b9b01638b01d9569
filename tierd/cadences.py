"""Measures of each run what `snapshot.cadence = "auto"` needs: stalls, persists, training time and failures.

The measurements are in the daemon's memory only. lifecycle/cadence.py chooses the interval; Welcome and each Persisted
tell it to the trainers.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

from tierd.config.sections import SnapshotConfig
from tierd.format.ids import Run
from tierd.lifecycle.cadence import Choice, choose, estimate_mtbf_s
from tierd.memory.outcomes import RUNS_MAX

SNAPSHOTS_REMEMBERED = 8
STALLS_REMEMBERED = 64  # one for each rank and snapshot


@dataclass(slots=True)
class _Seen:
    """`started_s`: since when a rank has been connected; None: no rank is connected. `trained_s`: the time before
    that."""

    started_s: float | None = None
    trained_s: float = 0.0
    failures: int = 0
    stalls_s: deque[float] = field(default_factory=lambda: deque(maxlen=STALLS_REMEMBERED))
    persists_s: deque[float] = field(default_factory=lambda: deque(maxlen=SNAPSHOTS_REMEMBERED))


class Cadences:
    """Times are monotonic, in seconds."""

    def __init__(self, config: SnapshotConfig | None = None) -> None:
        self._config = config or SnapshotConfig()
        self._runs: dict[Run, _Seen] = {}

    @property
    def is_auto(self) -> bool:
        return self._config.cadence == "auto"

    def entered(self, run: Run, now_s: float) -> None:
        """A rank is connected."""
        seen = self._of(run)
        if seen.started_s is None:
            seen.started_s = now_s

    def left(self, run: Run, now_s: float, *, has_failed: bool) -> None:
        """No rank is connected any more."""
        seen = self._of(run)
        if seen.started_s is not None:
            seen.trained_s += max(0.0, now_s - seen.started_s)
            seen.started_s = None
            seen.failures += has_failed

    def stalled(self, run: Run, seconds: float) -> None:
        """A rank's snapshot() took so long."""
        self._of(run).stalls_s.append(seconds)

    def persisted(self, run: Run, seconds: float) -> None:
        self._of(run).persists_s.append(seconds)

    def choice(self, run: Run, now_s: float) -> Choice | None:
        """The interval of the run; None if the config is not `cadence = "auto"`."""
        if not self.is_auto:
            return None
        seen = self._runs.get(run, _Seen())
        trained_s = seen.trained_s + (max(0.0, now_s - seen.started_s) if seen.started_s is not None else 0.0)
        mtbf_s, source = estimate_mtbf_s(self._config.mtbf_s, seen.failures, trained_s)
        return choose(
            # The median: the first snapshot of a rank also waits until its slots are ready.
            stall_s=statistics.median(seen.stalls_s) if seen.stalls_s else None,
            persist_s=statistics.median(seen.persists_s) if seen.persists_s else None,
            mtbf_s=mtbf_s,
            mtbf_source=source,
            stall_share_max=self._config.stall_share_max,
        )

    def every_s(self, run: Run, now_s: float) -> float:
        """The interval of `choice` in seconds; 0 without one."""
        choice = self.choice(run, now_s)
        return choice.every_s if choice is not None else 0.0

    def _of(self, run: Run) -> _Seen:
        seen = self._runs.pop(run, None) or _Seen()
        self._runs[run] = seen  # moves it to the end: the first one is the least recently used
        while len(self._runs) > RUNS_MAX:
            del self._runs[next(iter(self._runs))]
        return seen
