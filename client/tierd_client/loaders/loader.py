"""A torch DataLoader that resumes in the middle of an epoch exactly as if it had never stopped.

It counts the batches it delivers, reads no sample twice, and does not draw from the global generators. Each batch has
its own random numbers: augmentation is the same with any number of workers, and after a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from tierd_client.loaders.sampler import Batch, ResumableSampler
from tierd_client.state import rng


class ResumableLoader(DataLoader[Any]):
    """`dataset` (map-style) in the batches of `sampler`. `options`: further options of torch's DataLoader.

    A `for` over it goes through one epoch, or the rest of it. After a `break` the next `for` continues there. State
    that is restored during a `for` takes effect at the next batch.

    Within a batch the global generators of Python, numpy and torch (CPU) start from the batch's seed, in the dataset
    and in `collate_fn`. Generators that the dataset owns are not seeded.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: ResumableSampler,
        *,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        **options: Any,
    ) -> None:
        # With batch_size=None torch passes each item of the sampler, here a whole batch, to the dataset unchanged.
        fetch = _Fetch(dataset, collate_fn)
        generator = torch.Generator()  # for the seeds of workers: without it each start draws one from the global one
        super().__init__(fetch, batch_size=None, sampler=sampler, collate_fn=unchanged, generator=generator, **options)
        self._generator = generator
        self._resumable = sampler

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._resumable.epoch

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        sampler = self._resumable
        while True:
            jumps = sampler.jumps
            self._generator.manual_seed(rng.seed_of(sampler.seed, sampler.epoch, "workers"))
            for batch in super().__iter__():
                sampler.advance()
                yield batch
                if sampler.jumps != jumps:
                    break
            else:
                # Not with the last batch: a snapshot after it still belongs to this epoch, whose end is to come.
                sampler.set_epoch(sampler.epoch + 1)
                return

    def state_dict(self) -> dict[str, Any]:
        """The state of the sampler: the same on all ranks."""
        return self._resumable.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the checkpoint was. Raises Mismatch when it was of another dataset."""
        self._resumable.load_state_dict(state)

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Take the states of all ranks of another world size, and share out the rest of the epoch, each sample once."""
        self._resumable.load_state_dicts(states)


@dataclass(frozen=True, slots=True)
class _Fetch(Dataset[Any]):
    """The batches of a dataset by their indexes, read in a worker or in the training process."""

    source: Dataset[Any]
    collate: Callable[[list[Any]], Any]

    def __getitem__(self, batch: Batch) -> Any:
        with rng.temporary_seed(batch.seed):
            fetch_all = getattr(self.source, "__getitems__", None)  # torch's name for reading several at once
            samples = fetch_all(list(batch)) if fetch_all else [self.source[index] for index in batch]
            return self.collate(samples)


def unchanged(batch: Any) -> Any:
    """A collate function for batches that are complete already."""
    return batch
