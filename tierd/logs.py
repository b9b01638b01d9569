"""The daemon's log on stderr: a line, or a JSON object, for each event. Text from outside controls no terminal."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

import msgspec

from tierd.format.text import printable, printable_json

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


class JsonFormatter(logging.Formatter):
    """A record as one JSON object on one line. `template`: the message without its values, the same for each event of
    one kind. `traceback`: its lines; absent if there is none."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        event: dict[str, object] = {
            "at": at,
            "level": record.levelname,
            "message": printable(record.getMessage(), EVENT_CHARS_MAX),
            "template": printable(str(record.msg), EVENT_CHARS_MAX),
        }
        if record.exc_info:
            lines = self.formatException(record.exc_info).split("\n")
            event["traceback"] = [printable(line) for line in lines[-TRACEBACK_LINES_MAX:]]
        return printable_json(msgspec.json.encode(event))


FORMATTERS: dict[str, type[logging.Formatter]] = {"text": EventFormatter, "json": JsonFormatter}


def configure(limit: logging.Filter, log_format: str) -> None:
    """Log to stderr what passes `limit`. Does nothing where the root logger has a handler."""
    handler = logging.StreamHandler()
    handler.addFilter(limit)
    handler.setFormatter(FORMATTERS[log_format]())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
