"""The tutorial, done as it says: its script is trained, killed, stopped, and restored from the cold tier alone."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.support.waiting import DEADLINE_S, wait_until

ROOT = Path(__file__).parents[2]
TUTORIAL = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
PAUSE, SHORT_PAUSE = "time.sleep(0.2)", "time.sleep(0.05)"  # a person needs time to kill it, the test less


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TIERD_")}
    return {**kept, "TIERD_DAEMON_LISTEN": "127.0.0.1:0", **more}


@contextmanager
def daemon(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / "serve.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tierd", "serve"], cwd=folder, env=environment(), stdout=log, stderr=log
        )
    try:
        wait_until((folder / ".tierd/tierd.sock").exists, "the daemon to listen")
        yield process
    finally:
        process.kill()
        process.wait()


def start(folder: Path, output: str, **more: str) -> subprocess.Popen[bytes]:
    with (folder / output).open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "train.py"], cwd=folder, env=environment(**more), stdout=file, stderr=subprocess.STDOUT
        )


def losses(folder: Path, output: str) -> dict[int, str]:
    lines = re.findall(r"^step (\d+) loss (\S+)$", (folder / output).read_text(), re.MULTILINE)
    return {int(step): loss for step, loss in lines}


def command(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "tierd", *arguments],
        cwd=folder,
        env=environment(),
        text=True,
        check=True,
        capture_output=True,
        timeout=DEADLINE_S,
    ).stdout


@pytest.mark.long  # four trainings, each with its own start of torch
def test_the_tutorial_works_as_written(tmp_path: Path) -> None:
    (script,) = (block for block in re.findall(r"^```python\n(.*?)^```$", TUTORIAL, re.S | re.M) if "connect(" in block)
    assert PAUSE in script
    (tmp_path / "train.py").write_text(script.replace(PAUSE, SHORT_PAUSE))
    with daemon(tmp_path) as process:
        trainer = start(tmp_path, "killed.txt")
        wait_until(lambda: 18 in losses(tmp_path, "killed.txt"), "step 18")
        trainer.kill()
        trainer.wait()

        trainer = start(tmp_path, "stopped.txt")
        wait_until(lambda: 33 in losses(tmp_path, "stopped.txt"), "step 33")
        trainer.send_signal(signal.SIGTERM)
        assert trainer.wait(DEADLINE_S) == 0
        assert re.match(r"resumed at step \d+ from memory", (tmp_path / "stopped.txt").read_text())
        killed, stopped = losses(tmp_path, "killed.txt"), losses(tmp_path, "stopped.txt")
        repeated = killed.keys() & stopped.keys()
        assert {step: killed[step] for step in repeated} == {step: stopped[step] for step in repeated}

        trainer = start(tmp_path, "ended.txt")
        assert trainer.wait(DEADLINE_S) == 0
        text = (tmp_path / "ended.txt").read_text()
        assert text.startswith(f"resumed at step {max(stopped)} from hot\n")
        cold = tmp_path / ".tierd/cold/tutorial"
        wait_until(lambda: any(cold.glob("000000000060-*/manifest.json")), "step 60 in cold")
        process.kill()
        process.wait()

    shutil.rmtree(tmp_path / ".tierd/hot")
    (tmp_path / ".tierd/tierd.sock").unlink(missing_ok=True)
    restored = command(tmp_path, "restore", "--tier", "cold", "--to", "restored")
    assert re.match(r"restored tutorial step 60 \(generation 3\) from cold to .*, verified$", restored)
    with safe_open(tmp_path / "restored/rank-00000-of-00001.safetensors", "pt") as shard:
        assert shard.get_tensor("model.0.weight").shape == (64, 16)
    with daemon(tmp_path):
        trainer = start(tmp_path, "back.txt", TIERD_RESUME="50")
        assert trainer.wait(DEADLINE_S) == 0
    assert (tmp_path / "back.txt").read_text().startswith("resumed at step 50 from cold\n")
    ended, back = losses(tmp_path, "ended.txt"), losses(tmp_path, "back.txt")
    assert back == {step: loss for step, loss in ended.items() if step > 50}
