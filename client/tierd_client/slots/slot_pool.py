"""This rank's slots, with the state of each: free, being filled, or holding a snapshot.

A daemon that comes back, or another one in its place, is offered all slots and sent again what it may have lost.
The training thread fills slots, and messages on the session's thread free them; the session's lock guards both.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from dataclasses import dataclass

import msgspec

from tierd.errors import Corrupt, Full
from tierd.format import wire
from tierd.transitions import next_state
from tierd_client.log import log
from tierd_client.session import DaemonSession
from tierd_client.slots.slot import Slot
from tierd_client.slots.slot_states import TRANSITIONS, PooledSlotEvent, PooledSlotState

POLL_S = 0.25  # how often a wait checks whether the daemon is still there
ABSENCE_S = 3.0  # the longest wait for a daemon that restarts
SILENCE_S = 10.0  # a daemon that answers nothing for longer counts as hung
ASK_INTERVAL_S = 2.0  # of a wait: an answer may be lost with the daemon that sent it


@dataclass(slots=True)
class _PooledSlot:
    """`offered_bytes`: the capacity that the daemon knows. `sealed`: the message, sent or not, about the snapshot in
    it; `sent_s`: when. `reported_refusal`: why it is not page-locked, as last reported."""

    slot: Slot
    state: PooledSlotState = PooledSlotState.FREE
    offered_bytes: int = 0
    sealed: wire.Sealed | None = None
    sent_s: float = 0.0
    reported_refusal: str = ""

    def on(self, event: PooledSlotEvent) -> None:
        self.state = next_state(TRANSITIONS, self.state, event)
        if self.state is PooledSlotState.FREE:
            self.sealed = None

    @property
    def is_offered(self) -> bool:
        return self.offered_bytes == self.slot.capacity_bytes


class SlotPool:
    """Starts with the slots that the daemon kept from this rank's previous process: their pages are faulted in."""

    def __init__(self, session: DaemonSession) -> None:
        self._session = session
        self._changed = threading.Condition(session.lock)
        self._slots: dict[int, _PooledSlot] = {}
        self._lost: deque[wire.SnapshotLost] = deque(maxlen=wire.SLOTS_MAX)
        self._keeper = session.welcome.boot  # the daemon process that keeps INHERITED slots
        self._asked_s: float | None = None  # when a question was sent that is not answered yet
        for kept, descriptor in zip(session.welcome.slots, session.kept_descriptors, strict=True):
            try:
                slot = Slot.adopt(descriptor, kept.capacity_bytes)
            except (Corrupt, Full, OSError) as error:
                log.warning("tierd: adopt slot %d: %s; a new slot replaces it", kept.slot, error)
                continue
            state = PooledSlotState.FREE if kept.is_free else PooledSlotState.INHERITED
            self._slots[kept.slot] = _PooledSlot(slot, state, offered_bytes=kept.capacity_bytes)

    def __len__(self) -> int:
        return len(self._slots)

    # ── the training thread ──

    def missing_bytes(self, count: int, size_bytes: int) -> int:
        """The memory that is still to be allocated for `count` slots of this size."""
        slots = [self._slots[index].slot for index in range(count) if index in self._slots]
        return count * size_bytes - sum(min(slot.capacity_bytes, size_bytes) for slot in slots)

    def make(self, count: int, size_bytes: int) -> None:
        """Create slots until there are `count`. Raises Full when there is no memory for them."""
        for index in range(count):
            if index not in self._slots:
                slot = Slot.create(size_bytes)
                with self._session.lock:
                    self._slots[index] = _PooledSlot(slot)
                    self._offer(index)

    def take(self, step: int, wait_s: float, *, is_last: bool = False) -> int | None:
        """The index of a free slot, now being filled. None when no slot becomes free within `wait_s`, or the daemon is
        absent or silent. `is_last`: of the last snapshot of a run that stops, for which an older one gives way."""
        deadline_s = time.monotonic() + wait_s
        next_ask_s = 0.0
        with self._changed:
            while True:
                for index, pooled in self._slots.items():
                    if pooled.state is PooledSlotState.FREE:
                        pooled.on(PooledSlotEvent.TAKE)
                        if not pooled.is_offered:
                            self._offer(index)
                        self._session.send(wire.Filling(slot=index, step=step))
                        return index
                if time.monotonic() >= next_ask_s and self._ask_for_slot(is_last=is_last):
                    next_ask_s = time.monotonic() + ASK_INTERVAL_S
                left_s = deadline_s - time.monotonic()
                # Only the daemon frees slots: without one that answers, stop waiting.
                is_absent = self._session.absent_s > ABSENCE_S or self._session.ended_by is not None
                if left_s <= 0 or is_absent or self.is_silent():
                    return None
                self._changed.wait(min(left_s, POLL_S))

    def slot(self, index: int) -> Slot:
        return self._slots[index].slot

    def report_unpinned(self, index: int, step: int) -> None:
        """Tell the daemon, once per reason, that copies from a GPU go into memory that is not page-locked."""
        pooled = self._slots[index]
        if pooled.reported_refusal != pooled.slot.refusal:
            pooled.reported_refusal = pooled.slot.refusal
            self._session.report("unpinned", step, detail=pooled.slot.refusal)

    def seal(self, sealed: wire.Sealed) -> None:
        """The slot holds the whole snapshot: send it to the daemon, now or when the daemon is back."""
        with self._session.lock:
            pooled = self._slots[sealed.slot]
            pooled.sealed = sealed
            pooled.on(PooledSlotEvent.SEAL)
            self._send(pooled, sealed)

    def abandon(self, index: int, lost: wire.SnapshotLost) -> None:
        """The snapshot being copied into the slot failed: the other ranks must not keep their shards of it."""
        with self._changed:
            self._lost.append(lost)
            self._abandon(index)
            self._session.send(lost)
            self._changed.notify_all()

    def reclaim(self, *, keep: int | None = None) -> None:
        """Free the slots that an interrupted snapshot took, and send what it sealed. One thread takes snapshots, so
        no other snapshot can be in progress, except the one that is being copied into slot `keep`."""
        with self._changed:
            for index, pooled in self._slots.items():
                if pooled.state is PooledSlotState.FILLING and index != keep:
                    self._abandon(index)
                elif pooled.state is PooledSlotState.SEALED and pooled.sealed is not None:
                    self._send(pooled, msgspec.structs.replace(pooled.sealed, resent=True))
            self._changed.notify_all()

    def is_silent(self) -> bool:
        """Whether a snapshot or a question was sent to the daemon more than SILENCE_S ago and is not answered."""
        with self._session.lock:
            sent_s = [pooled.sent_s for pooled in self._unanswered()]
            if self._asked_s is not None:
                sent_s.append(self._asked_s)
            return time.monotonic() - min(sent_s, default=math.inf) > SILENCE_S

    def wait_safe(self, timeout_s: float) -> bool:
        """Wait until every sealed snapshot is durable, or accepted by a daemon that is still running."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while True:
                unsafe = {PooledSlotState.SEALED, PooledSlotState.SENT}
                if not self._session.is_there():
                    unsafe.add(PooledSlotState.ACCEPTED)
                if not any(pooled.state in unsafe for pooled in self._slots.values()):
                    return True
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or self._session.ended_by is not None:
                    return False
                self._changed.wait(min(left_s, POLL_S))

    def close(self) -> None:
        with self._session.lock:
            for pooled in self._slots.values():
                pooled.slot.close()
            self._slots.clear()

    # ── the session's thread ──

    def on_attach(self) -> None:
        """A daemon is back, perhaps a new process: offer the slots, and send their snapshots again, oldest first."""
        self._asked_s = None
        has_keeper = self._session.welcome.boot == self._keeper
        for index, pooled in self._slots.items():
            pooled.on(PooledSlotEvent.REATTACH)
            if pooled.state is PooledSlotState.FILLING:
                pooled.offered_bytes = 0  # it may be growing at this moment: `seal` offers it
                continue
            self._offer(index)
            if pooled.state is PooledSlotState.INHERITED and not has_keeper:
                pooled.on(PooledSlotEvent.KEEPER_GONE)
        unanswered = (pooled.sealed for pooled in self._unanswered() if pooled.sealed)
        for sealed in sorted(unanswered, key=lambda sealed: sealed.step):
            self._session.send(msgspec.structs.replace(sealed, resent=True))
            self._slots[sealed.slot].sent_s = time.monotonic()
        for lost in self._lost:
            self._session.send(lost)
        self._changed.notify_all()

    def on_message(self, message: wire.ToClient) -> None:
        with self._changed:
            self._asked_s = None
            match message:
                case wire.Accepted():
                    pooled = self._slots.get(message.slot)
                    if pooled is not None and pooled.sealed is not None and pooled.sealed.step == message.step:
                        pooled.on(PooledSlotEvent.ACCEPT)
                case wire.Released():
                    pooled = self._slots.get(message.slot)
                    if pooled is not None:
                        pooled.on(PooledSlotEvent.RELEASE)
                case wire.Persisted() | wire.Replicated() if message.generation == self._session.welcome.generation:
                    for pooled in self._slots.values():
                        if pooled.sealed is not None and pooled.sealed.step == message.step:
                            pooled.on(PooledSlotEvent.PERSIST)
                    while self._lost and self._lost[0].step < message.step:
                        self._lost.popleft()  # no rank keeps a shard that is older than a whole checkpoint
                case _:
                    return
            self._changed.notify_all()

    # ── with the lock held ──

    def _abandon(self, index: int) -> None:
        pooled = self._slots[index]
        pooled.on(PooledSlotEvent.ABANDON)
        if pooled.is_offered:
            self._session.send(wire.Abandon(slot=index))
        else:
            self._offer(index)

    def _offer(self, index: int) -> None:
        pooled = self._slots[index]
        pooled.offered_bytes = pooled.slot.capacity_bytes
        self._session.send(wire.AttachSlot(slot=index, capacity_bytes=pooled.offered_bytes), [pooled.slot.fd])

    def _send(self, pooled: _PooledSlot, sealed: wire.Sealed) -> None:
        if not pooled.is_offered:
            self._offer(sealed.slot)
            # The daemon assumes that a newly attached slot is free.
            self._session.send(wire.Filling(slot=sealed.slot, step=sealed.step))
        self._session.send(sealed)
        pooled.sent_s = time.monotonic()
        pooled.on(PooledSlotEvent.SEND)

    def _ask_for_slot(self, *, is_last: bool) -> bool:
        """Ask the daemon for a slot. Its answer also tells a hung daemon from a slow disk. False while another answer
        is due."""
        steps = [pooled.sealed.step for pooled in self._slots.values() if pooled.sealed is not None]
        if self._asked_s is not None or self._unanswered() or not steps:
            return False
        self._asked_s = time.monotonic()
        generation = self._session.welcome.generation
        self._session.send(wire.Ask(step=max(steps), generation=generation, needs_slot=True, is_last=is_last))
        return True

    def _unanswered(self) -> list[_PooledSlot]:
        """The slots whose snapshot was sent and is not acknowledged."""
        sent = (PooledSlotState.SENT, PooledSlotState.RESENT)
        return [pooled for pooled in self._slots.values() if pooled.state in sent]
