"""`tierd ls`, `show` and `status`: what the tiers hold, with a daemon and without one."""

from __future__ import annotations

import http.server
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from tests.support.cli import House, flip_a_bit, folder_of, make_checkpoint, make_house, make_part
from tierd.cli import daemon_http as daemon
from tierd.cli.app import make_app
from tierd.cli.ls import by_metric
from tierd.format.manifest import REPORTED_UNHEALTHY
from tierd.status.checkpoint_report import CheckpointRow

DEAD_S3 = """
[[cold]]
name = "dr"
url = "s3://bucket/prefix"
region = "eu-west-1"
endpoint_url = "http://127.0.0.1:9"
[limits]
request_timeout_s = 2
"""


@pytest.fixture
def house(tmp_path: Path) -> House:
    return make_house(tmp_path)


@pytest.fixture
def house_with_dead_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> House:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    return make_house(tmp_path, more=DEAD_S3)


# ── ls ──


def test_a_run_that_is_not_there_is_answered_with_those_that_are(house: House) -> None:
    make_checkpoint(house.hot, step=100)
    assert "there are the runs run42" in house.tierd("ls", "--run", "run24").stderr
    refused = house.tierd("show", "run42/100")
    assert (refused.exit_code, "hint: tierd show run42 100" in refused.stderr) == (2, True)


def test_ls_prints_every_field_of_a_row_newest_first(house: House) -> None:
    make_checkpoint(house.hot, house.cold, step=100, milestones=("best",))
    make_checkpoint(house.hot, step=200, sequence=2)

    rows = house.json("ls")

    assert [row["step"] for row in rows] == [200, 100]
    assert rows[1] == {
        "run": "run42",
        "step": 100,
        "generation": 1,
        "tiers": ["hot", "cold"],
        "milestone": "best",
        "healthy": None,
        "size_bytes": 40_000,
        "created_at": "2025-01-01T00:00:00.000+00:00",
        "metrics": {"loss": 2.5},
    }


def test_ls_and_show_agree_on_a_checkpoint_that_the_training_reported_as_unhealthy(house: House) -> None:
    """With `health.examine = false` nobody examines it."""
    make_checkpoint(house.hot, step=100, metrics={REPORTED_UNHEALTHY: 1.0})
    assert [row["healthy"] for row in house.json("ls")] == [False]
    assert house.json("show", "run42", "100")["healthy"] is False
    assert "NO: reported by the training" in house.tierd("show", "run42", "100").stdout


def test_ls_prints_a_table_that_is_never_truncated(house: House) -> None:
    make_checkpoint(house.hot, run="a-run-with-quite-a-long-name-" + "x" * 60, milestones=("best-so-far",))

    lines = house.tierd("ls").stdout.splitlines()

    assert lines[0].split() == ["RUN", "STEP", "GEN", "TIERS", "MILESTONE", "SIZE", "AGE", "METRICS"]
    cells = lines[1].split()
    assert cells[:7] == ["a-run-with-quite-a-long-name-" + "x" * 60, "100", "1", "hot", "best-so-far", "40", "kB"]
    assert cells[-1] == "loss=2.5"


def test_ls_says_of_a_part_how_many_ranks_are_here(house: House) -> None:
    make_checkpoint(house.cold, step=100, world_size=4)
    make_part(house.hot, [0, 1], step=100)
    make_part(house.hot, [0, 1], step=200, sequence=2)

    rows = house.json("ls")
    part = {"hot": {"ranks": [0, 1], "world_size": 4}}
    assert [(row["step"], row["tiers"], row["parts"]) for row in rows] == [(200, [], part), (100, ["cold"], part)]
    cells = [line.split()[1:7] for line in house.tierd("ls").stdout.splitlines()[1:]]
    assert cells == [
        ["200", "1", "hot(part", "2/4", "ranks)", "40"],
        ["100", "1", "hot(part", "2/4", "ranks),cold", "80"],
    ]
    assert [row["step"] for row in house.json("ls", "--tier", "hot")] == [200, 100]
    assert [row["step"] for row in house.json("ls", "--tier", "cold")] == [100]


