"""Real trainings of Hugging Face Trainer and Lightning, unchanged, whose own checkpoints tierd adopts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import Daemon
from tests.support.forks import Done, Forks
from tests.support.waiting import wait_until

KILL_AT = 26


def losses(done: Done) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in done.lines[0]}


@pytest.mark.long
@pytest.mark.parametrize(("preset", "saved_as"), [("hf-trainer", "checkpoint-{}"), ("lightning", "step={}.ckpt")])
def test_a_training_goes_on_from_cold_after_its_machine_was_lost(tmp_path: Path, preset: str, saved_as: str) -> None:
    out, house = tmp_path / "out", tmp_path / "house"
    watch = f'[[watch]]\npath = "../out"\nrun = "run"\npreset = "{preset}"\nquiet_s = 0.2\n'
    common: dict[str, Any] = {"preset": preset, "kill_at": 0, "pace": "", "resume": ""}
    with Forks("watched_training", tmp_path) as forks:
        whole = forks.run("whole", **{**common, "output": str(tmp_path / "whole")})
        assert whole.codes == [0], whole.stderr
        expected = losses(whole)
        with Daemon(house, more=f"{watch}[lifecycle.cold]\nkeep_last = 1\nkeep_every = 5\n") as daemon:
            killed = forks.run(
                "killed", **{**common, "output": str(out), "pace": str(daemon.hot / "run"), "kill_at": KILL_AT}
            )
            assert killed.codes == [-9], killed.stderr
            newest = max(step for step in expected if step < KILL_AT and step % 2 == 0)
            wait_until(lambda: daemon.steps("cold") == [10, 20, newest], "the copies of every fifth and the last one")
            local = {path for path in os.listdir(out) if path.startswith(saved_as.partition("{")[0])}
            assert local == {saved_as.format(step) for step in (newest - 2, newest)}, "the framework's own rotation"
            (watch_report,) = daemon.status()["watches"]
            assert (watch_report["adopted"], watch_report["problems"]) == (newest // 2, [])
        shutil.rmtree(out)
        shutil.rmtree(house / "hot")

        with Daemon(house, more=watch) as daemon:
            back = out / saved_as.format(newest) if preset == "hf-trainer" else out
            restored = daemon.tierd("restore", "--tier", "cold", "--run", "run", "--to", back)
            assert restored.returncode == 0, restored.stderr
            resumed = forks.run(
                "resumed", **{**common, "output": str(out), "resume": str(out / saved_as.format(newest))}
            )
            assert resumed.codes == [0], resumed.stderr
            found = losses(resumed)
            assert min(found) == newest + 1
            assert found == {step: loss for step, loss in expected.items() if step > newest}, "its loss continues"
            wait_until(lambda: max(daemon.steps("cold")) == max(expected), "the last checkpoint in cold")
