"""`tierd log --audit` without a daemon: what it prints, filters and refuses, and events that commands add."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tierd.audit import AuditTrail, TrailFiles
from tierd.cli.app import make_app
from tierd.format import layout
from tierd.format.audit import EventKind


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Of a hot directory with a trail of three events."""
    config = tmp_path / "tierd.toml"
    config.write_text('[hot]\npath = "hot"\n')
    times = iter(["2026-01-01T00:00:00+00:00", "2026-01-02T00:00:00+00:00", "2026-01-03T00:00:00+00:00"])
    trail = AuditTrail(node="n\x1b[2J", now=lambda: next(times))
    events = deque(trail.record(EventKind.COMMITTED, run=run, tier="hot") for run in ("a", "b", "a"))
    TrailFiles(tmp_path / "hot", None, create=True).append(events)
    return config


def run_log(config: Path, *arguments: str) -> Result:
    return CliRunner().invoke(make_app(["log", "version"]), ["--config", str(config), "log", *arguments])


def test_it_prints_each_event_and_that_the_chain_is_whole(config: Path) -> None:
    result = run_log(config, "--audit")
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == [
        f"2026-01-0{day}T00:00:00+00:00" for day in (1, 2, 3)
    ]
    assert "\x1b" not in result.stdout
    assert "chain whole: 3 events" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "sequences"),
    [
        (["--run", "a"], [1, 3]),
        (["--since", "2026-01-02"], [2, 3]),
        (["--since", "2026-01-02T01:00:00+02:00", "--run", "a"], [3]),
        (["--since", "99999d"], [1, 2, 3]),
    ],
)
def test_it_shows_the_events_of_a_run_and_since_a_time(
    config: Path, arguments: list[str], sequences: list[int]
) -> None:
    trail = json.loads(run_log(config, "--audit", "--json", *arguments).stdout)
    assert [event["sequence"] for event in trail["events"]] == sequences
    assert (trail["count"], trail["problem"]) == (3, "")


def test_a_broken_chain_has_the_exit_code_of_a_failed_verification(config: Path) -> None:
    path = config.parent / "hot" / layout.AUDIT / layout.audit_file(1)
    path.write_bytes(path.read_bytes().replace(b'"run":"b"', b'"run":"c"'))
    result = run_log(config, "--audit")
    assert result.exit_code == 12
    assert "line 3: event 3 has another digest of the line before" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "exit_code"), [([], 2), (["--audit", "--since", "soon"], 2), (["--audit", "--run", "../x"], 2)]
)
def test_what_cannot_be_answered_is_refused(config: Path, arguments: list[str], exit_code: int) -> None:
    assert run_log(config, *arguments).exit_code == exit_code


def test_a_directory_without_a_trail_is_named(tmp_path: Path) -> None:
    config = tmp_path / "tierd.toml"
    config.write_text('[hot]\npath = "hot"\n')
    assert run_log(config, "--audit").exit_code == 10
    assert not (tmp_path / "hot").exists()
