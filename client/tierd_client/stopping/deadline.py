"""When a run must be over, and how long before that it has to begin to stop: the walltime of a job.

The reserve is a pure function of what was measured, so that it can be tried on any pace of training:
reserve = 5 s + 1.5 × (2 × step + stage + persist), each the slowest of the last few.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from tierd.errors import BadConfig

SLURM, OWN = "SLURM_JOB_END_TIME", "TIERD_DEADLINE"
FLOOR_S = 5.0  # to leave the loop, end the process, and be told a moment late
MARGIN = 1.5  # the next one may be slower than all before it
UNMEASURED_S = 30.0  # what persisting is taken for before the first one, but no more than a tenth of the time there is
STEPS_REMEMBERED = 16  # an evaluation in between is forgotten again
SNAPSHOTS_REMEMBERED = 8


@dataclass(frozen=True, slots=True)
class Deadline:
    """`at_s` is in seconds since the epoch; `source` is what set it, for people."""

    at_s: float
    source: str


def find_deadline(environ: Mapping[str, str], max_runtime_s: float | None, now_s: float) -> Deadline | None:
    """The earliest of `max_runtime_s` from now, $SLURM_JOB_END_TIME (seconds since the epoch) and $TIERD_DEADLINE
    (the same, or ISO 8601 with a zone). Raises BadConfig naming what is none of these."""
    found: list[Deadline] = []
    if max_runtime_s is not None:
        if not (math.isfinite(max_runtime_s) and max_runtime_s > 0):
            raise BadConfig(f"connect with max_runtime_s={max_runtime_s!r}: expected seconds, more than 0")
        found.append(Deadline(now_s + max_runtime_s, f"max_runtime_s={max_runtime_s:g}"))
    told = [(name, environ.get(name, "")) for name in (SLURM, OWN)]
    found += [Deadline(_epoch_s(name, text), f"${name}") for name, text in told if text]
    return min(found, key=lambda one: one.at_s, default=None)


def _epoch_s(name: str, text: str) -> float:
    expected = "seconds since the epoch" if name == SLURM else "seconds since the epoch, or ISO 8601 with a zone"
    try:
        at_s = float(text)
    except ValueError:
        if name == SLURM:
            raise BadConfig(f"connect: ${name} is {text!r}, expected {expected}") from None
        at_s = _iso_s(name, text, expected)
    if not math.isfinite(at_s) or at_s <= 0:
        raise BadConfig(f"connect: ${name} is {text!r}, expected {expected}")
    return at_s


def _iso_s(name: str, text: str, expected: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise BadConfig(f"connect: ${name} is {text!r}, expected {expected}") from None
    if moment.tzinfo is None:
        raise BadConfig(
            f"connect: ${name} is {text!r}, which has no zone", hint=f"write {text}Z for UTC, or {text}+02:00"
        )
    return moment.timestamp()


def reserve_s(*, step_s: float, stage_s: float, persist_s: float) -> float:
    """Begin to stop when less than this is left.

    Two steps: the one under way, and one more that the ranks may need to agree. Then the last snapshot.
    """
    return FLOOR_S + MARGIN * (2 * step_s + stage_s + persist_s)


class Pace:
    """What was measured of late: how long steps, staging and persisting took, in seconds."""

    def __init__(self) -> None:
        self._steps_s: deque[float] = deque(maxlen=STEPS_REMEMBERED)
        self._stages_s: deque[float] = deque(maxlen=SNAPSHOTS_REMEMBERED)
        self._persists_s: deque[float] = deque(maxlen=SNAPSHOTS_REMEMBERED)
        self._step_began_s: float | None = None

    def stepped(self, now_s: float) -> None:
        """A step has ended, and the next begins."""
        if self._step_began_s is not None:
            self._steps_s.append(now_s - self._step_began_s)
        self._step_began_s = now_s

    def staged(self, seconds: float) -> None:
        self._stages_s.append(seconds)

    def persisted(self, seconds: float) -> None:
        self._persists_s.append(seconds)

    def reserve_s(self, given_s: float) -> float:
        """`given_s`: how much time there was at the start."""
        unmeasured_s = max(0.0, min(UNMEASURED_S, given_s / 10))
        # Copies: these are measured on other threads than this one.
        return reserve_s(
            step_s=max(self._steps_s.copy(), default=0.0),
            stage_s=max(self._stages_s.copy(), default=0.0),
            persist_s=max(self._persists_s.copy(), default=unmeasured_s),
        )
