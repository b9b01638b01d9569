"""The life of a slot as one table: which event leads from which state to which. Unlisted moves raise.

    FREE → FILLING → SEALED → PERSISTING → RETAINED → FREE

The newest whole snapshot is RETAINED until a newer one is whole: a crash at any instant finds a whole snapshot in
memory once there was one. Where a checkpoint rests in the tiers is no state here: a manifest is present or not.
"""

from __future__ import annotations

from enum import Enum

from tierd.errors import BadRequest


class SlotState(Enum):
    FREE = "free"
    FILLING = "filling"  # the trainer writes into it
    SEALED = "sealed"  # it holds one whole snapshot, which outlives the trainer from here on
    PERSISTING = "persisting"  # its bytes are on their way to the hot tier
    RETAINED = "retained"  # durable in the hot tier, and still the newest in memory


class SlotEvent(Enum):
    FILL = "fill"
    ABANDON = "abandon"  # staging stopped half-way, and the trainer says so
    SEAL = "seal"
    PERSIST = "persist"
    PERSISTED = "persisted"
    PERSIST_FAILED = "persist_failed"  # to be tried again: the bytes are still here
    RELEASE = "release"  # a newer snapshot is whole
    SUPERSEDE = "supersede"  # it cannot be committed, and a newer one is whole or its generation is fenced
    TRAINER_DIED = "trainer_died"


TRANSITIONS: dict[tuple[SlotState, SlotEvent], SlotState] = {
    (SlotState.FREE, SlotEvent.FILL): SlotState.FILLING,
    (SlotState.FILLING, SlotEvent.ABANDON): SlotState.FREE,
    (SlotState.FILLING, SlotEvent.SEAL): SlotState.SEALED,
    (SlotState.SEALED, SlotEvent.PERSIST): SlotState.PERSISTING,
    (SlotState.SEALED, SlotEvent.SUPERSEDE): SlotState.FREE,
    (SlotState.PERSISTING, SlotEvent.PERSISTED): SlotState.RETAINED,
    (SlotState.PERSISTING, SlotEvent.PERSIST_FAILED): SlotState.SEALED,
    (SlotState.RETAINED, SlotEvent.RELEASE): SlotState.FREE,
    # A dead trainer costs only what it had not sealed.
    (SlotState.FREE, SlotEvent.TRAINER_DIED): SlotState.FREE,
    (SlotState.FILLING, SlotEvent.TRAINER_DIED): SlotState.FREE,
    (SlotState.SEALED, SlotEvent.TRAINER_DIED): SlotState.SEALED,
    (SlotState.PERSISTING, SlotEvent.TRAINER_DIED): SlotState.PERSISTING,
    (SlotState.RETAINED, SlotEvent.TRAINER_DIED): SlotState.RETAINED,
}


def next_state(state: SlotState, event: SlotEvent) -> SlotState:
    """Raises BadRequest when the event has no place in this state: a peer broke the protocol, or we did."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        allowed = ", ".join(one.value for at, one in TRANSITIONS if at is state)
        raise BadRequest(f"{event.value} a slot that is {state.value}: expected one of {allowed}") from None
