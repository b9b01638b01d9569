"""A request on any node reaches the ranks of all nodes, and no death of a daemon or of the store holds up a rank."""

from __future__ import annotations

import json
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tierd_client.stopping import node_calls as module
from tierd_client.stopping.node_calls import NodeCalls

from tests.support.nodes import connect_on, connected, nodes
from tests.support.trainer import Trainer, Training, together
from tests.support.waiting import wait_until

FOREVER = 1_000_000
INTERRUPTED = 42


class Node:
    """The lowest rank of a node, with what it had its daemon repeat."""

    def __init__(self, store: dist.Store, rank: int, lowest: list[int]) -> None:
        self.repeated: list[int] = []
        self.forced = 0
        self.calls = NodeCalls(self.repeated.append, self._force)
        self._start = lambda: self.calls.start(store, rank, lowest)

    def _force(self) -> None:
        self.forced += 1

    def __enter__(self) -> Node:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.calls.close()


@pytest.fixture(autouse=True)
def short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.01)


@pytest.fixture
def node_list() -> Iterator[list[Node]]:
    store, lowest = dist.HashStore(), [0, 2, 4]
    with Node(store, 0, lowest) as first, Node(store, 2, lowest) as second, Node(store, 4, lowest) as third:
        yield [first, second, third]


def test_call_on_one_node_is_repeated_once_on_each_other(node_list: list[Node]) -> None:
    first, second, third = node_list
    second.calls.called(0)
    second.calls.called(0)
    wait_until(lambda: first.repeated == third.repeated == [0])
    for node in node_list:  # the daemons call their ranks, and also these
        node.calls.called(0)
    third.calls.called(1)
    first.calls.called(1)  # two at once
    wait_until(lambda: second.repeated == [1])
    assert (first.repeated, third.repeated, [node.forced for node in node_list]) == ([0], [0], [0, 0, 0])


def test_call_before_the_start_is_passed_on() -> None:
    store = dist.HashStore()
    early, other = Node(store, 0, [0, 1]), Node(store, 1, [0, 1])
    early.calls.called(0)
    with other, early:
        wait_until(lambda: other.repeated == [0])


def test_force_reaches_the_other_nodes_before_the_process_that_serves_the_store_ends(node_list: list[Node]) -> None:
    first, second, third = node_list
    first.calls.forced()
    first.calls.close()
    assert (first.forced, second.forced, third.forced) == (0, 1, 1)


def test_force_does_not_wait_long_for_a_node_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FORCE_TIMEOUT_S", 0.1)
    with Node(dist.HashStore(), 0, [0, 1]) as node:
        node.calls.forced()
        node.calls.close()
        assert "tierd-node-calls" not in {thread.name for thread in threading.enumerate()}


def test_daemon_that_is_back_is_told_again(node_list: list[Node]) -> None:
    first, second, _ = node_list
    first.calls.on_attach()
    assert first.repeated == []
    second.calls.called(0)
    wait_until(lambda: first.repeated == [0])
    first.calls.on_attach()
    assert first.repeated == [0, 0]


def test_store_that_is_gone_ends_only_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    class Gone(dist.Store):
        def check(self, keys: list[str]) -> bool:
            raise dist.DistNetworkError("Connection reset by peer\nC++ stack")

    with Node(Gone(), 0, [0, 1]) as node:
        wait_until(lambda: "no longer pass between the nodes: Connection reset by peer" in caplog.text)
        node.calls.called(0)
        node.calls.forced()
    assert "stack" not in caplog.text


def test_store_that_hangs_does_not_hold_up_the_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSE_TIMEOUT_S", 0.05)
    gate = threading.Event()

    class Hung(dist.Store):
        def check(self, keys: list[str]) -> bool:
            return not gate.wait(60)

    with Node(Hung(), 0, [0, 1]) as node:
        node.calls.called(0)
        began = time.monotonic()
        node.calls.close()
        assert time.monotonic() - began < 10
    gate.set()


# ── real ranks and daemons; functions with a leading underscore run in a trainer ──


def _loop(training: Training, seed: int) -> int | None:
    """The step of the stop, at a random speed."""
    chance = random.Random(seed)
    with training.client as client:
        for step in range(1, FOREVER):
            time.sleep(chance.uniform(0, 0.01))
            if client.due(step):
                training.snapshot(step)
            if client.stopping:
                return step
    return None


def _loop_until_interrupted(training: Training, began: Path) -> None:
    """The process ends at once, as a script would."""
    try:
        with training.client as client:
            began.touch()
            for step in range(1, FOREVER):
                client.due(step)
                time.sleep(0.01)
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None


def begin(trainers: list[Trainer]) -> None:
    for rank, trainer in enumerate(trainers):
        trainer.begin("apply", _loop, rank)


