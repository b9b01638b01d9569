"""`tierd fork`: the checkpoint is kept for the fork, nothing is copied, and the training begins there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cli import House, make_checkpoint, make_house
from tests.support.daemon import Daemon
from tests.support.trainer import Trainer

KEEP_ONE = """
[lifecycle.hot]
keep_last = 1
[lifecycle.cold]
keep_last = 1
"""


@pytest.fixture
def house(tmp_path: Path) -> House:
    return make_house(tmp_path)


def test_fork_marks_the_checkpoint_and_says_how_to_begin(house: House) -> None:
    make_checkpoint(house.hot, house.cold, step=100)
    make_checkpoint(house.hot, step=200, sequence=2)

    forked = house.json("fork", "--run", "run42", "--step", "100", "--as", "ablation")

    assert (forked["tiers"], forked["milestone"]) == (["hot", "cold"], "fork-ablation")
    assert forked["resume"] == "run:run42@milestone:fork-ablation"
    assert house.json("show", "run42", "milestone:fork-ablation")["manifest"]["step"] == 100
    assert not (house.hot / "ablation").exists()
    text = house.tierd("fork", "--run", "run42", "--step", "100", "--as", "ablation").stdout
    kept, start = text.splitlines()
    assert kept.endswith("kept as milestone fork-ablation in hot, cold"), "a second time it is the same"
    assert "TIERD_RESUME=run:run42@milestone:fork-ablation" in start


def test_fork_refuses_what_would_be_no_new_run(house: House) -> None:
    make_checkpoint(house.hot, step=100)
    make_checkpoint(house.hot, run="taken", step=1)
    for words, code, text in (
        (("--step", "100", "--as", "run42"), 2, "that is the same run"),
        (("--step", "100", "--as", "taken"), 15, "that run has checkpoints, the newest is taken/"),
        (("--step", "999", "--as", "new"), 10, "there is none"),
        (("--step", "100", "--as", "a/b"), 2, "a/b"),
    ):
        result = house.tierd("fork", "--run", "run42", *words)
        assert (result.exit_code, text in result.stderr) == (code, True), result.output
    assert house.tierd("fork", "--run", "run42", "--step", "100", "--as", "new", "--dry-run").exit_code == 0
    assert list(house.hot.rglob("milestone-*")) == []


def test_fork_is_refused_where_its_milestone_would_lead_to_another_checkpoint(house: House) -> None:
    make_checkpoint(house.hot, step=100)
    make_checkpoint(house.hot, step=200, sequence=2)
    for first, second in (("new", "new"), ("x" * 59 + "-a", "x" * 59 + "-b")):
        assert house.tierd("fork", "--run", "run42", "--step", "200", "--as", first).exit_code == 0
        result = house.tierd("fork", "--run", "run42", "--step", "100", "--as", second)
        assert (result.exit_code, "is of run42/000000000200-g0001" in result.stderr) == (15, True), result.output


def test_fork_is_refused_where_no_tier_keeps_milestones(tmp_path: Path) -> None:
    house = make_house(tmp_path, more="[lifecycle.cold]\nmilestones = false")
    make_checkpoint(house.hot, step=100)
    result = house.tierd("fork", "--run", "run42", "--step", "100", "--as", "new")
    assert (result.exit_code, "would expire while the fork needs it" in result.stderr) == (2, True), result.output
    assert list(house.hot.rglob("milestone-*")) == []
    result = house.tierd("milestone", "best", "--run", "run42", "--step", "100")
    assert (result.exit_code, "no tier keeps milestones" in result.stderr) == (0, True), result.output
    with house.config.open("a") as config:
        config.write("\n[lifecycle.hot]\nmilestones = true")
    assert house.tierd("fork", "--run", "run42", "--step", "100", "--as", "new").exit_code == 0


def test_training_of_the_fork_begins_there_and_its_parent_does_not_expire(tmp_path: Path) -> None:
    with Daemon(tmp_path, more=KEEP_ONE) as daemon, Trainer() as trainer:
        trainer.connect(daemon.socket, "base")
        trainer.train(1)
        trainer.durable()
        digest = trainer.digest()
        resume = daemon.json("fork", "--run", "base", "--step", "1", "--as", "ablation")["resume"]
        for _ in range(3):
            trainer.train(1)
            trainer.durable()
            trainer.wait_replicated()
        assert 1 in daemon.steps("cold", "base")
        with Trainer(seed=2) as fork:
            fork.connect(daemon.socket, "ablation")
            found = fork.restore(resume=resume)
            assert (found.run, found.step, fork.digest()) == ("base", 1, digest)
            fork.train(1)
            fork.durable()
            assert fork.restore(resume=resume).run == "ablation"
        row = daemon.json("runs")[0]
        assert (row["run"], row["generations"][0]["parent"]) == ("ablation", "base/000000000001-g0001")
