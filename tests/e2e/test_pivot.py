"""`tierd pivot` with real trainers: a phase ends, and the next one begins with the same weights and moments."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import Daemon
from tests.support.trainer import Trainer, Training, joined
from tests.support.waiting import wait_until

HISTORY, SAMPLES = ".loss.json", ".samples.json"


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    (tmp_path / "out").mkdir()
    section = f'[sidecars]\npath = "../out"\nrun = "run"\nkeep = ["{HISTORY}"]\nreset = ["{SAMPLES}", "*.bandit"]'
    with Daemon(tmp_path / "house", more=section) as daemon:
        yield daemon


@contextmanager
def training(daemon: Daemon) -> Generator[tuple[Trainer, Any, str]]:
    """A trainer that trains until a stop request, what it has restored, and the digest of its state then."""
    with joined(daemon.root, 1) as (trainer,):
        trainer.connect(daemon.socket, every_steps=0)
        restored = trainer.restore()
        digest = trainer.digest()
        trainer.enter()
        trainer.begin("apply", _loop, str(daemon.root.parent / "out"))
        yield trainer, restored, digest


def _loop(training: Training, folder: str) -> int:
    """Runs in the trainer. A line of the history per step; the samples hold the state of a bandit. The last step. A
    snapshot when one is asked for."""
    samples = Path(folder) / SAMPLES
    arms = json.loads(samples.read_text()) if samples.exists() else []
    with training.client as client, (Path(folder) / HISTORY).open("a") as history:
        while True:
            training.train(1)
            arms.append(training.step)
            samples.write_text(json.dumps(arms))
            history.write(f"{training.step}\n")
            history.flush()
            if client.due(training.step) or client.stopping:
                client.snapshot(training.step, training.state)
            if client.stopping:
                return training.step


def test_a_phase_ends_and_the_next_one_begins_with_its_weights(daemon: Daemon, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with training(daemon) as (trainer, restored, begun):
        assert restored is None
        wait_until(lambda: (out / SAMPLES).exists() and len(json.loads((out / SAMPLES).read_text() or "[]")) > 3)
        report = daemon.json("pivot", "--run", "run", "--name", "phase-1")
        last = trainer.end()
        digest = trainer.digest()
    assert (report["step"], report["generation"], report["milestone"]) == (last, 1, "phase-1")
    assert report["tiers"] == ["hot", "cold"] or report["tiers"] == ["hot"]
    assert list(report["archived"]) == [SAMPLES]
    assert not (out / SAMPLES).exists()
    lines = (out / HISTORY).read_text()
    with training(daemon) as (trainer, restored, begun):
        assert restored.step == last
        assert begun == digest, "weights and moments, bit for bit"
        wait_until((out / SAMPLES).exists, "the new bandit")
        daemon.tierd("stop", "--run", "run")
        assert trainer.end() > last
    assert json.loads((out / SAMPLES).read_text())[0] == last + 1, "the bandit began anew"
    history = [int(line) for line in (out / HISTORY).read_text().splitlines()]
    assert (out / HISTORY).read_text().startswith(lines)
    assert history == list(range(1, len(history) + 1)), "the history is unbroken"
    done = daemon.tierd("sidecars", "--run", "run", "--phase", "phase-1", "--tier", "cold", "--into", tmp_path / "old")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "old" / SAMPLES).read_text()) == list(range(1, last + 1))


def test_a_pivot_that_a_tier_has_stopped_is_completed_by_the_next_one(daemon: Daemon, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with training(daemon) as (trainer, _, _):
        wait_until((out / SAMPLES).exists, "the samples")
        wait_until(lambda: daemon.cold.exists())
        assert daemon.tierd("stop", "--run", "run").returncode == 0
        last = trainer.end()
    wait_until(lambda: daemon.steps("cold") == [last], "the copy in cold")
    before = (out / SAMPLES).read_bytes()
    daemon.cold.rename(tmp_path / "away")
    daemon.cold.write_text("no folder")
    failed = daemon.tierd("pivot", "--run", "run", "--name", "phase-1")
    assert failed.returncode != 0
    assert "repeat the command when it answers" in failed.stderr
    assert (out / SAMPLES).read_bytes() == before
    daemon.cold.unlink()
    (tmp_path / "away").rename(daemon.cold)
    for archived in ([SAMPLES], []):
        report = daemon.json("pivot", "--run", "run", "--name", "phase-1")
        assert (report["step"], list(report["archived"])) == (last, archived)
    assert not (out / SAMPLES).exists()
    (out / SAMPLES).write_text("[0]")  # as of another phase: steps begin at 1
    assert list(daemon.json("pivot", "--run", "run", "--name", "phase-1")["archived"]) == [SAMPLES]
    versions = [each["version"] for each in daemon.json("sidecars", "--run", "run") if each["phase"] == "phase-1"]
    assert versions == [1, 2], "what the milestone had stays"


def test_a_pivot_leaves_the_files_of_a_phase_that_has_begun(daemon: Daemon, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with training(daemon) as (trainer, _, _):
        wait_until((out / SAMPLES).exists, "the samples")
        daemon.json("pivot", "--run", "run", "--name", "phase-1")
        trainer.end()
    with training(daemon) as (trainer, _, _):
        wait_until((out / SAMPLES).exists, "the samples of the next phase")
        refused = daemon.tierd("pivot", "--run", "run", "--name", "phase-1")
        assert refused.returncode != 0
        assert "generation 2 has begun since" in refused.stderr
        daemon.tierd("stop", "--run", "run")
        trainer.end()
    assert (out / SAMPLES).exists()


def test_a_start_without_a_checkpoint_is_no_next_phase_and_marks_nothing(daemon: Daemon, tmp_path: Path) -> None:
    """It may have written into the files of the phase, so they are not those of the newest checkpoint."""
    out = tmp_path / "out"
    with training(daemon) as (trainer, _, _):
        wait_until((out / SAMPLES).exists, "the samples")
        daemon.tierd("stop", "--run", "run")
        trainer.end()
    with Trainer() as crashed:
        crashed.connect(daemon.socket)
        crashed.restore()
        crashed.kill()
    wait_until(lambda: daemon.json("status")["runs"][0]["state"] == "lost")
    refused = daemon.tierd("pivot", "--run", "run", "--name", "phase-1")
    assert refused.returncode == 2
    assert "generation 2 has begun and has no checkpoint" in refused.stderr
    assert (out / SAMPLES).exists()
    assert [each["milestone"] for each in daemon.json("ls")] == [None]
    with training(daemon) as (trainer, _, _):
        report = daemon.json("pivot", "--run", "run", "--name", "phase-1")
        assert (report["step"], report["generation"]) == (trainer.end(), 3)
    assert not (out / SAMPLES).exists()


def test_a_milestone_that_another_command_has_set_ends_no_phase(daemon: Daemon, tmp_path: Path) -> None:
    """The run goes on with the files, and then they are not those of that checkpoint."""
    out = tmp_path / "out"

    def check_refused(expected: str) -> None:
        refused = daemon.tierd("pivot", "--run", "run", "--name", "best")
        assert refused.returncode == 2
        assert expected in refused.stderr
        assert (out / SAMPLES).exists()

    with training(daemon) as (trainer, _, _):
        wait_until((out / SAMPLES).exists, "the samples")
        assert daemon.tierd("snapshot", "--run", "run", "--milestone", "best").returncode == 0
        check_refused("is the milestone best already, and the run goes on")
        assert trainer.is_busy
        daemon.tierd("stop", "--run", "run")
        last = trainer.end()
    check_refused("best is a milestone already, and run/")
    report = daemon.json("pivot", "--run", "run", "--name", "phase-1")
    assert (report["step"], list(report["archived"])) == (last, [SAMPLES])


def test_the_end_of_a_phase_outlasts_a_loss_of_power(
    daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the next phase could begin with a file of the former one."""
    with training(daemon) as (trainer, _, _):
        wait_until((tmp_path / "out" / SAMPLES).exists, "the samples")
        daemon.tierd("stop", "--run", "run")
        trainer.end()
    synced: list[set[str]] = []
    fsync = os.fsync

    def note(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}") == str(tmp_path / "out"):
            synced.append({path.name for path in (tmp_path / "out").iterdir()})
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    daemon.json("pivot", "--run", "run", "--name", "phase-1")
    assert synced[-1:] == [{HISTORY}]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param("x" * 121 + ".bandit", "cannot be part of a key", marks=pytest.mark.long),
        ("a b.bandit", "cannot be part of a key"),
        ("link.bandit", "Too many levels of symbolic links"),
        pytest.param("folder.bandit", "it is not a regular file", marks=pytest.mark.long),
    ],
)
def test_a_file_that_cannot_be_archived_is_refused_before_the_run_stops(
    daemon: Daemon, tmp_path: Path, name: str, expected: str
) -> None:
    with training(daemon) as (trainer, _, _):
        if name.startswith("link"):
            (tmp_path / "out" / name).symlink_to(tmp_path / "elsewhere")
        elif name.startswith("folder"):
            (tmp_path / "out" / name).mkdir()
        else:
            (tmp_path / "out" / name).write_text("[1]")
        refused = daemon.tierd("pivot", "--run", "run", "--name", "phase-1")
        assert refused.returncode == 2
        assert expected in refused.stderr
        assert trainer.is_busy, "it goes on"
        assert name in {path.name for path in (tmp_path / "out").iterdir()}
        daemon.tierd("stop", "--run", "run")
        trainer.end()