def test_ls_says_of_what_is_not_committed_in_cold_how_many_ranks_are_there(house: House) -> None:
    make_checkpoint(house.cold, step=100, world_size=4)
    make_part(house.hot, [0, 1], step=200, sequence=2)
    for ranks, step in (([0, 1], 200), ([2, 3], 300)):
        make_part(house.cold, ranks, step=step, sequence=step // 100)
    listed = house.tierd("ls")
    assert listed.stdout.splitlines()[1].split()[3:8] == ["hot(part", "2/4", "ranks),cold(part", "2/4", "ranks)"]
    not_committed = "not committed: run42/000000000300-g0001 in cold: the shards of 2 of 4 ranks, without ranks 0-1"
    assert not_committed in listed.stderr
    assert not_committed in house.tierd("ls", str(house.cold)).stderr.replace(str(house.cold), "cold")
    target = house.root / "restored"
    for words, why in (
        (("--tier", "hot"), "from the nodes: the parts of ranks 2-3 are missing"),
        (("--step", "300"), "in cold: the shards of 2 of 4 ranks, without ranks 0-1"),
    ):
        restored = house.tierd("restore", *words, "--to", target)
        assert (restored.exit_code, why in restored.stderr) == (3, True)
    assert not target.exists()
    passed_over = house.tierd("restore", "--to", target)
    assert (passed_over.exit_code, "passed over: run42/000000000300" in passed_over.stderr) == (0, True)


def test_many_checkpoints_are_sorted_by_a_metric_at_once() -> None:
    rows = [
        CheckpointRow(
            run="run",
            step=step,
            generation=1,
            tiers=["hot"],
            milestone=None,
            healthy=None,
            size_bytes=1,
            created_at="",
            metrics={"loss": float(step % 100)} if step % 2 else {},
        )
        for step in range(20_000)
    ]
    began_s = time.process_time()
    measured, others = by_metric(rows, "loss", is_highest_first=True)
    assert time.process_time() - began_s < 1
    assert (len(measured), len(others)) == (10_000, 10_000)
    assert [row.step for row in measured[:2]] == [99, 199], "of equal ones the first stays first"


def test_ls_filters_by_run_and_by_tier(house: House) -> None:
    make_checkpoint(house.hot, run="a")
    make_checkpoint(house.cold, run="b")

    assert [row["run"] for row in house.json("ls", "--run", "a")] == ["a"]
    assert [row["run"] for row in house.json("ls", "--tier", "cold")] == ["b"]
    assert house.tierd("ls", "--tier", "glacier").exit_code == 2
    assert house.tierd("ls", "--tier", "memory").exit_code == 13


def test_ls_of_a_directory_needs_no_daemon_and_no_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path / "usb-disk")
    monkeypatch.chdir(tmp_path)

    result = CliRunner().invoke(make_app(), ["ls", str(tmp_path / "usb-disk"), "--json"])

    assert result.exit_code == 0, result.output
    assert msgspec.json.decode(result.stdout)[0]["tiers"] == [str(tmp_path / "usb-disk")]


def test_ls_of_a_missing_directory_is_exit_2_and_of_an_empty_one_an_empty_list(house: House) -> None:
    assert house.tierd("ls", house.root / "nowhere").exit_code == 2
    assert house.json("ls", house.cold) == []
    assert "no checkpoints" in house.tierd("ls", house.cold).stderr


def test_ls_and_status_make_no_directories(house: House) -> None:
    house.hot.rmdir()
    house.cold.rmdir()

    assert house.json("ls") == []
    assert house.tierd("status").exit_code == 13
    assert sorted(one.name for one in house.root.iterdir()) == ["tierd.toml"]


def test_ls_reports_an_unreadable_manifest_and_lists_the_others(house: House) -> None:
    make_checkpoint(house.hot, step=100)
    broken = make_checkpoint(house.hot, step=200)
    path = folder_of(house.hot, broken) / "manifest.json"
    path.write_bytes(path.read_bytes()[:50])

    result = house.tierd("ls", "--json")

    assert [row["step"] for row in msgspec.json.decode(result.stdout)] == [100]
    assert "000000000200-g0001" in result.stderr


