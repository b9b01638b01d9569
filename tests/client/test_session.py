"""The session: it reads, it reconnects, it never blocks training, and its thread never ends unnoticed."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tierd_client import BadRequest, Corrupt, DaemonUnreachable, Stale, TierdError
from tierd_client import session as module
from tierd_client.generation import Generation
from tierd_client.ranks import Ranks
from tierd_client.session import DaemonSession

from tests.support.waiting import DEADLINE_S, wait_until
from tests.support.wire_peer import DaemonPeer as Peer
from tests.support.wire_peer import welcome
from tierd.format import wire


@pytest.fixture
def peer() -> Iterator[Peer]:
    with Peer() as peer:
        yield peer


find = wire.Find(request=0, step=None, generation=None, milestone=None, tier="auto", exclude=[])


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# ── greeting ──


def test_daemon_that_accepts_and_never_answers_is_unreachable_after_the_timeout(peer: Peer) -> None:
    began = time.monotonic()
    with pytest.raises(DaemonUnreachable, match=r"no answer within 0\.2 s"):
        peer.begin(timeout_s=0.2).result(DEADLINE_S)
    assert time.monotonic() - began < 30


def test_refused_hello_raises_the_error_of_the_daemon(peer: Peer) -> None:
    opening = peer.begin()
    peer.admit(wire.Refused(request=0, kind="stale", message="greet: too old", hint="stop"))
    with pytest.raises(Stale, match="too old"):
        opening.result(DEADLINE_S)


def test_hello_answered_by_another_message_is_refused(peer: Peer) -> None:
    opening = peer.begin()
    peer.admit(wire.Released(slot=0))
    with pytest.raises(BadRequest, match="it answered Released"):
        opening.result(DEADLINE_S)


def test_missing_descriptors_of_slots_are_refused_and_the_others_closed(peer: Peer) -> None:
    kept = [wire.KeptSlot(slot=index, capacity_bytes=4096, is_free=True) for index in range(2)]
    opening = peer.begin()
    before = descriptors()
    with open(os.devnull) as file:
        peer.admit(welcome(slots=kept), [file.fileno()])
    with pytest.raises(BadRequest, match="1 of 2 descriptors arrived") as caught:
        opening.result(DEADLINE_S)
    assert "ulimit" in caught.value.hint
    peer.drop()
    assert descriptors() <= before


# ── find ──


def test_answer_to_find_brings_the_tier_and_the_descriptors(peer: Peer) -> None:
    session = peer.open()
    asking = peer._pool.submit(session.find, find)
    (question,) = peer.receive_until(wire.Find)
    assert isinstance(question, wire.Find)
    peer.send(wire.Progress(request=question.request, done_bytes=1, total_bytes=2))
    with open(os.devnull) as file:
        peer.send(wire.FoundReplica(request=question.request, tier="hot"), [file.fileno(), file.fileno()])
    answer, received = asking.result(DEADLINE_S)
    assert answer.tier == "hot"
    assert len(received) == 2
    assert not any(os.get_inheritable(descriptor) for descriptor in received)
    for descriptor in received:
        os.close(descriptor)
    session.close()


def test_refused_find_raises_the_error_of_the_daemon(peer: Peer) -> None:
    session = peer.open()
    asking = peer._pool.submit(session.find, find)
    peer.receive_until(wire.Find)
    peer.send(wire.Refused(request=1, kind="corrupt", message="all damaged", hint=""))
    with pytest.raises(Corrupt, match="all damaged"):
        asking.result(DEADLINE_S)
    session.close()


def test_descriptors_of_a_late_answer_are_closed(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_TIMEOUT_S", 0.1)
    heard = threading.Event()
    session = peer.open(on_message=lambda message: heard.set())
    with pytest.raises(DaemonUnreachable, match="no answer or progress for"):
        session.find(find)
    before = descriptors()
    with open(os.devnull) as file:
        peer.send(wire.FoundReplica(request=1, tier="hot"), [file.fileno()] * 3)
    peer.send(wire.Released(slot=0))
    assert heard.wait(DEADLINE_S)
    assert descriptors() <= before
    session.close()


def test_find_ends_when_the_connection_ends_even_if_the_daemon_is_back_at_once(peer: Peer) -> None:
    session = peer.open()
    asking = peer._pool.submit(session.find, find)
    peer.receive_until(wire.Find)
    peer.drop()
    peer.admit(welcome())
    with pytest.raises(DaemonUnreachable, match="the connection ended during a request"):
        asking.result(DEADLINE_S)
    session.close()


def test_find_raises_at_once_when_the_daemon_is_gone(peer: Peer) -> None:
    session = peer.open()
    peer.die()
    wait_until(lambda: not session.is_attached, "the session to notice")
    began = time.monotonic()
    with pytest.raises(DaemonUnreachable, match="is not connected"):
        session.find(find)
    assert time.monotonic() - began < 10
    session.close()


def test_dead_daemon_is_not_there_even_before_the_thread_notices(peer: Peer) -> None:
    """A snapshot that it had accepted is gone: a client that closes now must wait for the next daemon."""
    session = peer.open()
    assert session.is_there()
    with session.lock:  # the thread cannot mark it detached
        peer.die()
        assert not session.is_there()
    session.close()


# ── reconnecting ──


def test_session_reconnects_as_the_generation_that_it_was_given(peer: Peer) -> None:
    attached = threading.Event()
    session = peer.open(on_attach=attached.set)
    peer.drop()
    hello = peer.admit(welcome("second"))
    assert (hello.generation, hello.run, hello.rank) == (1, "run", 0)
    assert attached.wait(DEADLINE_S)
    assert session.welcome.boot == "second"
    assert session.absent_s == 0
    session.close()


def test_daemon_that_drops_every_connection_is_retried_with_backoff(peer: Peer) -> None:
    session = peer.open()
    pauses: list[float] = []
    for _ in range(4):
        began = time.monotonic()
        peer.drop()
        peer.admit(welcome())
        pauses.append(time.monotonic() - began)
    assert pauses[-1] > 0.35
    assert pauses[-1] > 2 * min(pauses)
    session.close()


def test_send_to_a_daemon_that_does_not_read_never_blocks(peer: Peer) -> None:
    session = peer.open()
    report = wire.Report(outcome="failed", step=1, tier="", seconds=0.0, detail="x" * 4096)
    began = time.monotonic()
    for _ in range(1000):
        session.send(report)
    assert time.monotonic() - began < 10
    assert not session.is_attached
    session.close()


def test_packet_that_is_not_a_message_is_skipped(peer: Peer, caplog: pytest.LogCaptureFixture) -> None:
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


def test_fenced_session_ends_for_good_with_stale(peer: Peer) -> None:
    session = peer.open()
    peer.send(wire.Fenced(generation=7))
    wait_until(lambda: session.ended_by, "the news")
    assert isinstance(session.ended_by, Stale)
    assert "generation 7 has taken over" in str(session.ended_by)
    assert not session.is_attached
    with pytest.raises(Stale):
        session.find(find)
    session.close()


def test_session_fenced_while_disconnected_ends_with_stale(peer: Peer) -> None:
    session = peer.open()
    peer.drop()
    peer.admit(wire.Refused(request=0, kind="stale", message="join run: generation 3 has taken over", hint=""))
    wait_until(lambda: session.ended_by, "the news")
    assert isinstance(session.ended_by, Stale)
    session.close()


def test_session_fenced_by_its_own_successor_logs_no_error(peer: Peer, caplog: pytest.LogCaptureFixture) -> None:
    session = peer.open()
    session.has_successor = True
    peer.send(wire.Fenced(generation=2))
    wait_until(lambda: session.ended_by, "the news")
    session.close()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("where", ["on_message", "on_attach"])
def test_bug_in_a_listener_ends_the_session_with_an_error(peer: Peer, where: str) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    session = peer.open(**{where: broken})
    if where == "on_attach":
        peer.drop()
        peer.admit(welcome())
    else:
        peer.send(wire.Released(slot=0))
    wait_until(lambda: session.ended_by, "the session to end")
    assert "a bug" in str(session.ended_by)
    session.close()


def test_close_sends_goodbye_and_ends_the_thread(peer: Peer) -> None:
    session = peer.open()
    session.close()
    assert isinstance(peer.receive(), wire.Goodbye)
    assert not [thread for thread in threading.enumerate() if thread.name == "tierd-session"]


def test_session_closed_while_reconnecting_stays_closed(peer: Peer) -> None:
    attached = threading.Event()
    session = peer.open(on_attach=attached.set)
    peer.drop()
    wait_until(lambda: not session.is_attached, "the session to notice")
    closing = threading.Thread(target=session.close)
    closing.start()
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
    assert not attached.is_set()


def test_session_that_was_never_started_can_be_closed(peer: Peer) -> None:
    opening = peer.begin()
    peer.admit(welcome())
    session: DaemonSession = opening.result(DEADLINE_S)
    session.close()
    with pytest.raises(TierdError):
        session.find(find)


def test_a_trainer_that_begins_anew_says_which_generation_it_had(peer: Peer) -> None:
    """A daemon in another container does not see its pid, and would report that another trainer has taken over."""
    generation = Generation("run", peer.path, Ranks(0, 1), {}, starts_anew=False)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(generation.join)
        assert peer.admit(welcome(generation=4)).continues == 0
        joining.result(DEADLINE_S)
        former, peer._connection = peer._connection, None  # stays open meanwhile
        renewing = pool.submit(generation.renew)
        hello = peer.admit(welcome(generation=5))
        renewing.result(DEADLINE_S)
    assert (hello.generation, hello.continues, generation.session.hello.continues) == (None, 4, 0)
    generation.session.close()
    generation.pool.close()
    assert former is not None
    former.close()
