"""What `tierd status` and the page say of the near future, and what they leave to the alarms."""

from __future__ import annotations

import pytest

from tierd.cli.options import Settings
from tierd.cli.status import print_status
from tierd.status.outlook import outlook
from tierd.status.report import Alarm, DiskForecast, QueueReport, Severity, StatusReport, TierReport
from tierd.web.pages import overview_page

FULL = DiskForecast(verdict="full", full_at="2026-11-28T03:12:40+00:00", full_in_s=15_120.0)


def status(disk: DiskForecast | None = None, *, rate: float = 0.0, queue: QueueReport | None = None) -> StatusReport:
    hot = TierReport(name="hot", url="file:///nvme", is_known=True, disk=disk, write_bytes_per_s=rate)
    queues = [QueueReport(tier="hot", checkpoints=0), *([queue] if queue else [])]
    return StatusReport(version="0", node="n1", pid=1, uptime_s=9.0, is_ready=True, tiers=[hot], queues=queues)


def test_a_disk_that_will_be_full_is_named_with_its_time_and_how_long_it_is_until_then(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = "hot FULL at 2026-11-28 03:12 UTC, in 4 h 12 min, at this pace; docs/RUNBOOK.md#disk-full"
    assert outlook(status(FULL)) == [line]
    print_status(status(FULL), Settings(None))
    assert line in capsys.readouterr().out.splitlines()
    assert line in overview_page(status(FULL), [], {})


def test_what_hot_keeps_for_a_late_cold_tier_is_named() -> None:
    late = DiskForecast(verdict="full", full_at=FULL.full_at, full_in_s=60.0, waits_for=["cold", "dr"])
    when = "hot FULL at 2026-11-28 03:12 UTC, in 1 min 0 s"
    assert outlook(status(late)) == [
        f"{when}, at this pace, with what waits for cold and dr; docs/RUNBOOK.md#disk-full"
    ]


def test_where_all_is_well_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    for disk in (None, DiskForecast(verdict="fits")):
        assert outlook(status(disk, queue=QueueReport(tier="cold", checkpoints=0, copy_s=5.0, due_every_s=9.0))) == []
    print_status(status(), Settings(None))
    assert capsys.readouterr().out.endswith("file:///nvme\n"), "no empty line"
    assert "Nothing was written in the last minute." in overview_page(status(), [], {})


def test_without_a_basis_the_forecast_is_unknown() -> None:
    (line,) = outlook(status(DiskForecast(verdict="unknown")))
    # With `keep_last = 1` there are never two, so it does not promise to be known later.
    assert line == "hot: full at an unknown time, while not every run has two checkpoints that show its pace"


def test_what_an_alarm_or_a_queue_says_is_not_repeated() -> None:
    almost = status(FULL)
    full = Alarm(alert="TierdDiskAlmostFull", severity=Severity.WARNING, message="", runbook="disk-full", command="")
    almost.alarms = [full]
    assert outlook(almost) == []
    replaced = QueueReport(tier="cold", checkpoints=1, copy_s=90.0, due_every_s=60.0, given_up={"replaced": 2})
    assert outlook(status(queue=replaced)) == []


def test_rates_and_a_tier_that_cannot_keep_up() -> None:
    slow = QueueReport(tier="cold", checkpoints=1, copy_s=90.0, due_every_s=60.0)
    assert outlook(status(rate=2.5e6, queue=slow)) == [
        "written in the last minute: 2.5 MB/s to hot",
        "cold CANNOT KEEP UP: a copy takes 1 min 30 s, and one is due every 1 min 0 s; docs/RUNBOOK.md#cold-too-slow",
    ]
