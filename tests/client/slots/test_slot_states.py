"""Every pair of state and event of a pooled slot, against the table written out a second time."""

from __future__ import annotations

import itertools

import pytest
from tierd_client.slots.slot_states import TRANSITIONS
from tierd_client.slots.slot_states import PooledSlotEvent as Event
from tierd_client.slots.slot_states import PooledSlotState as State

from tierd.errors import BadRequest
from tierd.transitions import next_state

MOVES = {
    "free": {"take": "filling", "release": "free", "reattach": "free"},
    "filling": {"abandon": "free", "seal": "sealed", "release": "filling", "reattach": "filling"},
    "sealed": {"send": "sent", "accept": "accepted", "persist": "persisted", "release": "free", "reattach": "sent"},
    "sent": {"accept": "accepted", "persist": "persisted", "release": "free", "reattach": "sent"},
    "accepted": {"accept": "accepted", "persist": "persisted", "release": "free", "reattach": "sent"},
    "persisted": {"accept": "persisted", "persist": "persisted", "release": "free", "reattach": "resent"},
    "resent": {"accept": "persisted", "persist": "persisted", "release": "free", "reattach": "resent"},
    "inherited": {"release": "free", "reattach": "inherited", "keeper_gone": "free"},
}
PAIRS = list(itertools.product(State, Event))


@pytest.mark.parametrize(("state", "event"), PAIRS, ids=lambda member: member.value)
def test_every_pair_moves_as_the_table_says_or_is_refused(state: State, event: Event) -> None:
    expected = MOVES[state.value].get(event.value)
    if expected is None:
        with pytest.raises(BadRequest, match=f"{event.value} a slot that is {state.value}"):
            next_state(TRANSITIONS, state, event)
    else:
        assert next_state(TRANSITIONS, state, event).value == expected


def test_refusal_names_the_allowed_events() -> None:
    with pytest.raises(BadRequest, match="expected one of take, release, reattach"):
        next_state(TRANSITIONS, State.FREE, Event.SEAL)


def test_slot_of_a_persisted_snapshot_becomes_free_again() -> None:
    state = State.FREE
    for event in (Event.TAKE, Event.SEAL, Event.SEND, Event.ACCEPT, Event.PERSIST, Event.RELEASE):
        state = next_state(TRANSITIONS, state, event)
    assert state is State.FREE


def test_only_the_daemon_frees_a_slot_that_holds_a_whole_snapshot() -> None:
    whole = set(State) - {State.FREE, State.FILLING}
    leaving = {event for (at, event), to in TRANSITIONS.items() if at in whole and to not in whole}
    assert leaving == {Event.RELEASE, Event.KEEPER_GONE}


def test_durable_snapshot_stays_durable_when_a_daemon_comes_back() -> None:
    durable = {State.PERSISTED, State.RESENT}
    assert {next_state(TRANSITIONS, state, Event.REATTACH) for state in durable} <= durable
