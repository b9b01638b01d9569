"""`tierd demo` as a process: a small model, real processes and real kills."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tierd.cli import demo
from tierd.cli.app import make_app


@pytest.mark.timeout(300)
def test_demo_recovers_three_times_and_compares_the_loss_curves(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tierd", "demo", "--fast", "--dir", str(tmp_path / "demo")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line[:17] for line in lines[1:4]] == ["trainer SIGKILLed", "daemon SIGKILLed ", "hot tier deleted "]
    assert "loss curves identical: 60 steps, bit for bit" in done.stdout
    # Compare the curves here too, instead of trusting the demo's own comparison.
    curves = [(tmp_path / "demo" / name).read_bytes() for name in ("loss.jsonl", "undisturbed.jsonl")]
    assert curves[0] == curves[1]
    assert curves[0].count(b"\n") == 60


def test_demo_finds_curves_that_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    it = demo._Demo(tmp_path, tmp_path / "s", demo.FAST)  # pyright: ignore[reportPrivateUsage]
    expected = tmp_path / "undisturbed.jsonl"
    expected.write_bytes(b'{"step": 1, "loss": 0.5}\n' * demo.FAST.steps)
    (tmp_path / "loss.jsonl").write_bytes(expected.read_bytes().replace(b"0.5}", b"0.6}", 1))
    assert it._compare(expected) == 1  # pyright: ignore[reportPrivateUsage]
    assert "differ from step 1" in capsys.readouterr().err


def test_demo_refuses_a_directory_that_holds_something(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    done = CliRunner().invoke(make_app(), ["demo", "--dir", str(tmp_path)])
    assert done.exit_code == 15
    assert "holds something" in done.stderr
    assert (tmp_path / "mine").read_text() == "precious"
