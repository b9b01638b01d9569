"""The GPU benchmark runs on the CPU: every method saves and reports its figures, which mean nothing here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ENVIRONMENT, ROOT


@pytest.mark.long
def test_every_method_is_measured_and_the_state_is_restored(tmp_path: Path) -> None:
    command = [sys.executable, "bench/gpu_stall.py", "--device=cpu", "--small", "--rounds=1", "--batch=2"]
    done = subprocess.run(
        [*command, f"--dir={tmp_path}"], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    facts = [json.loads(line) for line in done.stdout.splitlines()]
    assert facts[0]["machine"]["device"] == "cpu"
    ways = ["tierd sync", "tierd overlap", "torch.save", "DCP thread", "DCP process"]
    assert [one["way"] for one in facts if "call_ms" in one] == ways
    assert facts[-1]["tier"] == "memory"
    assert list(tmp_path.iterdir()) == []
