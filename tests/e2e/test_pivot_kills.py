"""`tierd pivot` is killed at each step and run again: no byte of a file is lost, and the second run completes.

A step is a call that changes a file, a request to a bucket or to the daemon, or a failpoint: the command dies directly
before it. The files of the tiers are read with code of this test.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from tests.e2e.test_pivot import HISTORY, SAMPLES, training
from tests.support.bucket import Bucket, bucket_server
from tests.support.daemon import Daemon
from tests.support.kills.battery import BucketObjects
from tests.support.processes import ForkedProcess, run_tierd
from tests.support.s3 import BUCKET, ENVIRONMENT
from tests.support.waiting import DEADLINE_S, wait_until
from tierd import failpoints

CHANGES = {"os.link", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}
REQUESTS = {"http.client.send", "socket.connect", "socket.sendmsg"}
FAILPOINTS = ("tier.mark", "sidecar.put", "file.created", "file.write", "file.sync", "file.link", "file.linked")
RESET = {
    SAMPLES: json.dumps(list(range(2000))).encode(),  # its last byte is a segment of its own
    "lines.bandit": b'{"arm": 1}\n' * 50,
    "empty.bandit": b"",
}
LARGE = {**RESET, "large.bandit": bytes(range(256)) * 40_000}  # two segments
SECTION = f'[sidecars]\npath = "../out"\nrun = "run"\nkeep = ["{HISTORY}"]\nreset = ["{SAMPLES}", "*.bandit"]'
SEGMENT = re.compile(r"file-(?P<file>.+)-v(?P<version>\d+)-(?P<begin>\d{15})-(?P<end>\d{15})-[0-9a-f-]+\.(seg|tail)")

Files = Callable[[], Mapping[str, bytes]]
"""Reads all files of a tier, by key."""


# ── the command that is killed ──


def killed_at(step: int, arguments: list[str], environ: Mapping[str, str], log: str) -> None:
    """The `tierd` command, killed before this step. Runs in a forked process."""
    os.environ[failpoints.VARIABLE] = environ.get(failpoints.VARIABLE, "")
    failpoints.arm()
    steps = count(1)

    def before(event: str, details: tuple[object, ...]) -> None:
        if is_step(event, details) and next(steps) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(before)
    run_tierd(arguments, environ, log)


def is_step(event: str, details: tuple[object, ...]) -> bool:
    if event == "open":  # opened to be written; what Python caches for itself has a whole path
        path, _, flags = details
        return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR)) and not str(path).startswith("/")
    return event in CHANGES or event in REQUESTS


def pivot(daemon: Daemon, phase: str, *, step: int = 0, failpoint: str = "") -> bool:
    """Whether it was killed; otherwise it has succeeded."""
    log = daemon.root / f"pivot-{phase}.log"
    arguments = ["--config", str(daemon.config), "pivot", "--run", "run", "--name", phase]
    environ = {**os.environ, **ENVIRONMENT, failpoints.VARIABLE: failpoint}
    code = ForkedProcess(killed_at, step, arguments, environ, str(log)).wait(DEADLINE_S)
    assert code in (0, -signal.SIGKILL), log.read_text()
    return code != 0


# ── what is expected ──


def archived(files: Mapping[str, bytes], phase: str, name: str) -> set[bytes]:
    """The versions of a file that a tier has."""
    segments: dict[str, dict[int, bytes]] = {}
    for key, raw in files.items():
        match = SEGMENT.fullmatch(key.removeprefix(f"run/sidecars-{phase}/"))
        if match is not None and match["file"] == name:
            content = raw[raw.index(b"\n") + 1 :]
            assert len(content) == int(match["end"]) - int(match["begin"]), key
            pieces = segments.setdefault(match["version"], {})
            pieces[int(match["begin"])] = max(content, pieces.get(int(match["begin"]), b""), key=len)
    versions: set[bytes] = set()
    for pieces in segments.values():
        whole = b""
        while more := pieces.get(len(whole), b""):
            whole += more
        versions.add(whole)
    return versions


def folder_files(root: Path) -> dict[str, bytes]:
    """A file that a daemon deletes meanwhile is left out."""
    files: dict[str, bytes] = {}
    for path in root.rglob("*"):
        with suppress(FileNotFoundError, IsADirectoryError):
            files[path.relative_to(root).as_posix()] = path.read_bytes()
    return files


@dataclass
class Trials:
    """Kills the command again and again, each time with another name, on files that are all in their place."""

    daemon: Daemon
    tiers: list[Files]
    reset: Mapping[str, bytes]

    @property
    def out(self) -> Path:
        return self.daemon.root.parent / "out"

    def kill_and_repeat(self, phase: str, *, step: int = 0, failpoint: str = "") -> bool:
        """Whether the command was killed: otherwise it has come to its end."""
        kept = (self.out / HISTORY).read_bytes()
        for name, content in self.reset.items():
            (self.out / name).write_bytes(content)
        is_killed = pivot(self.daemon, phase, step=step, failpoint=failpoint)
        left = self.check_nothing_lost(phase)
        report = self.daemon.json("pivot", "--run", "run", "--name", phase)
        assert report["archived"] == left, "the second run archives what is left"
        assert self.check_nothing_lost(phase) == {}
        assert [path.name for path in self.out.iterdir()] == [HISTORY]
        assert (self.out / HISTORY).read_bytes() == kept
        assert (self.daemon.folder(report["step"]) / f"milestone-{phase}.json").exists()
        return is_killed

    def check_nothing_lost(self, phase: str) -> dict[str, int]:
        """Each file is in its place, or every tier has it whole and once. The sizes of those in their place."""
        left: dict[str, int] = {}
        for name, content in self.reset.items():
            if (self.out / name).exists():
                assert (self.out / name).read_bytes() == content, name
                left[name] = len(content)
            elif content:
                for files in self.tiers:
                    assert archived(files(), phase, name) == {content}, f"{phase}: {name} is nowhere"
        return left

    def at_each_step(self, *, stride: int = 1, first: int = 1) -> int:
        """At every `stride`-th step. How many trials were killed."""
        for killed, step in enumerate(count(first, stride)):
            if not self.kill_and_repeat(f"step-{step}", step=step):
                return killed
        raise AssertionError

    def at_each_failpoint(self, names: Iterable[str]) -> int:
        """At each hit of each of them. How many trials were killed."""
        killed = 0
        for name in names:
            for hit in count(1):
                failpoint = f"{name}=kill@{hit}"
                if not self.kill_and_repeat(f"{name.replace('.', '-')}-{hit}", failpoint=failpoint):
                    assert hit > 1, f"{name} is never reached"
                    break
                killed += 1
        return killed


# ── the trials ──


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with bucket_server() as bucket:
        yield bucket


@pytest.fixture
def daemon(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Daemon]:
    (tmp_path / "out").mkdir()
    cold = 'url = "file://cold"'
    if "bucket" in request.fixturenames:
        bucket: Bucket = request.getfixturevalue("bucket")
        cold = f'url = "s3://{BUCKET}/deep"\nendpoint_url = "{bucket.url}"'
    with Daemon(tmp_path / "house", cold=cold, more=SECTION, environ=ENVIRONMENT) as daemon:
        yield daemon


@pytest.fixture
def trials(request: pytest.FixtureRequest, daemon: Daemon, tmp_path: Path) -> Trials:
    """Of a run that has stopped, with a checkpoint in both tiers."""
    with training(daemon) as (trainer, _, _):
        wait_until((tmp_path / "out" / SAMPLES).exists)
        assert daemon.tierd("stop", "--run", "run").returncode == 0
        last = trainer.end()
    wait_until(lambda: daemon.steps("cold") == [last], "the copy in cold")
    cold: Files = partial(folder_files, daemon.cold)
    if "bucket" in request.fixturenames:
        cold = BucketObjects(request.getfixturevalue("bucket"), "deep/").files
    is_long = request.node.get_closest_marker("long") is not None
    return Trials(daemon, [partial(folder_files, daemon.hot), cold], LARGE if is_long else RESET)


@pytest.mark.long
def test_a_pivot_that_is_killed_at_some_steps_loses_nothing_and_is_completed(trials: Trials) -> None:
    assert trials.at_each_step(stride=7) >= 4


@pytest.mark.long
def test_a_pivot_that_is_killed_at_requests_to_a_bucket_loses_nothing_and_is_completed(
    bucket: Bucket, trials: Trials
) -> None:
    assert trials.at_each_step(stride=9, first=3) >= 2


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_pivot_that_is_killed_at_each_step_loses_nothing_and_is_completed(trials: Trials) -> None:
    assert trials.at_each_step() >= 30


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_pivot_that_is_killed_at_each_failpoint_loses_nothing_and_is_completed(trials: Trials) -> None:
    assert trials.at_each_failpoint(FAILPOINTS) >= 30


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_pivot_that_is_killed_at_each_request_to_a_bucket_loses_nothing_and_is_completed(
    bucket: Bucket, trials: Trials
) -> None:
    assert trials.at_each_step() >= 30
    assert trials.at_each_failpoint(["s3.put_bytes", "s3.placed"]) >= 10


@pytest.mark.parametrize("stride", [12, pytest.param(1, marks=pytest.mark.long)])
def test_a_pivot_that_is_killed_while_it_stops_the_run_is_completed(
    daemon: Daemon, tmp_path: Path, stride: int
) -> None:
    """The checkpoint of the stop ends the phase, and the file of that step is archived."""
    out, before, killed = tmp_path / "out", 0, 0
    for step in count(2, stride):
        phase = f"step-{step}"
        with training(daemon) as (trainer, _, _):
            wait_until((out / SAMPLES).exists, "the samples")
            is_killed = pivot(daemon, phase, step=step)
            report = daemon.json("pivot", "--run", "run", "--name", phase)
            last = trainer.end()
        assert report["step"] == last
        assert not (out / SAMPLES).exists()
        expected = json.dumps(list(range(before + 1, last + 1))).encode()
        for tier in (daemon.hot, daemon.cold):
            assert archived(folder_files(tier), phase, SAMPLES) == {expected}
        assert (out / HISTORY).read_text().split() == [str(each) for each in range(1, last + 1)]
        before = last
        if not is_killed:
            break
        killed += 1
    assert killed
