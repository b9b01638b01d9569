"""The generator states before each batch that was read and not yet trained on: frameworks' loaders read ahead.

A dataset or a collate function may draw random numbers, for example to mask tokens. A resumed training reads those
batches again and must get the same ones. Works in this process; workers have generators of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from tierd_client.state import rng

Generators = dict[str, Any]


class ReadAhead:
    """For one loader. A snapshot stores `states()`; a resume gives them to `repeat`."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = list(devices)
        self._read: list[Generators | None] = []
        self._to_repeat: list[Generators | None] = []
        self._to_skip = 0
        self._before: Generators | None = None
        self._repeated: Generators | None = None

    def watch(self, loader: Any, *, has_dataset: bool = False) -> None:
        """Records each batch that `loader` (a torch DataLoader) collates from now on.

        With `has_dataset` also what its map-style dataset draws.
        """
        if loader.num_workers > 0:
            return
        collate = loader.collate_fn
        if has_dataset:
            # A loader refuses to replace its dataset by assignment. No iterator exists yet, so none has the other one.
            vars(loader)["dataset"] = _WatchedDataset(loader.dataset, self._begin)

        def watched(samples: Any) -> Any:
            if not has_dataset:
                self._begin()
            batch = collate(samples)
            self._end()
            return batch

        loader.collate_fn = watched

    def _begin(self) -> None:
        """A batch is read."""
        self._before = rng.capture(self._devices)
        self._repeated = self._to_repeat.pop(0) if self._to_repeat and not self._to_skip else None
        if self._repeated is not None:
            rng.restore(self._repeated, self._devices)

    def _end(self) -> None:
        before = self._before
        assert before is not None, "_begin comes first"
        if self._to_skip:
            self._to_skip -= 1
        elif self._repeated is not None:
            self._read.append(self._repeated)
            rng.restore(before, self._devices)  # the numbers of this batch were drawn before the snapshot
        else:
            self._read.append(before if rng.capture(self._devices) != before else None)

    def keep(self, count: int) -> None:
        """All but the newest `count` batches were trained on."""
        del self._read[: max(0, len(self._read) - count)]

    def trained(self, count: int = 1) -> None:
        """The `count` oldest batches were trained on."""
        del self._read[:count]

    def states(self) -> list[Generators | None]:
        """The generator states before each batch; None for a batch that drew no numbers."""
        return list(self._read)

    def repeat(self, states: list[Generators | None], *, after: int = 0) -> None:
        """The next batches are those that a snapshot stored, after `after` batches that are read for nothing."""
        self._to_repeat = list(states)
        self._to_skip = after


class _WatchedDataset(torch.utils.data.Dataset[Any]):
    """A map-style dataset that calls `begin` before it reads the samples of a batch."""

    def __init__(self, dataset: Any, begin: Callable[[], None]) -> None:
        self._dataset = dataset
        self._begin = begin

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        self._begin()
        return self._dataset[index]

    def __getitems__(self, indices: list[Any]) -> Any:
        self._begin()
        read_all = getattr(self._dataset, "__getitems__", None)
        return read_all(indices) if read_all else [self._dataset[index] for index in indices]
