"""TRL trainings that are killed and started again end bit for bit as undisturbed ones."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import Daemon
from tests.support.forks import Forks
from tests.support.killed_training import check_killed_training, random_kills

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("trl", "peft", "datasets"))), reason="needs trl, peft and datasets"
    ),
]


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    with Forks("trl_training", tmp_path_factory.mktemp("trl")) as forks:
        yield forks


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"method": "sft"}, id="sft"),
        pytest.param({"method": "sft", "args": {"packing": True, "max_steps": 20}}, id="sft-packing"),
        pytest.param({"method": "dpo"}, id="dpo"),
        pytest.param({"method": "dpo", "args": {"precompute_ref_log_probs": True}}, id="dpo-precomputed"),
        pytest.param(
            {"method": "dpo", "lora": False, "args": {"sync_ref_model": True, "ref_model_sync_steps": 3}},
            id="dpo-reference-model-that-follows",
        ),
        pytest.param({"method": "sft", "ranks": 2}, id="sft-2-ranks"),
        pytest.param({"method": "dpo", "ranks": 2}, id="dpo-2-ranks"),
    ],
)
def test_trl_training_killed_at_random_steps_ends_identically(
    forks: Forks, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """The metrics and the token counter of TRL continue too."""
    kills = random_kills(tmp_path.name, first=3, last=19)
    alone = check_killed_training(forks, tmp_path, kills, **settings)
    assert alone.result["tokens"] > 0


def test_trainer_that_generates_its_batches_is_refused(forks: Forks, tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        refused = forks.run("grpo", method="grpo", socket=daemon.socket, output=str(tmp_path / "output"))
    assert refused.codes == [1]
    assert "resume a GRPOTrainer: the completions that it generates for several steps are not saved" in refused.stderr
