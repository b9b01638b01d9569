"""The random number generators are captured and restored."""

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


def test_all_generators_are_restored(files: Files) -> None:
    def draw() -> list[object]:
        return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item()]

    draw()  # leaves the second gaussian of a pair cached
    raw = stage(TrainingState(model=small_net()))
    expected = draw()
    restore(TrainingState(model=small_net()), [files.on_disk(raw)])
    assert draw() == expected


@pytest.mark.parametrize(
    "saved", [{}, {"python": None}, {**rng.capture(), "torch": b"short"}, {**rng.capture(), "numpy": {}}]
)
def test_malformed_generator_state_is_corrupt(saved: dict[str, Any]) -> None:
    with pytest.raises(Corrupt, match="restore rng"):
        rng.restore(saved)


def test_cached_second_gaussian_is_restored() -> None:
    random.gauss(0, 1)
    np.random.randn()
    saved = rng.capture()
    expected = [random.gauss(0, 1), np.random.randn()]
    rng.restore(saved)
    assert [random.gauss(0, 1), np.random.randn()] == expected


def test_saved_generators_of_missing_gpus_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    saved = rng.capture()
    rng.restore(saved | {"cuda": [b"\0" * 16] * (len(saved["cuda"]) + 1)})
    assert "not all are restored" in caplog.text


def test_capture_does_not_initialise_cuda() -> None:
    was = torch.cuda.is_initialized()
    assert rng.capture([torch.device("cpu")])["cuda"] == [] or was
    assert torch.cuda.is_initialized() == was


def test_temporary_seed_is_reproducible_and_leaves_the_generators_unchanged() -> None:
    def draw() -> list[float]:
        return [random.random(), np.random.random(), np.random.normal(), torch.rand(()).item()]

    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    undisturbed = draw()
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    drawn: list[list[float]] = []
    for seed in (rng.seed_of(1, "a"), rng.seed_of(1, "a"), rng.seed_of(1, "b")):
        with rng.temporary_seed(seed):
            drawn.append(draw())
    assert drawn[0] == drawn[1] != drawn[2]
    assert draw() == undisturbed
    assert rng.seed_of(1, "a") == 2461651067226055738, "seeds are part of what a resumed run depends on"