def test_ls_with_one_unreachable_tier_is_exit_3_and_lists_the_others(house_with_dead_s3: House) -> None:
    house = house_with_dead_s3
    make_checkpoint(house.hot)

    result = house.tierd("ls", "--json")

    assert result.exit_code == 3
    assert len(msgspec.json.decode(result.stdout)) == 1
    assert "dr is left out" in result.stderr

    result = house.tierd("ls", "--run", "other")

    assert "no checkpoints of run other in any tier that could be listed" in result.stderr


HUNG_LS = """
import sys
from pathlib import Path
from tests.support.hung_directory import hung_directory
from tierd.cli import app, opened_tiers

opened_tiers.SILENCE_S = 1.0
config, cold = sys.argv[1:]
sys.argv = ["tierd", "--config", config, "ls"]
with hung_directory(Path(cold)) as hung:
    hung.answer = lambda: None
    app.main()
"""


def test_ls_lists_the_other_tiers_and_ends_while_a_directory_hangs(house: House) -> None:
    """The process must not wait at its exit for the thread that hangs."""
    make_checkpoint(house.hot, step=100)
    command = [sys.executable, "-c", HUNG_LS, str(house.config), str(house.cold)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=os.getcwd())
    assert ended.returncode == 3, ended.stderr
    assert "cold is left out, it cannot be listed" in ended.stderr
    assert "no answer for 1 s" in ended.stderr
    assert [line.split()[1] for line in ended.stdout.splitlines()[1:]] == ["100"]


def test_restore_from_an_unreachable_tier_is_exit_14(house_with_dead_s3: House) -> None:
    result = house_with_dead_s3.tierd("restore", "--tier", "dr", "--to", house_with_dead_s3.root / "restored")

    assert result.exit_code == 14
    assert "s3://bucket/prefix" in result.stderr
    assert "Traceback" not in result.stderr


def test_control_characters_in_a_manifest_do_not_reach_the_terminal(house: House) -> None:
    manifest = make_checkpoint(house.hot)
    path = folder_of(house.hot, manifest) / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"loss": 2.5', rb'"\u001b]0;owned\u0007[red]": 2.5'))

    assert list(house.json("ls")[0]["metrics"]) == ["\x1b]0;owned\x07[red]"]
    for verb in (["ls"], ["show", "run42"]):
        out = house.tierd(*verb).stdout
        assert "\x1b" not in out
        assert r"\x1b]0;owned\x07[red]" in out


# ── show ──


def test_show_prints_the_whole_manifest_and_its_tiers(house: House) -> None:
    manifest = make_checkpoint(house.hot, house.cold, step=100, milestones=("best",))

    found = house.json("show", "run42", "latest")

    assert found["manifest"] == msgspec.to_builtins(manifest)
    assert found["tiers"] == ["hot", "cold"]
    assert found["milestones"] == ["best"]
    text = house.tierd("show", "run42", "100").stdout
    for entry in manifest.files:
        assert entry.name in text
        assert entry.crc64nvme in text


def test_show_of_an_unknown_run_is_exit_10_and_names_the_runs(house: House) -> None:
    make_checkpoint(house.hot)

    result = house.tierd("show", "run43")

    assert result.exit_code == 10
    assert "run42" in result.stderr


def test_show_of_a_part_says_which_ranks_are_here_and_that_no_tier_has_it_whole(house: House) -> None:
    make_checkpoint(house.cold, step=100, world_size=4)
    make_part(house.hot, [0, 1], step=100)
    make_part(house.hot, [0, 1], step=200, sequence=2)

    part = house.json("show", "run42", "200")
    assert part["tiers"] == []
    assert part["parts"] == {"hot": {"ranks": [0, 1], "world_size": 4}}
    text = house.tierd("show", "run42", "200").stdout
    assert "tiers         none has it whole" in text
    assert "in hot        only ranks 0-1 of 4" in text

    newest = house.tierd("show", "run42")
    assert "step          100" in newest.stdout
    assert "run42/000000000200-g0001 hot(part 2/4 ranks)" in newest.stderr
    assert house.json("show", "run42", "100")["tiers"] == ["cold"]


# ── status ──


