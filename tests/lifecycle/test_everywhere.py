"""While all nodes work, there is always a step that all of them have, however far one of them is behind."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.support.rooms import RUN
from tierd.format.ids import CheckpointId, checkpoint_id
from tierd.lifecycle.everywhere import needed_parts


def at(step: int, generation: int = 1) -> CheckpointId:
    return checkpoint_id(RUN, step, generation)


PARTS = [at(step) for step in range(1, 7)]


def steps(**known: CheckpointId | bool | None) -> list[int]:
    arguments: dict[str, CheckpointId | bool | None] = {"everywhere": None, "newest_in_cold": None}
    return sorted(each.step for each in needed_parts(PARTS, **arguments | known))  # pyright: ignore[reportArgumentType]


def test_parts_from_the_step_on_that_all_nodes_have_are_needed() -> None:
    assert steps(everywhere=at(4)) == [4, 5, 6]
    assert steps(everywhere=at(4), newest_in_cold=at(5)) == [4, 5, 6]
    assert steps(everywhere=at(1, generation=2)) == []


def test_without_that_step_parts_newer_than_cold_are_needed() -> None:
    assert steps() == [1, 2, 3, 4, 5, 6]
    assert steps(newest_in_cold=at(5)) == [5, 6]


def test_what_all_nodes_of_an_earlier_start_had_does_not_count_once_cold_has_one_of_a_later_start() -> None:
    assert steps(everywhere=at(3), newest_in_cold=at(1, generation=2)) == []
    assert steps(everywhere=at(3), newest_in_cold=at(5)) == [3, 4, 5, 6]


def test_hot_that_is_full_gives_up_only_what_cold_replaces() -> None:
    assert steps(everywhere=at(4), is_cold_enough=True) == [4, 5, 6]
    assert steps(everywhere=at(4), newest_in_cold=at(5), is_cold_enough=True) == [6]
    assert steps(newest_in_cold=at(3), is_cold_enough=True) == [4, 5, 6]


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=20), min_size=2, max_size=4), st.integers(1, 3))
def test_no_node_deletes_the_newest_step_that_all_have(persisted: list[list[bool]], keep_last: int) -> None:
    """Each node persists some of the steps, late or not, and keeps the last ones and what is needed."""
    count = min(map(len, persisted))
    hot: list[set[int]] = [set() for _ in persisted]
    everywhere: CheckpointId | None = None
    for step in range(1, count + 1):
        for held, is_persisted in zip(hot, persisted, strict=True):
            if is_persisted[step - 1]:
                held.add(step)
        best = max(set.intersection(*hot), default=None)
        for held in hot:  # before they know of the new one
            needed = {each.step for each in needed_parts(map(at, held), everywhere=everywhere, newest_in_cold=None)}
            held &= needed | set(sorted(held)[-keep_last:])
        assert max(set.intersection(*hot), default=None) == best
        if best is not None:
            everywhere = at(best)
