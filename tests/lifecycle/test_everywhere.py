"""While all nodes work, all of them have some step. When a run has left a node, its parts go there."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.rooms import RUN
from tierd.format.ids import HOT, CheckpointId, checkpoint_id
from tierd.lifecycle.everywhere import left_since, needed_parts, spare_parts
from tierd.lifecycle.policy import CheckpointView

NOW = datetime(2026, 11, 20, tzinfo=UTC)
DAY_S = 86400.0
WEEK_S = 7 * DAY_S


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


# ── a run that has left the node ──


def part(step: int, *tiers: str, milestone: str = "", foreign: str = "") -> CheckpointView:
    milestones = frozenset({milestone} - {""})
    held = frozenset({HOT, *tiers})
    return CheckpointView(
        id=at(step), sequence=step, milestones=milestones, healthy=None, tiers=held, foreign=foreign, is_part=True
    )


def is_left(age_s: float, *, absent_s: float, was_seen: bool = True, grace_s: float = WEEK_S) -> bool:
    newest = NOW - timedelta(seconds=age_s)
    since = left_since(newest, now=NOW, absent_s=absent_s, was_seen=was_seen, restart_s=3600.0, grace_s=grace_s)
    assert since in (None, newest)
    return since is not None


@pytest.mark.parametrize(
    ("age_days", "absent_days", "was_seen", "expected"),
    [
        (8, 8, True, True),
        (6, 8, True, False),  # a part or a claim was written since
        (8, 6, True, False),  # trainers were here, and wrote nothing
        (8, 0.1, False, True),  # the daemon has restarted
        (8, 0.01, False, False),  # only just
        (-8, 8, True, False),  # written by a clock that was ahead
    ],
)
def test_a_run_has_left_when_neither_trainers_nor_files_are_new(
    age_days: float, absent_days: float, was_seen: bool, expected: bool
) -> None:
    assert is_left(age_days * DAY_S, absent_s=absent_days * DAY_S, was_seen=was_seen) is expected


def test_a_run_has_not_left_without_a_limit_or_if_its_files_are_not_known() -> None:
    assert not is_left(1e9, absent_s=1e9, grace_s=0.0)
    assert left_since(None, now=NOW, absent_s=1e9, was_seen=True, restart_s=0.0, grace_s=1.0) is None


def spare(*parts: CheckpointView, newest: int | None, known: str = "cold", waiting: int = 0) -> list[int]:
    found = spare_parts(
        parts, newest_in_cold=None if newest is None else at(newest), known={known}, waiting={at(waiting)}
    )
    return sorted(each.step for each in found)


def test_parts_go_that_cold_has_or_has_newer() -> None:
    assert spare(part(5), part(6, "cold"), part(7), newest=6) == [5, 6]
    assert spare(part(5), part(6), newest=None) == []


def test_a_milestone_goes_only_if_cold_has_it_itself() -> None:
    best = part(5, milestone="best")
    assert spare(best, part(6, "cold", milestone="last"), part(7), newest=8) == [6]
    assert spare(part(6, "cold", milestone="last"), newest=6, known="dr") == []


def test_what_cold_should_get_from_here_and_what_is_in_doubt_stay() -> None:
    assert spare(part(5), part(6), part(7), newest=8, waiting=5) == [6]
    assert spare(part(5, foreign="no claim"), newest=7) == []


def test_the_newest_of_a_generation_stays_with_an_older_one() -> None:
    assert spare(part(5, milestone="best"), part(6, "cold"), part(7, "cold"), newest=7) == [6]
    assert spare(part(5), part(6), part(7, milestone="best"), newest=8) == [5, 6]


@given(
    st.dictionaries(st.integers(1, 9), st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=6),
    st.one_of(st.none(), st.integers(1, 9)),
)
def test_cold_has_what_goes_or_a_newer_one(parts: dict[int, tuple[bool, bool, bool]], newest: int | None) -> None:
    views = [
        part(step, *(["cold"] if in_cold else []), milestone="m" if marked else "")
        for step, (in_cold, marked, _) in parts.items()
    ]
    waiting = {at(step) for step, (*_, waits) in parts.items() if waits}
    newest_in_cold = None if newest is None else at(newest)
    gone = spare_parts(views, newest_in_cold=newest_in_cold, known={"cold"}, waiting=waiting)
    stays = {
        view.id
        for view in views
        if newest is None
        or view.id.step > newest
        or (view.milestones and "cold" not in view.tiers)
        or view.id in waiting
    }
    if stays:
        stays.add(max((view.id for view in views), key=lambda each: each.step))
    assert gone == {view.id for view in views} - stays
