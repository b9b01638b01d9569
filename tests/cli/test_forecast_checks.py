"""`tierd doctor --state-gb`: what a run will need before its first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.cli import House, make_house
from tests.support.daemon import Daemon
from tests.support.trainer import Trainer
from tierd.cli import forecast_checks

FORECAST = {"forecast", "write rate", "upload cap", "upload rate", "memlock"}


@pytest.fixture(autouse=True)
def little_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 MiB instead of 64: a disk of a test machine takes seconds for these."""
    monkeypatch.setattr(forecast_checks, "MEASURED_BYTES", 1 << 20)


def forecast(house: House, *arguments: str) -> dict[tuple[str, str], dict[str, Any]]:
    found = msgspec.json.decode(house.tierd("doctor", "--json", *arguments).stdout)
    return {(one["about"], one["check"]): one for one in found if one["check"] in FORECAST}


def test_a_run_that_fits_and_one_that_does_not(tmp_path: Path) -> None:
    house = make_house(tmp_path)
    assert forecast(house) == {}
    small = forecast(house, "--state-gb", "0.000001", "--every-s", "600")
    assert {about for about, _ in small} == {"hot", "cold"}
    assert {one["verdict"] for one in small.values()} == {"ok"}
    assert "a state of 1 kB every 10 min 0 s needs" in small["hot", "forecast"]["message"]
    large = forecast(house, "--state-gb", "1e6", "--every-s", "60")
    assert {one["verdict"] for one in large.values()} == {"warning"}
    assert "some are replaced before they arrive" in large["hot", "write rate"]["message"]
    assert "keep fewer" in large["hot", "forecast"]["hint"]
    assert {about for about, _ in forecast(house, "--state-gb", "1", "--tier", "hot")} == {"hot"}
    house.tierd("doctor", "--state-gb", "1e6")
    assert sorted(path.name for path in (tmp_path / "hot").iterdir() if path.is_file()) == [], "nothing stays"


def test_the_cap_and_what_the_daemon_has_measured(tmp_path: Path) -> None:
    with Daemon(tmp_path, cold='url = "file://cold"\nmax_upload_mib_s = 1.0') as daemon, Trainer() as trainer:
        trainer.connect(daemon.socket)
        trainer.train(1)
        trainer.snapshot()
        trainer.wait_replicated()
        for gigabytes, verdict in (("0.5", "warning"), ("0.0005", "ok")):
            shown = daemon.tierd("doctor", "--json", "--state-gb", gigabytes, "--every-s", "60")
            found = {one["check"]: one for one in msgspec.json.decode(shown.stdout) if one["about"] == "cold"}
            assert found["upload cap"]["verdict"] == verdict
            assert "max_upload_mib_s = 1 allows a copy in" in found["upload cap"]["message"]
            assert found["upload rate"]["verdict"] == "note"
            assert "too small to show the rate" in found["upload rate"]["message"], "a copy of some kB is all latency"


@pytest.mark.parametrize(
    "wrong", [("--state-gb", "inf"), ("--state-gb", "1e300"), ("--every-s", "inf"), ("--every-s", "1e300")]
)
def test_numbers_out_of_range_are_refused_with_the_range(tmp_path: Path, wrong: tuple[str, str]) -> None:
    refused = make_house(tmp_path).tierd("doctor", "--json", "--state-gb", "1", *wrong)
    assert (refused.exit_code, refused.stdout) == (2, ""), refused.output
    assert "this is a bug" not in refused.stderr


def test_the_largest_numbers_have_a_forecast(tmp_path: Path) -> None:
    house = make_house(tmp_path)
    assert forecast(house, "--state-gb", "1e9", "--every-s", "1", "--every-steps", "1000000000")
    assert forecast(house, "--state-gb", "1e9", "--every-s", "1e9", "--every-steps", "1")


def test_less_than_a_byte_of_state_is_a_mistake(tmp_path: Path) -> None:
    refused = make_house(tmp_path).tierd("doctor", "--json", "--state-gb", "0.0000001", "--every-s", "60")
    assert refused.exit_code == 2, refused.output


def test_copies_of_large_checkpoints_show_the_rate(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon, Trainer(width=5000) as trainer:  # 2 MB
        trainer.connect(daemon.socket)
        trainer.train(1)
        trainer.snapshot()
        trainer.wait_replicated()
        shown = daemon.tierd("doctor", "--json", "--state-gb", "0.001", "--every-s", "600")
    found = {one["check"]: one for one in msgspec.json.decode(shown.stdout) if one["about"] == "cold"}
    assert found["upload rate"]["verdict"] == "ok", found["upload rate"]["message"]
    assert "the daemon's copies went at" in found["upload rate"]["message"]
