"""What the copies to each cold tier have shown since the daemon's start: how long one takes, and what was given up.

Facts for status and metrics. No decision rests on them.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from enum import StrEnum

COPIES_REMEMBERED = 8


class Reason(StrEnum):
    """Why hot deleted a checkpoint before a cold tier that should have it got it."""

    REPLACED = "replaced"  # newer ones replaced it, as copies are slower than snapshots
    NO_SPACE = "no_space"  # hot had no room for new checkpoints


@dataclass(slots=True)
class CopyRecord:
    """Of one tier. `committed_at_s`: when the last copy was committed, Unix time; None: none yet. `durations_s`: of the
    last copies. `given_up`: how many copies were, by reason; `given_up_at_s`: when the last one was."""

    committed_at_s: float | None = None
    durations_s: deque[float] = field(default_factory=lambda: deque(maxlen=COPIES_REMEMBERED))
    given_up: Counter[Reason] = field(default_factory=Counter[Reason])
    given_up_at_s: dict[Reason, float] = field(default_factory=dict[Reason, float])

    @property
    def copy_s(self) -> float | None:
        """How long a copy takes: the shortest interval between snapshots at which all can be copied."""
        return statistics.median(self.durations_s) if self.durations_s else None


class CopyRecords:
    def __init__(self) -> None:
        self._tiers: defaultdict[str, CopyRecord] = defaultdict(CopyRecord)

    def __getitem__(self, tier: str) -> CopyRecord:
        return self._tiers[tier]

    def gave_up(self, tier: str, reason: Reason, *, at_s: float) -> None:
        self._tiers[tier].given_up[reason] += 1
        self._tiers[tier].given_up_at_s[reason] = at_s

    def committed(self, tier: str, *, seconds: float, at_s: float) -> None:
        self._tiers[tier].committed_at_s = at_s
        self._tiers[tier].durations_s.append(seconds)
