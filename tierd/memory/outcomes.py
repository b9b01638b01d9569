"""The outcome of each run: how its ranks exited. Kept in the daemon's memory.

The outcome of a run is the most severe outcome of its ranks: if one rank failed, the run failed. What a former daemon
has left of it is read by workers/attached_runs.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tierd.errors import BadRequest
from tierd.format.ids import Generation, Rank, Run
from tierd.format.node_file import ranks_text
from tierd.format.run_state import BROKE_OFF, ENDED_BADLY, OUTCOMES, RunState
from tierd.format.wire import REASON_CHARS_MAX

RUNS_MAX = 1024
ENDED_RECENT_S = 24 * 3600.0  # an outcome is an alarm for so long: then the run is taken for abandoned


@dataclass(slots=True)
class _Ranks:
    """`outcomes`: (outcome, reason) of each rank that has exited. `former`: the same of the run, as a former daemon has
    left it; no rank has connected to this one."""

    generation: Generation
    former: tuple[RunState, str] | None = None
    present: set[Rank] = field(default_factory=set)
    outcomes: dict[Rank, tuple[RunState, str]] = field(default_factory=dict)
    ended_s: float = 0.0  # monotonic time when a rank last disconnected


class RunOutcomes:
    """`on_change`: called after a rank has entered or disconnected."""

    def __init__(self) -> None:
        self._runs: dict[Run, _Ranks] = {}
        self.on_change: Callable[[], object] = lambda: None

    def rank_entered(self, run: Run, generation: Generation, rank: Rank) -> None:
        """The rank is connected (again): an earlier outcome of it is discarded."""
        ranks = self._runs.pop(run, None)
        if ranks is None or ranks.generation != generation or ranks.former is not None:
            ranks = _Ranks(generation)
        self._runs[run] = ranks  # moves the run to the end: the first one is the least recently used
        ranks.present.add(rank)
        ranks.outcomes.pop(rank, None)
        while len(self._runs) > RUNS_MAX:
            del self._runs[next(iter(self._runs))]
        self.on_change()

    def rank_exited(self, run: Run, rank: Rank, outcome: RunState, reason: str) -> None:
        """The rank has sent Goodbye with this outcome. Raises BadRequest for a state that is no outcome."""
        if outcome not in OUTCOMES:
            raise BadRequest(f"record the outcome of {run} rank {rank}: {outcome} is not one of {', '.join(OUTCOMES)}")
        if run in self._runs:
            self._runs[run].outcomes[rank] = outcome, reason[:REASON_CHARS_MAX]

    def rank_disconnected(self, run: Run, rank: Rank, *, now_s: float = 0.0) -> None:
        """The rank's connection has ended; without a Goodbye before, its outcome is `lost`."""
        ranks = self._runs.get(run)
        if ranks is not None:
            ranks.present.discard(rank)
            ranks.ended_s = now_s
            ranks.outcomes.setdefault(rank, (RunState.LOST, "it ended without a message: killed or crashed"))
            self.on_change()

    def restore(self, run: Run, generation: Generation, outcome: RunState, reason: str, *, ended_s: float) -> bool:
        """A former daemon had its ranks. Returns whether it is taken over: not if a rank has connected since."""
        if run in self._runs or len(self._runs) >= RUNS_MAX:
            return False
        self._runs[run] = _Ranks(generation, former=(outcome, reason), ended_s=ended_s)
        return True

    def restored(self) -> list[tuple[Run, Generation]]:
        """The runs of which only a former daemon had ranks."""
        return [(run, ranks.generation) for run, ranks in self._runs.items() if ranks.former is not None]

    def ended_badly(self, run: Run) -> str:
        """Which ranks have ended badly while others are connected, and why the worst of them has; empty if none has."""
        ranks = self._runs.get(run)
        if ranks is None or not ranks.present:
            return ""
        bad = {rank: outcome for rank, outcome in ranks.outcomes.items() if outcome[0] in ENDED_BADLY}
        if not bad:
            return ""
        worst, reason = _worst(bad.values())
        noun = "rank" if len(bad) == 1 else "ranks"
        return f"{noun} {ranks_text(sorted(bad))} {worst}{f': {reason}' if reason else ''}"

    def forget(self, run: Run) -> None:
        self._runs.pop(run, None)

    def all_ranks(self) -> list[tuple[Run, Generation, list[Rank]]]:
        """The connected ranks of each run, or those that were connected last; no ranks for a run that was restored."""
        return [(run, ranks.generation, sorted(ranks.present or ranks.outcomes)) for run, ranks in self._runs.items()]

    def is_in_good_order(self, run: Run, world_size: int) -> bool:
        """Whether every rank of the run's newest generation has left with a Goodbye, and none of them failed."""
        ranks = self._runs.get(run)
        if ranks is None or ranks.present or len(ranks.outcomes) < world_size:
            return False
        return all(outcome not in BROKE_OFF for outcome, _ in ranks.outcomes.values())

    def ended_s(self, run: Run) -> float | None:
        """The monotonic time when its last rank disconnected; None while one is connected, or none has been."""
        ranks = self._runs.get(run)
        return None if ranks is None or ranks.present else ranks.ended_s

    def state(self, run: Run) -> tuple[RunState, str] | None:
        """(state, reason): `running` while a rank is connected, then the outcome. None: no rank has connected since
        the daemon started, and nothing is known of an earlier one."""
        ranks = self._runs.get(run)
        if ranks is None:
            return None
        if ranks.present:
            return RunState.RUNNING, ""
        return ranks.former or _worst(ranks.outcomes.values())


def _worst(outcomes: Iterable[tuple[RunState, str]]) -> tuple[RunState, str]:
    return max(outcomes, key=lambda outcome: (OUTCOMES.index(outcome[0]), outcome[1]))
