"""torchtitan's own Trainer with TierdCheckpointer: killed runs end bit for bit as undisturbed ones."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import Daemon
from tests.support.waiting import wait_until
from tierd.errors import BadConfig

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed: pip install torchtitan==0.3.0"
)

STEPS, INTERVAL = 24, 4
START_S = 600.0


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("daemon")) as daemon:
        yield daemon


class Run:
    """One command of a torchtitan training with several ranks, which can be started again and again."""

    def __init__(self, folder: Path, ranks: int, steps: int = STEPS, **checkpoint: Any) -> None:
        self.folder, self.ranks = folder, ranks
        folder.mkdir(exist_ok=True)
        options = {"enable": True, "interval": INTERVAL, **checkpoint}
        module = "tests.support.titan_training"
        self.command = [sys.executable, "-m", module, str(folder), str(steps), json.dumps(options)]
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        for rank in range(self.ranks):
            places = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.ranks)}
            environ = {**os.environ, **places, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
            with (self.folder / f"output-{rank}.txt").open("ab") as output:
                self.processes.append(subprocess.Popen(self.command, env=environ, stdout=output, stderr=output))

    def end(self) -> list[int]:
        codes = [process.wait(START_S) for process in self.processes]
        self.processes.clear()
        return codes

    def interrupt(self, at_step: int, number: signal.Signals) -> list[int]:
        """Starts the command, sends the signal to all ranks after `at_step` is logged, and returns the exit codes."""
        self.start()
        wait_until(lambda: at_step in self.losses() or self.is_over(), timeout_s=START_S)
        for process in self.processes:
            process.send_signal(number)
        return self.end()

    def is_over(self) -> bool:
        return any(process.poll() is not None for process in self.processes)

    def lines(self, rank: int = 0) -> list[dict[str, Any]]:
        path = self.folder / f"losses-{rank}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def losses(self, rank: int = 0) -> dict[int, set[str]]:
        """By step: the losses that all starts computed."""
        losses: dict[int, set[str]] = {}
        for line in self.lines(rank):
            if "loss" in line:
                losses.setdefault(line["step"], set()).add(line["loss"])
        return losses

    def weights(self, rank: int) -> list[str]:
        return [line["weights"] for line in self.lines(rank) if "weights" in line]

    def output(self) -> str:
        return "\n".join(path.read_text() for path in self.folder.glob("output-*.txt"))


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_and_stopped_training_ends_as_an_undisturbed_one(ranks: int, daemon: Daemon, tmp_path: Path) -> None:
    """Three SIGKILLs, one SIGTERM, and two more starts of the finished run. With two ranks the model is sharded."""
    undisturbed = Run(tmp_path / "undisturbed", ranks, run=f"undisturbed-{ranks}", socket=daemon.socket)
    undisturbed.start()
    assert undisturbed.end() == [0] * ranks, undisturbed.output()

    run = Run(tmp_path / "killed", ranks, run=f"killed-{ranks}", socket=daemon.socket)
    chance = random.Random(ranks)
    for first in (5, 10, 14):
        assert set(run.interrupt(first + chance.randrange(4), signal.SIGKILL)) == {-signal.SIGKILL}, run.output()
    assert run.interrupt(19, signal.SIGTERM) == [0] * ranks, run.output()
    for _ in range(3):
        run.start()
        assert run.end() == [0] * ranks, run.output()

    for rank in range(ranks):
        assert len(run.losses(rank)) == STEPS
        assert run.losses(rank) == undisturbed.losses(rank)
        assert run.weights(rank)[-3:] == undisturbed.weights(rank) * 3
    steps = [row["step"] for row in daemon.json("ls", "--run", f"killed-{ranks}")]
    assert steps[0] == STEPS
    assert [line for line in run.lines() if line["step"] == STEPS and "loss" in line] == [
        {"step": STEPS, "loss": next(iter(run.losses()[STEPS]))}
    ]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_training_of_the_stock_manager_is_continued_not_begun_anew(daemon: Daemon, tmp_path: Path) -> None:
    stock = Run(tmp_path, 1, steps=6, last_save_model_only=False, keep_latest_k=0)
    stock.start()
    assert stock.end() == [0], stock.output()
    (tmp_path / "losses-0.jsonl").unlink()

    run = Run(tmp_path, 1, steps=8, run="migrated", socket=daemon.socket)
    run.start()
    assert run.end() == [0], run.output()
    assert sorted(run.losses()) == [7, 8]
    assert [row["step"] for row in daemon.json("ls", "--run", "migrated")] == [8]


@pytest.mark.filterwarnings("ignore")  # importing torchtitan warns
def test_options_that_tierd_cannot_honour_are_refused() -> None:
    from tierd_client.frameworks.torchtitan import TierdCheckpointer

    with pytest.raises(BadConfig, match="keep_latest_k=5: tierd's lifecycle deletes checkpoints"):
        TierdCheckpointer.Config(enable=True, run="run", keep_latest_k=5)
    options: list[Any] = [{"export_dtype": "bfloat16"}, {"last_save_model_only": True}]
    for option in options:
        with pytest.raises(BadConfig, match="without last_save_in_hf"):
            TierdCheckpointer.Config(enable=True, run="run", **option)
    TierdCheckpointer.Config(enable=True, last_save_in_hf=True, last_save_model_only=True, export_dtype="bfloat16")
