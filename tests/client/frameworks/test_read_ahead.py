"""Batches that were read ahead of the training are the same when a resumed training reads them again."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from tierd_client.frameworks.read_ahead import ReadAhead
from tierd_client.state import rng
from torch.utils.data import DataLoader


def drawn(samples: list[int]) -> tuple[list[int], float, float, float]:
    return samples, random.random(), float(np.random.rand()), float(torch.rand(()))


def loader(collate: Any = drawn) -> tuple[ReadAhead, DataLoader[int]]:
    ahead = ReadAhead([])
    loader: DataLoader[int] = DataLoader(range(6), batch_size=1, collate_fn=collate)  # pyright: ignore[reportArgumentType]
    ahead.watch(loader)
    return ahead, loader


def test_repeated_batch_draws_the_same_numbers_and_leaves_the_generators_unchanged() -> None:
    ahead, first = loader()
    batches = iter(first)
    read = [next(batches) for _ in range(3)]
    ahead.trained()
    torch.rand(5)  # training draws too, after the batch was read
    saved, generators = ahead.states(), rng.capture()
    following = next(batches)

    ahead, second = loader()
    ahead.repeat(saved)
    batches = iter(second)
    rng.restore(generators)
    again = [next(batches) for _ in range(2)]
    assert [numbers for _, *numbers in again] == [numbers for _, *numbers in read[1:]]
    assert next(batches)[1:] == following[1:]


def test_batch_that_draws_no_numbers_adds_no_state() -> None:
    ahead, batches = loader(list)
    list(batches)
    assert ahead.states() == [None] * 6


def test_only_the_newest_batches_are_kept() -> None:
    ahead, batches = loader()
    list(batches)
    newest = ahead.states()[-1:]
    ahead.keep(1)
    assert ahead.states() == newest
    ahead.keep(0)
    assert ahead.states() == []
