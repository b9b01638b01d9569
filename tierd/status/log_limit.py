"""Bounds the log: of repeated lines, the first ones of each period are written and the others are counted.

The lines of one log statement are limited, so no peer can fill the disk by provoking the same warning. A warning that
is repeated word for word is written once, so a tier that fails does not hide other lines.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container
from dataclasses import dataclass

LINES_MAX = 100
PERIOD_S = 10.0
REPEATED_MAX = 64  # the last warnings, whose repetition is recognised

_Statement = tuple[str, int, str]


@dataclass(slots=True)
class _Lines:
    started_s: float
    count: int = 0


class LogLimit(logging.Filter):
    """Passes LINES_MAX lines of each statement per PERIOD_S. `kinds`: first arguments that are counted apart."""

    def __init__(self, kinds: Container[str] = (), *, now_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._kinds = kinds
        self._now_s = now_s
        self._lines: dict[_Statement, _Lines] = {}  # as many as there are statements in the program
        self._warnings: dict[str, _Lines] = {}  # by their text, the oldest first

    def filter(self, record: logging.LogRecord) -> bool:
        return not self._is_repeated(record) and self._is_within_limit(record)

    def _is_repeated(self, record: logging.LogRecord) -> bool:
        """Whether the same warning, or the same line of a library, was written within the period. An event of tierd's
        own that is no warning is never left out."""
        if record.levelno < logging.WARNING and record.name == "tierd":
            return False
        text, now_s = record.getMessage(), self._now_s()
        lines = self._warnings.get(text)
        if lines is not None and now_s - lines.started_s < PERIOD_S:
            lines.count += 1
            return True
        if lines is not None and lines.count:
            _append(record, "in the %.0f s before it, it was left out %d times", now_s - lines.started_s, lines.count)
        self._warnings.pop(text, None)
        self._warnings[text] = _Lines(now_s)
        if len(self._warnings) > REPEATED_MAX:
            del self._warnings[next(iter(self._warnings))]
        return False

    def _is_within_limit(self, record: logging.LogRecord) -> bool:
        first = record.args[0] if isinstance(record.args, tuple) and record.args else None
        kind = first if isinstance(first, str) and first in self._kinds else ""
        lines = self._lines.setdefault((record.pathname, record.lineno, kind), _Lines(self._now_s()))
        left_out = 0
        if self._now_s() - lines.started_s >= PERIOD_S:
            left_out = max(0, lines.count - LINES_MAX)
            lines.started_s, lines.count = self._now_s(), 0
        lines.count += 1
        if left_out:
            record.msg = f"{record.msg} (before it, {left_out} lines like this were left out)"
        elif lines.count == LINES_MAX:
            record.msg = f"{record.msg} (more lines like this are left out for up to {PERIOD_S:.0f} s)"
        return lines.count <= LINES_MAX


def _append(record: logging.LogRecord, template: str, *values: object) -> None:
    """The values are no part of the template, which is the same for each event of one kind."""
    if isinstance(record.args, tuple) and record.args:
        record.msg, record.args = f"{record.msg} ({template})", (*record.args, *values)
    else:  # its text is not formatted
        record.msg = f"{record.msg} ({template % values})"
