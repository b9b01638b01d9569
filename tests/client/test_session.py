"""The session: it hears, it re-attaches, it never blocks the training, and it never dies in silence."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator

import pytest
from tierd_client import BadRequest, Corrupt, DaemonUnreachable, Stale, TierdError
from tierd_client import session as module
from tierd_client.session import DaemonSession

from tests.support.waiting import DEADLINE_S, wait_until
from tests.support.wire_peer import DaemonPeer as Peer
from tests.support.wire_peer import welcome
from tierd.format import wire


@pytest.fixture
def peer() -> Iterator[Peer]:
    with Peer() as peer:
        yield peer


def ask(number: int) -> wire.Find:
    return wire.Find(request=number, step=None, generation=None, milestone=None, tier="auto", exclude=[])


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# ── greeting ──


def test_a_daemon_that_takes_the_connection_and_says_nothing_is_unreachable_in_time(peer: Peer) -> None:
    began = time.monotonic()
    with pytest.raises(DaemonUnreachable, match=r"no answer within 0\.2 s"):
        peer.begin(timeout_s=0.2).result(DEADLINE_S)
    assert time.monotonic() - began < 30


def test_a_refused_greeting_raises_what_the_daemon_says(peer: Peer) -> None:
    opening = peer.begin()
    peer.admit(wire.Refused(request=0, kind="stale", message="greet: too old", hint="stop"))
    with pytest.raises(Stale, match="too old"):
        opening.result(DEADLINE_S)


def test_a_greeting_answered_by_something_else_is_refused(peer: Peer) -> None:
    opening = peer.begin()
    peer.admit(wire.Released(slot=0))
    with pytest.raises(BadRequest, match="it answered Released"):
        opening.result(DEADLINE_S)


def test_slots_whose_descriptors_did_not_come_are_refused_and_those_that_came_are_closed(peer: Peer) -> None:
    kept = [wire.KeptSlot(slot=index, capacity_bytes=4096, is_free=True) for index in range(2)]
    opening = peer.begin()
    before = descriptors()
    with open(os.devnull) as file:
        peer.admit(welcome(slots=kept), [file.fileno()])
    with pytest.raises(BadRequest, match="1 descriptors came of 2") as caught:
        opening.result(DEADLINE_S)
    assert "ulimit" in caught.value.hint
    peer.drop()
    assert descriptors() <= before


# ── asking ──


def test_an_answer_brings_the_tier_and_its_descriptors(peer: Peer) -> None:
    session = peer.open()
    asking = peer._pool.submit(session.find, ask)
    (find,) = peer.receive_until(wire.Find)
    assert isinstance(find, wire.Find)
    peer.send(wire.Progress(request=find.request, done_bytes=1, total_bytes=2))
    with open(os.devnull) as file:
        peer.send(wire.FoundReplica(request=find.request, tier="hot"), [file.fileno(), file.fileno()])
    answer, found = asking.result(DEADLINE_S)
    assert answer.tier == "hot"
    assert len(found) == 2
    assert not any(os.get_inheritable(descriptor) for descriptor in found)
    for descriptor in found:
        os.close(descriptor)
    session.close()


def test_a_question_is_answered_by_a_refusal(peer: Peer) -> None:
    session = peer.open()
    asking = peer._pool.submit(session.find, ask)
    peer.receive_until(wire.Find)
    peer.send(wire.Refused(request=1, kind="corrupt", message="all damaged", hint=""))
    with pytest.raises(Corrupt, match="all damaged"):
        asking.result(DEADLINE_S)
    session.close()


def test_an_answer_that_comes_too_late_is_closed(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_TIMEOUT_S", 0.1)
    heard = threading.Event()
    session = peer.open(on_message=lambda message: heard.set())
    with pytest.raises(DaemonUnreachable, match="said nothing for"):
        session.find(ask)
    before = descriptors()
    with open(os.devnull) as file:
        peer.send(wire.FoundReplica(request=1, tier="hot"), [file.fileno()] * 3)
    peer.send(wire.Released(slot=0))
    assert heard.wait(DEADLINE_S)
    assert descriptors() <= before
    session.close()


def test_a_question_ends_when_the_connection_does_even_if_it_is_back_at_once(peer: Peer) -> None:
    session = peer.open()
    asking = peer._pool.submit(session.find, ask)
    peer.receive_until(wire.Find)
    peer.drop()
    peer.admit(welcome())
    with pytest.raises(DaemonUnreachable, match="went away while it was asked"):
        asking.result(DEADLINE_S)
    session.close()


def test_a_question_to_a_daemon_that_is_gone_is_answered_at_once(peer: Peer) -> None:
    session = peer.open()
    peer.die()
    wait_until(lambda: not session.is_attached, "the end to be heard")
    began = time.monotonic()
    with pytest.raises(DaemonUnreachable, match="is gone"):
        session.find(ask)
    assert time.monotonic() - began < 10
    session.close()


def test_daemon_that_has_just_died_is_not_there_even_before_the_thread_hears_of_it(peer: Peer) -> None:
    """What it had accepted is not safe with it: a client that closes now must wait for its successor."""
    session = peer.open()
    assert session.is_there()
    with session.lock:  # the thread cannot mark it detached
        peer.die()
        assert not session.is_there()
    session.close()


# ── re-attaching ──


def test_it_comes_back_as_the_generation_that_it_was_given(peer: Peer) -> None:
    attached = threading.Event()
    session = peer.open(on_attach=attached.set)
    peer.drop()
    hello = peer.admit(welcome("second"))
    assert (hello.generation, hello.run, hello.rank) == (1, "run", 0)
    assert attached.wait(DEADLINE_S)
    assert session.welcome.boot == "second"
    assert session.absent_s == 0
    session.close()


def test_a_daemon_that_throws_it_out_each_time_is_not_run_down(peer: Peer) -> None:
    session = peer.open()
    pauses: list[float] = []
    for _ in range(4):
        began = time.monotonic()
        peer.drop()
        peer.admit(welcome())
        pauses.append(time.monotonic() - began)
    assert pauses[-1] > 0.6
    assert pauses[-1] > 2 * min(pauses)
    session.close()


def test_sending_to_a_daemon_that_does_not_read_never_blocks(peer: Peer) -> None:
    session = peer.open()
    report = wire.Report(outcome="failed", step=1, tier="", seconds=0.0, detail="x" * 4096)
    began = time.monotonic()
    for _ in range(1000):
        session.send(report)
    assert time.monotonic() - began < 10
    assert not session.is_attached
    session.close()


def test_a_packet_that_is_no_message_is_passed_over(peer: Peer, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[wire.ToClient] = []
    session = peer.open(on_message=heard.append)
    before = descriptors()
    with open(os.devnull) as file:
        peer.send_raw(b"\xff rubbish", [file.fileno()])
        peer.send(wire.Released(slot=3), [file.fileno()])
    wait_until(lambda: heard, "the message after it")
    assert heard == [wire.Released(slot=3)]
    assert descriptors() <= before
    assert "read a message of 9 bytes" in caplog.text
    session.close()


def test_once_fenced_it_ends_for_good_and_says_why(peer: Peer) -> None:
    session = peer.open()
    peer.send(wire.Fenced(generation=7))
    wait_until(lambda: session.ended_by, "the news")
    assert isinstance(session.ended_by, Stale)
    assert "generation 7 has taken over" in str(session.ended_by)
    assert not session.is_attached
    with pytest.raises(Stale):
        session.find(ask)
    session.close()


def test_fenced_while_it_was_away_it_ends_as_well(peer: Peer) -> None:
    session = peer.open()
    peer.drop()
    peer.admit(wire.Refused(request=0, kind="stale", message="join run: generation 3 has taken over", hint=""))
    wait_until(lambda: session.ended_by, "the news")
    assert isinstance(session.ended_by, Stale)
    session.close()


def test_fenced_by_its_own_successor_it_ends_without_a_word(peer: Peer, caplog: pytest.LogCaptureFixture) -> None:
    session = peer.open()
    session.has_successor = True
    peer.send(wire.Fenced(generation=2))
    wait_until(lambda: session.ended_by, "the news")
    session.close()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("where", ["on_message", "on_attach"])
def test_a_bug_in_a_callback_is_told_and_not_a_silence(peer: Peer, where: str) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    session = peer.open(**{where: broken})
    if where == "on_attach":
        peer.drop()
        peer.admit(welcome())
    else:
        peer.send(wire.Released(slot=0))
    wait_until(lambda: session.ended_by, "the bug to be told")
    assert "a bug" in str(session.ended_by)
    session.close()


def test_closing_ends_the_thread_and_says_goodbye(peer: Peer) -> None:
    session = peer.open()
    session.close()
    assert isinstance(peer.receive(), wire.Goodbye)
    assert not [thread for thread in threading.enumerate() if thread.name == "tierd-session"]


def test_closed_while_it_looks_for_the_daemon_it_does_not_come_back(peer: Peer) -> None:
    attached = threading.Event()
    session = peer.open(on_attach=attached.set)
    peer.drop()
    wait_until(lambda: not session.is_attached, "the end to be heard")
    closing = threading.Thread(target=session.close)
    closing.start()
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
    assert not attached.is_set()


def test_a_session_that_was_never_started_can_be_closed(peer: Peer) -> None:
    opening = peer.begin()
    peer.admit(welcome())
    session: DaemonSession = opening.result(DEADLINE_S)
    session.close()
    with pytest.raises(TierdError):
        session.find(ask)
