"""Problems and notes of one watched folder, and where they are reported: status, log, metrics and incidents."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from tierd.context import DaemonContext
from tierd.errors import NotFound, TierdError
from tierd.format.ids import Run
from tierd.format.text import printable

log = logging.getLogger("tierd")

SHOWN_MAX = 10  # names in one line, and lines of one kind


class WatchFindings:
    """`problems`: those of this pass, by the name of the entry; "" is the folder itself. `notes`: those of this pass.
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
