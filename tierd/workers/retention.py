"""What a store does not let go of yet (S3's Object Lock), and when to ask it again. Only saves asking in vain."""

from __future__ import annotations

import math

from tierd.errors import Retained
from tierd.format.ids import CheckpointId

ASK_S_MIN = 60.0
ASK_S_MAX = 24 * 3600.0  # a person may lift a lock before its time


class Retentions:
    def __init__(self) -> None:
        self._until_s: dict[tuple[str, CheckpointId], float] = {}

    def add(self, tier: str, checkpoint: CheckpointId, error: Retained, *, now_s: float) -> None:
        wait_s = min(max(error.remaining_s, ASK_S_MIN), ASK_S_MAX)
        self._until_s[tier, checkpoint] = now_s + wait_s

    def holds(self, tier: str, checkpoint: CheckpointId, *, now_s: float) -> bool:
        return self._until_s.get((tier, checkpoint), -math.inf) > now_s

    def forget_due(self, *, now_s: float) -> None:
        """Before a pass: those that may be asked for again, and those that nobody will ask for."""
        self._until_s = {held: until_s for held, until_s in self._until_s.items() if until_s > now_s}

    @property
    def due_s(self) -> float:
        """When the first of them may be asked for again."""
        return min(self._until_s.values(), default=math.inf)
