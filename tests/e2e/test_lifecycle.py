"""The default lifecycle after forty snapshots, with a cold tier at file:// and on S3."""

from __future__ import annotations

import filecmp
import json
import shutil
import signal
import socket
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import Daemon
from tests.support.s3 import BUCKET, faulty_proxy, rclone_server
from tests.support.trainer import Trainer, Training
from tests.support.waiting import wait_until
from tierd.format import layout

TENTHS = [10, 20, 30, 40]
KEPT_COLD = [10, 17, 20, 30, 38, 39, 40]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path) as daemon:
        yield daemon


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    with Trainer() as trainer:
        yield trainer


def take_snapshots(training: Training, count: int, milestone_at: int) -> None:
    """As fast as possible. Runs in the trainer."""
    for _ in range(count):
        training.train(1)
        training.snapshot(milestone="best" if training.step == milestone_at else None)
    training.wait_persisted()


def test_hot_keeps_the_last_three_of_forty_snapshots_and_cold_also_every_tenth_and_the_milestone(
    daemon: Daemon, trainer: Trainer
) -> None:
    trainer.connect(daemon.socket)
    trainer.apply(take_snapshots, 40, 17)

    wait_until(lambda: daemon.steps("hot") == [38, 39, 40] and daemon.steps("cold") == KEPT_COLD, "the lifecycle")
    rows = daemon.json("ls")
    assert [(row["step"], row["tiers"]) for row in rows] == [
        (40, ["memory", "hot", "cold"]),
        (39, ["hot", "cold"]),
        (38, ["hot", "cold"]),
        *((step, ["cold"]) for step in (30, 20, 17, 10)),
    ]
    assert {row["step"]: row["milestone"] for row in rows if row["milestone"]} == {17: "best"}
    for folder in map(daemon.folder, (38, 39, 40)):
        there = daemon.cold / "run" / folder.name
        names = sorted(path.name for path in folder.iterdir())
        wait_until(lambda there=there, names=names: names == sorted(path.name for path in there.iterdir()), "markers")
        assert filecmp.cmpfiles(folder, there, names, shallow=False) == (names, [], [])


@pytest.mark.long
def test_hot_keeps_every_tenth_and_the_milestone_until_the_cold_tier_is_back(daemon: Daemon, trainer: Trainer) -> None:
    trainer.connect(daemon.socket)
    shutil.rmtree(daemon.cold, ignore_errors=True)
    daemon.cold.write_text("in the way")
    trainer.apply(take_snapshots, 40, 17)

    wait_until(lambda: daemon.steps("hot") == KEPT_COLD, "all that no policy keeps to be evicted")
    assert daemon.steps("cold") == []
    assert daemon.metric('tierd_queue_checkpoints{tier="cold"}') == len(KEPT_COLD)

    daemon.cold.unlink()
    daemon.cold.mkdir()
    wait_until(lambda: daemon.steps("hot") == [38, 39, 40] and daemon.steps("cold") == KEPT_COLD, "the lifecycle")


@pytest.mark.long
def test_every_tenth_is_kept_although_the_daemon_is_killed_repeatedly(daemon: Daemon, trainer: Trainer) -> None:
    trainer.connect(daemon.socket)
    for _ in range(3):
        trainer.apply(take_snapshots, 7, 0)
        daemon.kill()
        daemon.start()
        daemon.wait_attached()
    trainer.apply(take_snapshots, 7, 0)

    wait_until(lambda: daemon.steps("cold") == [10, 20, 26, 27, 28], "the lifecycle")


# ── S3 ──


def on_server(url: str) -> str:
    """The configuration of a cold tier on this server."""
    return f'url = "s3://{BUCKET}/tierd"\nendpoint_url = "{url}"\nregion = "us-east-1"'


