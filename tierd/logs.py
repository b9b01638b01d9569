"""The daemon's log: one line for each event, on stderr. Text from outside cannot begin a line or control a terminal."""

from __future__ import annotations

import logging

from tierd.format.text import printable

EVENT_CHARS_MAX = 8192
TRACEBACK_LINES_MAX = 200
_INDENT = "    | "  # no event begins with it, so a newline in an exception's message forges none


class EventFormatter(logging.Formatter):
    """A record as one printable line, and its traceback, if any, as indented ones."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        record.message = record.getMessage()
        record.asctime = self.formatTime(record)
        lines = [printable(self.formatMessage(record), EVENT_CHARS_MAX)]
        if record.exc_info:
            traceback = self.formatException(record.exc_info).split("\n")
            lines += [_INDENT + printable(line) for line in traceback[-TRACEBACK_LINES_MAX:]]
        if record.stack_info:
            lines += [_INDENT + printable(line) for line in record.stack_info.split("\n")[-TRACEBACK_LINES_MAX:]]
        return "\n".join(lines)


def configure(limit: logging.Filter) -> None:
    """Log to stderr what passes `limit`. Does nothing where the root logger has a handler."""
    handler = logging.StreamHandler()
    handler.addFilter(limit)
    handler.setFormatter(EventFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
