"""Replicas that a store refuses to delete for some time (S3's Object Lock), and when to try again."""

from __future__ import annotations

import math

from tierd.errors import Retained
from tierd.format.ids import CheckpointId

RETENTION_S_MIN = 60.0
RETENTION_S_MAX = 24 * 3600.0  # someone may remove a lock early


class Retentions:
    def __init__(self) -> None:
        self._until_s: dict[tuple[str, CheckpointId], float] = {}

    def add(self, tier: str, checkpoint: CheckpointId, error: Retained, *, now_s: float) -> None:
        pause_s = min(max(error.remaining_s, RETENTION_S_MIN), RETENTION_S_MAX)
        self._until_s[tier, checkpoint] = now_s + pause_s

    def holds(self, tier: str, checkpoint: CheckpointId, *, now_s: float) -> bool:
        return self._until_s.get((tier, checkpoint), -math.inf) > now_s

    def forget_due(self, *, now_s: float) -> None:
        """Before a pass: also forgets replicas that nobody will try to delete again."""
        self._until_s = {replica: until_s for replica, until_s in self._until_s.items() if until_s > now_s}

    @property
    def due_s(self) -> float:
        """When the first deletion may be tried again; inf when there is none."""
        return min(self._until_s.values(), default=math.inf)
