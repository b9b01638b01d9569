"""Ranks on several nodes join one generation, each with the daemon of its node."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tierd_client import BadConfig, DaemonUnreachable, Unsupported
from tierd_client.nodes import find_node, is_lowest_of_node
from tierd_client.ranks import Ranks

from tests.support.daemon import Daemon
from tests.support.nodes import connect_on, connected, hello_of, node, nodes, refusals_on
from tests.support.trainer import joined, together
from tests.support.waiting import wait_until
from tests.support.wire_peer import HELLO
from tierd.format import wire


class OtherRanks(Ranks):
    """This is one of several ranks; what it asks its own daemon, the others ask theirs."""

    def __init__(self, rank: int, answers: list[list[wire.Welcome]]) -> None:
        """`answers`: by question, the daemons' answers by rank."""
        super().__init__(0, 1)
        self.rank, self.world_size, self.answers = rank, len(answers[0]), answers

    def gather(self, content: bytes) -> list[bytes]:
        former = msgspec.json.decode(content)
        return [
            msgspec.json.encode({**former, "boot": each.boot, "seen": each.seen, "version": each.version})
            for each in self.answers.pop(0)
        ]


def answer(boot: str, seen: int | None = 0) -> wire.Welcome:
    return wire.Welcome(
        protocol=1,
        version="9.9",
        node="here",
        boot=boot,
        generation=0,
        slots=[],
        every_steps=0,
        every_s=0.0,
        slots_per_rank=2,
        slot_wait_s=0.0,
        when_busy="wait",
        seen=seen,
    )


def found(rank: int, *questions: str, seen: Callable[[int], int | None] = lambda rank: rank) -> Any:
    """`questions`: which daemons the ranks find, as a letter each."""
    answers = [[answer(boot, seen(rank)) for rank, boot in enumerate(boots)] for boots in questions]
    ranks = OtherRanks(rank, answers)
    result = find_node(ranks, lambda: answer("?"))
    assert not ranks.answers
    return result


def test_ranks_with_one_daemon_are_on_one_node() -> None:
    assert found(1, "aaaa") == (None, 0)
    assert found(1, "aaaa", seen=lambda rank: None) == (None, 0)
    assert find_node(Ranks(0, 1), lambda: pytest.fail("a single rank asks no daemon")) == (None, 0)


def test_ranks_are_grouped_by_their_daemons_in_any_order() -> None:
    assert found(2, "abba", "abba") == (wire.NodeRanks(ranks=[1, 2], lowest=[0, 1]), 3)
    assert found(3, "abca", "abca") == (wire.NodeRanks(ranks=[0, 3], lowest=[0, 1, 2]), 3)


def test_daemon_that_restarts_during_the_look_is_one_node() -> None:
    assert found(1, "ab", "bb") == (None, 0)
    assert found(3, "aabc", "aacc", "aacc") == (wire.NodeRanks(ranks=[2, 3], lowest=[0, 2]), 3)


def test_daemon_that_knows_one_node_only_is_named() -> None:
    with pytest.raises(Unsupported, match=r"2 nodes, and the daemon of rank 1 \(tierd 9\.9\) supports one"):
        found(0, "ab", "ab", seen=lambda rank: None if rank else 4)


def test_lowest_rank_of_a_node_speaks_for_it() -> None:
    on_second = wire.NodeRanks(ranks=[2, 3], lowest=[0, 2])
    assert [is_lowest_of_node(msgspec.structs.replace(HELLO, rank=rank)) for rank in (0, 1)] == [True, False]
    over_nodes = [msgspec.structs.replace(HELLO, rank=rank, node=on_second) for rank in (2, 3)]
    assert [is_lowest_of_node(hello) for hello in over_nodes] == [True, False]


# ── real ranks and daemons ──


def claims(daemon: Daemon, generation: int) -> set[str]:
    """The random bits of the generation's claim in hot and in cold."""
    folders = [daemon.hot, daemon.root.parent / "cold"]
    return {json.loads((folder / f"run/generation-{generation:04d}.json").read_text())["claim"] for folder in folders}


