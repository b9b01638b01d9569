"""What `tierd status` prints of a report, and the page with it: where a number holds only with a reservation."""

from __future__ import annotations

import pytest

from tierd.cli.options import Settings
from tierd.cli.status import _print  # pyright: ignore[reportPrivateUsage]
from tierd.status.report import RunReport, StatusReport, TierReport
from tierd.status.work_at_risk import RiskReport
from tierd.web.pages import run_page

RUN = RunReport(
    run="gpt",
    generation=1,
    state="running",
    at_risk=[RiskReport(lost="node", tier="cold", step=5, seconds=30.0, gpu_seconds=240.0, steps=3)],
)
HOT = TierReport(name="hot", url="file:///nvme", is_known=True, checkpoints=3, used_bytes=30, listed_age_s=4.0)


def shown(capsys: pytest.CaptureFixture[str], cold: TierReport) -> str:
    status = StatusReport(
        version="0", node="n1", pid=1, uptime_s=9.0, is_ready=True, runs=[RUN], tiers=[HOT, cold]
    )  # fmt: skip
    _print(status, Settings(None))
    page = run_page(status, RUN, [], {})
    assert ("at step 5 from cold, which is not reachable" in page) is not cold.is_known
    return capsys.readouterr().out


def test_a_restart_from_a_tier_that_cannot_be_reached_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    cold = TierReport(name="cold", url="s3://b/p", is_known=True, checkpoints=1, used_bytes=10, listed_age_s=3.0)
    text = shown(capsys, cold)
    assert "  if the node is lost now: 3 steps, 30 s, 4 min 0 s of GPU time; back to step 5 from cold\n" in text
    lost = TierReport(name="cold", url="s3://b/p", is_known=False, error="no connection", checkpoints=1, used_bytes=10)
    text = shown(capsys, lost)
    assert "; back to step 5 from cold, WHICH IS NOT REACHABLE\n" in text
    assert "s3://b/p  NOT REACHABLE: no connection\n" in text


def test_an_old_listing_is_shown_with_its_age(capsys: pytest.CaptureFixture[str]) -> None:
    cold = TierReport(name="cold", url="s3://b/p", is_known=True, checkpoints=1, used_bytes=10, listed_age_s=400.0)
    text = shown(capsys, cold)
    assert "s3://b/p  as listed 6 min 40 s ago\n" in text
    assert "file:///nvme\n" in text
