"""Requests of operators and calls to meetings, with handmade peers of a real daemon."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support.daemon import Daemon, serving
from tests.support.waiting import wait_until
from tests.support.wire_peer import Peer
from tierd.api.rank_requests import REQUESTS_MAX
from tierd.format import wire


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with serving(tmp_path_factory.mktemp("requests")) as daemon:
        yield daemon
        assert "Traceback" not in daemon.log, daemon.log


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    return "run-" + "".join(char if char.isalnum() else "-" for char in request.node.name)[-100:]


@pytest.fixture
def peers(daemon: Daemon, run: str) -> Iterator[tuple[Peer, Peer, Peer]]:
    """Both ranks of a run, and an operator."""
    with ExitStack() as stack:
        first, second, operator = (stack.enter_context(Peer(daemon.socket)) for _ in range(3))
        first.greet(run, world_size=2)
        second.greet(run, rank=1, world_size=2, generation=1)
        operator.greet(run, rank=None)
        yield first, second, operator


def request(peer: Peer, kind: str, milestone: str | None = None, number: int = 7) -> None:
    peer.send(wire.Request(request=number, kind=kind, milestone=milestone))


def refusal(peer: Peer) -> wire.Refused:
    """The next message, which must be a refusal; the connection stays open."""
    message = wire.decode_to_client(peer.socket.recv(wire.MESSAGE_BYTES_MAX))
    assert isinstance(message, wire.Refused)
    assert message.request == 7
    return message


def test_a_request_is_forwarded_to_rank_0_and_its_answer_to_the_operator(peers: tuple[Peer, Peer, Peer]) -> None:
    first, second, operator = peers
    request(operator, "snapshot", "best")
    requested = first.hear(wire.Requested)
    assert (requested.kind, requested.milestone) == ("snapshot", "best")
    second.send(wire.Answer(request=requested.request, step=1))  # it has not received the request
    first.send(wire.Answer(request=requested.request + 1, step=2))  # an unknown number
    first.send(wire.Answer(request=requested.request, step=3))
    first.send(wire.Answer(request=requested.request, step=4))
    assert operator.hear(wire.Agreed) == wire.Agreed(request=7, step=3, generation=1)
    request(operator, "stop")
    repeated = first.hear(wire.Requested)
    first.send(wire.Answer(request=repeated.request, step=5, kind="slots_busy", message="no slot", hint="wait"))
    assert refusal(operator) == wire.Refused(request=7, kind="slots_busy", message="no slot", hint="wait")


def test_a_forced_call_is_passed_to_every_rank_and_not_repeated_later(
    daemon: Daemon, run: str, peers: tuple[Peer, Peer, Peer]
) -> None:
    first, second, _ = peers
    second.send(wire.Convene(meeting=0))
    assert first.hear(wire.Convened) == second.hear(wire.Convened) == wire.Convened(meeting=0)
    second.send(wire.Convene(meeting=0, is_forced=True))
    assert first.hear(wire.Convened) == second.hear(wire.Convened) == wire.Convened(meeting=0, is_forced=True)
    with Peer(daemon.socket) as again:
        again.greet(run, rank=1, world_size=2, generation=1)
        assert again.hear(wire.Convened) == wire.Convened(meeting=0)


def test_a_request_is_refused_while_the_rank_that_answers_is_not_connected(
    daemon: Daemon, run: str, peers: tuple[Peer, Peer, Peer]
) -> None:
    first, _, operator = peers
    first.close()
    wait_until(lambda: [each["ranks_attached"] for each in daemon.status()["runs"] if each["run"] == run] == [1])
    request(operator, "stop")
    refused = refusal(operator)
    assert refused.kind == "not_found"
    assert "its lowest rank on this node is not connected" in refused.message


def test_a_forced_stop_is_sent_to_every_rank(peers: tuple[Peer, Peer, Peer]) -> None:
    first, second, operator = peers
    request(operator, "force")
    assert first.hear(wire.Requested) == second.hear(wire.Requested)


@pytest.mark.parametrize(("kind", "milestone"), [("panic", None), ("", None), ("snapshot", "../x"), ("snapshot", "")])
def test_an_invalid_request_is_refused_and_not_forwarded(
    peers: tuple[Peer, Peer, Peer], kind: str, milestone: str | None
) -> None:
    first, _, operator = peers
    request(operator, kind, milestone)
    assert refusal(operator).kind == "bad_request"
    request(operator, "stop")
    assert first.hear(wire.Requested).kind == "stop"
    assert sum(isinstance(message, wire.Requested) for message in first.heard) == 1


def test_a_request_without_a_trainer_is_not_found(daemon: Daemon, run: str) -> None:
    with Peer(daemon.socket) as operator:
        operator.greet(run, rank=None)
        request(operator, "stop")
        assert refusal(operator).kind == "not_found"


def test_a_request_is_refused_when_its_trainer_disconnects(peers: tuple[Peer, Peer, Peer]) -> None:
    first, _, operator = peers
    request(operator, "stop")
    first.hear(wire.Requested)
    first.close()
    assert refusal(operator).kind == "transient"


def test_pending_requests_are_bounded_and_end_with_their_operator(
    daemon: Daemon, peers: tuple[Peer, Peer, Peer], run: str
) -> None:
    first, _, operator = peers
    with Peer(daemon.socket) as other:
        other.greet(run, rank=None)
        for number in range(REQUESTS_MAX):
            request(other, "snapshot", number=number)
        for _ in range(REQUESTS_MAX):
            first.hear(wire.Requested)
        request(operator, "stop")
        assert refusal(operator).kind == "transient"
        other.send(wire.Goodbye())
        assert other.is_dropped()
    request(operator, "stop")
    assert first.hear(wire.Requested).kind == "stop"


def test_a_call_to_a_meeting_is_sent_to_every_rank_and_to_a_rank_that_reconnects(
    daemon: Daemon, peers: tuple[Peer, Peer, Peer], run: str
) -> None:
    first, second, _ = peers
    second.send(wire.Convene(meeting=3))
    assert first.hear(wire.Convened) == second.hear(wire.Convened) == wire.Convened(meeting=3)
    second.close()
    first.send(wire.Convene(meeting=2))  # an earlier meeting
    with Peer(daemon.socket) as reconnected:
        reconnected.greet(run, rank=1, world_size=2, generation=1)
        assert reconnected.hear(wire.Convened).meeting == 3
    with Peer(daemon.socket) as newer, Peer(daemon.socket) as its_second:
        newer.greet(run, world_size=2)
        its_second.greet(run, rank=1, world_size=2, generation=2)
        newer.send(wire.Convene(meeting=0))
        assert its_second.hear(wire.Convened).meeting == 0, "meetings of another generation do not count"


def test_an_operator_with_a_request_receives_messages_about_snapshots(daemon: Daemon, run: str) -> None:
    with Peer(daemon.socket) as trainer, Peer(daemon.socket) as operator:
        trainer.greet(run)
        trainer.attach(0)
        operator.greet(run, rank=None)
        request(operator, "snapshot")
        trainer.hear(wire.Requested)
        trainer.seal(0, 5, b"five")
        assert operator.hear(wire.Persisted).step == 5


@pytest.mark.parametrize(
    "message", [wire.Convene(meeting=0), wire.Answer(request=1, step=1), wire.Ask(step=1, generation=1)]
)
def test_an_operator_cannot_send_messages_of_a_rank(daemon: Daemon, run: str, message: wire.ToDaemon) -> None:
    with Peer(daemon.socket) as operator:
        operator.greet(run, rank=None)
        operator.send(message)
        assert operator.is_dropped()


def test_status_shows_the_outcome_of_a_rank(daemon: Daemon, run: str) -> None:
    def state() -> tuple[str, str]:
        row = next(row for row in daemon.status()["runs"] if row["run"] == run)
        return row["state"], row["reason"]

    with Peer(daemon.socket) as peer:
        peer.greet(run)
        assert state() == ("running", "")
        peer.send(wire.Goodbye(state="halted", reason="loss is nan"))
        assert peer.is_dropped()
    assert state() == ("halted", "loss is nan")
    page = daemon.request("/")[1].decode()
    assert "halted: loss is nan" in page
    with Peer(daemon.socket) as peer:
        peer.greet(run)
        peer.send(wire.Goodbye(state="well", reason=""))
        assert peer.is_dropped()
    assert state()[0] == "lost"