def test_a_file_to_keep_is_never_deleted(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / SAMPLES).write_text("[1]")
    section = f'[sidecars]\npath = "../out"\nrun = "run"\nkeep = ["*.json"]\nreset = ["{SAMPLES}"]'
    with Daemon(tmp_path / "house", more=section) as daemon:
        refused = daemon.tierd("pivot", "--run", "run", "--name", "phase-1")
    assert refused.returncode == 2
    assert "fits both [sidecars] keep and reset" in refused.stderr
    assert (tmp_path / "out" / SAMPLES).exists()


def test_a_pivot_stops_no_run_while_a_tier_does_not_answer(daemon: Daemon, tmp_path: Path) -> None:
    with training(daemon) as (trainer, _, _):
        wait_until(daemon.cold.exists)
        daemon.cold.rename(tmp_path / "away")
        daemon.cold.write_text("no folder")
        refused = daemon.tierd("pivot", "--run", "run", "--name", "phase-1")
        assert refused.returncode != 0
        assert "repeat the command when it answers" in refused.stderr
        assert trainer.is_busy, "it goes on"
        daemon.cold.unlink()
        (tmp_path / "away").rename(daemon.cold)
        daemon.tierd("stop", "--run", "run")
        trainer.end()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--run", "other", "--name", "a"], "the files of [sidecars] are those of run"),
        (["--run", "run", "--name", "a/b"], "cannot name a milestone"),
        (["--run", "run", "--name", "a"], "run"),
    ],
)
def test_a_pivot_that_cannot_be_done_changes_nothing(
    daemon: Daemon, tmp_path: Path, arguments: list[str], expected: str
) -> None:
    (tmp_path / "out" / SAMPLES).write_text("[]")
    refused = daemon.tierd("pivot", *arguments)
    assert refused.returncode != 0
    assert expected in refused.stderr
    assert "Traceback" not in refused.stderr
    assert (tmp_path / "out" / SAMPLES).exists()


def test_a_run_of_another_program_is_not_said_to_go_on_from_the_checkpoint(daemon: Daemon, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-5"
    checkpoint.mkdir()
    (checkpoint / "weights").write_bytes(b"1")
    (tmp_path / "out" / SAMPLES).write_text("[]")
    assert daemon.tierd("adopt", checkpoint, "--run", "run", "--step", "5").returncode == 0
    ended = daemon.tierd("pivot", "--run", "run", "--name", "phase-1")
    assert ended.returncode == 0, ended.stderr
    assert "tierd cannot see whether it still runs" in ended.stderr
    assert "its next start begins where that program resumes" in ended.stdout
    assert not (tmp_path / "out" / SAMPLES).exists()
