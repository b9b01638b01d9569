"""Runs over several nodes: a daemon for each, and one checkpoint over all of them in the cold tier."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
from tierd_client import TierUnreachable

from tests.support.nodes import connected, nodes, run_watchful
from tests.support.trainer import refusals, together
from tests.support.waiting import wait_until
from tierd.workers import committer

OVER_NODES = ("cold.node_file", "cold.part_sent", "cold.assemble", "cold.assembled")


def test_a_run_over_two_nodes_is_committed_in_cold_and_goes_on_after_its_trainers_are_killed(tmp_path: Path) -> None:
    with nodes(tmp_path) as daemons:
        with connected(daemons, 4) as trainers:
            assert together(trainers, "restore") == [None] * 4
            together(trainers, "train", 2)
            together(trainers, "snapshot", metrics={"loss": 1.0})
            together(trainers, "wait_persisted", 30)
            together(trainers, "wait_replicated", timeout_s=60)
            together(trainers, "train", 1)
            together(trainers, "snapshot")
            together(trainers, "wait_replicated", timeout_s=60)
            digests = together(trainers, "digest")
        for step in (2, 3):
            folder = tmp_path / "cold" / "run" / f"{step:012d}-g0001"
            assert {path.name for path in folder.iterdir()} >= {
                "manifest.json",
                "node-00000-of-00004.json",
                "node-00002-of-00004.json",
                *(f"rank-{rank:05d}-of-00004.safetensors" for rank in range(4)),
            }
        with connected(daemons, 4) as trainers:
            found = together(trainers, "restore")
            assert [(f.step, f.tier, f.generation) for f in found] == [(3, "memory", 1)] * 4
            assert together(trainers, "digest") == digests
            together(trainers, "train", 1)
            together(trainers, "snapshot")
            together(trainers, "wait_replicated", timeout_s=60)
        assert (tmp_path / "cold" / "run" / "000000000004-g0002" / "manifest.json").exists()


@pytest.mark.parametrize("is_home", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_daemon_that_is_killed_delays_the_commit_only(tmp_path: Path, *, is_home: bool) -> None:
    with nodes(tmp_path) as daemons, connected(daemons, 2) as trainers:
        killed = daemons[0] if is_home else daemons[1]
        for step, failpoint in enumerate(OVER_NODES[2:] if is_home else OVER_NODES[:2], start=1):
            killed.restart_armed(f"{failpoint}=kill@1")
            killed.wait_attached()
            together(trainers, "train", 1)
            together(trainers, "snapshot")
            assert killed.wait_exit() == -signal.SIGKILL
            killed.restart_armed("")
            manifest = tmp_path / "cold" / "run" / f"{step:012d}-g0001" / "manifest.json"
            wait_until(manifest.exists, f"the commit after {failpoint}")
            together(trainers, "wait_replicated", timeout_s=60)


@pytest.mark.parametrize(
    "failpoint", [pytest.param("cold.assemble", id="before the PUT"), pytest.param("cold.assembled", id="its answer")]
)
def test_the_committer_dies_before_the_put_or_its_answer(tmp_path: Path, failpoint: str) -> None:
    """It does not come back. The daemon of another node commits, or finds the same bytes there."""
    with nodes(tmp_path) as (home, other):
        other.kill()
        other.run_with(run_impatient)
        other.start()
        with connected([home, other], 2) as trainers:
            together(trainers, "restore")
            home.restart_armed(f"{failpoint}=kill@1")
            home.wait_attached()
            together(trainers, "train", 1)
            together(trainers, "snapshot")
            digests = together(trainers, "digest")
            assert home.wait_exit() == -signal.SIGKILL
            trainers[1].wait_replicated()
        home.restart_armed("")
        other.kill()
        shutil.rmtree(other.hot)
        other.start()
        with connected([home, other], 2) as trainers:
            assert {(each.step, each.tier) for each in together(trainers, "restore")} == {(1, "cold")}
            assert together(trainers, "digest") == digests
        assert home.json("verify", "--tier", "cold")[0]["problems"] == []


def run_impatient(arguments: list[str], environ: Mapping[str, str], log: str) -> None:
    """A daemon that waits only a moment for the one of rank 0."""
    committer.LIST_MIN_S = committer.YIELD_MIN_S = 0.1
    committer.LIST_MAX_S = committer.YIELD_MAX_S = 0.5
    run_watchful(arguments, environ, log)


@pytest.mark.long
def test_a_part_whose_node_died_is_no_checkpoint_for_anyone(tmp_path: Path) -> None:
    with nodes(tmp_path) as (a, b):
        with connected([a, b], 2) as trainers:
            assert together(trainers, "restore") == [None] * 2
            together(trainers, "train", 2)
            b.signal(signal.SIGSTOP)
            together(trainers, "snapshot")
            trainers[0].wait_persisted(30)
        b.kill()
        parts = {tier: {"ranks": [0], "world_size": 2} for tier in ("memory", "hot")}
        (row,) = a.json("ls")
        assert (row["step"], row["tiers"], row["parts"] | parts) == (2, [], row["parts"])
        target = tmp_path / "restored"
        restored = a.tierd("restore", "--run", "run", "--to", target)
        assert restored.returncode == 3
        assert "from the nodes: the parts of ranks 1 are missing" in restored.stderr
        assert not target.exists()
        assert [(one["tier"], one["problems"]) for one in a.json("verify")] == [("hot", [])]
        with nodes(tmp_path, "c") as (c,):
            for daemons in ([a, c], [c, a]):
                with connected(daemons, 2) as trainers:
                    for error in refusals(trainers, "restore"):
                        assert isinstance(error, TierUnreachable)
                        assert "start again later" in error.hint
