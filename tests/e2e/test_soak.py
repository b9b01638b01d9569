"""The daemon's descriptors, mappings, threads, tasks and slots stay the same over many snapshots and trainers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.daemon import Daemon
from tests.support.soak import (
    LIFE_SNAPSHOTS,
    SLACK,
    Footprint,
    open_files,
    settled,
    settled_growth,
    soak,
    take_snapshots,
)

PLAIN = "[health]\nexamine = false"  # the shards are plain bytes


@pytest.mark.parametrize(
    ("warm_up", "snapshots", "life"),
    [
        (20, 60, 10),
        pytest.param(1_000, 10_000, LIFE_SNAPSHOTS, marks=[pytest.mark.long, pytest.mark.timeout(3600)]),
    ],
)
def test_footprint_of_the_daemon_is_flat_over_many_snapshots(
    tmp_path: Path, warm_up: int, snapshots: int, life: int
) -> None:
    with Daemon(tmp_path, more=PLAIN) as daemon:
        take_snapshots(daemon, warm_up, first_step=1, life=life)
        first = settled(daemon)
        take_snapshots(daemon, snapshots - warm_up, first_step=1 + warm_up, life=life)
        assert settled_growth(daemon, first) == {}, f"first {first}; open now: {open_files(daemon)}"
        assert first.slots == 2
        assert first.tasks > 5


@pytest.mark.long
@pytest.mark.parametrize("leak", ["descriptors", "tasks"])
def test_a_leak_is_reported(tmp_path: Path, leak: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two descriptors, or two tasks, that are left behind by each restore."""
    monkeypatch.setattr("tests.support.soak.SETTLE_S", 1.0)
    leaks = {"descriptors": "os.dup(0)", "tasks": "asyncio.ensure_future(asyncio.Event().wait())"}
    code = f"""
import asyncio, os, sys
from tierd.cli import main
from tierd.workers.restorer import Restorer
find, kept = Restorer.find, []
async def leaking(*arguments):
    kept.extend([{leaks[leak]}, {leaks[leak]}])
    return await find(*arguments)
Restorer.find = leaking
sys.argv[0] = "tierd"
main()
"""
    with Daemon(tmp_path, more=PLAIN, command=("-c", code)) as daemon:
        take_snapshots(daemon, 50, first_step=1)
        first = settled(daemon)
        take_snapshots(daemon, 100, first_step=51)
        assert settled_growth(daemon, first).keys() == {leak}


def test_growth_is_what_exceeds_the_slack() -> None:
    first = Footprint(descriptors=40, mappings=300, threads=12, tasks=20, slots=2, memory_mib=60)
    assert first.growth(first) == {}
    later = Footprint(
        descriptors=40 + SLACK.descriptors + 1,
        mappings=310,
        threads=12 + SLACK.threads + 2,
        tasks=20,
        slots=2,
        memory_mib=60,
    )
    assert later.growth(first) == {"descriptors": 1, "threads": 2}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_soak_with_real_trainers_reports_no_growth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Daemon(tmp_path) as daemon:
        assert soak(daemon, duration_s=130, seed=1) == {}
    assert capsys.readouterr().out.count(" min: ") >= 2, sys.stderr
