"""Bounds the log: of lines that one statement writes again and again, it shows the first of each period.

So no peer can fill the disk by what it makes the daemon complain about. Other lines are not affected.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container
from dataclasses import dataclass

LINES_MAX = 100
PERIOD_S = 10.0

_Statement = tuple[str, int, str]


@dataclass(slots=True)
class _Lines:
    began_s: float
    count: int = 0


class LogLimit(logging.Filter):
    """Passes LINES_MAX lines of each statement per PERIOD_S. `kinds`: first arguments that are counted apart."""

    def __init__(self, kinds: Container[str] = (), *, now_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._kinds = kinds
        self._now_s = now_s
        self._lines: dict[_Statement, _Lines] = {}  # as many as there are statements in the program

    def filter(self, record: logging.LogRecord) -> bool:
        first = record.args[0] if isinstance(record.args, tuple) and record.args else None
        kind = first if isinstance(first, str) and first in self._kinds else ""
        lines = self._lines.setdefault((record.pathname, record.lineno, kind), _Lines(self._now_s()))
        left_out = 0
        if self._now_s() - lines.began_s >= PERIOD_S:
            left_out = max(0, lines.count - LINES_MAX)
            lines.began_s, lines.count = self._now_s(), 0
        lines.count += 1
        if left_out:
            record.msg = f"{record.msg} (before it, {left_out} lines like this were left out)"
        elif lines.count == LINES_MAX:
            record.msg = f"{record.msg} (more lines like this are left out for up to {PERIOD_S:.0f} s)"
        return lines.count <= LINES_MAX
