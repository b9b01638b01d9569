"""Which of the last snapshots of a run over several nodes are durable on every node.

All ranks take the same snapshots. They put their answers together in the exchange that every snapshot makes anyway, so
what they learn is as old as one snapshot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

COUNT = 8  # snapshots; a node that is further behind than this says nothing new


class EverywherePersisted:
    """`persisted` is called by the session's thread, all else by the training's. Each line that changes `_persisted` is
    one call of a set's method, which Python does not interrupt."""

    def __init__(self) -> None:
        self._generation = 0
        self._steps: deque[int] = deque(maxlen=COUNT)
        self._persisted: set[int] = set()
        self.step: int | None = None
        """The newest step that is known to be durable on every node, in the generation of the last snapshot."""

    def taken(self, generation: int, step: int) -> None:
        """All ranks have taken a snapshot."""
        if generation != self._generation:
            self._generation, self.step = generation, None
            self._steps.clear()
            self._persisted.clear()
        self._steps.append(step)
        self._persisted.intersection_update(self._steps)

    def persisted(self, generation: int, step: int) -> None:
        """The daemon of this node has the part of this step in hot, or a cold tier has it whole."""
        if generation == self._generation:
            self._persisted.add(step)

    def missing(self) -> list[int]:
        """COUNT numbers for the last snapshots, newest first: 0 if it is durable here, else 1. The ranks exchange their
        maximum and pass it to `agree`."""
        values = [int(step not in self._persisted) for step in reversed(self._steps)]
        return values + [1] * (COUNT - len(values))

    def agree(self, maxima: Sequence[int]) -> int | None:
        """The newest step that is durable on every node, if that is a newer one than was known."""
        found = next(
            (step for step, is_missing in zip(reversed(self._steps), maxima, strict=False) if not is_missing), None
        )
        if found is None or (self.step is not None and found <= self.step):
            return None
        self.step = found
        return found
