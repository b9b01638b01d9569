"""One number is the position in an epoch, and it means the same on any number of ranks."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tierd_client.loaders.sampler import ResumableSampler, find_rank
from torch.utils.data import DataLoader

from tierd.errors import BadConfig, Mismatch


def ranks_of(world_size: int, length: int = 48, batch_size: int = 3, **options: object) -> list[ResumableSampler]:
    return [
        ResumableSampler(length, batch_size=batch_size, rank=rank, world_size=world_size, **options)  # type: ignore[arg-type]
        for rank in range(world_size)
    ]


def consume(samplers: list[ResumableSampler], batches: int | None = None) -> list[int]:
    """The samples that all ranks read."""
    seen: list[int] = []
    for sampler in samplers:
        for count, batch in enumerate(sampler):
            if count == batches:
                break
            seen += batch
            sampler.advance()
    return seen


@pytest.mark.parametrize("is_shuffled", [True, False])
def test_ranks_share_each_epoch_and_epochs_have_different_orders(is_shuffled: bool) -> None:
    samplers = ranks_of(4, shuffle=is_shuffled)
    first = consume(samplers)
    second = consume(samplers)
    assert sorted(first) == sorted(second) == list(range(48))
    assert [sampler.epoch for sampler in samplers] == [1] * 4
    assert (first != second) == is_shuffled


def test_batches_of_all_ranks_together_are_the_next_samples_in_order() -> None:
    batches = [list(sampler) for sampler in ranks_of(2, length=12, shuffle=False)]
    assert batches == [[[0, 2, 4], [6, 8, 10]], [[1, 3, 5], [7, 9, 11]]]


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 3), (1, 4), (4, 1), (3, 4)])
def test_rest_of_an_epoch_is_resharded_and_no_sample_is_read_twice(before: int, after: int) -> None:
    length = 54  # two batches of three, on each of `before` ranks, leave what `after` ranks can share evenly
    samplers = ranks_of(before, length)
    seen = consume(samplers, batches=2)
    states = [sampler.state_dict() for sampler in samplers]
    others = ranks_of(after, length, seed=99)
    for sampler in others:
        sampler.load_state_dicts(states)
    seen += consume(others)
    assert Counter(seen) == Counter(range(length))
    assert {*consume(others)} == {*range(length)}, "the next epoch is whole"


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 50), st.integers(1, 5), st.integers(1, 5), st.booleans())
def test_all_ranks_have_equally_many_batches_for_any_length(
    length: int, batch_size: int, world_size: int, drop_last: bool
) -> None:
    samplers = ranks_of(world_size, length, batch_size, drop_last=drop_last)
    batches = [list(sampler) for sampler in samplers]
    assert {len(rank_batches) for rank_batches in batches} == {len(samplers[0])}
    sizes = [[len(batch) for batch in rank_batches] for rank_batches in batches]
    assert sizes == [sizes[0]] * world_size
    counts = Counter(index for rank_batches in batches for batch in rank_batches for index in batch)
    if drop_last:
        assert {*sizes[0]} <= {batch_size}
        assert set(counts.values()) <= {1}
        assert length - len(counts) < batch_size * world_size
    else:
        assert set(counts) == set(range(length))
        assert counts.total() - length < world_size


def test_sampler_works_with_a_plain_torch_loader() -> None:
    def loader(sampler: ResumableSampler) -> DataLoader[int]:
        return DataLoader(torch.arange(48), batch_sampler=sampler, generator=torch.Generator())  # type: ignore[arg-type]

    sampler = ResumableSampler(48, batch_size=5)
    seen: list[int] = []
    for batch in loader(sampler):
        seen += batch.tolist()
        sampler.advance()
        if len(seen) == 20:
            break
    resumed = ResumableSampler(48, batch_size=5, seed=9)
    resumed.load_state_dict(sampler.state_dict())
    plain = loader(resumed)
    for epoch in range(resumed.epoch, 2):
        resumed.set_epoch(epoch)  # does nothing within the current epoch
        for batch in plain:
            seen += batch.tolist()
            resumed.advance()
    assert Counter(seen) == Counter([*range(48)] * 2)


def test_invalid_arguments_and_states_are_refused() -> None:
    sampler = ResumableSampler(48, batch_size=3)
    state = sampler.state_dict()
    with pytest.raises(Mismatch, match="had 48 samples, now 47"):
        ResumableSampler(47, batch_size=3).load_state_dict(state)
    with pytest.raises(Mismatch, match="rank 0 epoch 0 sample 0, rank 1 epoch 0 sample 6"):
        sampler.load_state_dicts([state, {**state, "consumed": 6}])
    with pytest.raises(Mismatch, match="not a sampler"):
        sampler.load_state_dict({"position": 3})
    for options in ({"length": 0, "batch_size": 1}, {"length": 1, "batch_size": 0}):
        with pytest.raises(BadConfig):
            ResumableSampler(**options)


def test_rank_comes_from_torch_distributed_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_rank(None, None) == (0, 1)
    assert find_rank(1, 3) == (1, 3)
    for rank, world_size in [(1, None), (None, 2), (2, 2), (-1, 2)]:
        with pytest.raises(BadConfig, match="give both"):
            find_rank(rank, world_size)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    with pytest.raises(BadConfig, match="torchrun has started several ranks"):
        find_rank(None, None)
