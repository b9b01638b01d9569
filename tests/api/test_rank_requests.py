"""What operators ask of a run, and how its ranks are called together: spoken to a real daemon, by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support.daemon import Daemon, serving
from tests.support.wire_peer import Peer
from tierd.api.rank_requests import REQUESTS_MAX
from tierd.format import wire


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with serving(tmp_path_factory.mktemp("requests")) as found:
        yield found
        assert "Traceback" not in found.log, found.log


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    return "run-" + "".join(one if one.isalnum() else "-" for one in request.node.name)[-100:]


@pytest.fixture
def peers(daemon: Daemon, run: str) -> Iterator[tuple[Peer, Peer, Peer]]:
    """Both ranks of a run, and an operator."""
    with ExitStack() as stack:
        first, second, operator = (stack.enter_context(Peer(daemon.socket)) for _ in range(3))
        first.greet(run, world_size=2)
        second.greet(run, rank=1, world_size=2, generation=1)
        operator.greet(run, rank=None)
        yield first, second, operator


def ask(peer: Peer, kind: str, milestone: str | None = None, number: int = 7) -> None:
    peer.send(wire.Request(request=number, kind=kind, milestone=milestone))


def refusal(peer: Peer) -> wire.Refused:
    """An answer, not the end of the conversation."""
    message = wire.decode_to_client(peer.socket.recv(wire.MESSAGE_BYTES_MAX))
    assert isinstance(message, wire.Refused)
    assert message.request == 7
    return message


def test_a_request_goes_to_rank_0_and_its_answer_back_to_who_asked(peers: tuple[Peer, Peer, Peer]) -> None:
    first, second, operator = peers
    ask(operator, "snapshot", "best")
    asked = first.hear(wire.Requested)
    assert (asked.kind, asked.milestone) == ("snapshot", "best")
    second.send(wire.Answer(request=asked.request, step=1))  # it was not asked
    first.send(wire.Answer(request=asked.request + 1, step=2))  # nobody has asked this
    first.send(wire.Answer(request=asked.request, step=3))
    first.send(wire.Answer(request=asked.request, step=4))
    assert operator.hear(wire.Agreed) == wire.Agreed(request=7, step=3, generation=1)
    ask(operator, "stop")
    again = first.hear(wire.Requested)
    first.send(wire.Answer(request=again.request, step=5, kind="slots_busy", message="no slot", hint="wait"))
    assert refusal(operator) == wire.Refused(request=7, kind="slots_busy", message="no slot", hint="wait")


def test_force_goes_to_every_rank(peers: tuple[Peer, Peer, Peer]) -> None:
    first, second, operator = peers
    ask(operator, "force")
    assert first.hear(wire.Requested) == second.hear(wire.Requested)


@pytest.mark.parametrize(("kind", "milestone"), [("panic", None), ("", None), ("snapshot", "../x"), ("snapshot", "")])
def test_what_makes_no_sense_is_refused_and_no_rank_hears_of_it(
    peers: tuple[Peer, Peer, Peer], kind: str, milestone: str | None
) -> None:
    first, _, operator = peers
    ask(operator, kind, milestone)
    assert refusal(operator).kind == "bad_request"
    ask(operator, "stop")
    assert first.hear(wire.Requested).kind == "stop"
    assert sum(isinstance(one, wire.Requested) for one in first.heard) == 1


def test_with_no_trainer_there_it_is_not_found(daemon: Daemon, run: str) -> None:
    with Peer(daemon.socket) as operator:
        operator.greet(run, rank=None)
        ask(operator, "stop")
        assert refusal(operator).kind == "not_found"


def test_a_trainer_that_leaves_without_an_answer_is_told_of(peers: tuple[Peer, Peer, Peer]) -> None:
    first, _, operator = peers
    ask(operator, "stop")
    first.hear(wire.Requested)
    first.close()
    assert refusal(operator).kind == "transient"


def test_only_so_many_requests_wait_and_those_of_an_operator_who_left_do_not(
    daemon: Daemon, peers: tuple[Peer, Peer, Peer], run: str
) -> None:
    first, _, operator = peers
    with Peer(daemon.socket) as other:
        other.greet(run, rank=None)
        for number in range(REQUESTS_MAX):
            ask(other, "snapshot", number=number)
        for _ in range(REQUESTS_MAX):
            first.hear(wire.Requested)
        ask(operator, "stop")
        assert refusal(operator).kind == "transient"
        other.send(wire.Goodbye())
        assert other.is_dropped()
    ask(operator, "stop")
    assert first.hear(wire.Requested).kind == "stop"


def test_a_call_to_a_meeting_reaches_every_rank_and_one_that_comes_back_later(
    daemon: Daemon, peers: tuple[Peer, Peer, Peer], run: str
) -> None:
    first, second, _ = peers
    second.send(wire.Convene(meeting=3))
    assert first.hear(wire.Convened) == second.hear(wire.Convened) == wire.Convened(meeting=3)
    second.close()
    first.send(wire.Convene(meeting=2))  # sent again, late
    with Peer(daemon.socket) as back:
        back.greet(run, rank=1, world_size=2, generation=1)
        assert back.hear(wire.Convened).meeting == 3
    with Peer(daemon.socket) as newer, Peer(daemon.socket) as its_second:
        newer.greet(run, world_size=2)
        its_second.greet(run, rank=1, world_size=2, generation=2)
        newer.send(wire.Convene(meeting=0))
        assert its_second.hear(wire.Convened).meeting == 0, "meetings of another generation are none of its own"


def test_an_operator_who_asked_hears_what_becomes_of_snapshots(daemon: Daemon, run: str) -> None:
    with Peer(daemon.socket) as trainer, Peer(daemon.socket) as operator:
        trainer.greet(run)
        trainer.attach(0)
        operator.greet(run, rank=None)
        ask(operator, "snapshot")
        trainer.hear(wire.Requested)
        trainer.seal(0, 5, b"five")
        assert operator.hear(wire.Persisted).step == 5


@pytest.mark.parametrize(
    "message", [wire.Convene(meeting=0), wire.Answer(request=1, step=1), wire.Ask(step=1, generation=1)]
)
def test_an_operator_cannot_speak_for_a_rank(daemon: Daemon, run: str, message: wire.ToDaemon) -> None:
    with Peer(daemon.socket) as operator:
        operator.greet(run, rank=None)
        operator.send(message)
        assert operator.is_dropped()


def test_the_last_word_of_a_rank_is_what_status_says(daemon: Daemon, run: str) -> None:
    def told() -> tuple[str, str]:
        row = next(one for one in daemon.status()["runs"] if one["run"] == run)
        return row["state"], row["reason"]

    with Peer(daemon.socket) as peer:
        peer.greet(run)
        assert told() == ("running", "")
        peer.send(wire.Goodbye(state="halted", reason="loss is nan"))
        assert peer.is_dropped()
    assert told() == ("halted", "loss is nan")
    page = daemon.request("/")[1].decode()
    assert "halted: loss is nan" in page
    with Peer(daemon.socket) as peer:
        peer.greet(run)
        peer.send(wire.Goodbye(state="well", reason=""))
        assert peer.is_dropped()
    assert told()[0] == "lost"
