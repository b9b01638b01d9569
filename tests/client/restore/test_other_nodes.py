"""A training over several nodes starts from scratch only if no daemon of any node knows a checkpoint of the run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from tierd_client import TargetNotEmpty, TierUnreachable
from tierd_client.restore.other_nodes import report_newer_here
from tierd_client.session import DaemonSession

from tests.support.nodes import connect_on, node
from tests.support.trainer import Trainer, joined, refusals, together
from tests.support.waiting import wait_until
from tests.support.wire_peer import HELLO
from tierd.format import wire
from tierd.format.ids import CheckpointId, Generation, Run, Step


def save_in(root: Path, cold: Path) -> None:
    """A checkpoint of step 2, by one rank, that is left in this cold tier only."""
    with node(root, "former", cold=cold) as daemon, joined(root, 1) as (trainer,):
        trainer.connect(daemon.socket)
        trainer.train(2)
        trainer.snapshot()
        trainer.wait_replicated()


def private(cold: Path) -> str:
    """More lines of a config: a cold tier that the other node has not."""
    return f'[[cold]]\nname = "dr"\nurl = "file://{cold}"\n'


@pytest.fixture
def started(tmp_path: Path) -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(started: ExitStack, root: Path) -> list[Trainer]:
    """A connected rank on each of two nodes; the second also has a cold tier of its own, in `dr`."""
    a = started.enter_context(node(root, "a", cold=root / "cold"))
    b = started.enter_context(node(root, "b", cold=root / "cold", more=private(root / "dr")))
    trainers = started.enter_context(joined(root, 2))
    connect_on([a, b], trainers)
    return trainers


def test_checkpoint_in_the_shared_cold_tier_is_restored_on_all_nodes(tmp_path: Path, started: ExitStack) -> None:
    save_in(tmp_path, tmp_path / "cold")
    found: list[Any] = together(start(started, tmp_path), "restore")
    assert [(each.step, each.tier) for each in found] == [(2, "cold")] * 2


def test_run_that_no_node_knows_starts_from_scratch(tmp_path: Path, started: ExitStack) -> None:
    trainers = start(started, tmp_path)
    assert together(trainers, "restore") == [None, None]
    assert together(trainers, "restore", resume="scratch") == [None, None]


@pytest.mark.long
def test_checkpoint_that_only_another_node_knows_is_no_reason_to_start_from_scratch(
    tmp_path: Path, started: ExitStack
) -> None:
    save_in(tmp_path, tmp_path / "dr")
    trainers = start(started, tmp_path)
    for error in refusals(trainers, "restore"):
        assert isinstance(error, TierUnreachable)
        assert "step 2" in error.message or "000000000002" in error.message
    for error in refusals(trainers, "restore", resume="scratch"):
        assert isinstance(error, TargetNotEmpty)
    assert together(trainers, "restore", resume="scratch", force=True) == [None, None]


@pytest.mark.long
def test_first_snapshot_without_a_restore_asks_all_nodes(tmp_path: Path, started: ExitStack) -> None:
    save_in(tmp_path, tmp_path / "dr")
    a = started.enter_context(node(tmp_path, "a", cold=tmp_path / "cold"))
    b = started.enter_context(node(tmp_path, "b", cold=tmp_path / "cold", more=private(tmp_path / "dr")))
    wait_until(lambda: b.steps("dr") == [2])
    trainers = started.enter_context(joined(tmp_path, 2))
    connect_on([a, b], trainers)
    together(trainers, "train", 1)
    assert {type(error) for error in refusals(trainers, "snapshot")} == {TargetNotEmpty}


def test_tier_that_only_another_node_has_and_cannot_list_is_no_reason_to_start_from_scratch(
    tmp_path: Path, started: ExitStack
) -> None:
    trainers = start(started, tmp_path)
    shutil.rmtree(tmp_path / "dr")
    for choice in ({}, {"resume": "scratch"}):
        for error in refusals(trainers, "restore", **choice):
            assert isinstance(error, TierUnreachable)
            assert "dr" in error.message


def test_newer_checkpoint_that_is_passed_over_is_logged_on_its_node(caplog: pytest.LogCaptureFixture) -> None:
    def checkpoint(step: int) -> CheckpointId:
        return CheckpointId(run=Run("run"), step=Step(step), generation=Generation(1))

    def session(rank: int, ranks: list[int]) -> DaemonSession:
        hello = msgspec.structs.replace(HELLO, rank=rank, node=wire.NodeRanks(ranks=ranks, lowest=[0, 2]))
        return cast("DaemonSession", SimpleNamespace(hello=hello, welcome=SimpleNamespace(newest=checkpoint(7))))

    report_newer_here(session(3, [2, 3]), checkpoint(5))  # rank 2 speaks for the node
    report_newer_here(session(2, [2, 3]), checkpoint(7))
    assert not caplog.records
    report_newer_here(session(2, [2, 3]), checkpoint(5))
    assert "has step 7 of generation 1" in caplog.text
