"""What commands say of a tier that lost checkpoints, that is another place than before, or that is another tier."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.cli import House, make_checkpoint, make_house
from tests.support.daemon import Daemon
from tests.support.waiting import wait_until
from tierd.errors import BadConfig, Corrupt, TierUnreachable
from tierd.format import layout


@pytest.fixture
def house(tmp_path: Path) -> House:
    return make_house(tmp_path)


def tier_of(daemon: Daemon, name: str) -> dict[str, object]:
    return next(tier for tier in daemon.status()["tiers"] if tier["name"] == name)


# ── lost checkpoints ──


def test_commands_look_at_the_tiers_now_and_name_what_disappeared(tmp_path: Path) -> None:
    """The daemon lists a cold tier every ten minutes. Nobody has to wait for that."""
    with Daemon(tmp_path) as daemon:
        make_checkpoint(daemon.cold, step=10, sequence=10)
        make_checkpoint(daemon.hot, daemon.cold, step=100, sequence=11)
        wait_until(lambda: daemon.steps("hot") == [100], "hot to be listed")
        assert json.loads(daemon.tierd("ls", "--json").stdout)[1]["tiers"] == ["cold"]

        shutil.rmtree(daemon.cold / "run42")

        listed = daemon.tierd("ls", "--json")
        assert listed.returncode == 0
        assert [row["step"] for row in json.loads(listed.stdout)] == [100]
        assert "lost: run42/000000000010-g0001 disappeared from cold" in listed.stderr
        verified = daemon.tierd("verify")
        assert verified.returncode == Corrupt.exit_code
        assert "damaged: run42/000000000010-g0001 disappeared from cold" in verified.stdout
        assert "run42/000000000010-g0001 disappeared from cold" in daemon.tierd("status").stdout
        wait_until(lambda: daemon.steps("cold") == [100], "hot's checkpoint to be sent again")
        assert daemon.metric('tierd_lost_checkpoints_total{tier="cold"}') == 2.0
        assert "lost" in [failure["kind"] for failure in daemon.status()["failures"]]


def test_verify_without_a_daemon_says_what_cold_lacks(house: House) -> None:
    make_checkpoint(house.hot, step=100)
    result = house.tierd("verify")
    assert result.exit_code == 0
    assert "1 of 1 replicas are whole" in result.stdout
    assert "cold lacks 1 checkpoint of hot that it should have" in result.stderr


def test_ls_says_how_old_a_listing_is_that_could_not_be_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Daemon(tmp_path) as daemon:
        wait_until(lambda: tier_of(daemon, "cold")["is_known"], "cold to be listed")
        monkeypatch.setattr("tierd.cli.ls.LOOK_S", -1.0)
        assert "tierd: cold is shown as it was " in daemon.tierd("ls").stderr


# ── another place ──


def test_an_absent_cold_mount_at_start_is_reported_and_not_taken_for_empty(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        make_checkpoint(daemon.cold, step=10, sequence=10)
        daemon.tierd("ls")
        wait_until(lambda: (daemon.hot / layout.KNOWN_TIERS / "cold.json").exists(), "cold to be remembered")
        assert daemon.stop() == 0
        daemon.cold.rename(tmp_path / "unmounted")
        daemon.cold.mkdir()
        daemon.start()
        wait_until(lambda: "has no marker" in str(tier_of(daemon, "cold")["error"]), "the absence to be reported")
        assert daemon.tierd("ls").returncode == 3
        assert daemon.metric('tierd_halted{reason="tier_unreachable"}') == 1.0
        assert any(failure["stage"] == "list" for failure in daemon.status()["failures"])
        assert list(daemon.cold.iterdir()) == []
        assert daemon.stop() == 0
        for arguments, code in (
            (("ls",), 3),
            (("restore", "--tier", "cold", "--to", str(tmp_path / "to")), TierUnreachable.exit_code),
            (("verify", "--tier", "cold"), TierUnreachable.exit_code),
            (("doctor", "--tier", "cold"), TierUnreachable.exit_code),
        ):
            done = daemon.tierd(*arguments)
            assert done.returncode == code, arguments
            assert "has no marker" in done.stdout + done.stderr, arguments
        daemon.cold.rmdir()
        found = daemon.tierd("doctor", "--tier", "cold").stdout
        assert "has no marker" in found
        assert "`tierd serve` makes it" not in found, "a tier that was there before is not made anew"


def test_a_start_with_cold_that_is_a_link_to_hot_is_refused(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)
    daemon.hot.mkdir()
    daemon.cold.symlink_to(daemon.hot)
    assert "cold" in daemon.tierd("doctor").stdout
    daemon.launch()
    assert daemon.wait_exit() == BadConfig.exit_code
    assert "is the same place as hot" in daemon.log
    assert "Traceback" not in daemon.log


@pytest.mark.parametrize("is_marked", [True, False])
def test_doctor_and_ls_name_a_cold_tier_that_is_hot(house: House, is_marked: bool) -> None:
    make_checkpoint(house.hot, step=100)
    house.cold.rmdir()
    house.cold.symlink_to(house.hot)
    if is_marked:
        (house.hot / layout.tier_marker_key("0e2fd2a5-6f0b-4f1c-9f3e-0b8f4f6c7a11")).touch()
        listed = house.tierd("ls", "--json")
        assert listed.exit_code == 3
        assert json.loads(listed.stdout)[0]["tiers"] == ["hot"]
    advice = [each for each in json.loads(house.tierd("doctor", "--json").stdout) if each["check"] == "place"]
    assert [(each["about"], each["verdict"]) for each in advice] == [("cold", "problem")]
    assert "same" in advice[0]["message"]


def test_commands_without_a_daemon_make_no_marker(house: House, tmp_path: Path) -> None:
    make_checkpoint(house.hot, house.cold, step=100)
    commands = [
        "ls",
        "verify",
        "status",
        "doctor",
        "show run42",
        "lifecycle",
        f"restore --tier cold --to {tmp_path}/to",
    ]
    before = sorted(path for root in (house.hot, house.cold) for path in root.rglob("*"))
    for command in commands:
        house.tierd(*command.split())
    assert sorted(path for root in (house.hot, house.cold) for path in root.rglob("*")) == before
