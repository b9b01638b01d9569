"""The random number generators go on where they were."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tierd_client.state import rng
from tierd_client.state.training_state import TrainingState

from tests.support.state import Files, restore, small_net, stage
from tierd.errors import Corrupt


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    opened = Files(tmp_path)
    yield opened
    opened.close()


def test_all_generators_go_on_where_they_were(files: Files) -> None:
    def draw() -> list[object]:
        return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item()]

    draw()  # leaves half a pair of gaussians behind
    raw = stage(TrainingState(model=small_net()))
    expected = draw()
    restore(TrainingState(model=small_net()), [files.on_disk(raw)])
    assert draw() == expected


@pytest.mark.parametrize(
    "saved", [{}, {"python": None}, {**rng.capture(), "torch": b"short"}, {**rng.capture(), "numpy": {}}]
)
def test_state_that_is_none_is_corrupt(saved: dict[str, Any]) -> None:
    with pytest.raises(Corrupt, match="restore rng"):
        rng.restore(saved)


def test_half_a_pair_of_gaussians_is_kept() -> None:
    random.gauss(0, 1)
    np.random.randn()
    saved = rng.capture()
    expected = [random.gauss(0, 1), np.random.randn()]
    rng.restore(saved)
    assert [random.gauss(0, 1), np.random.randn()] == expected


def test_generators_of_gpus_that_are_not_there_are_missed_aloud(caplog: pytest.LogCaptureFixture) -> None:
    saved = rng.capture()
    rng.restore(saved | {"cuda": [b"\0" * 16] * (len(saved["cuda"]) + 1)})
    assert "not all come back" in caplog.text


def test_cuda_is_not_woken_up() -> None:
    was = torch.cuda.is_initialized()
    assert rng.capture([torch.device("cpu")])["cuda"] == [] or was
    assert torch.cuda.is_initialized() == was


def test_numbers_drawn_from_a_seed_are_the_same_each_time_and_leave_no_trace() -> None:
    def draw() -> list[float]:
        return [random.random(), np.random.random(), np.random.normal(), torch.rand(()).item()]

    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    undisturbed = draw()
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    drawn: list[list[float]] = []
    for seed in (rng.seed_of(1, "a"), rng.seed_of(1, "a"), rng.seed_of(1, "b")):
        with rng.drawn_from(seed):
            drawn.append(draw())
    assert drawn[0] == drawn[1] != drawn[2]
    assert draw() == undisturbed
    assert rng.seed_of(1, "a") == 2461651067226055738, "seeds are part of what a resumed run depends on"
