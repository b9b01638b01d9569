"""A run over several nodes goes on from what its nodes have together, or from cold: at the newest step that is whole.

Most tests are named after a row of the table in docs/decisions/0060-the-nodes-together-are-a-source-of-a-restore.md.
"""

from __future__ import annotations

import math
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tierd_client
import torch
from tierd_client import TierUnreachable, Unhealthy

from tests.support.cli import flip_a_bit
from tests.support.daemon import Daemon
from tests.support.nodes import connect_on, connected, nodes
from tests.support.trainer import Trainer, Training, joined, refusals, together
from tests.support.waiting import wait_until


def hold_cold(daemon: Daemon) -> None:
    """From now on the node sends almost nothing to the cold tier, so that no checkpoint becomes whole there."""
    daemon.config.write_text(
        daemon.config.read_text().replace('name = "cold"', 'name = "cold"\nmax_upload_mib_s = 1e-6')
    )
    daemon.signal(signal.SIGHUP)
    daemon.wait_log("max_upload_mib_s is now")


def save(trainers: Sequence[Trainer], *, in_cold: bool = False) -> list[str]:
    """One more step, and a snapshot that is durable on every node. The digests of the ranks."""
    together(trainers, "train", 1)
    together(trainers, "durable")
    if in_cold:
        together(trainers, "wait_replicated", timeout_s=60)
    return together(trainers, "digest")


def restart(daemons: Sequence[Daemon]) -> None:
    for daemon in daemons:
        daemon.kill()
        daemon.start()


def restored(
    daemons: Sequence[Daemon], world_size: int, *, has_scale: bool = False, **which: Any
) -> tuple[list[tuple[int, str]], list[str]]:
    """(step, tier) and digest of each rank after a restart of all trainers."""
    with connected(daemons, world_size) as trainers:
        if has_scale:
            together(trainers, "apply", _add_scale)
        found = together(trainers, "restore", **which)
        return [(each.step, each.tier) for each in found], together(trainers, "digest")


def folders(daemons: Sequence[Daemon], step: int) -> list[Path]:
    return [daemon.hot / "run" / f"{step:012d}-g0001" for daemon in daemons]


def test_all_trainers(tmp_path: Path) -> None:
    """They go on from memory, at the last snapshot, although no cold tier has one, and in a new generation."""
    with nodes(tmp_path) as daemons:
        hold_cold(daemons[1])
        with connected(daemons, 4) as trainers:
            assert together(trainers, "restore") == [None] * 4
            save(trainers)
            digests = save(trainers)
        with connected(daemons, 4) as trainers:
            found = together(trainers, "restore")
            assert [(each.step, each.tier, each.generation) for each in found] == [(2, "memory", 1)] * 4
            assert together(trainers, "digest") == digests
            assert together(trainers, "generation") == [2] * 4
        assert not list((tmp_path / "cold" / "run").glob("*/manifest.json"))


@pytest.mark.long
def test_all_nodes_disks_kept(tmp_path: Path) -> None:
    """The daemons restart too: from hot, at the last step that all nodes have persisted."""
    with nodes(tmp_path) as daemons:
        hold_cold(daemons[1])
        with connected(daemons, 4) as trainers:
            together(trainers, "restore")
            digests = save(trainers)
        restart(daemons)
        assert restored(daemons, 4) == ([(1, "hot")] * 4, digests)


@pytest.mark.long
def test_one_daemon_restarts(tmp_path: Path) -> None:
    """One node reads its part from memory, the other from hot: the same step."""
    with nodes(tmp_path) as daemons:
        hold_cold(daemons[1])
        with connected(daemons, 4) as trainers:
            together(trainers, "restore")
            digests = save(trainers)
        restart(daemons[1:])
        assert restored(daemons, 4) == ([(1, "memory")] * 2 + [(1, "hot")] * 2, digests)


@pytest.mark.long
def test_ranks_placed_elsewhere_read_from_cold(tmp_path: Path) -> None:
    with nodes(tmp_path) as daemons:
        with connected(daemons, 4) as trainers:
            together(trainers, "restore")
            digests = save(trainers, in_cold=True)
        restart(daemons)
        assert restored(daemons[::-1], 4) == ([(1, "cold")] * 4, digests)


