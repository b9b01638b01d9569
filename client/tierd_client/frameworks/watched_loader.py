"""The loaders of a Lightning training, which call tierd between two batches and begin at the position of a snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
from lightning.fabric.utilities.data import _set_sampler_epoch, sized_len  # pyright: ignore[reportPrivateUsage]
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DistributedSampler, IterableDataset, SequentialSampler
from torch.utils.data.dataloader import _InfiniteConstantSampler  # pyright: ignore[reportPrivateUsage]

from tierd_client.state import rng
from tierd_client.state.sections import is_stateful


class GeneratorStates(msgspec.Struct):
    """All generators at one instant: `everyone` as `rng.capture` returns them, `own` those that loaders were given.

    `seeds`: of the samplers that distribute an epoch among ranks. Lightning takes them from `seed_everything`.
    """

    everyone: dict[str, Any]
    own: list[bytes]
    seeds: list[int]


class LoaderPosition(msgspec.Struct):
    """The position in the data: training has used `given` batches of this epoch, which were all if `is_over`.

    `at_iter`, `at_first`: when the epoch's iterators were made, and when its first batch was fetched. `at_ahead`: when
    a batch was fetched that training has not used yet. `should_stop`: training ends here, for example early.
    `broadcasts_next`: DDP's next forward begins with a broadcast of rank 0's buffers.
    """

    world_size: int
    epoch: int
    given: int
    is_over: bool
    should_stop: bool
    broadcasts_next: bool
    at_iter: GeneratorStates
    at_first: GeneratorStates | None
    at_ahead: GeneratorStates | None
    now: GeneratorStates


class WatchedLoader(CombinedLoader):
    """Lightning's combined loader. Calls `before_batch` before each fetch, and resumes at a LoaderPosition.

    Lightning restores loaders whose state is their whole position. Otherwise they repeat the batches of their epoch.
    """

    def __init__(
        self,
        iterables: Any,
        mode: Any,
        before_batch: Callable[[], None],
        device: torch.device,
        resumed: LoaderPosition | None = None,
    ) -> None:
        super().__init__(iterables, mode)
        self._before_batch = before_batch
        self._device = device
        self._resumed = resumed
        self._at_iter: GeneratorStates | None = None
        self._at_first: GeneratorStates | None = None
        self._at_last: GeneratorStates | None = None
        self._at_next: list[GeneratorStates | None] = []
        self._fetched = 0
        self._fetches_ahead = False
        self.states_ahead: list[dict[str, Any]] = []
        """The states of the loaders before the last batch was fetched, where Lightning fetches one ahead."""

    def randomness(
        self, given: int
    ) -> tuple[GeneratorStates, GeneratorStates | None, GeneratorStates | None, GeneratorStates]:
        """`at_iter`, `at_first`, `at_ahead` and `now` of the LoaderPosition after `given` batches."""
        now = self._randomness()
        return self._at_iter or now, self._at_first, self._at_last if self._fetched > given else None, now

    def __iter__(self) -> WatchedLoader:
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            self._set(resumed.now if resumed.is_over else resumed.at_iter)
            for loader in self.flattened:
                _set_sampler_epoch(loader, resumed.epoch)  # Lightning does so later, but batches are read again now
        self._at_iter, self._at_first, self._fetched = self._randomness(), None, 0
        super().__iter__()
        self._fetches_ahead = sized_len(self) is None  # Lightning then fetches ahead, to know which batch is the last
        if resumed is None:
            return self
        if not resumed.is_over:
            self._at_first = resumed.at_first
            if self._at_first is not None and not self._keep_position:
                self._set(self._at_first)
                for _ in range(resumed.given):
                    super().__next__()
            self._fetched = resumed.given
        # The next batches must not depend on numbers that the hooks at the start of training draw.
        now = self._randomness() if resumed.is_over else resumed.now
        first: list[GeneratorStates | None] = (
            [now, None] if self._fetches_ahead else [now]
        )  # None: as the fetch before leaves it
        self._at_next = first if resumed.at_ahead is None else [resumed.at_ahead, now]
        return self

    def __next__(self) -> Any:
        self._before_batch()
        at_next = self._at_next.pop(0) if self._at_next else None
        if at_next is not None:
            self._set(at_next)
        if self._at_first is None:
            self._at_first = self._randomness()
        if self._fetches_ahead:
            self._at_last, self.states_ahead = self._randomness(), self._state_dicts()
        batch = super().__next__()
        self._fetched += 1
        if self._at_next and self._at_next[0] is None:
            self._at_next[0] = self._randomness()
        return batch

    def _load_state_dicts(self, states: list[dict[str, Any]]) -> None:
        if self._keep_position:
            super()._load_state_dicts(states)

    @property
    def _keep_position(self) -> bool:
        return all(_keeps_position(loader) for loader in self.flattened)

    def _randomness(self) -> GeneratorStates:
        own = [generator.get_state().numpy().tobytes() for generator in self._generators()]
        return GeneratorStates(
            rng.capture([self._device]), own, [sampler.seed for sampler in self._distributed_samplers()]
        )

    def _set(self, randomness: GeneratorStates) -> None:
        rng.restore(randomness.everyone, [self._device])
        for generator, state in zip(self._generators(), randomness.own, strict=False):
            generator.set_state(rng.state_tensor(state))
        for sampler, seed in zip(self._distributed_samplers(), randomness.seeds, strict=False):
            sampler.seed = seed

    def _generators(self) -> Iterator[torch.Generator]:
        """The generators that a loader or its sampler was given, each once."""
        seen: set[int] = set()
        for owner in self._owners():
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator) and id(generator) not in seen:
                seen.add(id(generator))
                yield generator

    def _distributed_samplers(self) -> Iterator[DistributedSampler[Any]]:
        return (owner for owner in self._owners() if isinstance(owner, DistributedSampler))

    def _owners(self) -> Iterator[Any]:
        """The loaders and their samplers, with those that Lightning has wrapped."""
        for loader in self.flattened:
            batches = getattr(loader, "batch_sampler", None)
            for sampler in (getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)):
                yield sampler
                yield getattr(getattr(sampler, "dataset", None), "_sampler", None)
            yield loader


def _keeps_position(loader: Any) -> bool:
    """Whether the loader's state is its whole position.

    torchdata's loader draws an order anew if the sampler has no state: under DDP, Lightning wraps the sampler of a
    shuffled loader in such a one. It counts twice what it has read again of a stream without a state.
    """
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", getattr(loader, "sampler", None))
    has_state = is_stateful(sampler) or type(sampler).__module__.startswith("torchdata.")
    is_fixed = sampler is None or type(sampler) in (SequentialSampler, DistributedSampler, _InfiniteConstantSampler)
    is_bare_stream = isinstance(dataset := getattr(loader, "dataset", None), IterableDataset) and not is_stateful(
        dataset
    )
    return is_stateful(loader) and (has_state or is_fixed) and not is_bare_stream
