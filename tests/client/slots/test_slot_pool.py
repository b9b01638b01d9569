"""A rank's slot pool, against a daemon that stops, restarts, and has lost its memory."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tierd_client.session import DaemonSession
from tierd_client.slots.slot import Slot
from tierd_client.slots.slot_pool import SlotPool
from tierd_client.slots.slot_states import PooledSlotState as State

from tests.support.gpu import DEVICE, Runtime
from tests.support.waiting import DEADLINE_S, wait_until
from tests.support.wire_peer import DaemonPeer as Peer
from tests.support.wire_peer import welcome
from tierd.format import wire

SIZE = 1 << 20


@pytest.fixture
def peer() -> Iterator[Peer]:
    with Peer() as peer:
        yield peer


class Lab:
    """A slot pool on a session with the peer."""

    def __init__(self, peer: Peer, first: wire.Welcome, descriptors: list[int]) -> None:
        opening = peer.begin()
        peer.admit(first, descriptors)
        self.session: DaemonSession = opening.result(DEADLINE_S)
        self.pool = SlotPool(self.session)
        self.session.start(self.pool)

    def states(self) -> list[State]:
        return [pooled.state for _, pooled in sorted(self.pool._slots.items())]


@contextlib.contextmanager
def lab_of(peer: Peer, first: wire.Welcome | None = None, descriptors: list[int] | None = None) -> Iterator[Lab]:
    lab = Lab(peer, first or welcome(), descriptors or [])
    try:
        yield lab
    finally:
        lab.session.close()
        lab.pool.close()


def sealed(slot: int, step: int) -> wire.Sealed:
    return wire.Sealed(
        slot=slot, step=step, size_bytes=10, created_at="", stall_s=0.0, metrics={}, milestone=None, parent=None,
        architecture_hash="", versions={}, resent=False,
    )  # fmt: skip


def fill(lab: Lab, step: int) -> None:
    index = lab.pool.take(step, 0.0)
    assert index is not None
    lab.pool.seal(sealed(index, step))


def kinds(messages: list[wire.ToDaemon]) -> list[str]:
    return [f"{type(message).__name__} {message.slot}" for message in messages if hasattr(message, "slot")]


def test_slot_is_offered_filled_sealed_and_free_again_when_released(peer: Peer) -> None:
    with lab_of(peer) as lab:
        lab.pool.make(2, SIZE)
        fill(lab, 1)
        assert kinds(peer.receive_until(wire.Sealed)) == ["AttachSlot 0", "AttachSlot 1", "Filling 0", "Sealed 0"]
        fill(lab, 2)
        assert lab.pool.take(3, 0.05) is None
        peer.send(wire.Released(slot=0))
        assert lab.pool.take(3, DEADLINE_S) == 0


def test_slot_that_is_not_page_locked_is_reported_once(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(monkeypatch)
    runtime.refuses_with = 2
    with lab_of(peer) as lab:
        lab.pool.make(1, SIZE)
        for step in (1, 2):
            lab.pool.slot(0).pin(DEVICE)
            lab.pool.report_unpinned(0, step)
        lab.session.send(wire.Ask(step=1, generation=1))
        reports = [message for message in peer.receive_until(wire.Ask) if isinstance(message, wire.Report)]
    assert [(report.outcome, report.step) for report in reports] == [("unpinned", 1)]
    assert "cudaHostRegister returns 2" in reports[0].detail


def test_lost_snapshot_is_reported_to_each_daemon_until_a_newer_snapshot_is_durable(peer: Peer) -> None:
    lost = wire.SnapshotLost(step=1, kind="torn", message="m", hint="")
    with lab_of(peer) as lab:
        lab.pool.make(2, SIZE)
        index = lab.pool.take(1, 0.0)
        assert index is not None
        lab.pool.abandon(index, lost)
        assert [type(message).__name__ for message in peer.receive_until(wire.SnapshotLost)[-2:]] == [
            "Abandon",
            "SnapshotLost",
        ]
        assert lab.states() == [State.FREE, State.FREE]

        peer.drop()
        peer.admit(welcome("second"))
        assert peer.receive_until(wire.SnapshotLost)[-1] == lost
        fill(lab, 2)
        peer.send(wire.Persisted(step=2, generation=1, seconds=0.1))
        wait_until(lambda: State.PERSISTED in lab.states(), "the news")
        peer.drop()
        peer.admit(welcome("third"))
        assert "SnapshotLost" not in {type(message).__name__ for message in peer.receive_until(wire.Sealed)}
        fill(lab, 3)
        assert "SnapshotLost" not in {type(message).__name__ for message in peer.receive_until(wire.Sealed)}


def test_reclaim_keeps_the_slot_that_is_being_copied_into(peer: Peer) -> None:
    with lab_of(peer) as lab:
        lab.pool.make(2, SIZE)
        first, second = lab.pool.take(1, 0.0), lab.pool.take(2, 0.0)
        lab.pool.reclaim(keep=first)
        assert lab.states() == [State.FILLING, State.FREE]
        assert second == 1


def test_wait_for_a_slot_ends_when_one_is_released(peer: Peer) -> None:
    with lab_of(peer) as lab:
        lab.pool.make(2, SIZE)
        for step in (1, 2):
            fill(lab, step)
        threading.Timer(0.05, peer.send, [wire.Released(slot=1)]).start()
        assert lab.pool.take(3, DEADLINE_S) == 1


def test_wait_for_a_slot_ends_when_the_daemon_stays_away(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierd_client.slots.slot_pool.ABSENCE_S", 0.1)
    with lab_of(peer) as lab:
        lab.pool.make(2, SIZE)
        for step in (1, 2):
            fill(lab, step)
        peer.die()
        assert lab.pool.take(3, 1e9) is None


def test_wait_for_a_slot_ends_when_the_daemon_does_not_acknowledge_a_snapshot(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierd_client.slots.slot_pool.SILENCE_S", 0.1)
    with lab_of(peer) as lab:
        lab.pool.make(2, SIZE)
        for step in (1, 2):
            fill(lab, step)
        assert lab.pool.take(3, 1e9) is None
        assert lab.pool.is_silent()
        peer.send(wire.Accepted(slot=0, step=1))
        peer.send(wire.Accepted(slot=1, step=2))
        wait_until(lambda: not lab.pool.is_silent(), "the answers")


def test_wait_for_a_slot_ends_when_the_daemon_hangs_after_it_has_acknowledged_all(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierd_client.slots.slot_pool.SILENCE_S", 0.5)
    monkeypatch.setattr("tierd_client.slots.slot_pool.ASK_INTERVAL_S", 0.05)
    with lab_of(peer) as lab:
        lab.pool.make(2, SIZE)
        for step in (1, 2):
            fill(lab, step)
            peer.send(wire.Accepted(slot=step - 1, step=step))
        wait_until(lambda: lab.states() == [State.ACCEPTED] * 2, "the answers")
        taking = ThreadPoolExecutor(1).submit(lab.pool.take, 3, 1e9)
        for _ in range(3):  # a daemon that answers is waited for
            assert peer.receive_until(wire.Ask)[-1] == wire.Ask(step=2, generation=1, needs_slot=True)
            peer.send(wire.Accepted(slot=1, step=2))
        assert taking.result(DEADLINE_S) is None
        assert lab.pool.is_silent()


def test_wait_for_the_slot_of_the_last_snapshot_asks_an_older_one_to_give_way(peer: Peer) -> None:
    with lab_of(peer) as lab:
        lab.pool.make(2, SIZE)
        for step in (1, 2):
            fill(lab, step)
            peer.send(wire.Accepted(slot=step - 1, step=step))
        wait_until(lambda: lab.states() == [State.ACCEPTED] * 2, "the answers")
        taking = ThreadPoolExecutor(1).submit(lambda: lab.pool.take(3, DEADLINE_S, is_last=True))
        expected = wire.Ask(step=2, generation=1, needs_slot=True, is_last=True)
        assert peer.receive_until(wire.Ask)[-1] == expected
        peer.send(wire.Released(slot=1))
        assert taking.result(DEADLINE_S) == 1


def test_snapshot_in_a_cold_tier_is_safe_without_the_daemon(peer: Peer) -> None:
    with lab_of(peer) as lab:
        lab.pool.make(2, SIZE)
        fill(lab, 1)
        peer.send(wire.Replicated(step=1, generation=lab.session.welcome.generation, tier="cold"))
        wait_until(lambda: lab.states()[0] is State.PERSISTED, "the message")


def test_new_daemon_is_offered_all_slots_and_sent_their_snapshots_oldest_first(peer: Peer) -> None:
    with lab_of(peer) as lab:
        lab.pool.make(3, SIZE)
        for step in (5, 6, 7):
            fill(lab, step)
        peer.receive_until(wire.Sealed)
        peer.send(wire.Released(slot=0))
        wait_until(lambda: lab.states()[0] is State.FREE, "the release")
        fill(lab, 8)
        peer.die()
        peer.listen()
        peer.admit(welcome("second"))

        messages = [peer.receive() for _ in range(6)]
        assert kinds(messages[:3]) == ["AttachSlot 0", "AttachSlot 1", "AttachSlot 2"]
        resent = [message for message in messages[3:] if isinstance(message, wire.Sealed)]
        assert [(message.step, message.resent) for message in resent] == [(6, True), (7, True), (8, True)]


def test_slot_that_is_filling_when_the_daemon_restarts_is_offered_when_it_is_sealed(peer: Peer) -> None:
    with lab_of(peer) as lab:
        lab.pool.make(2, SIZE)
        assert lab.pool.take(1, 0.0) == 0
        peer.drop()
        peer.admit(welcome("second"))
        assert kinds([peer.receive()]) == ["AttachSlot 1"]
        lab.pool.slot(0).grow(4 * SIZE)
        lab.pool.seal(sealed(0, 1))
        assert kinds([peer.receive() for _ in range(3)]) == ["AttachSlot 0", "Filling 0", "Sealed 0"]


def test_interrupted_snapshot_is_abandoned_and_a_slot_that_grew_is_offered_again(peer: Peer) -> None:
    with lab_of(peer) as lab:
        lab.pool.make(2, SIZE)
        assert lab.pool.take(1, 0.0) == 0
        lab.pool.reclaim()
        assert kinds(peer.receive_until(wire.Abandon))[-1] == "Abandon 0"

        assert lab.pool.take(1, 0.0) == 0
        lab.pool.slot(0).grow(4 * SIZE)
        lab.pool.reclaim()
        assert kinds([peer.receive() for _ in range(2)]) == ["Filling 0", "AttachSlot 0"]
        assert lab.states() == [State.FREE, State.FREE]


def test_snapshot_is_safe_once_durable_or_accepted_by_a_running_daemon(peer: Peer) -> None:
    with lab_of(peer) as lab:
        assert lab.pool.wait_safe(0.0)
        lab.pool.make(2, SIZE)
        fill(lab, 1)
        assert not lab.pool.wait_safe(0.01)
        peer.send(wire.Accepted(slot=0, step=1))
        assert lab.pool.wait_safe(DEADLINE_S)
        peer.drop()
        wait_until(lambda: not lab.session.is_attached, "the session to notice")
        assert not lab.pool.wait_safe(0.01), "the daemon that accepted it may be dead"
        peer.admit(welcome("second"))
        peer.send(wire.Persisted(step=1, generation=1, seconds=0.1))
        assert lab.pool.wait_safe(DEADLINE_S)
        peer.drop()
        assert lab.pool.wait_safe(0.0), "durable is durable"


def test_inherited_snapshot_keeps_its_slot_until_released_or_the_daemon_that_kept_it_is_gone(peer: Peer) -> None:
    slots = [Slot.create(SIZE) for _ in range(2)]
    kept = [wire.KeptSlot(slot=index, capacity_bytes=slots[0].capacity_bytes, is_free=index == 0) for index in range(2)]
    with lab_of(peer, welcome(slots=kept), [slot.fd for slot in slots]) as lab:
        lab.pool.make(2, SIZE)
        assert lab.states() == [State.FREE, State.INHERITED]
        fill(lab, 3)
        assert lab.pool.take(4, 0.01) is None
        peer.drop()
        peer.admit(welcome("first", slots=[]))
        wait_until(lambda: lab.session.is_attached, "the daemon to be back")
        assert lab.states() == [State.SENT, State.INHERITED]
        peer.drop()
        peer.admit(welcome("second"))
        assert lab.pool.take(4, DEADLINE_S) == 1
    for slot in slots:
        slot.close()


def test_slot_that_cannot_be_adopted_is_replaced_by_a_new_one(peer: Peer, caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.closing(Slot.create(SIZE)) as slot:
        kept = [wire.KeptSlot(slot=0, capacity_bytes=slot.capacity_bytes * 2, is_free=True)]  # more than it has
        with lab_of(peer, welcome(slots=kept), [slot.fd]) as lab:
            assert len(lab.pool) == 0
            lab.pool.make(2, SIZE)
            assert lab.states() == [State.FREE, State.FREE]
    assert "adopt slot 0" in caplog.text


def test_messages_about_unknown_slots_and_former_snapshots_are_ignored(peer: Peer) -> None:
    with lab_of(peer) as lab:
        lab.pool.make(1, SIZE)
        lab.pool.take(1, 0.0)
        for message in (
            wire.Released(slot=0),  # it is being filled: a late message about the snapshot before
            wire.Released(slot=9),
            wire.Accepted(slot=9, step=1),
            wire.Accepted(slot=0, step=1),
            wire.Persisted(step=1, generation=1, seconds=0.0),
        ):
            lab.pool.on_message(message)
        assert lab.states() == [State.FILLING]
