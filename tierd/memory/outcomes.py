"""How the trainers of each run ended, in the words that their ranks left with. Kept in the daemon's memory only.

The gravest word counts: one rank that failed makes a run that failed, whatever the others said.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tierd.errors import BadRequest
from tierd.format.ids import Generation, Rank, Run
from tierd.format.wire import ENDINGS

RUNS_MAX = 1024
LOST = "lost"
REASON_CHARS_MAX = 1000


@dataclass(frozen=True, slots=True, order=True)
class Ending:
    gravity: int
    reason: str = ""

    @property
    def state(self) -> str:
        return ENDINGS[self.gravity]


@dataclass(slots=True)
class _Ranks:
    generation: Generation
    present: set[Rank] = field(default_factory=set)
    ended: dict[Rank, Ending] = field(default_factory=dict)


class RunOutcomes:
    def __init__(self) -> None:
        self._runs: dict[Run, _Ranks] = {}

    def entered(self, run: Run, generation: Generation, rank: Rank) -> None:
        """The rank is there (again): what it had said is no longer so."""
        ranks = self._runs.pop(run, None)
        if ranks is None or ranks.generation != generation:
            ranks = _Ranks(generation)
        self._runs[run] = ranks  # the run that was heard of last comes last
        ranks.present.add(rank)
        ranks.ended.pop(rank, None)
        while len(self._runs) > RUNS_MAX:
            del self._runs[next(iter(self._runs))]

    def said(self, run: Run, rank: Rank, state: str, reason: str) -> None:
        """The rank leaves with this word. Raises BadRequest for a word that there is not."""
        if state not in ENDINGS:
            raise BadRequest(f"take leave of {run} rank {rank}: it ends as {state[:80]!r}")
        if run in self._runs:
            self._runs[run].ended[rank] = Ending(ENDINGS.index(state), reason[:REASON_CHARS_MAX])

    def left(self, run: Run, rank: Rank) -> None:
        """The connection has ended, with a word or without."""
        ranks = self._runs.get(run)
        if ranks is not None:
            ranks.present.discard(rank)
            ranks.ended.setdefault(rank, Ending(ENDINGS.index(LOST), "the connection ended without a word"))

    def of(self, run: Run) -> tuple[str, str] | None:
        """(state, reason); the state is `running` while a rank is there. None: nobody has come since we started."""
        ranks = self._runs.get(run)
        if ranks is None:
            return None
        if ranks.present:
            return "running", ""
        gravest = max(ranks.ended.values())
        return gravest.state, gravest.reason
