"""`tierd drill`."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from tests.support.bucket import bucket_server
from tests.support.cli import House, folder_of, make_checkpoint, make_house, make_zeros
from tests.support.damage import flip
from tests.support.s3 import BUCKET, ENVIRONMENT
from tests.support.waiting import wait_until
from tierd.cli.app import make_app
from tierd.errors import BadConfig
from tierd.format import layout


@pytest.fixture
def house(tmp_path: Path) -> House:
    return make_house(tmp_path)


def rows(house: House, *arguments: str | Path, exit_code: int = 0) -> dict[str, Any]:
    result = house.tierd("drill", *arguments, "--json")
    assert result.exit_code == exit_code, result.output
    return {one["tier"]: one for one in msgspec.json.decode(result.stdout)}


def everything(house: House) -> set[Path]:
    return set(house.root.rglob("*"))


def test_drill_restores_verifies_and_deletes_one_checkpoint_of_each_tier(house: House) -> None:
    for step in (100, 200):
        make_checkpoint(house.hot, house.cold, step=step)
    before = everything(house)
    result = house.tierd("drill")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["TIER", "hot", "cold"]
    assert all("every chunk" in line for line in lines[1:])
    assert everything(house) == before


def test_drill_takes_the_named_run_step_and_tier(house: House, tmp_path: Path) -> None:
    for step in (100, 200, 300):
        make_checkpoint(house.hot, house.cold, step=step, milestones=("best",) if step == 200 else ())
    make_checkpoint(house.cold, step=7, run="other")
    found = rows(house, "--run", "run42", "--step", "latest")
    assert {one["step"] for one in found.values()} == {300}
    assert found["cold"]["size_bytes"] == 40_000
    assert found["cold"]["seconds"] > 0
    assert found["cold"]["bytes_per_s"] > 0
    assert found["cold"]["is_verified"]
    assert rows(house, "--run", "run42", "--step", "milestone:best", "--tier", "cold")["cold"]["step"] == 200
    assert rows(house, "--run", "other", "--tier", "cold")["cold"]["step"] == 7
    assert list(rows(house, "--tier", "hot", "--scratch", tmp_path / "new/deep")) == ["hot"]
    assert not (tmp_path / "new").exists()


def test_drill_of_a_damaged_replica_is_exit_12_and_the_other_tiers_are_still_drilled(house: House) -> None:
    made = make_checkpoint(house.hot, house.cold)
    flip(house.hot, made, made.files[0].name)
    before = everything(house)
    found = rows(house, exit_code=12)
    assert "chunk 1 of 3" in found["hot"]["error"]
    assert found["cold"]["is_verified"]
    assert not found["hot"]["is_verified"]
    assert everything(house) == before


def test_drill_of_an_empty_tier_is_an_error_of_that_tier(house: House) -> None:
    made = make_checkpoint(house.hot)
    assert "holds none" in rows(house, exit_code=3)["cold"]["error"]
    assert rows(house, "--tier", "cold", exit_code=10)["cold"]["step"] is None
    assert rows(house, "--step", "7", exit_code=10)["hot"]["error"] is not None
    (folder_of(house.hot, made) / layout.MANIFEST).write_bytes(b"{")
    assert rows(house, exit_code=12)["hot"]["error"] is not None
    assert house.tierd("drill", "--tier", "dr").exit_code == 2


def test_place_needs_no_config_but_one_that_is_there_must_be_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path / "usb")
    monkeypatch.chdir(tmp_path)
    command = ["drill", "--from", str(tmp_path / "usb")]
    assert CliRunner().invoke(make_app(), command).exit_code == 0
    (tmp_path / "tierd.toml").write_text("[security")
    result = CliRunner().invoke(make_app(), command)
    assert result.exit_code == BadConfig.exit_code
    assert "tierd.toml" in str(result.exception) + result.output


def test_drill_of_a_place_writes_nothing_there(tmp_path: Path) -> None:
    house = make_house(tmp_path)
    usb, scratch = tmp_path / "usb disk", tmp_path / "scratch"
    made = make_checkpoint(usb)
    before = everything(house)
    found = rows(house, "--from", usb, "--scratch", scratch)
    assert list(found) == [str(usb)]
    assert found[str(usb)]["is_verified"]
    assert everything(house) == before
    flip(usb, made, made.files[0].name)
    assert "chunk 1 of 3" in rows(house, "--from", usb, "--scratch", scratch, exit_code=12)[str(usb)]["error"]
    assert everything(house) == before
    assert house.tierd("drill", "--from", usb, "--tier", "hot").exit_code == 2
    assert house.tierd("drill", "--from", tmp_path / "nowhere").exit_code == 2


def test_drill_of_a_bucket_by_its_url(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    made = make_checkpoint(house.root / "made")
    with bucket_server() as served:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", served.url)
        served.fill(house.root / "made", "deep")
        url = f"s3://{BUCKET}/deep"
        assert rows(house, "--from", url)[url]["size_bytes"] == made.size_bytes
        assert not (house.hot / ".drill").exists()
        served.script = lambda operation, key: "AccessDenied"
        assert "access denied" in rows(house, "--from", url, exit_code=14)[url]["error"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_drill_leaves_no_files(house: House, number: signal.Signals) -> None:
    make_zeros(house.cold, step=100, size_bytes=8 << 30)
    before = everything(house)
    drill = house.start("drill", "--tier", "cold")
    wait_until(lambda: any((house.hot / ".drill").rglob("*.partial")), "the drill to begin")
    drill.send_signal(number)
    drill.communicate(timeout=60)
    assert drill.returncode == 128 + number
    assert everything(house) == before
