"""What a watcher keeps of its folder from one pass to the next: the entries, the order of scans, and what it found."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tierd.backoff import backoff_s
from tierd.config.sections import LimitsConfig
from tierd.context import DaemonContext
from tierd.errors import Full, NotFound, TierdError, Transient
from tierd.format.ids import Run
from tierd.format.text import printable
from tierd.lifecycle.watched import Listed
from tierd.transfer.source_tree import SourceTree

log = logging.getLogger("tierd")

RECHECKED = 8  # adopted checkpoints, the newest: scanned in each pass, because they may be written in place
OTHERS_RECHECKED = 100  # older adopted checkpoints that one pass scans; the next pass continues after them
SCANNED_MAX = 1000  # checkpoints that are not adopted and that one pass scans
SHOWN_MAX = 10  # names in one line, and lines of one kind


@dataclass(slots=True)
class WatchedEntry:
    """An entry of the folder as of the last pass.

    `key`: a number that changes when anything in the entry changes. `since_s`: when the entry was first seen with this
    key. `is_late`: newer checkpoints had been adopted before it was first seen. `listed`: its files, read once it was
    unchanged for long enough. `is_done`: it was adopted as `step`, or will not be adopted, and `note` says why.
    `was_named`: the preset's file beside the checkpoints has named it. `tries`: how often its adoption has failed;
    `not_before_s`: when it is tried again. `is_refused`: the last failure cannot pass without a person."""

    key: int
    since_s: float
    tree: SourceTree | None
    is_late: bool
    listed: Listed | None = None
    is_done: bool = False
    is_adopted: bool = False
    step: int = 0
    was_named: bool = False
    note: str = ""
    tries: int = 0
    not_before_s: float = 0.0
    is_refused: bool = False

    def failed(self, error: TierdError, now_s: float, limits: LimitsConfig) -> None:
        self.tries += 1
        self.not_before_s = now_s + backoff_s(self.tries, min_s=limits.retry_min_s, max_s=limits.retry_max_s)
        self.is_refused = not isinstance(error, (Transient, Full))


class ScanOrder:
    """Chooses which checkpoints one pass scans, and in which order: there may be too many for it. `left`: how many that
    may be new were not scanned in the last pass."""

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


class WatchFindings:
    """The problems and notes, and where they are reported: status, log, metrics and incidents.

    `problems`: those of this pass, by the name of the entry; "" is the folder itself. `notes`: those of this pass.
    `missed`: checkpoints that the framework deleted before they were adopted, since the daemon's start."""

    def __init__(self, context: DaemonContext, run: Run, path: Path) -> None:
        self._context, self._run, self._path = context, run, path
        self.problems: dict[str, TierdError] = {}
        self.notes: list[str] = []
        self.missed: deque[str] = deque(maxlen=SHOWN_MAX)
        self._recorded: dict[str, str] = {}

    def begin_pass(self) -> None:
        self.problems, self.notes = {}, []

    def former(self, name: str) -> str:
        """The problem that the entry had in the last pass."""
        return self._recorded.get(name, "it failed")

    def count_missed(self, name: str) -> None:
        self.missed.append(f"{name} was deleted before it was adopted: let the framework keep more of them")
        self._context.metrics.watched_total.labels(self._run, "missed").inc()
        log.warning("watch %s: %s", self._path, self.missed[-1])

    def record(self) -> None:
        """Record each problem of this pass as a failure and in the log, once until it changes."""
        metrics = self._context.metrics
        for name, error in self.problems.items():
            if self._recorded.get(name) != error.message and not _is_awaited(name, error):
                self._context.incidents.record("watch", error)
                metrics.watched_total.labels(self._run, "refused").inc()
        self._recorded = {name: error.message for name, error in self.problems.items()}
        count = sum(1 for error in self.problems.values() if not isinstance(error, NotFound))
        metrics.watch_problems.labels(self._run).set(count)

    def problem_lines(self) -> list[str]:
        return lines([str(error) for name, error in self.problems.items() if not _is_awaited(name, error)])

    def note_lines(self) -> list[str]:
        awaited = [str(error) for name, error in self.problems.items() if _is_awaited(name, error)]
        return [*awaited, *self.missed, *self.notes]


def _is_awaited(name: str, error: TierdError) -> bool:
    """Whether the error only says that the folder does not exist. The training may create it later."""
    return name == "" and isinstance(error, NotFound)


def lines(found: Sequence[str]) -> list[str]:
    """The first SHOWN_MAX lines, made printable, for the status."""
    return [printable(line) for line in found[:SHOWN_MAX]]


def shown(names: Sequence[str]) -> str:
    """Names in one line."""
    more = f" and {len(names) - SHOWN_MAX} more" if len(names) > SHOWN_MAX else ""
    return ", ".join(names[:SHOWN_MAX]) + more
