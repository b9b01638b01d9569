"""The order in which a map-style dataset is read, and how far training has come in it.

An epoch is one order of all samples, and all ranks go through it together, so one number says what they have
consumed: it means the same on any number of ranks. The trap: workers fetch ahead, so what was handed out says nothing.
Only `advance` counts. `ResumableLoader` calls it for each batch that it delivers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from tierd.errors import BadConfig, Mismatch
from tierd_client.state import rng


class Batch(list[int]):
    """The indexes of one batch, and the seed of its random numbers."""

    seed: int = 0


class SamplerState(msgspec.Struct, frozen=True):
    """The same on all ranks. `consumed` counts the samples of the epoch's order that are behind all of them."""

    length: int
    seed: int
    shuffle: bool
    epoch: int
    consumed: int


class ResumableSampler(Sampler[list[int]]):
    """Batches of this rank's share of `range(length)`, in order or shuffled by (seed, epoch).

    Rank r of n takes every n-th sample, as torch's DistributedSampler does, so that one batch of each rank together
    are the next samples of the order. Every rank has the same number of batches: the last ones are filled up with
    at most n - 1 samples of the epoch's beginning, or with `drop_last` left out unless all are full.

    rank, world_size: of torch.distributed, which must be initialized before, unless given.

    With a DataLoader of torch it is the `batch_sampler`. Then call `advance()` once for each batch that training has
    consumed, and give the loader a `generator` of its own: else it draws from the global one at each start.
    Raises BadConfig for a length, batch size or rank that cannot be.
    """

    def __init__(
        self,
        length: int,
        *,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if length < 1 or batch_size < 1:
            raise BadConfig(f"sample {length} in batches of {batch_size}: both must be 1 or more")
        self._state = SamplerState(length, seed, shuffle, epoch=0, consumed=0)
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._rank, self._world_size = place_of(rank, world_size)
        self._is_begun = False
        self.moves = 0

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to, from 0."""
        return self._state.epoch

    @property
    def seed(self) -> int:
        """The seed of the order: the argument, or that of the restored checkpoint."""
        return self._state.seed

    def __len__(self) -> int:
        """Batches of one rank in a whole epoch."""
        return -(-self._each(self._state.length) // self._batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """The batches that remain of this epoch; of the next one when a pass has consumed all of this."""
        if self._is_begun and self._each(self._remaining) == 0:
            self.set_epoch(self.epoch + 1)
        self._is_begun = True
        state = self._state
        each = self._each(self._remaining)
        places = torch.arange(each) * self._world_size + self._rank + state.consumed
        mine = self._order()[places % state.length].tolist()
        for at in range(0, each, self._batch_size):
            batch = Batch(mine[at : at + self._batch_size])
            batch.seed = rng.seed_of(state.seed, state.epoch, batch[0])
            yield batch

    def advance(self) -> None:
        """Training has consumed one more batch, on every rank."""
        consumed = self._state.consumed + self._batch_size * self._world_size
        self._state = msgspec.structs.replace(self._state, consumed=min(consumed, self._state.length))

    def set_epoch(self, epoch: int) -> None:
        """To the beginning of another epoch. Within the epoch that it is in, it stays where it is."""
        if epoch != self.epoch:
            self._move(msgspec.structs.replace(self._state, epoch=epoch, consumed=0))

    def state_dict(self) -> dict[str, Any]:
        """Seed, epoch and consumed samples: the same on all ranks."""
        return msgspec.to_builtins(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Seed and order come from the checkpoint too. Raises Mismatch when it was of another dataset."""
        self.load_state_dicts([state])

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """From all ranks of another world size: what remains of the epoch is shared out anew, each sample once."""
        try:
            saved = msgspec.convert(states, list[SamplerState])
        except msgspec.ValidationError as error:
            raise Mismatch(f"restore the sampler: its state in the checkpoint is none of a sampler: {error}") from error
        if len(set(saved)) != 1:
            raise Mismatch(
                "restore the sampler: the ranks were not at one place: "
                + ", ".join(f"rank {rank} epoch {one.epoch} sample {one.consumed}" for rank, one in enumerate(saved)),
                hint="all ranks must take the same number of batches of the same size between snapshots",
            )
        if saved[0].length != self._state.length:
            raise Mismatch(
                f"restore the sampler: the dataset had {saved[0].length} samples, now {self._state.length}",
                hint="an epoch goes on only with the dataset that it began with",
            )
        self._move(saved[0])
        self._is_begun = False

    @property
    def _remaining(self) -> int:
        return self._state.length - self._state.consumed

    def _each(self, samples: int) -> int:
        """How many of so many samples each rank takes."""
        if self._drop_last:
            return samples // (self._batch_size * self._world_size) * self._batch_size
        return -(-samples // self._world_size)

    def _order(self) -> torch.Tensor:
        if not self._state.shuffle:
            return torch.arange(self._state.length)
        generator = torch.Generator().manual_seed(rng.seed_of(self.seed, self.epoch))
        return torch.randperm(self._state.length, generator=generator)

    def _move(self, state: SamplerState) -> None:
        """`moves` tells whoever is iterating that the place is another one now."""
        self._state = state
        self.moves += 1


def place_of(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """(rank, world size): as given, else those of torch.distributed, else a process by itself. Raises BadConfig."""
    if rank is None and world_size is None:
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        if dist.is_available() and dist.is_torchelastic_launched():
            raise BadConfig(
                "share out samples: torchrun has started several ranks, and torch.distributed is not initialized",
                hint="make samplers and loaders after init_process_group, or give them rank and world_size",
            )
        return 0, 1
    if rank is None or world_size is None or not 0 <= rank < world_size:
        raise BadConfig(f"share out samples: rank {rank} of {world_size}", hint="give both rank and world_size")
    return rank, world_size
