"""The generator states before each batch that was read and not yet trained on: frameworks' loaders read ahead.

A collate function may draw random numbers, for example to mask tokens. A resumed training reads those batches again and
must get the same ones. Works for collate functions in this process; workers have generators of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
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

    def watch(self, loader: Any) -> None:
        """Records each batch that `loader` (a torch DataLoader) collates from now on."""
        if loader.num_workers > 0:
            return
        collate = loader.collate_fn

        def watched(samples: Any) -> Any:
            before = rng.capture(self._devices)
            repeated = self._to_repeat.pop(0) if self._to_repeat else None
            if repeated is None:
                batch = collate(samples)
                self._read.append(before if rng.capture(self._devices) != before else None)
            else:
                rng.restore(repeated, self._devices)
                batch = collate(samples)
                self._read.append(repeated)
                rng.restore(before, self._devices)  # the numbers of this batch were drawn before the snapshot
            return batch

        loader.collate_fn = watched

    def keep(self, count: int) -> None:
        """All but the newest `count` batches were trained on."""
        del self._read[: max(0, len(self._read) - count)]

    def trained(self) -> None:
        """The oldest batch was trained on."""
        del self._read[:1]

    def states(self) -> list[Generators | None]:
        """The generator states before each batch; None for a batch that drew no numbers."""
        return list(self._read)

    def repeat(self, states: list[Generators | None]) -> None:
        """The next batches are those that a snapshot stored."""
        self._to_repeat = list(states)
