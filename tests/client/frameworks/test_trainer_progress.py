"""Hugging Face trainings of many kinds, killed at random steps, end bit for bit as undisturbed ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks import Forks
from tests.support.killed_training import check_killed_training, random_kills

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    with Forks("hf_training", tmp_path_factory.mktemp("hf")) as forks:
        yield forks


STREAM = {"streams": True, "args": {"max_steps": 24}}
WORKERS = {
    "max_steps": 24,
    "eval_steps": 12,
    "dataloader_num_workers": 2,
    "dataloader_multiprocessing_context": "fork",  # as in a script; the processes of tests have another default
}
CASES: dict[str, dict[str, Any]] = {
    "masks and metrics": {"metrics": True, "args": {"max_steps": 24, "include_num_input_tokens_seen": "all"}},
    "evaluation at the start": {"args": {"max_steps": 24, "eval_on_start": True, "neftune_noise_alpha": 5}},
    "early stopping": {"patience": 4, "args": {"learning_rate": 0.0}},
    "best model": {
        "patience": 4,
        "args": {
            "learning_rate": 0.5,
            "warmup_steps": 0,
            "save_strategy": "steps",
            "save_steps": 4,
            "save_total_limit": 2,
            "load_best_model_at_end": True,
        },
    },
    "epochs": {
        "samples": 33,
        "args": {"num_train_epochs": 5, "logging_strategy": "epoch", "eval_strategy": "epoch"},
    },
    "samples of similar length": {"args": {"max_steps": 24, "train_sampling_strategy": "group_by_length"}},
    "epochs that a callback ends": {"epoch_steps": 7, "args": {"max_steps": 24}},
    "stream": STREAM,
    "stream in several passes": {**STREAM, "samples": 50},
    "stream with masks": {**STREAM, "samples": 90, "masked": True},
    "workers": {"masked": False, "args": WORKERS},
    "workers that draw": {"args": WORKERS},
    "three workers that draw": {"samples": 100, "args": {**WORKERS, "dataloader_num_workers": 3}},
    "stream with workers that draw": {
        "streams": True,
        "masked": True,
        "args": {**WORKERS, "dataloader_num_workers": 1},
    },
    "augmented samples": {"draws": True, "args": {"max_steps": 24}},
    "workers that augment": {"draws": True, "args": WORKERS},
    "2 ranks": {"ranks": 2, "samples": 150, "args": {"max_steps": 24}},
    "2 ranks with workers": {"ranks": 2, "samples": 150, "args": WORKERS},
    "2 ranks, stream": {**STREAM, "ranks": 2, "samples": 100, "masked": True},
}


@pytest.mark.parametrize("case", CASES)
def test_training_killed_at_random_steps_ends_identically(forks: Forks, tmp_path: Path, case: str) -> None:
    check_killed_training(forks, tmp_path, random_kills(case, first=3, last=15), **CASES[case])
