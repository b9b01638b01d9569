"""This rank's slots, and what lies in each as far as we know: nothing, a snapshot being staged, a sealed one.

A daemon that comes back, or another one in its place, is offered them all and sent again what it may have lost.
The training thread fills them, the session's thread hears when they are free again; the session's lock guards both.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from enum import Enum

import msgspec

from tierd.errors import Corrupt, Full
from tierd.format import wire
from tierd_client.session import DaemonSession
from tierd_client.snapshot.slot import Slot

log = logging.getLogger("tierd_client")

LOOK_S = 0.25  # how soon a wait sees that the daemon has gone
LOST_MAX = 16  # as many as a rank may have slots, in which parts could be kept
ABSENCE_S = 3.0  # a daemon that is being restarted is worth a wait, once; one that stays away is not


class Use(Enum):
    FREE = "free"
    FILLING = "filling"
    SEALED = "sealed"  # ours, until the daemon says that it needs the slot no more
    INHERITED = "inherited"  # our predecessor's newest snapshot, which the daemon keeps until ours is whole


@dataclass(slots=True)
class _Held:
    """`offered_bytes`: the capacity that the daemon knows. `accepted_by` and `inherited_from` name a start of it.
    `refusal`: why it is not page-locked, as the daemon was told."""

    slot: Slot
    use: Use = Use.FREE
    offered_bytes: int = 0
    refusal: str = ""
    sealed: wire.Sealed | None = None
    sent_s: float = 0.0
    accepted_by: str = ""
    is_persisted: bool = False
    inherited_from: str = ""

    @property
    def is_offered(self) -> bool:
        return self.offered_bytes == self.slot.capacity_bytes


class SlotPool:
    """Begins with the slots that outlived our predecessor: their pages are warm."""

    def __init__(self, session: DaemonSession) -> None:
        self._session = session
        self._changed = threading.Condition(session.lock)
        self._held: dict[int, _Held] = {}
        self._lost: deque[wire.Lost] = deque(maxlen=LOST_MAX)
        descriptors = session.kept_descriptors
        for kept, descriptor in zip(session.welcome.slots, descriptors, strict=True):
            try:
                slot = Slot.adopt(descriptor, kept.capacity_bytes)
            except (Corrupt, Full, OSError) as error:
                log.warning("tierd: adopt slot %d: %s; a new one takes its place", kept.slot, error)
                continue
            held = self._held[kept.slot] = _Held(slot, offered_bytes=kept.capacity_bytes)
            if not kept.is_free:
                held.use, held.inherited_from = Use.INHERITED, session.welcome.boot

    def __len__(self) -> int:
        return len(self._held)

    # ── the training thread ──

    def make(self, count: int, size_bytes: int) -> None:
        """At least `count` slots. Raises Full when there is no memory for them."""
        for index in range(count):
            if index not in self._held:
                slot = Slot.create(size_bytes)
                with self._session.lock:
                    self._held[index] = _Held(slot)
                    self._offer(index)

    def take(self, step: int, wait_s: float) -> int | None:
        """A free slot, now being filled; None when there is none within `wait_s`."""
        deadline_s = time.monotonic() + wait_s
        with self._changed:
            while True:
                for index, held in self._held.items():
                    if held.use is Use.FREE:
                        held.use = Use.FILLING
                        if not held.is_offered:
                            self._offer(index)
                        self._session.send(wire.Filling(slot=index, step=step))
                        return index
                left_s = deadline_s - time.monotonic()
                # Without a daemon no slot can become free: the wait would only hold up training.
                if left_s <= 0 or self._session.absent_s > ABSENCE_S or self._session.ended_by is not None:
                    return None
                self._changed.wait(min(left_s, LOOK_S))

    def slot(self, index: int) -> Slot:
        return self._held[index].slot

    def report_unpinned(self, index: int, step: int) -> None:
        """Tell the daemon, once, when copies from a GPU go into memory that is not page-locked."""
        held = self._held[index]
        if held.refusal != held.slot.refusal:
            held.refusal = held.slot.refusal
            report = wire.Report(outcome="unpinned", step=step, tier="", seconds=0.0, detail=held.refusal[:4096])
            self._session.send(report)

    def seal(self, sealed: wire.Sealed) -> None:
        """The slot holds the whole snapshot: hand it to the daemon, now or when it is back."""
        with self._session.lock:
            held = self._held[sealed.slot]
            held.use, held.sealed = Use.SEALED, sealed
            held.sent_s, held.accepted_by, held.is_persisted = 0.0, "", False
            if not held.is_offered:
                self._offer(sealed.slot)
                # The daemon takes a slot that it has just been given as free.
                self._session.send(wire.Filling(slot=sealed.slot, step=sealed.step))
            self._session.send(sealed)
            held.sent_s = time.monotonic()

    def lose(self, index: int, lost: wire.Lost) -> None:
        """What was to be sealed in the slot never will be: the other ranks must not keep their parts for it."""
        with self._changed:
            self._lost.append(lost)
            self._free(index)
            self._session.send(lost)
            self._changed.notify_all()

    def reclaim(self, *, keep: int | None = None) -> None:
        """Free what a snapshot that was broken off had taken, wherever that was: one thread takes snapshots.
        `keep` is the slot into which one is being copied."""
        with self._changed:
            for index, held in self._held.items():
                if held.use is Use.FILLING:
                    if index != keep:
                        self._free(index)
                elif held.use is Use.SEALED and held.sealed is not None and not held.sent_s:
                    self.seal(msgspec.structs.replace(held.sealed, resent=True))
            self._changed.notify_all()

    def silent_s(self) -> float:
        """How long the daemon has owed us a word about a sealed snapshot."""
        now_s = time.monotonic()
        with self._session.lock:
            unheard = [one for one in self._held.values() if one.use is Use.SEALED and not one.accepted_by]
            return max((now_s - one.sent_s for one in unheard), default=0.0)

    def wait_safe(self, timeout_s: float) -> bool:
        """Until every sealed snapshot is durable, or in the hands of a daemon that is there now."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while not self._are_safe():
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or self._session.ended_by is not None:
                    return False
                self._changed.wait(min(left_s, LOOK_S))
            return True

    def close(self) -> None:
        with self._session.lock:
            for held in self._held.values():
                held.slot.close()
            self._held.clear()

    # ── the session's thread ──

    def on_attach(self) -> None:
        """The daemon is back, perhaps a new one: offer the slots, and send again what is in them, oldest first."""
        boot = self._session.welcome.boot
        for index, held in self._held.items():
            if held.use is Use.FILLING:
                held.offered_bytes = 0  # it may be growing at this moment: offered when it is sealed
                continue
            self._offer(index)
            held.accepted_by = ""
            if held.use is Use.INHERITED and held.inherited_from != boot:
                held.use = Use.FREE  # who kept it for our predecessor is gone
        sealed = [held for held in self._held.values() if held.use is Use.SEALED]
        for held in sorted(sealed, key=_step):
            if held.sealed is not None:
                self._session.send(msgspec.structs.replace(held.sealed, resent=True))
                held.sent_s = time.monotonic()
        for lost in self._lost:
            self._session.send(lost)
        self._changed.notify_all()

    def on_message(self, message: wire.ToClient) -> None:
        with self._changed:
            match message:
                case wire.Accepted():
                    held = self._held.get(message.slot)
                    if held is not None and held.sealed is not None and held.sealed.step == message.step:
                        held.accepted_by = self._session.welcome.boot
                case wire.Released():
                    held = self._held.get(message.slot)
                    if held is not None and held.use in (Use.SEALED, Use.INHERITED):
                        held.use, held.sealed = Use.FREE, None
                case wire.Persisted() if message.generation == self._session.welcome.generation:
                    for held in self._held.values():
                        if held.sealed is not None and held.sealed.step == message.step:
                            held.is_persisted = True
                    while self._lost and self._lost[0].step < message.step:
                        self._lost.popleft()  # a newer one is whole: nobody keeps parts of it any more
                case _:
                    return
            self._changed.notify_all()

    # ── with the lock held ──

    def _free(self, index: int) -> None:
        held = self._held[index]
        held.use = Use.FREE
        if held.is_offered:
            self._session.send(wire.Abandon(slot=index))
        else:
            self._offer(index)

    def _offer(self, index: int) -> None:
        held = self._held[index]
        held.offered_bytes = held.slot.capacity_bytes
        self._session.send(wire.AttachSlot(slot=index, capacity_bytes=held.offered_bytes), [held.slot.fd])

    def _are_safe(self) -> bool:
        boot = self._session.welcome.boot if self._session.is_there() else ""
        return all(
            held.use is not Use.SEALED or held.is_persisted or (held.accepted_by and held.accepted_by == boot)
            for held in self._held.values()
        )


def _step(held: _Held) -> int:
    return held.sealed.step if held.sealed is not None else 0
