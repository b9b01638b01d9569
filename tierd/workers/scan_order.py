"""Which checkpoints of a watched folder a pass scans, and in which order: a folder may have more than one pass can."""

from __future__ import annotations

from collections.abc import Collection, Mapping

RECHECKED = 8  # the newest adopted checkpoints, which are scanned again because they may be written in place
OTHERS_RECHECKED = 100  # of the older ones, in each pass the next ones
SCANNED_MAX = 1000  # checkpoints that are not adopted, in one pass


class ScanOrder:
    """`left`: how many checkpoints that may be new the last pass did not scan."""

    def __init__(self) -> None:
        self.left = 0
        self._rechecked = 0  # of the older adopted ones, how many in this turn

    def choose(
        self, steps: Mapping[str, int], *, done: Collection[str], stuck: Collection[str], newest: int
    ) -> list[str]:
        """`steps`: of the checkpoints in the folder, by name. `done`: those that were adopted or left alone. `stuck`:
        those that were not complete in the last pass. `newest`: the highest step that was adopted."""

        def turn(name: str) -> tuple[bool, bool, int]:  # what comes after a newer one is late
            return name in stuck, steps[name] <= newest, steps[name]

        new = sorted(steps.keys() - {*done}, key=turn)
        self.left = max(len(new) - SCANNED_MAX, 0)
        return [*self._again(sorted(done, key=steps.__getitem__)), *new[:SCANNED_MAX]]

    def _again(self, done: list[str]) -> list[str]:
        older, begin = done[:-RECHECKED], self._rechecked
        end = begin + OTHERS_RECHECKED
        self._rechecked = end if end < len(older) else 0
        return [*done[-RECHECKED:], *older[begin:end]]
