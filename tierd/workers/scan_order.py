"""Chooses which checkpoints of a watched folder one pass scans, and in which order: there may be too many for it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

RECHECKED = 8  # adopted checkpoints, the newest: scanned in each pass, because they may be written in place
OTHERS_RECHECKED = 100  # older adopted checkpoints that one pass scans; the next pass continues after them
SCANNED_MAX = 1000  # checkpoints that are not adopted and that one pass scans


class ScanOrder:
    """`left`: how many checkpoints that may be new were not scanned in the last pass."""

    def __init__(self) -> None:
        self.left = 0
        self._rechecked = 0  # older adopted checkpoints that this round has scanned

    def choose(
        self, steps: Mapping[str, int], *, done: Collection[str], stuck: Collection[str], newest: int
    ) -> list[str]:
        """The names to scan. `steps`: the steps of the checkpoints in the folder, by name. `done`: those that were
        adopted or will not be. `stuck`: those that were not complete in the last pass. `newest`: the highest step that
        was adopted; checkpoints above it come first, because those below it are late already."""

        def priority(name: str) -> tuple[bool, bool, int]:
            return name in stuck, steps[name] <= newest, steps[name]

        new = sorted(steps.keys() - {*done}, key=priority)
        self.left = max(len(new) - SCANNED_MAX, 0)
        return [*self._again(sorted(done, key=steps.__getitem__)), *new[:SCANNED_MAX]]

    def _again(self, done: list[str]) -> list[str]:
        older, begin = done[:-RECHECKED], self._rechecked
        end = begin + OTHERS_RECHECKED
        self._rechecked = end if end < len(older) else 0
        return [*done[-RECHECKED:], *older[begin:end]]
