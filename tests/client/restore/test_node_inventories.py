"""What a rank asks the daemons of several nodes before a restore."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest
from tierd_client.ranks import Ranks
from tierd_client.restore import node_parts
from tierd_client.restore.node_parts import NodeReplicas
from tierd_client.restore.replica import RestoreRequest
from tierd_client.session import DaemonSession

from tierd.errors import TierUnreachable
from tierd.format import wire
from tierd.format.node_messages import HELD_MAX, HeldCheckpoint


class FakeSession:
    """A daemon with `held`, newest first. `asked`: the questions that it got."""

    def __init__(self, held: list[HeldCheckpoint]) -> None:
        node = wire.NodeRanks(ranks=[0], lowest=[0, 1], claim="ab" * 16, base=0)
        self.hello = type("Hello", (), {"node": node, "run": "run", "rank": 0})()
        self.held = held
        self.asked: list[wire.Inventory] = []

    def inventory(self, question: wire.Inventory) -> wire.Held:
        self.asked.append(question)
        older = [
            each
            for each in self.held
            if question.older_than is None or (each.generation, each.step) < question.older_than
        ]
        return wire.Held(request=0, checkpoints=older[:HELD_MAX])


class FakeRanks:
    """The only rank of its node; `other`: what the lowest rank of another node sends."""

    rank = 0

    def __init__(self, other: bytes) -> None:
        self._other = other

    def run_on_all(self, work: Any) -> Any:
        return work()

    def gather(self, own: bytes) -> list[bytes]:
        return [own, self._other]

    def broadcast(self, own: bytes) -> bytes:
        return own


def part(step: int, rank: int, **fields: Any) -> HeldCheckpoint:
    of_part = {"world_size": 2, "part_in": ["hot"], "ranks": [rank], "head_digest": f"{step}"}
    return HeldCheckpoint(step=step, generation=1, **of_part | fields)


def replicas_of(session: FakeSession, other: list[HeldCheckpoint]) -> NodeReplicas:
    sent = msgspec.msgpack.encode(node_parts.NodeInventory(ranks=[1], checkpoints=other))
    return NodeReplicas(cast("DaemonSession", session), cast("Ranks", FakeRanks(sent)), RestoreRequest())


def test_what_two_nodes_have_is_found_when_one_is_far_ahead() -> None:
    """The hot tier of the other node was full for a long time, and no cold tier has a newer one."""
    session = FakeSession([part(step, 0) for step in range(100, 0, -1)])
    attempt = replicas_of(session, [part(5, 1)]).next()
    assert (attempt.checkpoint.step, attempt.tier) == (5, "hot")
    assert [question.lists_cold for question in session.asked] == [True, False, False, False]


def test_older_checkpoints_that_are_whole_are_not_asked_for() -> None:
    whole = [part(step, 0, part_in=[], ranks=[], whole_in=["cold"]) for step in range(100, 0, -1)]
    session = FakeSession(whole)
    replicas_of(session, [])
    assert len(session.asked) == 1


def test_a_newer_checkpoint_that_cannot_be_fetched_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise TierUnreachable("cold: no route")

    monkeypatch.setattr(node_parts, "find_replica", fail)
    session = FakeSession([part(9, 0, part_in=[], ranks=[], whole_in=["cold"]), part(5, 0)])
    attempt = replicas_of(session, [part(5, 1)]).next()
    assert attempt.checkpoint.step == 5
    assert "run/000000000009-g0001 is passed over: cold: no route" in caplog.text
