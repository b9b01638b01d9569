"""When a run must end (the walltime of a job), and how long before that it has to begin to stop.

reserve = 5 s + 1.5 × (2 × step + stage + persist), each the slowest of the last few.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from tierd.errors import BadConfig

SLURM, OWN = "SLURM_JOB_END_TIME", "TIERD_DEADLINE"
FLOOR_S = 5.0  # to leave the loop and end the process, with clocks checked once a second
MARGIN = 1.5  # the next step or snapshot may be slower than all before it
UNMEASURED_S = 30.0  # assumed time to persist before the first snapshot, at most a tenth of the whole run
STEPS_REMEMBERED = 16  # so that an evaluation counts as a slow step only for a while
SNAPSHOTS_REMEMBERED = 8


@dataclass(frozen=True, slots=True)
class Deadline:
    """`at_s`: seconds since the epoch. `source`: what set it, for messages."""

    at_s: float
    source: str


def find_deadline(environ: Mapping[str, str], max_runtime_s: float | None, now_s: float) -> Deadline | None:
    """The earliest of `max_runtime_s` from now, $SLURM_JOB_END_TIME (seconds since the epoch) and $TIERD_DEADLINE
    (the same, or ISO 8601 with a zone). Raises BadConfig for any other value."""
    deadlines: list[Deadline] = []
    if max_runtime_s is not None:
        if not (math.isfinite(max_runtime_s) and max_runtime_s > 0):
            raise BadConfig(f"connect with max_runtime_s={max_runtime_s!r}: expected seconds, more than 0")
        deadlines.append(Deadline(now_s + max_runtime_s, f"max_runtime_s={max_runtime_s:g}"))
    deadlines += [Deadline(_epoch_s(name, environ[name]), f"${name}") for name in (SLURM, OWN) if environ.get(name)]
    return min(deadlines, key=lambda deadline: deadline.at_s, default=None)


def _epoch_s(name: str, text: str) -> float:
    expected = "seconds since the epoch" if name == SLURM else "seconds since the epoch, or ISO 8601 with a zone"
    at_s = math.nan
    with contextlib.suppress(ValueError):
        at_s = float(text)
    if math.isnan(at_s) and name == OWN:
        with contextlib.suppress(ValueError):
            moment = datetime.fromisoformat(text)
            if moment.tzinfo is None:
                hint = f"write {text}Z for UTC, or {text}+02:00"
                raise BadConfig(f"connect: ${name} is {text!r}, which has no zone", hint=hint)
            at_s = moment.timestamp()
    if not math.isfinite(at_s) or at_s <= 0:
        raise BadConfig(f"connect: ${name} is {text!r}, expected {expected}")
    return at_s


class Pace:
    """How long the last steps, stagings and persists took, in seconds."""

    def __init__(self) -> None:
        self.steps_s: deque[float] = deque(maxlen=STEPS_REMEMBERED)
        self.stages_s: deque[float] = deque(maxlen=SNAPSHOTS_REMEMBERED)
        self.persists_s: deque[float] = deque(maxlen=SNAPSHOTS_REMEMBERED)
        self._step_started_s: float | None = None

    def stepped(self, now_s: float) -> None:
        """A step ended, and the next begins."""
        if self._step_started_s is not None:
            self.steps_s.append(now_s - self._step_started_s)
        self._step_started_s = now_s

    def reserve_s(self, total_s: float) -> float:
        """The run begins to stop when less than this is left: for two steps, the one in progress and one more that the
        ranks may need to agree, and for the last snapshot. `total_s`: the time from the start to the deadline."""
        unmeasured_s = max(0.0, min(UNMEASURED_S, total_s / 10))
        # Copies, since other threads append to the deques.
        step_s = max(self.steps_s.copy(), default=0.0)
        stage_s = max(self.stages_s.copy(), default=0.0)
        persist_s = max(self.persists_s.copy(), default=unmeasured_s)
        return FLOOR_S + MARGIN * (2 * step_s + stage_s + persist_s)
