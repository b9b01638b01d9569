"""What is given up of the checkpoints that wait in hot for a cold copy, when hot has no room."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.policy import view
from tierd.format.ids import HOT
from tierd.lifecycle.backlog import give_up
from tierd.lifecycle.policy import Action, CheckpointView

SIZE_BYTES = 10


def given_up(waiting: Iterable[CheckpointView], count: int, *, size_bytes: int = SIZE_BYTES) -> list[int]:
    """The numbers of those that are given up to free the space of `count` checkpoints."""
    views = list(waiting)
    numbers = {each.id: each.sequence for each in views}
    decisions = give_up(views, {each.id: size_bytes for each in views}, count * size_bytes)
    assert {decision.tier for decision in decisions} <= {HOT}
    return [numbers[decision.checkpoint] for decision in decisions]


def test_what_stays_is_spread_evenly() -> None:
    waiting = [view(number, HOT) for number in range(10, 100, 10)]
    assert given_up(waiting, 4) == [20, 40, 60, 80]
    assert given_up(waiting, 6) == [20, 40, 60, 80, 30, 70]


def test_newest_stays_longest() -> None:
    waiting = [view(number, HOT) for number in (10, 20, 30)]
    assert given_up(waiting, 9) == [20, 10, 30]


def test_what_another_tier_holds_goes_first() -> None:
    waiting = [view(10, HOT), view(20, HOT), view(30, HOT, "dr"), view(40, HOT, "dr")]
    assert given_up(waiting, 3) == [30, 40, 10]
    decisions = give_up(waiting, {each.id: 1 for each in waiting}, 3)
    assert [decision.action for decision in decisions] == [Action.EVICT, Action.EVICT, Action.EXPIRE]


def test_milestone_is_never_given_up() -> None:
    assert given_up([view(10, HOT, milestones=["best"]), view(20, HOT, "dr", milestones=["final"])], 9) == []


def test_run_whose_checkpoints_take_the_most_space_gives_up_first() -> None:
    small = [view(number, HOT, run="small") for number in (10, 20, 30, 40)]
    large = [view(number, HOT, run="large") for number in (10, 20)]
    sizes = {each.id: 1 for each in small} | {each.id: 100 for each in large}
    decisions = give_up([*small, *large], sizes, 150)
    assert [(decision.checkpoint.run, decision.checkpoint.step) for decision in decisions] == [
        ("large", 100),
        ("large", 200),
    ]


def test_nothing_is_given_up_while_there_is_room() -> None:
    assert given_up([view(10, HOT)], 0) == []


@settings(max_examples=200, deadline=None)
@given(
    numbers=st.sets(st.integers(1, 60), max_size=12),
    marked=st.sets(st.integers(1, 60), max_size=6),
    count=st.integers(0, 15),
)
def test_no_more_is_given_up_than_is_needed(numbers: set[int], marked: set[int], count: int) -> None:
    waiting = [view(number, HOT, milestones=["best"] if number in marked else []) for number in numbers]
    found = given_up(waiting, count)
    assert len(found) == len(set(found)) == min(count, len(numbers - marked))
    assert not set(found) & marked