@pytest.mark.long
def test_ranks_placed_elsewhere_without_cold_go_on_from_an_older_step_and_say_so(tmp_path: Path) -> None:
    with nodes(tmp_path) as daemons:
        with connected(daemons, 4) as trainers:
            together(trainers, "restore")
            digests = save(trainers, in_cold=True)
            hold_cold(daemons[1])
            save(trainers)
        restart(daemons)
        assert restored(daemons[::-1], 4) == ([(1, "cold")] * 4, digests)


@pytest.mark.usefixtures("checkpoints_examined")
@pytest.mark.long
def test_nan_on_one_node(tmp_path: Path) -> None:
    """The whole checkpoint is unhealthy: the one before is restored on all nodes, unless it is allowed."""
    with nodes(tmp_path) as daemons:
        hold_cold(daemons[1])
        with connected(daemons, 4) as trainers:
            together(trainers, "apply", _add_scale)
            together(trainers, "restore")
            digests = save(trainers)
            trainers[2].apply(_spoil)
            spoilt = save(trainers)
        wait_until(lambda: (folders(daemons, 2)[1] / "unhealthy.json").exists(), "the verdict of the second node")
        restart(daemons)  # memory holds the newest only
        assert restored(daemons, 4, has_scale=True) == ([(1, "hot")] * 4, digests)
        assert restored(daemons, 4, has_scale=True, allow_unhealthy=True) == ([(2, "hot")] * 4, spoilt)


def _add_scale(training: Training) -> None:
    """A tensor that differs between the ranks, and in which NaN is looked for."""
    scale = {"amax": torch.zeros(3)}
    training.extra["scale"] = scale["amax"]
    training.state = tierd_client.TrainingState(
        model=training.model,
        optimizer=training.optimizer,
        scheduler=training.scheduler,
        ema=scale,
        extra=training.extra,
        per_rank=["ema.amax"],
    )


def _spoil(training: Training) -> None:
    training.extra["scale"].fill_(math.nan)


def test_all_disks(tmp_path: Path) -> None:
    """The newest in cold."""
    with nodes(tmp_path) as daemons:
        with connected(daemons, 4) as trainers:
            together(trainers, "restore")
            digests = save(trainers, in_cold=True)
            hold_cold(daemons[1])
            save(trainers)
        for daemon in daemons:
            daemon.kill()
            shutil.rmtree(daemon.hot)
            daemon.start()
        assert restored(daemons, 4) == ([(1, "cold")] * 4, digests)


@pytest.mark.long
def test_fewer_nodes_without_peers_go_on_from_cold_and_say_what_is_lost(tmp_path: Path) -> None:
    """As an elastic torchrun does: the nodes that are left cannot read the part of the one that is gone."""
    with nodes(tmp_path) as daemons:
        with connected(daemons, 4) as trainers:
            together(trainers, "apply", _share_extra)
            together(trainers, "restore")
            digests = save(trainers, in_cold=True)
            hold_cold(daemons[1])
            save(trainers)
        daemons[1].kill()
        with joined(tmp_path, 2) as trainers:
            connect_on(daemons[:1], trainers)
            together(trainers, "apply", _share_extra)
            found = together(trainers, "restore")
            assert [(each.step, each.tier) for each in found] == [(1, "cold")] * 2
            assert len(set(digests)) == 4  # of four ranks, each with its own random numbers
            assert "run/000000000002-g0001" in daemons[0].log


def _share_extra(training: Training) -> None:
    del training.extra["rank"]


@pytest.mark.long
def test_part_that_is_not_whole_does_not_block_an_older_step(tmp_path: Path) -> None:
    with nodes(tmp_path) as daemons:
        hold_cold(daemons[1])
        with connected(daemons, 4) as trainers:
            together(trainers, "restore")
            digests = save(trainers)
            save(trainers)
        for daemon in daemons:
            daemon.kill()
        shutil.rmtree(folders(daemons, 2)[1])
        for daemon in daemons:
            daemon.start()
        assert restored(daemons, 4) == ([(1, "hot")] * 4, digests)


