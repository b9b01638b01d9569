"""The log as JSON. The log as text is tested in security/test_foreign_text.py."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest

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


JSON = {"TIERD_DAEMON_LOG_FORMAT": "json"}


@pytest.mark.parametrize(
    ("environ", "cold", "exit_code", "sentence"),
    [
        ({"TIERD_LISTEN": "x"}, "", 2, "nothing reads $TIERD_LISTEN"),
        ({"TIERD_SECURITY_KEY_FILE": "/nowhere"}, "", 2, "/nowhere"),
        ({"TIERD_DAEMON_LISTEN": "256.0.0.1:1"}, "", 2, "256.0.0.1"),
    ],
)
def test_the_error_that_ends_a_daemon_at_its_start_is_an_event_too(
    tmp_path: Path, environ: dict[str, str], cold: str, exit_code: int, sentence: str
) -> None:
    daemon = Daemon(tmp_path, cold=cold, environ={**environ, **JSON})
    daemon.launch()
    assert daemon.wait_exit() == exit_code
    *_, last = [json.loads(line) for line in daemon.log.splitlines()]
    assert (last["level"], last["template"]) == ("CRITICAL", "ended: %s")
    assert sentence in last["message"]
    assert {*last} == {"at", "level", "message", "template"}


def test_a_second_daemon_says_so_in_json_and_a_config_that_cannot_be_read_is_named_as_text(tmp_path: Path) -> None:
    with Daemon(tmp_path, environ=JSON) as first:
        second = Daemon(tmp_path, environ={**JSON, "TIERD_TRACEBACK": "1"})
        second.launch()
        assert second.wait_exit() == 11
        *_, last = [json.loads(line) for line in second.log.splitlines()]
        assert f"{first.pid}" in last["message"]
        assert last["traceback"], "asked for by TIERD_TRACEBACK"
    broken = Daemon(tmp_path / "broken", environ=JSON)
    broken.config.write_text("[daemon]\nlog_format =")
    broken.launch()
    assert broken.wait_exit() == 2
    assert broken.log.startswith("tierd: read config ")
