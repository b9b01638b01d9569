"""A loader resumed in the middle of an epoch gives the same batches, with workers that read ahead and augment."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tierd_client import ResumableLoader, ResumableSampler
from tierd_client.state.training_state import TrainingState

from tests.support.datasets import Augmented, Journal
from tests.support.state import Files, restore, small_net, stage

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),  # torch's workers, from Python 3.12 on
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # more workers than cores
]

LENGTH, BATCH_SIZE = 22, 4  # six batches in an epoch, the last of them short


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    opened = Files(tmp_path)
    yield opened
    opened.close()


def loader_of(workers: int, *, seed: int = 0, dataset: Augmented | None = None, **options: Any) -> ResumableLoader:
    sampler = ResumableSampler(LENGTH, batch_size=BATCH_SIZE, seed=seed)
    return ResumableLoader(dataset or Augmented(LENGTH), sampler, num_workers=workers, **options)


def train(loader: ResumableLoader, batches: int, state: TrainingState | None = None) -> tuple[list[Any], bytes]:
    """The next batches, each with numbers that training draws after it, and a snapshot taken after the last one."""
    rows: list[Any] = []
    while True:
        for batch in loader:
            rows.append((loader.epoch, batch.tolist(), random.random(), np.random.random(), torch.rand(()).item()))
            if len(rows) == batches:
                return rows, stage(state) if state else b""


@pytest.mark.parametrize(
    ("before", "workers"),
    [
        *((before, 0) for before in [1, 4, 6, 9]),
        *(pytest.param(before, 2, marks=() if before == 6 else pytest.mark.long) for before in [1, 4, 6, 9]),
    ],
)
def test_batches_after_a_resume_at_any_batch_are_identical(files: Files, workers: int, before: int) -> None:
    torch.manual_seed(1)
    loader = loader_of(workers, seed=3)
    _, raw = train(loader, before, TrainingState(model=small_net(), dataloader=loader))
    expected, _ = train(loader, 10)  # a new `for` continues after a `break`

    torch.manual_seed(2)
    resumed = loader_of(workers, seed=4)
    restore(TrainingState(model=small_net(), dataloader=resumed), [files.on_disk(raw)])
    assert train(resumed, 10)[0] == expected


def test_batches_do_not_depend_on_the_number_of_workers() -> None:
    def batches(workers: int) -> list[Any]:
        return [batch.tolist() for batch in loader_of(workers)]

    assert batches(0) == batches(1) == batches(2)


def test_random_numbers_differ_between_batches_and_epochs() -> None:
    drawn = [row[1:] for _, batch, *_ in train(loader_of(0), 12)[0] for row in batch]
    assert len({tuple(row) for row in drawn}) == 2 * LENGTH


def test_global_generators_are_not_changed() -> None:
    def draws() -> list[float]:
        return [random.random(), np.random.random(), torch.rand(()).item()]

    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    expected = draws()
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    for workers in (0, 1):
        list(loader_of(workers))
    assert draws() == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_consumed_samples_are_not_read_again(tmp_path: Path, workers: int) -> None:
    loader = loader_of(workers)
    iterator = iter(loader)
    consumed = [int(row[0]) for _ in range(3) for row in next(iterator)]
    resumed = loader_of(workers, dataset=(journal := Journal(LENGTH, tmp_path / "journal")))
    resumed.load_state_dict(loader.state_dict())
    rest = [int(row[0]) for batch in resumed for row in batch]
    assert sorted(journal.read()) == sorted(rest)
    assert sorted(rest + consumed) == list(range(LENGTH))


def test_epoch_resumed_after_its_last_batch_ends_first() -> None:
    loader = loader_of(0)
    for _ in loader:
        last, epoch = loader.state_dict(), loader.epoch
    assert (epoch, loader.epoch) == (0, 1)
    resumed = loader_of(0)
    resumed.load_state_dict(last)
    assert (resumed.epoch, list(resumed), resumed.epoch) == (0, [], 1)
    assert len(list(resumed)) == len(resumed) == 6


def test_state_restored_within_a_loop_takes_effect_at_the_next_batch() -> None:
    loader = loader_of(0)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    expected = [next(iterator).tolist() for _ in range(3)]
    loader.load_state_dict(state)
    assert [next(iterator).tolist() for _ in range(3)] == expected


def test_persistent_workers_continue_in_the_next_epoch() -> None:
    def epochs(**options: Any) -> list[Any]:
        loader = loader_of(1, **options)
        return [batch.tolist() for _ in range(2) for batch in loader]

    assert epochs(persistent_workers=True) == epochs()


class _Several(Augmented):
    def __getitems__(self, indexes: list[int]) -> list[int]:
        return [-index for index in indexes]


def test_dataset_with_getitems_reads_a_batch_at_once() -> None:
    seen = [-index for batch in loader_of(0, dataset=_Several(LENGTH), collate_fn=list) for index in batch]
    assert sorted(seen) == list(range(LENGTH))