@pytest.mark.long
def test_only_a_part_that_is_not_whole_is_no_reason_to_start_from_scratch(tmp_path: Path) -> None:
    with nodes(tmp_path) as daemons:
        hold_cold(daemons[1])
        with connected(daemons, 4) as trainers:
            together(trainers, "restore")
            save(trainers)
        for daemon in daemons:
            daemon.kill()
        shutil.rmtree(folders(daemons, 1)[1])
        for daemon in daemons:
            daemon.start()
        with connected(daemons, 4) as trainers:
            for error in refusals(trainers, "restore"):
                assert isinstance(error, TierUnreachable)
                assert "no node has the part with ranks 2-3 of 4" in error.message
            assert together(trainers, "restore", resume="scratch", force=True) == [None] * 4


@pytest.mark.long
def test_damaged_part_sends_all_ranks_to_the_next_source(tmp_path: Path) -> None:
    """Found on one rank: all take the copy in cold, and the older step where there is none."""
    with nodes(tmp_path) as daemons:
        with connected(daemons, 4) as trainers:
            together(trainers, "restore")
            first = save(trainers, in_cold=True)
            hold_cold(daemons[1])
            save(trainers)
        restart(daemons)
        for step, rank in ((2, 3), (1, 0)):
            flip_a_bit(folders(daemons, step)[rank // 2] / f"rank-{rank:05d}-of-00004.safetensors")
        assert restored(daemons, 4) == ([(1, "cold")] * 4, first)


@pytest.mark.long
def test_large_tensor_of_another_node_sends_all_ranks_to_cold(tmp_path: Path) -> None:
    """Replicated parameters are written once over all nodes; only small ones on each."""
    with nodes(tmp_path) as daemons:
        with joined(tmp_path, 4, width=2048) as trainers:
            connect_on(daemons, trainers)
            together(trainers, "restore")
            digests = save(trainers, in_cold=True)
            hold_cold(daemons[1])
            save(trainers)
        with joined(tmp_path, 4, width=2048) as trainers:
            connect_on(daemons, trainers)
            found = together(trainers, "restore")
            assert [(each.step, each.tier) for each in found] == [(1, "cold")] * 4
            assert together(trainers, "digest") == digests


@pytest.mark.usefixtures("checkpoints_examined")
@pytest.mark.long
def test_named_step_is_restored_from_the_nodes(tmp_path: Path) -> None:
    with nodes(tmp_path) as daemons:
        hold_cold(daemons[1])
        with connected(daemons, 4) as trainers:
            together(trainers, "apply", _add_scale)
            together(trainers, "restore")
            digests = save(trainers)
            trainers[2].apply(_spoil)
            save(trainers)
        wait_until(lambda: (folders(daemons, 2)[1] / "unhealthy.json").exists(), "the verdict of the second node")
        assert restored(daemons, 4, has_scale=True, resume=1) == ([(1, "hot")] * 4, digests)
        with connected(daemons, 4) as trainers:
            together(trainers, "apply", _add_scale)
            assert {type(error) for error in refusals(trainers, "restore", resume=2)} == {Unhealthy}


@pytest.mark.long
def test_hot_keeps_a_step_that_all_nodes_have_and_lets_older_ones_go(tmp_path: Path) -> None:
    with nodes(tmp_path) as daemons:
        hold_cold(daemons[1])
        with connected(daemons, 4) as trainers:
            together(trainers, "restore")
            for _ in range(6):
                save(trainers)
            assert all(folder.exists() for folder in folders(daemons, 5))
            together(trainers, "apply", _wait_everywhere)
            wait_until(lambda: not any(folder.exists() for folder in folders(daemons, 3)), "older parts to be deleted")
            assert all(folder.exists() for folder in folders(daemons, 6))


def _wait_everywhere(training: Training) -> None:
    training.client.wait_everywhere(60)
