"""The outcome of each run: how its ranks exited. Kept in the daemon's memory only.

The outcome of a run is the most severe outcome of its ranks: if one rank failed, the run failed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tierd.errors import BadRequest
from tierd.format.ids import Generation, Rank, Run
from tierd.format.wire import OUTCOMES

RUNS_MAX = 1024
ENDED_BADLY = ("lost", "failed", "halted")  # outcomes after which a person is expected to do something
ENDED_RECENT_S = 24 * 3600.0  # an outcome is an alarm for so long: then the run is taken for abandoned
LOST = OUTCOMES.index("lost")
GOOD_ORDER = {OUTCOMES.index(outcome) for outcome in ("finished", "stopped", "halted")}
REASON_CHARS_MAX = 1000


@dataclass(slots=True)
class _Ranks:
    """`outcomes`: (index in OUTCOMES, reason) of each rank that has exited."""

    generation: Generation
    present: set[Rank] = field(default_factory=set)
    outcomes: dict[Rank, tuple[int, str]] = field(default_factory=dict)
    ended_s: float = 0.0  # monotonic time when a rank last disconnected


class RunOutcomes:
    def __init__(self) -> None:
        self._runs: dict[Run, _Ranks] = {}

    def rank_entered(self, run: Run, generation: Generation, rank: Rank) -> None:
        """The rank is connected (again): an earlier outcome of it is discarded."""
        ranks = self._runs.pop(run, None)
        if ranks is None or ranks.generation != generation:
            ranks = _Ranks(generation)
        self._runs[run] = ranks  # moves the run to the end: the first one is the least recently used
        ranks.present.add(rank)
        ranks.outcomes.pop(rank, None)
        while len(self._runs) > RUNS_MAX:
            del self._runs[next(iter(self._runs))]

    def rank_exited(self, run: Run, rank: Rank, outcome: str, reason: str) -> None:
        """The rank has sent Goodbye with this outcome. Raises BadRequest for an unknown outcome."""
        if outcome not in OUTCOMES:
            raise BadRequest(f"record the outcome of {run} rank {rank}: {outcome[:80]!r} is not one of {OUTCOMES}")
        if run in self._runs:
            self._runs[run].outcomes[rank] = OUTCOMES.index(outcome), reason[:REASON_CHARS_MAX]

    def rank_disconnected(self, run: Run, rank: Rank, *, now_s: float = 0.0) -> None:
        """The rank's connection has ended; without a Goodbye before, its outcome is `lost`."""
        ranks = self._runs.get(run)
        if ranks is not None:
            ranks.present.discard(rank)
            ranks.ended_s = now_s
            ranks.outcomes.setdefault(rank, (LOST, "it ended without a message: killed or crashed"))

    def is_in_good_order(self, run: Run, world_size: int) -> bool:
        """Whether every rank of the run's newest generation has left with a Goodbye, and none of them failed."""
        ranks = self._runs.get(run)
        if ranks is None or ranks.present or len(ranks.outcomes) < world_size:
            return False
        return all(severity in GOOD_ORDER for severity, _ in ranks.outcomes.values())

    def ended_s(self, run: Run) -> float | None:
        """The monotonic time when its last rank disconnected; None while one is connected, or none has been."""
        ranks = self._runs.get(run)
        return None if ranks is None or ranks.present else ranks.ended_s

    def state(self, run: Run) -> tuple[str, str] | None:
        """(state, reason): `running` while a rank is connected, then the outcome. None: no rank has connected since
        the daemon started."""
        ranks = self._runs.get(run)
        if ranks is None:
            return None
        if ranks.present:
            return "running", ""
        severity, reason = max(ranks.outcomes.values())
        return OUTCOMES[severity], reason
