"""Over several nodes all ranks tell their daemons the same about a checkpoint, because each daemon writes it down."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tierd_client import Unsupported

from tests.support.daemon import Daemon
from tests.support.nodes import connected, nodes, sealed_of
from tests.support.trainer import Trainer, Training, refusals, together
from tests.support.waiting import wait_until
from tierd.format import wire

OWN = ("slot", "size_bytes", "stall_s", "resent")  # the fields in which the ranks' messages may differ


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Daemon]]:
    """Shared by all tests: each has a run of its own."""
    with nodes(tmp_path_factory.mktemp("nodes")) as daemons:
        yield daemons


def _snapshot_as_rank(training: Training, step: int) -> None:
    """Each rank gives metrics and a milestone of its own."""
    rank = training.client._ranks.rank
    training.shot = training.client.snapshot(
        step, training.state, metrics={"loss": float(rank)}, milestone=f"of-{rank}" if rank % 2 == 0 else None
    )
    training.client.wait_staged()


def _spoil(training: Training, is_spoiled: bool) -> None:
    training.extra["spoiled"] = (number for number in range(3)) if is_spoiled else 0


def _renew(training: Training) -> None:
    training.client._generation.renew()


def heads(trainers: list[Trainer], step: int) -> wire.Sealed:
    """What all ranks have sent about this step, without what is of one rank."""
    together(trainers, "apply", _snapshot_as_rank, step)
    sent: list[wire.Sealed] = together(trainers, "apply", sealed_of)
    plain = [msgspec.structs.replace(sealed, **dict.fromkeys(OWN, 0)) for sealed in sent]
    assert plain[0].step == step
    assert all(each == plain[0] for each in plain)
    return plain[0]


@pytest.mark.parametrize("staging", ["sync", "overlap"])
def test_all_ranks_send_the_head_of_rank_0(daemons: list[Daemon], staging: str) -> None:
    with connected(daemons, 4, run=staging, staging=staging, slots=4) as trainers:
        together(trainers, "train", 1)
        head = heads(trainers, 1)
        assert (head.metrics, head.milestone, head.number) == ({"loss": 0.0}, "of-0", 1)
        assert heads(trainers, 2).number == 2


def test_numbers_stay_the_same_after_a_snapshot_that_failed_on_one_rank(daemons: list[Daemon]) -> None:
    with connected(daemons, 4, run="failed", slots=4) as trainers:
        together(trainers, "train", 1)
        assert heads(trainers, 1).number == 1
        trainers[2].apply(_spoil, True)
        assert {type(error) for error in refusals(trainers, "snapshot", 2)} == {Unsupported}
        trainers[2].apply(_spoil, False)
        assert heads(trainers, 3).number == 2


def test_numbers_begin_again_with_a_generation(daemons: list[Daemon]) -> None:
    with connected(daemons, 2, run="renewed", slots=4) as trainers:
        together(trainers, "train", 1)
        assert [heads(trainers, step).number for step in (1, 2)] == [1, 2]
        together(trainers, "apply", _renew)
        assert [heads(trainers, step).number for step in (3, 4)] == [1, 2]


def test_message_that_is_sent_again_keeps_its_number(tmp_path: Path) -> None:
    with nodes(tmp_path) as daemons, connected(daemons, 2, slots=4) as trainers:
        together(trainers, "train", 1)
        first = heads(trainers, 5)
        daemons[1].kill()
        daemons[1].start()
        wait_until(lambda: [run["ranks_attached"] for run in daemons[1].status()["runs"]] == [1])
        again: list[wire.Sealed] = together(trainers, "apply", sealed_of)
        assert [(sealed.number, sealed.created_at) for sealed in again] == [(1, first.created_at)] * 2


def test_ranks_of_one_node_send_their_own_message_without_a_number(daemons: list[Daemon]) -> None:
    with connected(daemons[:1], 2, run="single") as trainers:
        together(trainers, "train", 1)
        together(trainers, "apply", _snapshot_as_rank, 1)
        sent: list[Any] = together(trainers, "apply", sealed_of)
        assert [sealed.number for sealed in sent] == [0, 0]
        assert [sealed.metrics for sealed in sent] == [{"loss": 0.0}, {"loss": 1.0}]
