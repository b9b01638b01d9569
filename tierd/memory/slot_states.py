"""The states of a slot, and the table of transitions. A transition that is not in the table raises.

    FREE → FILLING → SEALED → PERSISTING → RETAINED → FREE

The newest complete snapshot is RETAINED until a newer one is complete: after the first one, a crash at any instant
leaves a complete snapshot in memory. Whether a tier has the checkpoint is not a state here: its manifest says so.
"""

from __future__ import annotations

from enum import Enum

from tierd.errors import BadRequest


class SlotState(Enum):
    FREE = "free"
    FILLING = "filling"  # the trainer writes into it
    SEALED = "sealed"  # it holds a complete snapshot, which now survives the trainer
    PERSISTING = "persisting"  # its bytes are being written to the hot tier
    RETAINED = "retained"  # durable in the hot tier, and still in memory


class SlotEvent(Enum):
    FILL = "fill"
    ABANDON = "abandon"  # the trainer could not finish staging
    SEAL = "seal"
    PERSIST = "persist"
    PERSISTED = "persisted"
    PERSIST_FAILED = "persist_failed"  # it is retried: the bytes are still in the slot
    RELEASE = "release"  # a newer snapshot is complete
    SUPERSEDE = "supersede"  # it is not committed, and a newer one is complete, or its set was given up or fenced
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
    # When a trainer dies, only unsealed data is lost.
    (SlotState.FREE, SlotEvent.TRAINER_DIED): SlotState.FREE,
    (SlotState.FILLING, SlotEvent.TRAINER_DIED): SlotState.FREE,
    (SlotState.SEALED, SlotEvent.TRAINER_DIED): SlotState.SEALED,
    (SlotState.PERSISTING, SlotEvent.TRAINER_DIED): SlotState.PERSISTING,
    (SlotState.RETAINED, SlotEvent.TRAINER_DIED): SlotState.RETAINED,
}


def next_state(state: SlotState, event: SlotEvent) -> SlotState:
    """The state after the event. Raises BadRequest when the table does not list the event for this state."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        allowed = ", ".join(listed.value for source, listed in TRANSITIONS if source is state)
        raise BadRequest(f"{event.value} a slot that is {state.value}: expected one of {allowed}") from None
