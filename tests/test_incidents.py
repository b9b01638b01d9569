"""A failure is recorded in the log, in the counter and in the list."""

from __future__ import annotations

import json
import logging
import os

import pytest

from tierd.errors import Corrupt, Full
from tierd.format.ids import checkpoint_id
from tierd.incidents import LISTED_MAX, Incidents
from tierd.metrics import Metrics


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def incidents(metrics: Metrics) -> Incidents:
    return Incidents(metrics, lambda: "2025-01-01T00:00:00+00:00")


def test_a_tierd_error_is_recorded_with_its_kind_and_hint_and_without_a_traceback(
    metrics: Metrics, incidents: Incidents, caplog: pytest.LogCaptureFixture
) -> None:
    incidents.record("persist", Full("write x", hint="free space"), checkpoint_id("run42", 7, 1))
    assert incidents.recent() == [
        {
            "at": "2025-01-01T00:00:00+00:00",
            "run": "run42",
            "step": 7,
            "stage": "persist",
            "kind": "full",
            "message": "write x",
            "hint": "free space",
        }
    ]
    assert metrics.registry.get_sample_value("tierd_failures_total", {"stage": "persist", "kind": "full"}) == 1
    assert [(record.levelno, record.getMessage(), record.exc_info) for record in caplog.records] == [
        (logging.WARNING, "persist: write x (hint: free space)", None)
    ]


def test_another_error_is_recorded_as_a_bug_with_its_traceback(
    metrics: Metrics, incidents: Incidents, caplog: pytest.LogCaptureFixture
) -> None:
    try:
        _ = [][0]
    except IndexError as error:
        incidents.record("reap", error)
    assert incidents.recent()[0]["kind"] == "bug"
    assert "IndexError" in incidents.recent()[0]["message"]
    assert metrics.registry.get_sample_value("tierd_failures_total", {"stage": "reap", "kind": "bug"}) == 1
    assert "Traceback" in caplog.text


def test_the_list_of_incidents_is_bounded_and_newest_first(incidents: Incidents) -> None:
    for number in range(LISTED_MAX + 5):
        incidents.record("list", Corrupt(str(number)))
    assert [incident["message"] for incident in incidents.recent()] == [str(n) for n in range(LISTED_MAX + 4, 4, -1)]


def test_a_message_with_invalid_utf_8_can_be_encoded(incidents: Incidents) -> None:
    incidents.record("list", Corrupt("read " + os.fsdecode(b"caf\xe9")))
    assert json.dumps(incidents.recent(), ensure_ascii=False).encode()
