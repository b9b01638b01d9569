"""The example with a daemon: stock tools read its checkpoints, and it resumes bit for bit after any kill."""

from __future__ import annotations

import filecmp
import importlib.util
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tierd_client import DaemonUnreachable

from tests.support.daemon import Daemon
from tests.support.processes import ENVIRONMENT, ROOT
from tests.support.trainer import Trainer, Training
from tests.support.waiting import DEADLINE_S, wait_until

TINY = ["--model-size=tiny", "--threads=1", "--device=cpu", "--batch-size=2", "--block-size=32"]
STOCK = """
import sys, torch
from safetensors.torch import load_file
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader

folder, live = sys.argv[1], torch.load(sys.argv[2], weights_only=True)
plain = load_file(folder + "/rank-00000-of-00001.safetensors")
wanted = {name: torch.zeros_like(tensor) for name, tensor in live.items()}
dcp.load(wanted, storage_reader=HuggingFaceStorageReader(folder), no_dist=True)
for name, tensor in live.items():
    assert torch.equal(plain[name], tensor), name
    assert torch.equal(wanted[name], tensor), name
assert not any(name.startswith("tierd") for name in sys.modules)
print(len(live))
"""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path) as daemon:
        yield daemon


def run_example(training: Training, arguments: list[str], kept: str | None = None) -> int:
    """The example's `main`, run in the trainer. It saves its model to the file `kept` with torch.save."""
    spec = importlib.util.spec_from_file_location("train_gpt", ROOT / "examples" / "train_gpt.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    sys.modules["train_gpt"] = example
    spec.loader.exec_module(example)
    made: list[torch.nn.Module] = []
    gpt = example.GPT
    example.GPT = lambda shape: made.append(gpt(shape)) or made[0]
    code = example.main([*TINY, *arguments])
    if kept is not None:
        named = dict(made[0].named_parameters()) | dict(made[0].named_buffers())
        torch.save({f"model.{name}": tensor.detach() for name, tensor in named.items()}, kept)
    return code


def test_safetensors_and_stock_torch_read_a_checkpoint_that_equals_the_model(daemon: Daemon) -> None:
    live = daemon.root / "live.pt"
    with Trainer() as trainer:
        arguments = ["--steps=4", "--every=2", f"--socket={daemon.socket}", f"--loss-file={daemon.root}/loss.jsonl"]
        assert trainer.apply(run_example, [*arguments, "--run=run"], str(live)) == 0
    wait_until(lambda: daemon.steps("cold") == [2, 4], "the copies")

    hot, cold = daemon.folder(4), daemon.folder(4, tier="cold")
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", STOCK, str(hot), str(live)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20
    names = sorted(path.name for path in hot.iterdir())
    assert filecmp.cmpfiles(hot, cold, names, shallow=False) == (names, [], [])


class Disturbed:
    """The example, restarted until it ends, while the test kills its process and its daemon."""

    def __init__(self, daemon: Daemon, steps: int, delay_s: float) -> None:
        self.daemon = daemon
        self.losses = daemon.root / "loss.jsonl"
        self._arguments = [f"--steps={steps}", "--every=3", f"--socket={daemon.socket}", f"--loss-file={self.losses}"]
        self._arguments += [f"--step-delay-s={delay_s}", "--run=run"]
        self.trainer = self._start()

    def _start(self) -> Trainer:
        trainer = Trainer()
        trainer.begin("apply", run_example, self._arguments)
        return trainer

    def end(self) -> int:
        """Its exit code. It is restarted when it found no daemon, as a launcher does."""
        while True:
            try:
                return self.trainer.end(DEADLINE_S * 5)
            except DaemonUnreachable:
                self.kill_trainer()

    def kill_trainer(self) -> None:
        self.trainer.kill()
        self.trainer = self._start()

    def kill_daemon(self) -> None:
        self.daemon.kill()
        self.daemon.start()

    def kill_both(self) -> None:
        self.daemon.kill()
        self.trainer.kill()
        self.daemon.start()
        self.trainer = self._start()

    def hang_daemon(self) -> None:
        self.daemon.signal(signal.SIGSTOP)
        time.sleep(0.2)  # the duration of the hang
        self.daemon.signal(signal.SIGCONT)


def disturb(daemon: Daemon, *, kills: int, steps: int, seed: int) -> None:
    """Kills at random moments, after which the loss curve must be the undisturbed one."""
    undisturbed = daemon.root / "undisturbed.jsonl"
    with Trainer() as trainer:
        trainer.apply(run_example, [f"--steps={steps}", f"--loss-file={undisturbed}", "--no-tierd"])
    chance = random.Random(seed)
    run = Disturbed(daemon, steps, delay_s=0.02)
    try:
        for _ in range(kills):
            time.sleep(chance.uniform(0, 0.8))  # a random moment
            chance.choice([run.kill_trainer, run.kill_trainer, run.kill_daemon, run.kill_both, run.hang_daemon])()
        assert run.end() == 0
    finally:
        run.trainer.kill()
    assert run.losses.read_bytes() == undisturbed.read_bytes()
    for tier in ("hot", "cold"):
        assert daemon.tierd("verify", "--tier", tier).returncode == 0


@pytest.mark.long
def test_loss_curve_is_the_undisturbed_one_after_ten_random_kills(daemon: Daemon) -> None:
    disturb(daemon, kills=10, steps=60, seed=2)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_loss_curve_is_the_undisturbed_one_after_a_hundred_random_kills(daemon: Daemon) -> None:
    disturb(daemon, kills=100, steps=900, seed=time.time_ns())
