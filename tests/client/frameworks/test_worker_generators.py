"""Workers of a loader draw the same random numbers when a resumed training continues in the middle of an epoch."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from tierd_client.frameworks.worker_generators import WorkerGenerators
from torch.utils.data import DataLoader

from tierd.errors import Unsupported

BATCHES = 12


class Drawing(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), float(np.random.rand()), float(torch.rand(()))


class Plain(Drawing):
    def __getitem__(self, index: int) -> Any:
        return index


def drawing_loader(workers: int, *, first: int = 0, **options: Any) -> tuple[WorkerGenerators, DataLoader[Any]]:
    """`first`: the batch to begin with."""
    loader: DataLoader[Any] = DataLoader(
        options.pop("dataset", Drawing()),
        batch_sampler=[[index] for index in range(first, BATCHES)],
        num_workers=workers,
        collate_fn=list,
        multiprocessing_context="fork",
        **options,
    )
    generators = WorkerGenerators(loader, read_ahead=2)
    torch.manual_seed(1)  # the workers' seeds come from this generator
    generators.begin_epoch()
    return generators, loader


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")  # of a machine with two cores
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("trained", [1, 2, 7])
def test_batches_after_a_resume_draw_the_same_numbers(workers: int, trained: int) -> None:
    generators, loader = drawing_loader(workers)
    batches = iter(loader)
    read = [next(batches) for _ in range(trained + 2)]  # two more than were trained on
    saved = generators.states(trained)
    read += batches
    again, rest = drawing_loader(workers, first=trained)
    again.repeat(saved)
    assert list(rest) == read[trained:]


def test_second_resume_in_the_same_epoch_draws_the_same_numbers() -> None:
    whole = list(drawing_loader(2)[1])
    saved: list[bytes] = []
    for first, trained in ((0, 3), (3, 1), (4, 4)):
        generators, loader = drawing_loader(2, first=first)
        generators.repeat(saved)
        batches = iter(loader)
        assert [next(batches) for _ in range(trained)] == whole[first : first + trained]
        saved = generators.states(trained)
        del batches


def test_have_drawn_is_true_only_when_workers_have_drawn() -> None:
    for dataset, draws in ((Drawing(), True), (Plain(), False)):
        generators, loader = drawing_loader(2, dataset=dataset)
        for _ in range(2):
            generators.begin_epoch()
            list(loader)
            assert generators.have_drawn() is draws


def test_persistent_workers_that_draw_are_refused() -> None:
    generators, loader = drawing_loader(1, persistent_workers=True)
    list(loader)
    with pytest.raises(Unsupported, match="persistent workers, which draw numbers"):
        generators.have_drawn()
