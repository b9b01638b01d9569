"""Every pair of state and event, against the table written out a second time in the words of wire and metrics."""

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


@pytest.mark.parametrize(("state", "event"), PAIRS, ids=lambda one: one.value)
def test_every_pair_moves_as_the_table_says_or_is_refused(state: SlotState, event: SlotEvent) -> None:
    expected = MOVES[state.value].get(event.value)
    if expected is None:
        with pytest.raises(BadRequest, match=f"{event.value} a slot that is {state.value}"):
            next_state(state, event)
    else:
        assert next_state(state, event).value == expected


def test_refusal_names_what_would_have_been_allowed() -> None:
    with pytest.raises(BadRequest, match="expected one of abandon, seal, trainer_died"):
        next_state(SlotState.FILLING, SlotEvent.RELEASE)


def test_whole_life_of_a_slot_ends_where_it_began() -> None:
    state = SlotState.FREE
    for event in (SlotEvent.FILL, SlotEvent.SEAL, SlotEvent.PERSIST, SlotEvent.PERSISTED, SlotEvent.RELEASE):
        state = next_state(state, event)
    assert state is SlotState.FREE


def test_death_of_the_trainer_never_costs_a_sealed_snapshot() -> None:
    for state in (SlotState.SEALED, SlotState.PERSISTING, SlotState.RETAINED):
        assert next_state(state, SlotEvent.TRAINER_DIED) is state


def test_snapshot_leaves_memory_only_when_durable_or_superseded() -> None:
    whole = {SlotState.SEALED, SlotState.PERSISTING, SlotState.RETAINED}
    leaving = {(at, event) for (at, event), to in TRANSITIONS.items() if at in whole and to not in whole}
    assert leaving == {(SlotState.RETAINED, SlotEvent.RELEASE), (SlotState.SEALED, SlotEvent.SUPERSEDE)}


def test_every_state_has_its_series_in_the_metrics() -> None:
    assert tuple(state.value for state in SlotState) == metrics.SLOT_STATES
