"""A daemon over a folder that a framework writes: inotify, death of the daemon, and a restore on an empty machine."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.daemon import Daemon
from tests.support.foreign import contents
from tests.support.framework_saves import SAVES, Writer, save_dcp, save_hf
from tests.support.waiting import wait_until


def watching(
    root: Path,
    preset: str = "hf-trainer",
    *,
    more: str = "",
    failpoints: str = "",
    environ: dict[str, str] | None = None,
) -> Daemon:
    (root / "out").mkdir(parents=True, exist_ok=True)
    watch = f'[[watch]]\npath = "../out"\nrun = "run"\npreset = "{preset}"\nquiet_s = 0.3\n{more}'
    armed = {"TIERD_FAILPOINTS": failpoints} if failpoints else {}
    return Daemon(root / "house", more=watch, environ={**armed, **(environ or {})})


LONG = pytest.mark.long
WATCHING = ("adopt.commit", "adopt.committed")  # failpoints


@pytest.mark.parametrize("preset", ["deepspeed", *(pytest.param(name, marks=LONG) for name in ("hf-trainer", "dcp"))])
def test_checkpoints_come_back_on_an_empty_machine_from_cold(tmp_path: Path, preset: str) -> None:
    out = tmp_path / "out"
    with watching(tmp_path, preset) as daemon:
        wait_until(lambda: daemon.status()["watches"][0]["is_there"], "the first pass")
        for step in (10, 20):
            saved = SAVES[preset](out, step, Writer())
            wait_until(lambda step=step: step in daemon.steps("cold"), "the copy in cold")
        before = contents(saved)
        (watch,) = daemon.status()["watches"]
        assert (watch["adopted"], watch["newest_step"], watch["problems"]) == (2, 20, [])
        assert watch["polled_because"] == ""
        assert 'tierd_watched_total{outcome="adopted",run="run"}' in daemon.request("/metrics")[1].decode()
        printed = daemon.tierd("status").stdout
        assert f"watch {out} ({preset}) for run: 2 adopted since the daemon's start; the newest of step 20" in printed
    shutil.rmtree(out)
    shutil.rmtree(tmp_path / "house/hot")
    with watching(tmp_path, preset) as daemon:
        restored = daemon.tierd("restore", "--tier", "cold", "--run", "run", "--to", out / saved.name)
        assert restored.returncode == 0, restored.stderr
        assert contents(saved) == before
        wait_until(lambda: daemon.status()["watches"][0]["is_there"], "the first pass")
        SAVES[preset](out, 30, Writer())
        wait_until(lambda: 30 in daemon.steps("cold"), "the next checkpoint")
        rows = {row["step"]: row["generation"] for row in daemon.get("/api/v1/checkpoints")}
        assert rows == {10: 1, 20: 1, 30: 1}, "nothing is adopted twice"
        if preset != "deepspeed":  # there, `latest` names another one now
            wait_until(lambda: not daemon.status()["watches"][0]["waiting"], "the restored one to be known")


@pytest.mark.parametrize(
    "failpoint",
    [
        "adopt.commit@1",
        *(pytest.param(name, marks=LONG) for name in ("file.write@2", "file.linked@3", "adopt.committed@1")),
    ],
)
@pytest.mark.long
def test_killed_while_it_adopts_it_goes_on_and_adopts_once(tmp_path: Path, failpoint: str) -> None:
    (tmp_path / "out").mkdir()
    saved = save_dcp(tmp_path / "out", 10, Writer())
    daemon = watching(tmp_path, "dcp", failpoints=failpoint.replace("@", "=kill@"))
    try:
        daemon.launch()
        assert daemon.wait_exit() != 0
        daemon.restart_armed("")
        wait_until(lambda: daemon.steps("cold") == [10], "the copy in cold")
        save_dcp(tmp_path / "out", 20, Writer())
        wait_until(lambda: daemon.steps("cold") == [10, 20], "the next one")
        assert daemon.tierd("verify", "--deep").returncode == 0
        rows = daemon.json("ls")
        assert sorted((row["step"], row["generation"]) for row in rows) == [(10, 1), (20, 1)]
        assert daemon.tierd("restore", "--step", "10", "--to", tmp_path / "back").returncode == 0
        assert contents(tmp_path / "back") == contents(saved)
    finally:
        daemon.kill()


@pytest.mark.long
def test_drain_to_cold_takes_the_last_checkpoint_and_the_last_lines_of_a_training_that_has_just_ended(
    tmp_path: Path,
) -> None:
    """As where the disk is lost with the job."""
    out = tmp_path / "out"
    sidecars = f'\n[sidecars]\npath = "{out}"\nrun = "run"\nkeep = ["log.txt"]\n'
    daemon = watching(tmp_path, more=sidecars, environ={"TIERD_DAEMON_DRAIN_COLD_S": "600"})
    with daemon:
        wait_until(lambda: daemon.status()["watches"][0]["is_there"], "the first pass")
        SAVES["hf-trainer"](out, 10, Writer())
        (out / "log.txt").write_text("the last line\n")
        assert daemon.stop() == 0
    shutil.rmtree(out)
    shutil.rmtree(daemon.hot)
    assert daemon.tierd("restore", "--tier", "cold", "--run", "run", "--to", tmp_path / "back").returncode == 0
    assert daemon.tierd("sidecars", "--run", "run", "--tier", "cold", "--into", tmp_path / "files").returncode == 0
    assert (tmp_path / "files/log.txt").read_text() == "the last line\n"


def test_a_part_that_a_killed_command_left_is_cleared_and_a_restore_in_progress_is_not(tmp_path: Path) -> None:
    left = tmp_path / "house/hot/run/000000000010-g0001.partial"
    (left / "run/000000000010-g0001").mkdir(parents=True)
    (left / ".tierd-restore").touch()
    other = left.with_name("000000000020-g0001.partial")
    other.mkdir()
    (other / ".tierd-restore").touch()
    (other / "rank-00000.safetensors").touch()
    with watching(tmp_path) as daemon:
        save_hf(tmp_path / "out", 30, Writer())
        wait_until(lambda: daemon.steps("hot") == [30], "an adoption")
        assert not left.exists()
        assert other.exists()
        assert "000000000010-g0001.partial from hot" in daemon.log
