"""The example: it is deterministic, resumes bit for bit after a kill, and repairs a loss file with a torn line."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support.daemon import Daemon
from tests.support.processes import ENVIRONMENT, Script
from tests.support.waiting import DEADLINE_S

SCRIPT = Path(__file__).parents[1] / "examples" / "train_gpt.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_gpt", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_gpt"] = module  # dataclasses look their own module up
    spec.loader.exec_module(module)
    return module


SMALL = ["--model-size=tiny", "--batch-size=2", "--block-size=32", "--steps=20", "--threads=1", "--device=cpu"]
ENVIRON = {name: value for name, value in ENVIRONMENT.items() if not name.startswith("TIERD_")}


def start(folder: Path, *more: object) -> Script:
    return Script(SCRIPT, [*SMALL, *map(str, more)], folder=folder, environ=ENVIRON)


def train(folder: Path, *more: object) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)"""
    with start(folder, *more) as trainer:
        code = trainer.end()
        return code, trainer.stdout, trainer.stderr


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The loss curve of a run without tierd, started as its user starts it."""
    path = tmp_path_factory.mktemp("undisturbed") / "loss.jsonl"
    command = [sys.executable, str(SCRIPT), *SMALL, "--no-tierd", "--loss-file", str(path)]
    environ = {**ENVIRON, "PYTHONWARNINGS": "error"}
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    assert "starting fresh" in ran.stdout
    return path.read_bytes()


@pytest.mark.long
def test_two_runs_write_the_same_bytes_and_learn(undisturbed: bytes, tmp_path: Path) -> None:
    path = tmp_path / "loss.jsonl"
    train(tmp_path, "--no-tierd", "--loss-file", path)

    assert path.read_bytes() == undisturbed
    lines = [json.loads(line) for line in undisturbed.splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert lines[-1]["loss"] < lines[0]["loss"] < 6.0  # ln 256 = 5.5


def test_a_killed_run_resumes_with_the_same_command_and_ends_with_the_same_curve(
    undisturbed: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "loss.jsonl"
    with Daemon(tmp_path) as daemon:
        same = ["--socket", daemon.socket, "--every", "3", "--loss-file", path]
        with start(tmp_path, *same, "--step-delay-s", "0.1") as trainer:
            trainer.wait_line("step 10 ")

        code, stdout, stderr = train(tmp_path, *same)

    assert code == 0, stderr
    resumed = re.search(r"resumed at step (\d+) from memory in", stdout)
    assert resumed is not None, stdout
    assert 9 <= int(resumed[1]) < 20
    assert path.read_bytes() == undisturbed
    assert any((tmp_path / "hot").glob("*/000000000020-g*/manifest.json"))


def test_without_a_daemon_it_ends_with_an_error_and_leaves_the_curve_alone(tmp_path: Path) -> None:
    path = tmp_path / "loss.jsonl"
    path.write_bytes(b'{"step": 1}\n')

    code, _, stderr = train(tmp_path, "--socket", tmp_path / "absent.sock", "--loss-file", path)

    assert code == 13
    assert stderr.startswith("error: ")
    assert "Traceback" not in stderr
    assert path.read_bytes() == b'{"step": 1}\n'


def test_a_run_that_starts_fresh_discards_an_older_curve(example: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "loss.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 9.0}\n' * 40)

    with example.open_loss_file(path, 0):
        pass

    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    "torn", [b"", b'{"step": 6, "lo', b'{"step": 4, "loss": 1.0}'], ids=["whole", "torn", "no end"]
)
def test_resuming_cuts_the_curve_back_to_the_restored_step(example: ModuleType, tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "curves" / "loss.jsonl"
    path.parent.mkdir()
    whole = [json.dumps({"step": step, "loss": 1 / step}).encode() + b"\n" for step in range(1, 6)]
    path.write_bytes(b"".join(whole) + torn)

    with example.open_loss_file(path, 3) as file:
        file.write(b"next\n")

    assert path.read_bytes() == b"".join(whole[:3]) + b"next\n"


def test_a_torn_line_of_a_kept_step_is_cut(example: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "loss.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 2.5}\n{"step": 2')

    with example.open_loss_file(path, 5):
        pass

    assert path.read_bytes() == b'{"step": 1, "loss": 2.5}\n'


def test_the_default_model_has_about_ten_million_parameters(example: ModuleType) -> None:
    def parameters(size: str) -> int:
        with torch.device("meta"):
            return sum(p.numel() for p in example.GPT(example.SHAPES[size]).parameters())

    assert 10e6 < parameters("default") < 12e6
    assert 0.1e6 < parameters("tiny") < 0.4e6


def test_crops_continue_from_their_saved_position(example: ModuleType) -> None:
    corpus = example.read_corpus()
    first = example.RandomCrops(corpus, batch_size=3, block_size=16)
    first.next_batch()
    position = first.state_dict()
    expected = [first.next_batch() for _ in range(3)]

    again = example.RandomCrops(corpus, batch_size=3, block_size=16)
    again.load_state_dict(position)

    for inputs, targets in expected:
        got_inputs, got_targets = again.next_batch()
        assert torch.equal(got_inputs, inputs)
        assert torch.equal(got_targets, targets)
        assert torch.equal(targets[:, :-1], inputs[:, 1:])


def test_crops_of_another_text_are_refused(example: ModuleType) -> None:
    crops = example.RandomCrops(b"abc" * 100, batch_size=1, block_size=16)
    other = example.RandomCrops(b"xyz" * 100, batch_size=1, block_size=16)

    with pytest.raises(ValueError, match="another Python version"):
        other.load_state_dict(crops.state_dict())


def test_the_text_is_real_and_the_same_each_time(example: ModuleType) -> None:
    corpus = example.read_corpus()

    assert 1 << 20 < len(corpus) <= example.CORPUS_BYTES_MAX
    assert corpus == example.read_corpus()
    assert b"import" in corpus


def test_the_state_given_to_tierd_is_all_that_a_resume_needs(example: ModuleType) -> None:
    """Six steps, everything through bytes into new objects, six more: the losses of twelve undisturbed steps."""

    def build() -> dict[str, Any]:
        torch.manual_seed(example.SEED)
        model = example.GPT(example.Shape(layers=2, heads=2, width=32, block_size=16))
        optimizer = example.build_optimizer(model, 1e-3)
        data = example.RandomCrops(example.read_corpus(), batch_size=2, block_size=16)
        scheduler = example.build_scheduler(optimizer, 12)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": data}

    def step(parts: dict[str, Any]) -> float:
        inputs, targets = parts["data"].next_batch()
        loss = torch.nn.functional.cross_entropy(parts["model"](inputs).flatten(0, 1), targets.flatten())
        parts["optimizer"].zero_grad(set_to_none=True)
        loss.backward()
        parts["optimizer"].step()
        parts["scheduler"].step()
        return loss.item()

    parts = build()
    undisturbed = [step(parts) for _ in range(12)]

    parts = build()
    losses = [step(parts) for _ in range(6)]
    saved = io.BytesIO()
    torch.save({name: part.state_dict() for name, part in parts.items()} | {"rng": torch.get_rng_state()}, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    parts = build()
    for name, part in parts.items():
        part.load_state_dict(loaded[name])
    torch.set_rng_state(loaded["rng"])
    losses += [step(parts) for _ in range(6)]

    assert losses == undisturbed
