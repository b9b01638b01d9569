"""Looks up the transition of a slot in a table from (state, event) to the next state, for the daemon and the client."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from tierd.errors import BadRequest

State = TypeVar("State", bound=Enum)
Event = TypeVar("Event", bound=Enum)


def next_state(transitions: Mapping[tuple[State, Event], State], state: State, event: Event) -> State:
    """Raises BadRequest when the table does not list the event for this state."""
    try:
        return transitions[state, event]
    except KeyError:
        allowed = ", ".join(listed.value for source, listed in transitions if source is state)
        raise BadRequest(f"{event.value} a slot that is {state.value}: expected one of {allowed}") from None
