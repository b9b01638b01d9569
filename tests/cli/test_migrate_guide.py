"""docs/guides/migrate.md: its commands run on folders as other frameworks write them, and its code moves a training.

DeepSpeed, DLRover and torchsnapshot are not installed: the layouts are theirs, and `zero_to_fp32.py` and `Snapshot`
stand for what they do.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tierd_client
import torch
import torch.distributed.checkpoint as dcp
from tierd_client import TrainingState
from torch.distributed.checkpoint.state_dict import get_state_dict
from typer.testing import CliRunner

from tests.support.cli import House, make_house
from tests.support.daemon import Daemon
from tests.support.framework_saves import Writer, save_dcp, save_deepspeed
from tests.support.state import Training, assert_same
from tierd.cli.app import make_app

GUIDE = (Path(__file__).parents[2] / "docs/guides/migrate.md").read_text(encoding="utf-8")
FRAMEWORKS = ("torch.save", "torch.distributed.checkpoint", "DeepSpeed", "DLRover", "torchsnapshot")

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns of one process without torch.distributed

ZERO_TO_FP32 = """
import sys, torch
from pathlib import Path
from safetensors.torch import save_file
checkpoints, target, option = sys.argv[1:]
assert option == "--safe_serialization"
folder = Path(checkpoints) / (Path(checkpoints) / "latest").read_text()
assert folder.is_dir()
Path(target).mkdir()
weights = torch.load(Path(checkpoints) / "weights.pt")
save_file(weights, Path(target) / "model.safetensors", metadata={"format": "pt"})
"""


def blocks(framework: str, language: str) -> list[str]:
    section = re.search(rf"^## {re.escape(framework)}\n(.*?)(?=^## |\Z)", GUIDE, re.DOTALL | re.MULTILINE)
    assert section is not None
    return re.findall(rf"^```{language}\n(.*?)^```$", section[1], re.DOTALL | re.MULTILINE)


@dataclass
class Snapshot:
    """As torchsnapshot's: it gives the state of an app to its objects."""

    path: str

    def restore(self, app_state: dict[str, Any]) -> None:
        for key, stateful in app_state.items():
            stateful.load_state_dict(torch.load(Path(self.path) / "0" / key, weights_only=True))


def trained() -> Training:
    training = Training.fresh()
    training.train(3)
    return training


def write_old_checkpoints(training: Training) -> None:
    """Below the current folder, of steps 400 and 500, where each framework writes them."""
    model, optimizer = training.model.state_dict(), training.optimizer.state_dict()
    whole = {"model": model, "optimizer": optimizer, "step": 500}
    for name in ("torch-out", "dcp-out", "ds-out", "dlrover-out", "dlrover-fsdp", "snapshots"):
        Path(name).mkdir()
    for step in (400, 500):
        torch.save(whole, f"torch-out/step_{step}.pt")
        torch.save(whole, f"dlrover-out/checkpoint-{step}.pt")
        weights, moments = get_state_dict(training.model, training.optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=f"dcp-out/step-{step}", no_dist=True)
        save_dcp(Path("dlrover-fsdp"), step, Writer()).rename(f"dlrover-fsdp/{step}")
        save_deepspeed(Path("ds-out"), step, Writer())
        rank = Path(f"snapshots/step_{step}/0")
        rank.mkdir(parents=True)
        for key, value in (("model", model), ("optimizer", optimizer)):
            torch.save(value, rank / key)
        (rank.parent / ".snapshot_metadata").write_text("manifest: {}\nversion: 0.1.0\nworld_size: 1\n")
    torch.save(model, "ds-out/weights.pt")
    Path("ds-out/zero_to_fp32.py").write_text(ZERO_TO_FP32)
    Path("dlrover-out/dlrover_latest.txt").write_text("500")
    Path("dlrover-out/._dlrover_ckpt_stage").mkdir()


def run(line: str) -> None:
    """One line of a block. What is not tierd's runs in a shell, with this Python."""
    if line.startswith("tierd "):
        result = CliRunner().invoke(make_app(), shlex.split(line)[1:])
        assert result.exit_code == 0, f"{line}: {result.output}"
    else:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        subprocess.run(["bash", "-ec", line], check=True, env={**os.environ, "PATH": path}, timeout=120)


@pytest.mark.long
def test_the_commands_of_the_guide_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    house: House = make_house(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIERD_CONFIG", str(house.config))
    training = trained()
    write_old_checkpoints(training)
    for framework in FRAMEWORKS:
        (block,) = blocks(framework, "sh")
        for line in block.splitlines():
            run(line)

    runs = {report["run"]: report["step"] for report in house.json("ls")}
    adopted = ("torch-history", "dcp-history", "ds-history", "dlrover-history", "dlrover-fsdp", "torchsnapshot")
    assert set(adopted) < set(runs)
    for name in adopted:
        assert sorted(each["step"] for each in house.json("ls", "--run", name)) == [400, 500], name
    for name in ("torch-weights", "dcp-weights", "ds-weights", "dlrover-weights"):
        assert house.tierd("export", "--run", name, "--format", "torch", "--to", f"{name}.pt").exit_code == 0
        weights = torch.load(f"{name}.pt", weights_only=True)["model"]
        assert_same(weights, dict(training.model.state_dict()))
    assert_same(torch.load("dlrover-back/checkpoint-500.pt"), torch.load("dlrover-out/checkpoint-500.pt"))
    assert Path("dlrover-back/dlrover_latest.txt").read_text() == "500"
    assert Path("ds-back/latest").read_text().strip() == "global_step500"
    assert {path.name for path in Path("ds-back/global_step500").iterdir()} == {
        path.name for path in Path("ds-out/global_step500").iterdir()
    }
    assert (Path("snapshots-back/step_500/0/model")).read_bytes() == Path("snapshots/step_500/0/model").read_bytes()


@pytest.mark.long
@pytest.mark.parametrize("framework", [name for name in FRAMEWORKS if blocks(name, "python")])
def test_the_code_of_the_guide_moves_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, framework: str
) -> None:
    (code,) = blocks(framework, "python")
    training, moved, restored = trained(), Training.fresh(seed=5), Training.fresh(seed=6)
    monkeypatch.chdir(tmp_path)
    write_old_checkpoints(training)
    with Daemon(tmp_path / "house") as daemon:
        with tierd_client.connect("new", socket=daemon.socket) as client:
            given = {"torch": torch, "tierd_client": tierd_client, "client": client, "Snapshot": Snapshot}
            exec(code, {**given, "model": moved.model, "optimizer": moved.optimizer})
        with tierd_client.connect("new", socket=daemon.socket) as client:
            found = client.restore(TrainingState(model=restored.model, optimizer=restored.optimizer))
    assert found is not None
    assert found.step == 500
    assert_same(restored.model.state_dict(), training.model.state_dict())
    assert_same(restored.optimizer.state_dict(), training.optimizer.state_dict())


def test_each_framework_has_commands() -> None:
    assert [name for name in FRAMEWORKS if len(blocks(name, "sh")) != 1] == []
    assert len([name for name in FRAMEWORKS if blocks(name, "python")]) == 3
