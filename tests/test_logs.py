"""The log as JSON. The log as text is tested in security/test_foreign_text.py."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

from tests.support.daemon import Daemon
from tierd.logs import JsonFormatter


def record(message: str, *values: object) -> logging.LogRecord:
    try:
        raise ValueError("bad\nvalue \x1b[2J")
    except ValueError:
        return logging.LogRecord("tierd", logging.WARNING, "file", 1, message, values, sys.exc_info())


def test_an_event_is_one_object_on_one_line_and_text_from_outside_is_escaped() -> None:
    line = JsonFormatter().format(record("copy %s to %s", "run\n\x1b[2J\u202e", "cold"))
    assert line.isascii()
    assert line.isprintable()
    event = json.loads(line)
    assert (event["level"], event["template"]) == ("WARNING", "copy %s to %s")
    assert event["message"].startswith("copy run\\n\\x1b[2J")
    assert event["traceback"][-2:] == ["ValueError: bad", "value \\x1b[2J"]
    assert event["at"].endswith("+00:00")


def test_daemon_with_log_format_json_writes_nothing_else(tmp_path: Path) -> None:
    with Daemon(tmp_path, environ={"TIERD_DAEMON_LOG_FORMAT": "json"}) as daemon:
        daemon.stop()
        events = [json.loads(line) for line in daemon.log.splitlines()]
    templates = [event["template"] for event in events]
    assert "tierd %s serves %s, %s" in templates
    assert {*events[0]} == {"at", "level", "message", "template"}
