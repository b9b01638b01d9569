"""A failure is recorded in the log, in the counter and in the list."""

from __future__ import annotations

import logging
import os

import msgspec
import pytest

from tierd.errors import Corrupt, Full, TierUnreachable
from tierd.format.ids import checkpoint_id
from tierd.metrics import Metrics
from tierd.status.incidents import LISTED_MAX, Incidents
from tierd.status.report import FailureReport


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
        FailureReport(
            at="2025-01-01T00:00:00+00:00",
            run="run42",
            step=7,
            stage="persist",
            kind="full",
            first_at="2025-01-01T00:00:00+00:00",
            count=1,
            message="write x",
            hint="free space",
        )
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
    assert incidents.recent()[0].kind == "bug"
    assert "IndexError" in incidents.recent()[0].message
    assert metrics.registry.get_sample_value("tierd_failures_total", {"stage": "reap", "kind": "bug"}) == 1
    assert "Traceback" in caplog.text


def test_the_list_of_incidents_is_bounded_and_newest_first(incidents: Incidents) -> None:
    for number in range(LISTED_MAX + 5):
        incidents.record("list", Corrupt(str(number)))
    assert [incident.message for incident in incidents.recent()] == [str(n) for n in range(LISTED_MAX + 4, 4, -1)]


def test_a_message_with_invalid_utf_8_can_be_encoded(incidents: Incidents) -> None:
    incidents.record("list", Corrupt("read " + os.fsdecode(b"caf\xe9")))
    assert msgspec.json.encode(incidents.recent())


def test_a_failure_that_repeats_is_one_entry_with_the_number_of_times(metrics: Metrics) -> None:
    times = iter("abcdef")
    incidents = Incidents(metrics, lambda: next(times))
    for attempt in range(3):
        incidents.record("list", TierUnreachable(f"list cold: attempt {attempt} took {attempt}.5 s"))
    incidents.record("persist", TierUnreachable("list cold: attempt 1 took 1.5 s"))
    for step in (1, 2):
        incidents.record("scrub", Corrupt(f"read step {step}"))
    shown = [(each.stage, each.message, each.count, each.first_at, each.at) for each in incidents.recent()]
    assert shown == [
        ("scrub", "read step 2", 1, "f", "f"),
        ("scrub", "read step 1", 1, "e", "e"),
        ("persist", "list cold: attempt 1 took 1.5 s", 1, "d", "d"),
        ("list", "list cold: attempt 2 took 2.5 s", 3, "a", "c"),
    ]
    assert metrics.registry.get_sample_value("tierd_failures_total", {"stage": "list", "kind": "tier_unreachable"}) == 3