def test_ranks_of_two_nodes_join_one_generation_under_one_claim(tmp_path: Path) -> None:
    with nodes(tmp_path) as daemons, connected(daemons, 4) as trainers:
        hellos: list[wire.Hello] = together(trainers, "apply", hello_of)
        assert [hello.node.ranks for hello in hellos if hello.node] == [[0, 1], [0, 1], [2, 3], [2, 3]]
        assert {tuple(hello.node.lowest) for hello in hellos if hello.node} == {(0, 2)}
        (bits,) = {hello.node.claim for hello in hellos if hello.node}
        assert len(bits) == 32
        assert {hello.generation for hello in hellos} == {1}
        for daemon in daemons:
            assert claims(daemon, 1) == {bits}
            assert [run["ranks_attached"] for run in daemon.status()["runs"]] == [2]


def test_daemon_that_restarts_gets_its_ranks_back_with_the_same_claim(tmp_path: Path) -> None:
    with nodes(tmp_path) as daemons, connected(daemons, 4) as trainers:
        before = together(trainers, "apply", hello_of)
        for daemon in daemons:
            daemon.kill()
            daemon.start()
        for daemon in daemons:
            wait_until(lambda daemon=daemon: [run["ranks_attached"] for run in daemon.status()["runs"]] == [2])
            assert claims(daemon, 1) == {before[0].node.claim}
        assert together(trainers, "apply", hello_of) == before


def test_generation_is_above_what_only_another_node_knows(tmp_path: Path) -> None:
    with nodes(tmp_path) as daemons:
        for _ in range(3):
            with joined(tmp_path, 1) as (trainer,):
                trainer.connect(daemons[1].socket)
        for path in (tmp_path / "cold/run").glob("generation-*"):
            path.unlink()
        with joined(tmp_path, 2) as trainers:
            assert connect_on(daemons, trainers) == [4, 4]


def test_daemons_with_different_cold_tiers_are_refused(tmp_path: Path) -> None:
    a, b = (node(tmp_path, name, cold=tmp_path / f"cold-of-{name}") for name in "ab")
    with a, b, joined(tmp_path, 4) as trainers:
        for error in refusals_on([a, b], trainers):
            assert isinstance(error, BadConfig)
            assert "has no claim of it" in error.message
            assert "rank 2 of 4" in error.message or "rank 3 of 4" in error.message


@pytest.mark.parametrize("without", ["a", "b"])
def test_daemon_without_a_cold_tier_is_refused(tmp_path: Path, without: str) -> None:
    a, b = (node(tmp_path, name, cold=None if name == without else tmp_path / "cold") for name in "ab")
    with a, b, joined(tmp_path, 2) as trainers:
        for error in refusals_on([a, b], trainers):
            assert isinstance(error, BadConfig)
            assert "this daemon has no cold tier" in error.message


def test_daemon_that_cannot_be_reached_is_named_on_every_rank(tmp_path: Path) -> None:
    with nodes(tmp_path, "a") as (a,), joined(tmp_path, 2) as trainers:
        absent = node(tmp_path, "b", cold=None)
        for error in refusals_on([a, absent], trainers):
            assert isinstance(error, DaemonUnreachable)
            assert "join run as rank 1 of 2 on " in error.message
            assert absent.socket in error.message
        assert not list(a.hot.glob("run/generation-*"))


def test_settings_of_all_nodes_are_those_of_rank_0(tmp_path: Path) -> None:
    other = "[snapshot]\nevery_steps = 3\nslots = 4"
    a, b = node(tmp_path, "a", cold=tmp_path / "cold", more=other), node(tmp_path, "b", cold=tmp_path / "cold")
    with a, b, connected([a, b], 2) as trainers:
        assert together(trainers, "apply", _settings) == [(3, 4), (3, 4)]


def _settings(training: Any) -> tuple[int, int]:
    settings = training.client._generation.settings
    return settings.every_steps, settings.slots_per_rank


def test_ranks_on_one_node_send_what_they_always_sent(tmp_path: Path) -> None:
    with nodes(tmp_path, "a") as daemons, connected(daemons, 2) as trainers:
        hellos: list[wire.Hello] = together(trainers, "apply", hello_of)
        for rank, hello in enumerate(hellos):
            assert (hello.rank, hello.generation, hello.above, hello.node) == (rank, 1, 0, None)
        assert "claim" not in repr(hellos)