def test_status_names_a_part_as_a_part_and_never_offers_to_restore_it(house: House) -> None:
    make_checkpoint(house.cold, step=100, world_size=4)
    make_part(house.hot, [0, 1], step=200, sequence=2)

    lines = house.tierd("status").stdout.splitlines()

    assert any(line.split() == ["this", "node", "ranks", "0-1", "of", "4"] for line in lines)
    assert any(line.split()[:3] == ["hot", "step", "200"] and line.endswith("part 2/4 ranks") for line in lines)
    assert any("--step 100 " in line for line in lines if "get it back:" in line)
    assert any(line.split()[:4] == ["hot", "1", "(1", "parts)"] for line in lines)
    report = msgspec.json.decode(house.tierd("status", "--json").stdout)
    (run,) = report["runs"]
    assert run["tiers"]["hot"] is None
    assert run["nodes"]["parts"]["hot"]["step"] == 200


def test_status_of_parts_alone_says_that_a_restart_reads_them(house: House) -> None:
    make_part(house.hot, [2, 3], step=200)

    text = house.tierd("status").stdout

    assert "get it back" not in text
    assert "a restart of the run reads the parts of all nodes" in text


def test_status_without_a_daemon_is_exit_13_and_prints_newest_checkpoints_and_a_restore_command(house: House) -> None:
    make_checkpoint(house.hot, house.cold, step=100)
    make_checkpoint(house.hot, step=200, generation=2)

    result = house.tierd("status")

    assert result.exit_code == 13
    assert "tierd serve" in result.stderr
    lines = result.stdout.splitlines()
    assert any(line.split()[:5] == ["hot", "step", "200", "generation", "2"] for line in lines)
    assert any(line.split()[:5] == ["cold", "step", "100", "generation", "1"] for line in lines)
    command = next(line.split("get it back:")[1].split() for line in lines if "get it back:" in line)
    assert command[:3] == ["tierd", "--config", str(house.config)]
    done = CliRunner().invoke(make_app(), [*command[1:-1], str(house.root / "restored")])
    assert "restored run42 step 200 (generation 2) from hot" in done.stdout


def test_status_json_without_a_daemon_has_the_same_form_as_with_one(house: House) -> None:
    make_checkpoint(house.hot, step=100)

    result = house.tierd("status", "--json")

    assert result.exit_code == 13
    found = msgspec.json.decode(result.stdout)
    assert found["pid"] is None
    assert found["is_ready"] is False
    assert found["runs"][0]["tiers"]["hot"]["step"] == 100
    assert [tier["name"] for tier in found["tiers"]] == ["hot", "cold"]


