"""All pairs of state and event, compared with a second copy of the table."""

from __future__ import annotations

import itertools

import pytest

from tierd import metrics
from tierd.errors import BadRequest
from tierd.memory.slot_states import TRANSITIONS, SlotEvent, SlotState, next_state

MOVES = {
    "free": {"fill": "filling", "trainer_died": "free"},
    "filling": {"abandon": "free", "seal": "sealed", "trainer_died": "free"},
    "sealed": {"persist": "persisting", "supersede": "free", "trainer_died": "sealed"},
    "persisting": {"persisted": "retained", "persist_failed": "sealed", "trainer_died": "persisting"},
    "retained": {"release": "free", "trainer_died": "retained"},
}
PAIRS = list(itertools.product(SlotState, SlotEvent))


@pytest.mark.parametrize(("state", "event"), PAIRS, ids=lambda member: member.value)
def test_every_state_and_event_follows_the_table_or_is_refused(state: SlotState, event: SlotEvent) -> None:
    expected = MOVES[state.value].get(event.value)
    if expected is None:
        with pytest.raises(BadRequest, match=f"{event.value} a slot that is {state.value}"):
            next_state(state, event)
    else:
        assert next_state(state, event).value == expected


def test_a_refusal_names_the_allowed_events() -> None:
    with pytest.raises(BadRequest, match="expected one of abandon, seal, trainer_died"):
        next_state(SlotState.FILLING, SlotEvent.RELEASE)


def test_the_normal_cycle_of_a_slot_ends_in_free() -> None:
    state = SlotState.FREE
    for event in (SlotEvent.FILL, SlotEvent.SEAL, SlotEvent.PERSIST, SlotEvent.PERSISTED, SlotEvent.RELEASE):
        state = next_state(state, event)
    assert state is SlotState.FREE


def test_the_death_of_the_trainer_keeps_a_sealed_snapshot() -> None:
    for state in (SlotState.SEALED, SlotState.PERSISTING, SlotState.RETAINED):
        assert next_state(state, SlotEvent.TRAINER_DIED) is state


def test_a_snapshot_is_dropped_from_memory_only_when_durable_or_superseded() -> None:
    complete = {SlotState.SEALED, SlotState.PERSISTING, SlotState.RETAINED}
    dropping = {
        (source, event)
        for (source, event), target in TRANSITIONS.items()
        if source in complete and target not in complete
    }
    assert dropping == {(SlotState.RETAINED, SlotEvent.RELEASE), (SlotState.SEALED, SlotEvent.SUPERSEDE)}


def test_every_state_has_a_series_in_the_metrics() -> None:
    assert tuple(state.value for state in SlotState) == metrics.SLOT_STATES
