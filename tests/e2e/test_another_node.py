"""A job goes on on another node, whose daemon listed the cold tier before the job's first snapshot."""

from __future__ import annotations

from pathlib import Path

from tests.support.daemon import Daemon
from tests.support.trainer import Trainer


def test_a_job_that_moves_to_another_node_goes_on_from_its_last_copy(tmp_path: Path) -> None:
    cold = f'url = "file://{tmp_path}/cold"'
    with Daemon(tmp_path / "first", cold=cold) as first, Daemon(tmp_path / "second", cold=cold) as second:
        with Trainer() as trainer:
            trainer.connect(first.socket)
            trainer.train(3)
            trainer.durable()
            trainer.wait_replicated("cold")
            losses = trainer.train(2)
            trainer.kill()
        with Trainer() as moved:
            assert moved.connect(second.socket) == 2
            restored = moved.restore()
            assert (restored.step, restored.tier) == (3, "cold")
            assert moved.train(2) == losses
        assert sorted(path.name for path in (tmp_path / "cold" / "run").glob("generation-*")) == [
            "generation-0001.json",
            "generation-0002.json",
        ]
