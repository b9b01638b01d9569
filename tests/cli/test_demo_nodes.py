"""`tierd demo --nodes` as a user runs it: three real nodes, of which one is lost with its disk, and then all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ENVIRONMENT


@pytest.mark.long
@pytest.mark.timeout(600)
def test_training_over_three_nodes_goes_on_from_a_peer_and_then_from_the_bucket(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "tierd", "demo", "--nodes", "--fast", "--dir", "demo"]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=580, check=False, env=ENVIRONMENT, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    (_, one, every, *_) = (line.split("  ") for line in result.stdout.splitlines())
    one, every = ([word.strip() for word in row if word.strip()] for row in (one, every))
    assert (one[:2], one[-1]) == (["node c and its disk lost", "the copy on its peer"], "0 B")
    assert every[:2] == ["all nodes and disks lost", "cold"]
    assert every[-1] != "0 B"
    assert "loss curves identical: 60 steps, bit for bit" in result.stdout
    curves = [(tmp_path / "demo" / name).read_bytes() for name in ("loss.jsonl", "undisturbed.jsonl")]
    assert curves[0] == curves[1]
