"""`tierd demo` as a user runs it: a small model, but real processes, real kills and a real comparison at the end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tierd.cli import demo, demo_run
from tierd.cli.app import make_app


@pytest.mark.long  # five starts of torch; tests/test_train_gpt.py and tests/e2e kill the same training
@pytest.mark.timeout(300)
def test_demo_recovers_three_times_whatever_the_directory_and_the_settings(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('a file of the current directory was imported')")
    (tmp_path / "tierd.toml").write_text("this is not TOML")
    environment = {**os.environ, "TIERD_HOT_PATH": str(tmp_path / "hot"), "TIERD_RESUME": "require"}
    command = [sys.executable, "-P", "-m", "tierd", "demo", "--fast", "--dir", "demo"]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=280, check=False, env=environment, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line[:17] for line in lines[1:4]] == ["trainer SIGKILLed", "daemon SIGKILLed ", "hot tier deleted "]
    assert "loss curves identical: 60 steps, bit for bit" in result.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo", "tierd.toml", "torch.py"]
    # Compare here too, instead of trusting what the demo prints.
    curves = [(tmp_path / "demo" / name).read_bytes() for name in ("loss.jsonl", "undisturbed.jsonl")]
    assert curves[0] == curves[1]
    assert curves[0].count(b"\n") == 60


def test_demo_finds_curves_that_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unfinished = demo._Demo(tmp_path, tmp_path / "s", demo.FAST)  # pyright: ignore[reportPrivateUsage]
    expected = tmp_path / "undisturbed.jsonl"
    expected.write_bytes(b'{"step": 1, "loss": 0.5}\n' * demo.FAST.steps)
    (tmp_path / "loss.jsonl").write_bytes(expected.read_bytes().replace(b"0.5}", b"0.6}", 1))
    assert unfinished._compare(expected) == 1  # pyright: ignore[reportPrivateUsage]
    assert "differ from step 1" in capsys.readouterr().err


def test_demo_refuses_a_directory_that_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    result = CliRunner().invoke(make_app(["demo"]), ["demo", "--dir", str(tmp_path)])
    assert result.exit_code == 15
    assert "the directory is not empty" in result.stderr
    assert (tmp_path / "mine").read_text() == "precious"


def test_demo_refuses_a_directory_that_it_cannot_make(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = CliRunner().invoke(make_app(["demo"]), ["demo", "--dir", str(tmp_path / "file" / "demo")])
    assert result.exit_code == 2
    assert "give a writable one with --dir" in result.stderr


def test_demo_shows_and_keeps_the_log_of_a_trainer_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_program: str
) -> None:
    monkeypatch.setattr(demo_run, "PYTHON", (warm_program, "-P", "-m"))
    monkeypatch.setattr(demo, "TRAINER", "tierd_client.examples.absent")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(make_app(["demo"]), ["demo"])
    assert result.exit_code == 1
    assert "No module named tierd_client.examples.absent" in result.stderr
    assert [path.name for path in tmp_path.glob("demo-*/trainer.log")] == ["trainer.log"]