@contextmanager
def answering(house: House, body: bytes, code: int = 200) -> Iterator[None]:
    """A server that answers every request with `body`, at the address in the lock file of this house."""

    class Door(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(code)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            return

    server = http.server.HTTPServer(("127.0.0.1", 0), Door)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    lock = {"pid": 1, "listen": f"127.0.0.1:{server.server_address[1]}"}
    (house.hot / ".tierd.lock").write_bytes(msgspec.json.encode(lock))
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_daemon_of_another_directory_is_ignored(house: House) -> None:
    other = {
        "version": "0.1.0",
        "node": "n",
        "pid": 7,
        "uptime_s": 1.0,
        "is_ready": True,
        "tiers": [{"name": "hot", "url": "file:///elsewhere", "is_known": True}],
    }
    make_checkpoint(house.hot)

    with answering(house, msgspec.json.encode(other)):
        status = house.tierd("status")
        rows = house.json("ls")

    assert status.exit_code == 13
    assert "file:///elsewhere" in status.stderr
    assert rows[0]["tiers"] == ["hot"]


def test_status_says_which_tier_does_not_keep_up_and_what_was_given_up(house: House) -> None:
    queue = {
        "tier": "cold",
        "checkpoints": 4,
        "oldest_age_s": 400.0,
        "copying": "run42/000000000100-g0001",
        "copy_s": 360.0,
        "last_copy_age_s": 65.0,
        "given_up": {"replaced": 5, "no_space": 2},
    }
    hot = {"name": "hot", "url": f"file://{house.hot}", "is_known": True}
    facts = {"version": "0.1.0", "node": "n", "pid": 7, "uptime_s": 1.0, "is_ready": True}
    with answering(house, msgspec.json.encode({**facts, "tiers": [hot], "queues": [queue]})):
        status = house.tierd("status")
    assert status.stdout.splitlines()[-3:] == [
        "waiting for cold: 4, the oldest for 6 min 40 s; run42/000000000100-g0001 is being copied; "
        "last copy 1 min 5 s ago",
        "5 checkpoints were replaced by newer ones before a copy to cold, a copy takes 6 min 0 s",
        "GIVEN UP: 2 checkpoints were deleted before a copy to cold: hot had no room",
    ]


def test_status_counts_one_thing_as_one(house: House) -> None:
    queue = {"tier": "cold", "checkpoints": 0, "given_up": {"replaced": 1, "no_space": 1}}
    tier = {"name": "cold", "url": "s3://bucket", "is_known": True, "to_reap": 1}
    hot = {"name": "hot", "url": f"file://{house.hot}", "is_known": True}
    facts = {"version": "0.1.0", "node": "n", "pid": 7, "uptime_s": 1.0, "is_ready": True}
    runs = [{"run": "run42", "generation": 1}]
    with answering(house, msgspec.json.encode({**facts, "runs": runs, "tiers": [hot, tier], "queues": [queue]})):
        status, check = house.tierd("status"), house.tierd("status", "--check")
    assert status.stdout.splitlines()[-3:] == [
        "1 checkpoint was replaced by newer ones before a copy to cold",
        "GIVEN UP: 1 checkpoint was deleted before a copy to cold: hot had no room",
        "left to `tierd reap`: 1 checkpoint in cold, where this daemon deletes nothing",
    ]
    assert check.stdout == "OK: 1 run, 2 tiers\n"


@pytest.mark.parametrize("verb", [("ls",), ("show", "run42")])
def test_what_only_a_daemon_without_an_answer_knows_is_said_to_be_left_out(house: House, verb: tuple[str, ...]) -> None:
    make_checkpoint(house.hot)
    with answering(house, b"", 503):
        shown = house.tierd(*verb)
    assert shown.exit_code == 0
    assert "such as the memory tier, is left out: ask the daemon at 127.0.0.1:" in shown.stderr
    assert "HTTP 503" in shown.stderr
    assert "left out" not in house.tierd(*verb).stderr, "nothing listens there any more"


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"version": 1}', b"null"])
def test_answer_that_is_not_from_a_daemon_is_exit_13(house: House, body: bytes) -> None:
    with answering(house, body):
        assert house.tierd("status").exit_code == 13
        assert house.json("ls") == []


def test_tiers_are_listed_while_another_program_has_the_port_of_the_daemon(house: House) -> None:
    make_checkpoint(house.hot)
    with answering(house, b"", code=404):
        status = house.tierd("status")
        rows = house.json("ls")
    assert status.exit_code == 13
    assert "HTTP 404" in status.stderr
    assert "another program may use that port" in status.stderr
    assert "step 100" in status.stdout
    assert len(rows) == 1


def test_daemon_that_hangs_is_abandoned_and_the_tiers_are_listed(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "TIMEOUT_S", 0.2)
    make_checkpoint(house.hot)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        lock = {"pid": 1, "listen": f"127.0.0.1:{deaf.getsockname()[1]}"}
        (house.hot / ".tierd.lock").write_bytes(msgspec.json.encode(lock))

        status = house.tierd("status")
        rows = house.json("ls")

    assert status.exit_code == 13
    assert "timed out" in status.stderr
    assert "step 100" in status.stdout
    assert len(rows) == 1


# ── as a process ──


@pytest.mark.usefixtures("forked_python")
def test_closed_output_pipe_is_no_error(house: House) -> None:
    for step in range(3):
        make_checkpoint(house.hot, step=step)
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run(
        [sys.executable, "-m", "tierd", "--config", str(house.config), "ls", "--json"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    os.close(writer)

    assert process.stderr == ""
    assert process.returncode == 141


def test_ls_lists_a_checkpoint_with_a_flipped_bit(house: House) -> None:
    manifest = make_checkpoint(house.hot)
    flip_a_bit(folder_of(house.hot, manifest) / manifest.files[0].name)

    assert len(house.json("ls")) == 1
