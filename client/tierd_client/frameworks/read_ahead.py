"""The generators before each batch that is read and not trained on: loaders of frameworks read ahead.

A collator may draw random numbers, to mask tokens, say. A resumed training reads those batches again, and must find
the same ones. Holds for collators in this process; those of workers draw from generators of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from tierd_client.state import rng

Generators = dict[str, Any]


class ReadAhead:
    """One loader's. `states` is what a snapshot needs of it, None for a batch that drew nothing."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = list(devices)
        self._read: list[Generators | None] = []
        self._again: list[Generators | None] = []

    def watch(self, loader: Any) -> None:
        """From now on, `loader` (a torch DataLoader) tells of each batch that it puts together."""
        if loader.num_workers == 0:
            loader.collate_fn = self._watched(loader.collate_fn)

    def _watched(self, collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def watched(samples: Any) -> Any:
            before = rng.capture(self._devices)
            drawn_from = self._again.pop(0) if self._again else None
            if drawn_from is None:
                batch = collate(samples)
                self._read.append(before if rng.capture(self._devices) != before else None)
            else:
                rng.restore(drawn_from, self._devices)
                batch = collate(samples)
                self._read.append(drawn_from)
                rng.restore(before, self._devices)  # what it drew was drawn before the snapshot
            return batch

        return watched

    def trained(self) -> None:
        """On the oldest of the batches."""
        del self._read[:1]

    def keep(self, count: int) -> None:
        """All but the newest `count` are trained on."""
        del self._read[: max(0, len(self._read) - count)]

    def states(self) -> list[Generators | None]:
        return list(self._read)

    def repeat(self, states: list[Generators | None]) -> None:
        """The next batches are those of a snapshot."""
        self._again = list(states)
