"""Which of the last snapshots of a run over several nodes are safe on every node.

A snapshot is safe on a node when its part is durable there, was not found to be unhealthy and, if nodes read from each
other, when the node also has the copy of its partner's part. All ranks take the same snapshots. They combine their
answers in the exchange that every snapshot makes anyway, so an answer is as old as one snapshot.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence

from tierd.format import wire

COUNT = 8  # snapshots; of a node that is further behind than this, no new snapshot becomes known as safe
VERDICT_TIMEOUT_S = 60.0  # after this time a part that the daemon has not examined counts as healthy
COPY_TIMEOUT_S = 600.0  # if a node could copy nothing for so long, its durable parts count as safe without copies


class EverywherePersisted:
    """`on_message` is called by the session's thread, all else by the training's. There is no lock: each line that
    changes an object of both threads is one call of a method of it, which is atomic under the GIL."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._generation = 0
        self._steps: deque[int] = deque(maxlen=COUNT)
        self._persisted: dict[int, float] = {}  # and since when
        self._verdicts: dict[int, bool] = {}
        self._copied: set[int] = set()
        self._now_s = now_s
        self._copies = self._copies_seen = 0  # messages of `copied`, in all and at the last look
        self._waiting_since_s: float | None = None  # since when a copy is missing and none was made
        self.keeps_copies = False
        """Whether the daemon copies the parts of another node, and this rank counts the copies."""
        self.step: int | None = None
        """The newest step that is known to be safe on every node, in the generation of the last snapshot."""

    def taken(self, generation: int, step: int) -> None:
        """All ranks have taken a snapshot."""
        if generation != self._generation:
            self._generation, self.step = generation, None
            for each in (self._steps, self._persisted, self._verdicts, self._copied):
                each.clear()
        self._steps.append(step)
        for known in (self._persisted, self._verdicts):
            for old in [each for each in list(known) if each not in self._steps]:
                known.pop(old, None)
        self._copied.intersection_update(self._steps)

    def on_message(self, message: wire.Persisted | wire.Replicated | wire.Copied | wire.Failed) -> None:
        """What the daemon of this node says of a snapshot."""
        generation, step = message.generation, message.step
        if isinstance(message, wire.Copied | wire.Replicated):
            self.copied(generation, step)
        if isinstance(message, wire.Persisted | wire.Replicated):
            self.persisted(generation, step)
        if isinstance(message, wire.Persisted) and message.is_healthy is not None:
            self.examined(generation, step, is_healthy=message.is_healthy)

    def persisted(self, generation: int, step: int) -> None:
        """The daemon of this node has the part of this step in hot, or a cold tier has it whole."""
        if generation == self._generation:
            self._persisted.setdefault(step, self._now_s())

    def examined(self, generation: int, step: int, *, is_healthy: bool) -> None:
        """The daemon of this node has examined the part of this step, or examines none and reports it as healthy."""
        if generation == self._generation:
            self._verdicts.update({step: is_healthy})

    def copied(self, generation: int, step: int) -> None:
        """The daemon of this node has the copy of the other node's part of this step, or a cold tier has it whole."""
        if generation == self._generation:
            self._copied.add(step)
            self._copies += 1  # only here: the training's thread reads it

    def is_settled(self, step: int) -> bool:
        """Whether the step is safe on this node, or never will be, because it is unhealthy."""
        self._look_at_copies()
        return self._is_copied(step) and self._is_examined(step)

    def awaited(self, step: int) -> str:
        """What a step that is not settled waits for, as a sentence without its end."""
        return (
            "this node has not examined its part yet"
            if self._is_copied(step)
            else "this node has no copy yet of its partner's part"
        )

    def missing(self) -> list[int]:
        """COUNT numbers for the last snapshots, newest first: 0 if the snapshot is safe here, else 1. The ranks compute
        the maximum over all ranks and pass it to `agree`."""
        self._look_at_copies()
        values = [int(not self._is_safe(step)) for step in reversed(self._steps)]
        return values + [1] * (COUNT - len(values))

    def agree(self, maxima: Sequence[int]) -> int | None:
        """The newest step that is safe on every node; None if there is none, or none newer than the one before."""
        found = next(
            (step for step, is_missing in zip(reversed(self._steps), maxima, strict=False) if not is_missing), None
        )
        if found is None or (self.step is not None and found <= self.step):
            return None
        self.step = found
        return found

    def _is_safe(self, step: int) -> bool:
        return self._is_copied(step) and self._is_examined(step) and self._verdicts.get(step, True)

    def _is_examined(self, step: int) -> bool:
        since_s = self._persisted.get(step, math.inf)
        return step in self._verdicts or self._now_s() - since_s > VERDICT_TIMEOUT_S

    def _is_copied(self, step: int) -> bool:
        if step not in self._persisted or not self.keeps_copies or step in self._copied:
            return step in self._persisted
        return self._waiting_since_s is not None and self._now_s() - self._waiting_since_s > COPY_TIMEOUT_S

    def _look_at_copies(self) -> None:
        if not self.keeps_copies or self._persisted.keys() <= self._copied:
            self._waiting_since_s = None
        elif self._waiting_since_s is None or self._copies != self._copies_seen:
            self._waiting_since_s = self._now_s()
        self._copies_seen = self._copies
