"""The number of nodes changes over a restart: the training goes on from what its nodes have, not from cold.

In every test nothing becomes whole in cold. tests/e2e/test_torchrun_nodes.py does the same with a real `torchrun`.
"""

from __future__ import annotations

from pathlib import Path

import tierd_client
from tierd_client.loaders.sampler import ResumableSampler

from tests.e2e.test_nodes_copies import lose, safe
from tests.e2e.test_nodes_peers import LARGE, _share_extra, _weights, peers
from tests.e2e.test_nodes_restore import hold_cold, save
from tests.support.nodes import connect_on
from tests.support.trainer import Trainer, Training, joined, together

SAMPLES = 48
BATCH = 4  # of all ranks together


def test_fewer_nodes_go_on_from_memory_and_copies_and_more_from_where_they_have_been(tmp_path: Path) -> None:
    """Two nodes, one is lost with its disk, and then a new one joins. The data is read once."""
    with peers(tmp_path, "a", "b", "new") as (first, second, new):
        hold_cold(first)
        hold_cold(second)
        hold_cold(new)
        read: list[int] = []
        with joined(tmp_path, 4, width=LARGE) as trainers:
            connect_on([first, second], trainers)
            begin(trainers)
            assert together(trainers, "restore") == [None] * 4
            read += batches(trainers, 3)
            safe(trainers)
            (weights,) = set(together(trainers, "apply", _weights))
        lose(second)
        with joined(tmp_path, 2, width=LARGE, seed=2) as trainers:
            connect_on([first], trainers)
            begin(trainers)
            found = together(trainers, "restore")
            assert [(each.step, each.tier) for each in found] == [(1, "memory")] * 2
            assert set(together(trainers, "apply", _weights)) == {weights}
            read += batches(trainers, 3)
            save(trainers)
            (weights,) = set(together(trainers, "apply", _weights))
        with joined(tmp_path, 4, width=LARGE, seed=3) as trainers:
            connect_on([new, first], trainers)  # what there is, rank 0's node does not have
            begin(trainers)
            found = together(trainers, "restore")
            assert [(each.step, each.tier) for each in found] == [(2, "peer")] * 2 + [(2, "memory")] * 2
            assert set(together(trainers, "apply", _weights)) == {weights}
            read += batches(trainers, SAMPLES // BATCH - 6)
            safe(trainers)
        assert sorted(read) == list(range(SAMPLES))
        assert not list((tmp_path / "cold" / "run").glob("*/manifest.json"))


def begin(trainers: list[Trainer]) -> None:
    together(trainers, "apply", _share_extra)
    together(trainers, "apply", _add_sampler)


def batches(trainers: list[Trainer], count: int) -> list[int]:
    """The samples of the next batches of all ranks."""
    return [sample for samples in together(trainers, "apply", _read, count) for sample in samples]


# ── these run in a trainer ──


def _add_sampler(training: Training) -> None:
    sampler = ResumableSampler(SAMPLES, batch_size=BATCH // training.client._ranks.world_size)
    training.extra["sampler"] = sampler
    training.state = tierd_client.TrainingState(
        model=training.model,
        optimizer=training.optimizer,
        scheduler=training.scheduler,
        dataloader=sampler,
        extra={key: value for key, value in training.extra.items() if key != "sampler"},
    )


def _read(training: Training, count: int) -> list[int]:
    sampler: ResumableSampler = training.extra["sampler"]
    read: list[int] = []
    for _, batch in zip(range(count), sampler, strict=False):
        read += batch
        sampler.advance()
    return read
