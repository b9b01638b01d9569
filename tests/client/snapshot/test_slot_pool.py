"""The slots as the trainer knows them, against a daemon that comes, goes, and forgets."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
from tierd_client.session import DaemonSession
from tierd_client.snapshot.slot import Slot
from tierd_client.snapshot.slot_pool import SlotPool, Use

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


class House:
    def __init__(self, peer: Peer, first: wire.Welcome, descriptors: list[int]) -> None:
        opening = peer.begin()
        peer.admit(first, descriptors)
        self.session: DaemonSession = opening.result(DEADLINE_S)
        self.held = SlotPool(self.session)
        self.session.start(on_message=self.held.on_message, on_attach=self.held.on_attach)

    def use(self) -> list[Use]:
        return [one.use for _, one in sorted(self.held._held.items())]


@contextlib.contextmanager
def house(peer: Peer, first: wire.Welcome | None = None, descriptors: list[int] | None = None) -> Iterator[House]:
    made = House(peer, first or welcome(), descriptors or [])
    try:
        yield made
    finally:
        made.session.close()
        made.held.close()


def sealed(slot: int, step: int) -> wire.Sealed:
    return wire.Sealed(
        slot=slot, step=step, size_bytes=10, created_at="", stall_s=0.0, metrics={}, milestone=None, parent=None,
        architecture_hash="", versions={}, resent=False,
    )  # fmt: skip


def fill(house: House, step: int) -> int:
    index = house.held.take(step, 0.0)
    assert index is not None
    house.held.seal(sealed(index, step))
    return index


def kinds(messages: list[wire.ToDaemon]) -> list[str]:
    return [f"{type(one).__name__} {one.slot}" for one in messages if hasattr(one, "slot")]


def test_a_slot_is_offered_filled_sealed_and_free_again_when_released(peer: Peer) -> None:
    with house(peer) as one:
        one.held.make(2, SIZE)
        fill(one, 1)
        assert kinds(peer.receive_until(wire.Sealed)) == ["AttachSlot 0", "AttachSlot 1", "Filling 0", "Sealed 0"]
        fill(one, 2)
        assert one.held.take(3, 0.05) is None
        peer.send(wire.Released(slot=0))
        assert one.held.take(3, DEADLINE_S) == 0


def test_that_a_slot_is_not_page_locked_is_told_once(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(monkeypatch)
    runtime.refuses_with = 2
    with house(peer) as one:
        one.held.make(1, SIZE)
        for step in (1, 2):
            one.held.slot(0).pin(DEVICE)
            one.held.report_unpinned(0, step)
        one.session.send(wire.Ask(step=1, generation=1))
        reports = [said for said in peer.receive_until(wire.Ask) if isinstance(said, wire.Report)]
    assert [(one.outcome, one.step) for one in reports] == [("unpinned", 1)]
    assert "cudaHostRegister says 2" in reports[0].detail


def test_a_part_that_will_never_be_sealed_is_said_and_said_again_until_a_newer_one_is_whole(peer: Peer) -> None:
    lost = wire.Lost(step=1, kind="torn", message="m", hint="")
    with house(peer) as one:
        one.held.make(2, SIZE)
        index = one.held.take(1, 0.0)
        assert index is not None
        one.held.lose(index, lost)
        assert [type(said).__name__ for said in peer.receive_until(wire.Lost)[-2:]] == ["Abandon", "Lost"]
        assert one.use() == [Use.FREE, Use.FREE]

        peer.drop()
        peer.admit(welcome("second"))
        assert peer.receive_until(wire.Lost)[-1] == lost
        fill(one, 2)
        peer.send(wire.Persisted(step=2, generation=1, seconds=0.1))
        wait_until(lambda: not one.held._lost, "it to be needless")


def test_what_is_being_copied_into_a_slot_is_not_reclaimed(peer: Peer) -> None:
    with house(peer) as one:
        one.held.make(2, SIZE)
        first, second = one.held.take(1, 0.0), one.held.take(2, 0.0)
        one.held.reclaim(keep=first)
        assert one.use() == [Use.FILLING, Use.FREE]
        assert second == 1


def test_the_wait_for_a_slot_ends_when_one_is_released(peer: Peer) -> None:
    with house(peer) as one:
        one.held.make(2, SIZE)
        for step in (1, 2):
            fill(one, step)
        threading.Timer(0.05, peer.send, [wire.Released(slot=1)]).start()
        assert one.held.take(3, DEADLINE_S) == 1


def test_the_wait_for_a_slot_ends_when_the_daemon_stays_away(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierd_client.snapshot.slot_pool.ABSENCE_S", 0.1)
    with house(peer) as one:
        one.held.make(2, SIZE)
        for step in (1, 2):
            fill(one, step)
        peer.die()
        assert one.held.take(3, 1e9) is None


def test_another_daemon_is_offered_all_slots_and_sent_again_what_is_in_them_oldest_first(peer: Peer) -> None:
    with house(peer) as one:
        one.held.make(3, SIZE)
        for step in (5, 6, 7):
            fill(one, step)
        peer.receive_until(wire.Sealed)
        peer.send(wire.Released(slot=0))
        wait_until(lambda: one.use()[0] is Use.FREE, "the release")
        fill(one, 8)
        peer.die()
        peer.listen()
        peer.admit(welcome("second"))

        messages = [peer.receive() for _ in range(6)]
        assert kinds(messages[:3]) == ["AttachSlot 0", "AttachSlot 1", "AttachSlot 2"]
        again = [one for one in messages[3:] if isinstance(one, wire.Sealed)]
        assert [(one.step, one.resent) for one in again] == [(6, True), (7, True), (8, True)]


def test_a_slot_that_is_being_filled_while_the_daemon_changes_is_offered_when_it_is_sealed(peer: Peer) -> None:
    with house(peer) as one:
        one.held.make(2, SIZE)
        assert one.held.take(1, 0.0) == 0
        peer.drop()
        peer.admit(welcome("second"))
        assert kinds([peer.receive()]) == ["AttachSlot 1"]
        one.held.slot(0).grow(4 * SIZE)
        one.held.seal(sealed(0, 1))
        assert kinds([peer.receive() for _ in range(3)]) == ["AttachSlot 0", "Filling 0", "Sealed 0"]


def test_what_is_broken_off_is_abandoned_and_a_slot_that_grew_is_offered_anew(peer: Peer) -> None:
    with house(peer) as one:
        one.held.make(2, SIZE)
        assert one.held.take(1, 0.0) == 0
        one.held.reclaim()
        assert kinds(peer.receive_until(wire.Abandon))[-1] == "Abandon 0"

        assert one.held.take(1, 0.0) == 0
        one.held.slot(0).grow(4 * SIZE)
        one.held.reclaim()
        assert kinds([peer.receive() for _ in range(2)]) == ["Filling 0", "AttachSlot 0"]
        assert one.use() == [Use.FREE, Use.FREE]


def test_a_snapshot_is_safe_once_durable_or_with_a_daemon_that_is_there(peer: Peer) -> None:
    with house(peer) as one:
        assert one.held.wait_safe(0.0)
        one.held.make(2, SIZE)
        fill(one, 1)
        assert not one.held.wait_safe(0.01)
        peer.send(wire.Accepted(slot=0, step=1))
        assert one.held.wait_safe(DEADLINE_S)
        peer.drop()
        wait_until(lambda: not one.session.is_attached, "the end to be heard")
        assert not one.held.wait_safe(0.01), "the daemon that had accepted it may be dead"
        peer.admit(welcome("second"))
        peer.send(wire.Persisted(step=1, generation=1, seconds=0.1))
        assert one.held.wait_safe(DEADLINE_S)
        peer.drop()
        assert one.held.wait_safe(0.0), "durable is durable"


def test_a_predecessors_snapshot_is_left_alone_until_it_is_released_or_its_keeper_is_gone(peer: Peer) -> None:
    slots = [Slot.create(SIZE) for _ in range(2)]
    kept = [wire.KeptSlot(slot=index, capacity_bytes=slots[0].capacity_bytes, is_free=index == 0) for index in range(2)]
    with house(peer, welcome(slots=kept), [slot.fd for slot in slots]) as one:
        one.held.make(2, SIZE)
        assert one.use() == [Use.FREE, Use.INHERITED]
        fill(one, 3)
        assert one.held.take(4, 0.01) is None
        peer.drop()
        peer.admit(welcome("first", slots=[]))
        wait_until(lambda: one.session.is_attached, "the daemon to be back")
        assert one.use() == [Use.SEALED, Use.INHERITED]
        peer.drop()
        peer.admit(welcome("second"))
        assert one.held.take(4, DEADLINE_S) == 1
    for slot in slots:
        slot.close()


def test_a_slot_that_cannot_be_adopted_is_replaced_by_a_new_one(peer: Peer, caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.closing(Slot.create(SIZE)) as slot:
        kept = [wire.KeptSlot(slot=0, capacity_bytes=slot.capacity_bytes * 2, is_free=True)]  # more than it has
        with house(peer, welcome(slots=kept), [slot.fd]) as one:
            assert len(one.held) == 0
            one.held.make(2, SIZE)
            assert one.use() == [Use.FREE, Use.FREE]
    assert "adopt slot 0" in caplog.text


def test_messages_about_slots_that_it_has_not_are_passed_over(peer: Peer) -> None:
    with house(peer) as one:
        one.held.make(1, SIZE)
        one.held.take(1, 0.0)
        for message in (
            wire.Released(slot=0),  # it is being filled: whatever this is about, it is over
            wire.Released(slot=9),
            wire.Accepted(slot=9, step=1),
            wire.Accepted(slot=0, step=1),
            wire.Persisted(step=1, generation=1, seconds=0.0),
        ):
            one.held.on_message(message)
        assert one.use() == [Use.FILLING]
