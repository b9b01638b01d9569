"""`tierd doctor`: its text and JSON output, its exit codes, and that it leaves nothing behind."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from tests.support.bucket import bucket_server
from tests.support.cli import House, make_checkpoint, make_house
from tests.support.daemon import serving
from tests.support.s3 import BUCKET, SECRET_KEY
from tests.support.waiting import wait_until
from tierd.cli.app import make_app


def run_doctor(house: House, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    result = house.tierd("doctor", "--json", *arguments)
    return result.exit_code, msgspec.json.decode(result.stdout)


def problems(found: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
    return {(one["about"], one["check"], one["verdict"]) for one in found if one["verdict"] not in ("ok", "note")}


def test_doctor_before_the_first_start_reports_what_is_missing(disk_path: Path) -> None:
    house = make_house(disk_path)
    code, found = run_doctor(house)
    assert problems(found) == {("cold", "disk", "warning"), ("daemon", "daemon", "problem")}
    assert code == 13
    code, found = run_doctor(house, "--tier", "hot")
    assert (code, problems(found)) == (0, set())
    assert {one["check"] for one in found} == {"config", "directory", "o_direct", "filesystem", "space", "memory"}


def test_doctor_reports_only_the_config_if_it_is_wrong(tmp_path: Path) -> None:
    house = make_house(tmp_path, more="[hot2]")
    code, found = run_doctor(house)
    assert (code, problems(found)) == (2, {("config", "config", "problem")})
    assert "hot2" in found[0]["message"]
    assert house.tierd("doctor").exit_code == 2
    (tmp_path / "tierd.toml").unlink()
    code, found = run_doctor(house)
    assert code == 2
    assert "no such file" in found[0]["message"]


PEERS = '[peers]\nlisten = "127.0.0.1:0"'


def test_doctor_checks_the_address_that_other_nodes_are_told(tmp_path: Path) -> None:
    with serving(tmp_path, more=PEERS) as daemon:
        (found,) = (one for one in json.loads(daemon.tierd("doctor", "--json").stdout) if one["about"] == "peers")
        assert (found["check"], found["verdict"]) == ("address", "warning")
        assert "which is each node itself" in found["message"]
        config = daemon.config.read_text()
        daemon.stop()
        daemon.config.write_text(config + '\nadvertise = "192.0.2.1"')  # for documentation: nobody has it
        daemon.start()
        (found,) = (one for one in json.loads(daemon.tierd("doctor", "--json").stdout) if one["about"] == "peers")
        assert (found["check"], found["verdict"]) == ("address", "problem")
        assert "192.0.2.1" in found["message"]


def test_doctor_for_an_unknown_tier_is_exit_2(tmp_path: Path) -> None:
    result = make_house(tmp_path).tierd("doctor", "--tier", "cool")
    assert result.exit_code == 2
    assert "the tiers of this config are hot, cold" in result.stderr


def test_doctor_counts_existing_checkpoints_when_it_checks_space_and_memory(tmp_path: Path) -> None:
    house = make_house(tmp_path)
    make_checkpoint(house.hot, size_bytes=1_000_000)
    _, found = run_doctor(house, "--tier", "hot")
    (space,) = (one["message"] for one in found if one["check"] == "space")
    assert "8 MB more are needed for 5 checkpoints in all" in space
    (memory,) = (one["message"] for one in found if one["check"] == "memory")
    assert "a run needs 4 MB for its slots" in memory


def test_doctor_counts_room_for_two_of_the_largest_checkpoint_in_hot_as_deletion_does(tmp_path: Path) -> None:
    house = make_house(tmp_path)
    make_checkpoint(house.hot, step=1, size_bytes=2_000_000)
    make_checkpoint(house.hot, step=2, size_bytes=1_000_000)
    _, found = run_doctor(house, "--tier", "hot")
    (space,) = (one["message"] for one in found if one["check"] == "space")
    assert "8 MB more are needed" in space, "three of 2 MB and two of 4 MB, less the 6 MB that are there"


def test_doctor_reports_what_the_running_daemon_cannot_reach(tmp_path: Path) -> None:
    house = House(tmp_path)
    with bucket_server() as served:
        more = f'[[cold]]\nurl = "s3://{BUCKET}/deep"\nendpoint_url = "{served.url}"'
        served.script = lambda operation, key: "" if ".tierd-probe" in key else "AccessDenied"
        with serving(tmp_path, more=more) as daemon:
            wait_until(lambda: daemon.status()["tiers"][1]["error"] not in (None, "not listed yet"))
            code, found = run_doctor(house)
        assert code == 14
        messages = {one["check"]: one["message"] for one in found if one["about"] == "daemon"}
        assert "version " in messages["daemon"]
        assert "the daemon does not reach cold: list s3://" in messages["reach"]


def test_doctor_prints_a_line_and_a_hint_for_each_problem(tmp_path: Path) -> None:
    with bucket_server() as served:
        house = make_house(tmp_path)
        house.config.write_text(
            f"""
            [hot]
            path = "hot"
            [[cold]]
            url = "s3://{BUCKET}/deep"
            endpoint_url = "{served.url}"
            """
        )
        result = house.tierd("doctor", "--tier", "cold")
        assert result.exit_code == 1
        lines = result.stdout.splitlines()
        warned = next(at for at, line in enumerate(lines) if line.startswith("WARNING  cold     no lifecycle rule"))
        assert lines[warned + 1].strip().startswith("hint: add AbortIncompleteMultipartUpload")
        assert SECRET_KEY not in result.output
        served.access_keys = {"another"}
        result = house.tierd("doctor", "--tier", "cold")
        assert result.exit_code == 14
        assert "PROBLEM  cold     list s3://checkpoints/deep: S3 does not know this access key" in result.stdout


def test_doctor_and_the_log_name_what_other_users_can_reach(tmp_path: Path) -> None:
    house = House(tmp_path)
    (tmp_path / "hot").mkdir()
    (tmp_path / "hot").chmod(0o755)
    with serving(tmp_path) as daemon:
        daemon.wait_log(f"other users can reach the checkpoints in {daemon.hot}: its mode is 0755 (hint: chmod -R")
        assert ("hot", "exposure", "warning") in problems(run_doctor(house)[1])
        tmp_path.chmod(0o777)
        daemon.config.chmod(0o600)
        (message,) = (one["message"] for one in run_doctor(house)[1] if one["check"] == "socket")
        assert (
            message == f"other users can replace the socket, because they can write in {tmp_path}: trainers refuse it"
        )


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGTERM])
def test_interrupted_doctor_deletes_its_probe_objects(tmp_path: Path, number: signal.Signals) -> None:
    with bucket_server() as served:
        house = make_house(tmp_path)
        house.config.write_text(f'[[cold]]\nurl = "s3://{BUCKET}/deep"\nendpoint_url = "{served.url}"')
        served.script = lambda operation, key: "hold" if operation == "upload_part" else ""
        process = house.start("doctor", "--tier", "cold")
        assert served.held.wait(60)
        assert served.uploads
        served.script = lambda operation, key: ""
        process.send_signal(number)
        process.communicate(timeout=60)
        assert process.returncode == 128 + number
        assert (served.objects, served.uploads) == ({}, {})


def test_doctor_without_a_config_file_names_the_hot_tier_of_the_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(make_app(["doctor"]), ["doctor", "--tier", "hot"])
    assert f"there is no config file: the built-in defaults apply, and the hot tier is {tmp_path}/.tierd/hot" in (
        result.stdout
    )
