"""The order in which a map-style dataset is read, and how far training has come in it.

An epoch is one order of all samples, and all ranks go through it together. One number, the samples consumed, is the
position: it means the same on any number of ranks. Workers fetch batches ahead, so batches that were handed out do not
count; `advance` counts a batch that training has consumed. `ResumableLoader` calls it for each batch.
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
    """The same on all ranks. `consumed`: how many samples of the epoch's order all ranks together have consumed."""

    length: int
    seed: int
    shuffle: bool
    epoch: int
    consumed: int


class ResumableSampler(Sampler[list[int]]):
    """Batches of this rank's share of `range(length)`, in order or shuffled by (seed, epoch).

    Rank r of n takes every n-th sample, as torch's DistributedSampler does: one batch of each rank together are the
    next samples of the order. Every rank has the same number of batches. The last ones are filled up with at most
    n - 1 samples from the epoch's beginning; with `drop_last` they are dropped unless all are full.

    rank, world_size: default to those of torch.distributed, which must be initialized before.

    It can be the `batch_sampler` of a torch DataLoader. Then call `advance()` after each batch that training has
    consumed, and give the loader its own `generator`: otherwise it draws from the global one at each start.
    Raises BadConfig for an invalid length, batch size or rank.
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
        self._rank, self._world_size = find_rank(rank, world_size)
        self._is_iterated = False
        self.jumps = 0
        """How often the position was set, other than by `advance`: iterators of an earlier position are then stale."""

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
        return -(-self._samples_per_rank(self._state.length) // self._batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """The remaining batches of this epoch; of the next one if an earlier iteration has consumed all of this one."""
        if self._is_iterated and self._samples_per_rank(self._remaining) == 0:
            self.set_epoch(self.epoch + 1)
        self._is_iterated = True
        state = self._state
        count = self._samples_per_rank(self._remaining)
        positions = torch.arange(count) * self._world_size + self._rank + state.consumed
        order = torch.arange(state.length)
        if state.shuffle:
            generator = torch.Generator().manual_seed(rng.seed_of(state.seed, state.epoch))
            order = torch.randperm(state.length, generator=generator)
        indexes = order[positions % state.length].tolist()
        for begin in range(0, count, self._batch_size):
            batch = Batch(indexes[begin : begin + self._batch_size])
            batch.seed = rng.seed_of(state.seed, state.epoch, batch[0])
            yield batch

    def advance(self) -> None:
        """Counts one more batch, on every rank, as consumed."""
        consumed = self._state.consumed + self._batch_size * self._world_size
        self._state = msgspec.structs.replace(self._state, consumed=min(consumed, self._state.length))

    def set_epoch(self, epoch: int) -> None:
        """Goes to the beginning of another epoch. Does nothing if it is in that epoch already."""
        if epoch != self.epoch:
            self._jump(msgspec.structs.replace(self._state, epoch=epoch, consumed=0))

    def state_dict(self) -> dict[str, Any]:
        """Seed, epoch and consumed samples: the same on all ranks."""
        return msgspec.to_builtins(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore position, seed and order. Raises Mismatch when the state is that of another dataset."""
        self.load_state_dicts([state])

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Take the states of all ranks of another world size, and divide the rest of the epoch again, each sample once.

        Raises Mismatch when the ranks were at different positions.
        """
        try:
            saved = msgspec.convert(states, list[SamplerState])
        except msgspec.ValidationError as error:
            raise Mismatch(f"restore the sampler: its state in the checkpoint is not a sampler's: {error}") from error
        if len(set(saved)) != 1:
            positions = (f"rank {rank} epoch {state.epoch} sample {state.consumed}" for rank, state in enumerate(saved))
            raise Mismatch(
                f"restore the sampler: the ranks were at different positions: {', '.join(positions)}",
                hint="all ranks must take the same number of batches of the same size between snapshots",
            )
        if saved[0].length != self._state.length:
            raise Mismatch(
                f"restore the sampler: the dataset had {saved[0].length} samples, now {self._state.length}",
                hint="an epoch can only continue with the dataset that it began with",
            )
        self._jump(saved[0])
        self._is_iterated = False

    @property
    def _remaining(self) -> int:
        return self._state.length - self._state.consumed

    def _samples_per_rank(self, samples: int) -> int:
        """How many of the next `samples` each rank takes."""
        if self._drop_last:
            return samples // (self._batch_size * self._world_size) * self._batch_size
        return -(-samples // self._world_size)

    def _jump(self, state: SamplerState) -> None:
        self._state = state
        self.jumps += 1


def find_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """(rank, world size): as given, else from torch.distributed, else (0, 1).

    Raises BadConfig when they are invalid, or when torchrun has started ranks and torch.distributed is not initialized.
    """
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
