"""Nodes that read from each other: what a rank needs of another node's part comes from there, and not from cold.

In every test one node sends nothing to cold after the first step, so that only the nodes together have the last one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tierd_client import TierUnreachable

from tests.e2e.test_nodes_restore import hold_cold, restart, restored, save
from tests.support.daemon import Daemon
from tests.support.nodes import connect_on, connected, nodes
from tests.support.trainer import Training, joined, refusals, together
from tests.support.waiting import wait_until
from tierd.keys.key_file import make_key_file

PEERS = '[peers]\nlisten = "127.0.0.1:0"'
LARGE = 2048  # the width of a model with parameters that are written once over all nodes


@contextmanager
def peers(root: Path, *names: str, more: str = "", tls: bool = False) -> Generator[list[Daemon]]:
    with nodes(root, *names, more=f"{more}\n{PEERS}" + "\ntls = true" * tls) as daemons:
        yield daemons


def saved(daemons: Sequence[Daemon], world_size: int, *, steps: int = 1, in_cold: bool = False, **options: Any) -> Any:
    """After `steps` steps: the digests of the ranks at the last one. `in_cold`: the one before it is there."""
    with joined(daemons[0].root, world_size, **options) as trainers:
        connect_on(daemons, trainers)
        together(trainers, "restore")
        if in_cold:
            save(trainers, in_cold=True)
        hold_cold(daemons[1])
        digests: list[str] = []
        for _ in range(steps):
            digests = save(trainers)
        return digests


def left_behind(daemons: Sequence[Daemon]) -> list[Path]:
    """Of restores, not of copies."""
    return [path for daemon in daemons for path in (daemon.hot / "run").rglob("*.partial")]


@pytest.mark.long
def test_ranks_placed_elsewhere_read_from_the_nodes_where_they_were(tmp_path: Path) -> None:
    with peers(tmp_path) as daemons:
        digests = saved(daemons, 4)
        restart(daemons)
        assert restored(daemons[::-1], 4) == ([(1, "hot")] * 4, digests)


@pytest.mark.long
def test_ranks_placed_elsewhere_read_from_memory(tmp_path: Path) -> None:
    with peers(tmp_path) as daemons:
        digests = saved(daemons, 4)
        assert restored(daemons[::-1], 4) == ([(1, "memory")] * 4, digests)


@pytest.mark.long
def test_with_a_key_ranks_placed_elsewhere_read_signed_parts_from_memory_and_hot(tmp_path: Path) -> None:
    """Of what is in memory only, no node file was signed before another node asks for it."""
    make_key_file(tmp_path / "key")
    with peers(tmp_path, more=f'[security]\nkey_file = "{tmp_path / "key"}"') as daemons:
        digests = saved(daemons, 4)
        assert restored(daemons[::-1], 4) == ([(1, "memory")] * 4, digests)
        restart(daemons)
        assert restored(daemons[::-1], 4) == ([(1, "hot")] * 4, digests)


@pytest.mark.long
def test_large_tensor_of_another_node_is_read_from_there(tmp_path: Path) -> None:
    """As with DDP: replicated parameters are written once over all nodes."""
    with peers(tmp_path) as daemons:
        digests = saved(daemons, 4, width=LARGE, in_cold=True)
        with joined(tmp_path, 4, width=LARGE) as trainers:
            connect_on(daemons, trainers)
            found = together(trainers, "restore")
            assert [(each.step, each.tier) for each in found] == [(2, "memory")] * 4
            assert together(trainers, "digest") == digests
            assert "bytes of run/000000000002-g0001 from the node at" in daemons[0].log + daemons[1].log
            save(trainers)
        assert not left_behind(daemons)


def test_nodes_that_join_and_other_numbers_of_ranks_read_from_the_nodes(tmp_path: Path) -> None:
    """A third node has an empty disk, and its ranks are new ones."""
    with peers(tmp_path, "a", "b", "c") as (first, second, third):
        with joined(tmp_path, 4, width=LARGE) as trainers:
            connect_on([first, second], trainers)
            together(trainers, "apply", _share_extra)
            together(trainers, "restore")
            hold_cold(second)
            save(trainers)
            (saved_weights,) = set(together(trainers, "apply", _weights))
        restart([first, second])
        for placed, world_size, tiers in (
            ([third, first, second], 6, ["peer"] * 2 + ["hot"] * 4),
            ([second, first], 2, ["hot"] * 2),
        ):
            with joined(tmp_path, world_size, width=LARGE, seed=2) as trainers:
                connect_on(placed, trainers)
                together(trainers, "apply", _share_extra)
                found = together(trainers, "restore")
                assert [(each.step, each.tier) for each in found] == [(1, tier) for tier in tiers]
                assert set(together(trainers, "apply", _weights)) == {saved_weights}
        wait_until(lambda: not left_behind([first, second, third]), "the partial files to be deleted")


def _share_extra(training: Training) -> None:
    """Nothing differs between the ranks that another number of ranks could not restore."""
    del training.extra["rank"]


def _weights(training: Training) -> str:
    digest = hashlib.sha256()
    tensors = [*training.model.state_dict().values()]
    tensors += [value for each in training.optimizer.state_dict()["state"].values() for value in each.values()]
    for tensor in tensors:
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.long
def test_node_without_peers_is_read_by_its_own_ranks_only(tmp_path: Path) -> None:
    """It has another config: then all nodes go on as if none had peers."""
    with peers(tmp_path) as daemons:
        digests = saved(daemons, 4)
        daemons[0].config.write_text(daemons[0].config.read_text().replace(PEERS, ""))
        restart(daemons)
        with connected(daemons[::-1], 4) as trainers:
            for error in refusals(trainers, "restore"):
                assert isinstance(error, TierUnreachable)
                assert "and the nodes do not read from each other" in error.message
        assert restored(daemons, 4) == ([(1, "hot")] * 4, digests)


@pytest.mark.long
def test_node_that_cannot_be_reached_sends_all_ranks_to_cold(tmp_path: Path) -> None:
    """Once, and not for each older checkpoint again."""
    with peers(tmp_path) as daemons:
        digests = saved(daemons, 4, width=LARGE, in_cold=True, steps=2)
        for daemon in daemons:
            daemon.config.write_text(daemon.config.read_text().replace(PEERS, f'{PEERS}\nadvertise = "127.0.0.2"'))
        restart(daemons)
        with joined(tmp_path, 4, width=LARGE) as trainers:
            connect_on(daemons, trainers)
            found = together(trainers, "restore")
            assert [(each.step, each.tier) for each in found] == [(1, "cold")] * 4
            assert together(trainers, "digest") != digests
        assert all(daemon.log.count("from http://127.0.0.2") <= 2 for daemon in daemons)