@pytest.fixture
def on_s3(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon whose cold tier is a real S3 server."""
    with (
        rclone_server(tmp_path / "s3") as url,
        Daemon(tmp_path / "node", cold=on_server(url)) as daemon,
    ):
        yield daemon


@pytest.mark.usefixtures("checkpoints_examined")
def test_run_is_restored_and_resumed_from_s3_after_the_hot_disk_is_lost(on_s3: Daemon, trainer: Trainer) -> None:
    daemon = on_s3
    trainer.connect(daemon.socket)
    trainer.train(5)
    trainer.durable(metrics={"loss": float("nan"), "accuracy": 0.5})
    trainer.wait_replicated()
    digest = trainer.digest()
    files = [path for path in daemon.folder(5).iterdir() if not path.name.startswith(layout.HEALTHY)]
    hot = {path.name: path.read_bytes() for path in files}  # the examination may end after the copy
    trainer.kill()
    daemon.kill()
    shutil.rmtree(daemon.hot)

    restored = daemon.root / "restored"
    answer = daemon.json("restore", "--tier", "cold", "--run", "run", "--to", restored)
    assert (answer["step"], answer["tier"]) == (5, "cold")
    assert {path.name: path.read_bytes() for path in restored.iterdir() if path.name != layout.HEALTHY} == hot

    daemon.start()
    with Trainer(seed=2) as second:
        assert second.connect(daemon.socket) == 2
        found = second.restore()
        assert (found.step, found.tier) == (5, "cold")
        assert second.digest() == digest
        assert found.metrics["accuracy"] == 0.5
        assert found.metrics["loss"] != found.metrics["loss"]


def test_training_continues_while_s3_is_unavailable_and_the_copies_follow(tmp_path: Path, trainer: Trainer) -> None:
    away = threading.Event()
    with (
        rclone_server(tmp_path / "s3") as server,
        faulty_proxy(server, lambda method, path: "503" if away.is_set() else "") as url,
        Daemon(tmp_path / "node", cold=on_server(url)) as daemon,
    ):
        trainer.connect(daemon.socket)
        away.set()
        for _ in range(3):
            trainer.train(1)
            trainer.snapshot()
            trainer.wait_persisted()
        assert daemon.metric('tierd_queue_checkpoints{tier="cold"}') == 3
        wait_until(lambda: daemon.status()["failures"], "the failures to be reported")

        away.clear()
        trainer.wait_replicated()
        wait_until(lambda: daemon.steps("cold") == [1, 2, 3], "the copies")


# ── a real Prometheus ──


@pytest.mark.long
@pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed (apt-get install prometheus)"
)
def test_a_real_prometheus_scrapes_the_daemon_and_answers_queries(daemon: Daemon, trainer: Trainer) -> None:
    trainer.connect(daemon.socket)
    trainer.apply(take_snapshots, 4, 2)
    trainer.wait_replicated()
    with prometheus(daemon) as ask:
        expected = {
            'tierd_last_committed_step{run="run",tier="hot"}': 4,
            'tierd_last_committed_step{run="run",tier="cold"}': 4,
            'tierd_snapshots_total{run="run",outcome="persisted"}': 4,
            'tierd_checkpoints{run="run",tier="hot"}': 3,
            'tierd_snapshot_stall_seconds_count': 4,
            'tierd_persist_seconds_count': 4,
            'tierd_halted': 0,
            'tierd_queue_checkpoints{tier="cold"}': 0,
            'sum(tierd_slots)': 2,
        }  # fmt: skip
        wait_until(lambda: {query: ask(query) for query in expected} == expected, "the scrapes")
        assert ask('tierd_tier_used_bytes{tier="hot"}') > 1000
        assert ask('tierd_tier_free_bytes{tier="hot"}') > 1000
        assert ask('tierd_bytes_total{tier="hot",direction="write"}') > 1000
        assert ask('time() - tierd_last_committed_timestamp_seconds{run="run",tier="hot"}') < 60
        assert ask("tierd_build_info") == 1


class prometheus:
    """A Prometheus that scrapes the daemon. `with` gives a function that returns the highest sample of a query."""

    def __init__(self, daemon: Daemon) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._address = f"127.0.0.1:{free.getsockname()[1]}"
        config = daemon.root / "prometheus.json"  # JSON is YAML
        target = {"targets": [daemon.url.removeprefix("http://")]}
        scrape = {
            "job_name": "tierd",
            "scrape_interval": "200ms",
            "scrape_timeout": "200ms",
            "static_configs": [target],
        }
        config.write_text(json.dumps({"scrape_configs": [scrape]}))
        self._log = (daemon.root / "prometheus.log").open("wb")
        self._command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={daemon.root / 'tsdb'}"]

    def __enter__(self) -> Any:
        command = [*self._command, f"--web.listen-address={self._address}"]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        return self._ask

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def _ask(self, query: str) -> float | None:
        try:
            url = f"http://{self._address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
            with urllib.request.urlopen(url, timeout=10) as answer:
                samples = json.loads(answer.read())["data"]["result"]
        except OSError:
            return None  # it is not up yet
        return max((float(sample["value"][1]) for sample in samples), default=None)
