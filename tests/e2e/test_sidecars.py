"""A daemon over files that a training appends to: kills of the daemon, and a restore on an empty machine."""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.bucket import Bucket, bucket_server
from tests.support.daemon import Daemon
from tests.support.processes import run_tierd
from tests.support.s3 import BUCKET, ENVIRONMENT
from tests.support.waiting import wait_until

NAME = ".loss.json"
FOLLOWING = {"sidecar.put": 2, "sidecar.delete": 1}  # failpoints, and at which hit the daemon is killed


def following(root: Path, *, failpoints: str = "", bucket: Bucket | None = None) -> Daemon:
    (root / "out").mkdir(parents=True, exist_ok=True)
    section = f'[sidecars]\npath = "../out"\nrun = "run"\nkeep = ["{NAME}"]'
    environ = {"TIERD_FAILPOINTS": failpoints} if failpoints else {}
    cold = 'url = "file://cold"'
    if bucket is not None:
        cold = f'url = "s3://{BUCKET}/deep"\nendpoint_url = "{bucket.url}"'
        environ |= ENVIRONMENT
    daemon = Daemon(root / "house", cold=cold, more=section, environ=environ)
    daemon.run_with(run_watchful)
    return daemon


def run_watchful(arguments: list[str], environ: Mapping[str, str], log: str) -> None:
    """The `tierd` command, which looks several times a second at the files of the training."""
    from tierd.workers import sidecar_follower

    sidecar_follower.POLL_S = sidecar_follower.SidecarFollower.interval_s = 0.1
    sidecar_follower.COPY_S, sidecar_follower.REWRITTEN_S = 0.2, 0.5
    run_tierd(arguments, environ, log)


def in_tier(daemon: Daemon, tier: str) -> int:
    """How many bytes of the file the tier has."""
    reports = daemon.json("sidecars", "--run", "run", "--tier", tier)
    return max((report["size_bytes"][tier] for report in reports), default=0)


def written(daemon: Daemon, folder: Path, tier: str) -> bytes:
    done = daemon.tierd("sidecars", "--run", "run", "--tier", tier, "--into", folder)
    assert done.returncode == 0, done.stderr
    return (folder / NAME).read_bytes()


@pytest.mark.long
def test_every_line_of_a_history_reaches_cold_once_although_the_daemon_is_killed(tmp_path: Path) -> None:
    file, generator = tmp_path / "out" / NAME, random.Random(7)
    with following(tmp_path) as daemon:
        is_done = threading.Event()

        def append() -> None:
            for begin in range(0, 10_000, 50):
                with file.open("a") as opened:
                    opened.writelines(
                        f'{{"step": {step}, "loss": {1 / step}}}\n' for step in range(begin + 1, begin + 51)
                    )
                time.sleep(0.05)
            is_done.set()

        writer = threading.Thread(target=append)
        writer.start()
        try:
            while not is_done.is_set():
                for failpoint in ("", *(f"{name}=kill@{hit}" for name, hit in FOLLOWING.items()), "file.linked=kill@3"):
                    daemon.restart_armed(failpoint)
                    time.sleep(generator.uniform(0.5, 3.0))
        finally:
            writer.join()
        daemon.restart_armed("")
        lines = file.read_bytes()
        assert lines.count(b"\n") == 10_000
        wait_until(lambda: in_tier(daemon, "cold") == len(lines), "the last lines in cold")
        assert written(daemon, tmp_path / "cold-copy", "cold") == lines
        assert written(daemon, tmp_path / "hot-copy", "hot") == lines
        status = daemon.status()["sidecars"]
        assert (status["files"], status["size_bytes"], status["rewritten"]) == (1, len(lines), {})
        assert f"sidecar files in {tmp_path / 'out'} for run: 1 file" in daemon.tierd("status").stdout


def test_a_history_comes_back_from_a_bucket_on_an_empty_machine_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "out" / NAME
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with bucket_server() as bucket:
        comes_back_and_goes_on(tmp_path, file, bucket)


def comes_back_and_goes_on(tmp_path: Path, file: Path, bucket: Bucket) -> None:
    with following(tmp_path, bucket=bucket) as daemon:
        file.write_text("1\n2\n")
        wait_until(lambda: in_tier(daemon, "cold") == 4, "the copy in cold")
    shutil.rmtree(tmp_path / "out")
    shutil.rmtree(tmp_path / "house/hot")
    with following(tmp_path, bucket=bucket) as daemon:
        assert written(daemon, tmp_path / "out", "cold") == b"1\n2\n"
        again = daemon.tierd("sidecars", "--run", "run", "--into", tmp_path / "out")
        assert "is there already" in again.stdout
        with file.open("a") as opened:
            opened.write("3\n")
        wait_until(lambda: in_tier(daemon, "cold") == 6, "the new line in cold")
        (report,) = daemon.json("sidecars", "--run", "run", "--tier", "cold")
        assert report["version"] == 1


def test_a_history_that_lost_its_past_raises_an_alarm_and_both_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "out" / NAME
    with following(tmp_path) as daemon:
        file.write_text("1\n2\n3\n")
        wait_until(lambda: in_tier(daemon, "cold") == 6, "the copy in cold")
        file.write_text("1\n")
        reports = wait_until(
            lambda: found if len(found := daemon.json("sidecars", "--run", "run")) == 2 else [], "the second version"
        )
        assert [report["version"] for report in reports] == [1, 2]
        printed = daemon.tierd("status").stdout
        assert "WARNING: the past of .loss.json of run CHANGED" in printed
        assert "it has 2 bytes, and had 6" in printed
        refused = daemon.tierd("sidecars", "--run", "run", "--version", "1", "--into", tmp_path / "out")
        assert refused.returncode != 0
        assert "it exists with other bytes" in refused.stderr
        assert file.read_text() == "1\n"
        first = daemon.tierd("sidecars", "--run", "run", "--version", "1", "--into", tmp_path / "old")
        assert first.returncode == 0, first.stderr
        assert (tmp_path / "old" / NAME).read_text() == "1\n2\n3\n"


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ('[sidecars]\nkeep = ["a"]\nrun = "run"', "sidecars.path"),
        ('[sidecars]\npath = "out"\nkeep = ["a"]', "sidecars.run"),
        ('[sidecars]\npath = "out"\nrun = "run"', "sidecars.keep"),
        ('[sidecars]\npath = "out"\nrun = "run"\nkeep = ["a/b"]', "without a slash"),
    ],
)
def test_a_section_that_lacks_something_is_refused(tmp_path: Path, section: str, expected: str) -> None:
    daemon = Daemon(tmp_path / "house", more=section)
    refused = daemon.tierd("serve")
    assert refused.returncode == 2, refused.stderr
    assert expected in refused.stderr
