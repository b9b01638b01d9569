"""Looks up a transition in a table from (state, event) to the next state. A move that is not in the table raises."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from tierd.errors import BadRequest

State = TypeVar("State", bound=Enum)
Event = TypeVar("Event", bound=Enum)


def next_state(transitions: Mapping[tuple[State, Event], State], state: State, event: Event, *, of: str) -> State:
    """Raises BadRequest when the table does not list the event for this state. `of`: the owner of the state, as the
    message names it: "a slot"."""
    try:
        return transitions[state, event]
    except KeyError:
        allowed = ", ".join(listed.value for source, listed in transitions if source is state)
        raise BadRequest(f"{event.value} {of} that is {state.value}: expected one of {allowed}") from None