def stopped(trainers: list[Trainer]) -> int:
    """The step at which all have stopped."""
    steps = {trainer.end() for trainer in trainers}
    assert len(steps) == 1
    return steps.pop()


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 3])
def test_signal_on_any_node_stops_all_ranks_at_one_step(tmp_path: Path, rank: int) -> None:
    with nodes(tmp_path) as daemons, connected(daemons, 4) as trainers:
        together(trainers, "enter")
        begin(trainers)
        trainers[rank].signal(signal.SIGTERM)
        assert stopped(trainers) >= 1


def test_requests_on_both_nodes_at_once_stop_all_ranks_at_one_step(tmp_path: Path) -> None:
    with nodes(tmp_path) as daemons, connected(daemons, 4) as trainers:
        together(trainers, "enter")
        begin(trainers)
        for trainer in trainers:
            trainer.signal(signal.SIGTERM)
        assert stopped(trainers) >= 1


def test_stop_waits_for_the_daemon_of_another_node_that_is_dead_and_training_goes_on(tmp_path: Path) -> None:
    with nodes(tmp_path) as daemons, connected(daemons, 4) as trainers:
        together(trainers, "enter")
        daemons[1].kill()
        begin(trainers)
        trainers[0].signal(signal.SIGTERM)
        (store,) = daemons[0].root.glob("rendezvous-*")
        wait_until(lambda: b"round-0" in store.read_bytes(), "the call to be in the store")
        assert all(trainer.is_busy for trainer in trainers)
        daemons[1].start()
        assert stopped(trainers) > 1


@pytest.mark.parametrize("node", [pytest.param(0, marks=pytest.mark.long), 1])
def test_operator_on_any_node_gets_snapshots_and_stops_all_nodes(tmp_path: Path, node: int) -> None:
    with nodes(tmp_path) as daemons, connected(daemons, 4) as trainers:
        together(trainers, "enter")
        begin(trainers)
        snapshot = daemons[node].tierd("snapshot", "--run", "run")
        assert snapshot.returncode == 0, snapshot.stderr
        named = daemons[node].json("snapshot", "--run", "run", "--milestone", "best")
        for daemon in daemons:
            pattern = f"run/{named['step']:012d}-g*/node-*.json"
            wait_until(lambda: list((daemon.root / "hot").glob(pattern)), "the part of each node")  # noqa: B023
            files = (daemon.root / "hot").glob(pattern)
            assert [json.loads(path.read_text())["milestone"] for path in files] == ["best"]
        assert daemons[node].tierd("stop", "--run", "run", "--wait", "30").returncode in (0, 75)
        assert stopped(trainers) >= 1


@pytest.mark.parametrize("node", [pytest.param(0, marks=pytest.mark.long), 1])
def test_force_interrupts_the_ranks_of_all_nodes(tmp_path: Path, node: int) -> None:
    """Also those that hear of it only when rank 0 has gone, whose process serves the store."""
    with nodes(tmp_path) as daemons, ExitStack() as stack:
        trainers = [stack.enter_context(Trainer()) for _ in range(4)]
        together_by_rank(trainers, _join_tcp, free_port())
        connect_on(daemons, trainers)
        together(trainers, "enter")
        marks = [tmp_path / f"began-{trainer.pid}" for trainer in trainers]
        for trainer, mark in zip(trainers, marks, strict=True):
            trainer.begin("apply", _loop_until_interrupted, mark)
        wait_until(lambda: all(mark.exists() for mark in marks), "all ranks to train")
        forced = daemons[node].tierd("stop", "--run", "run", "--force", "--wait", "30")
        assert "no answer" not in forced.stderr
        assert trainers[0].wait_exit() == INTERRUPTED
        assert [trainer.wait_exit() for trainer in trainers[1:]] == [INTERRUPTED] * 3


@pytest.mark.long
def test_signal_stops_all_ranks_over_a_tcp_store(tmp_path: Path) -> None:
    with nodes(tmp_path) as daemons, ExitStack() as stack:
        trainers = [stack.enter_context(Trainer()) for _ in range(4)]
        together_by_rank(trainers, _join_tcp, free_port())
        connect_on(daemons, trainers)
        together(trainers, "enter")
        begin(trainers)
        trainers[2].signal(signal.SIGTERM)
        assert stopped(trainers) >= 1


def together_by_rank(trainers: list[Trainer], work: Any, *arguments: Any) -> None:
    for rank, trainer in enumerate(trainers):
        trainer.begin("apply", work, rank, len(trainers), *arguments)
    for trainer in trainers:
        trainer.end()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def _join_tcp(training: Training, rank: int, world_size: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
