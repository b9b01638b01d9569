"""The newest step that is durable on every node, as the ranks agree on it at each snapshot."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tierd_client.snapshot.everywhere import COPY_TIMEOUT_S, COUNT, VERDICT_TIMEOUT_S, EverywherePersisted


def exchange(ranks: list[EverywherePersisted]) -> set[int | None]:
    """What the ranks agree on."""
    maxima = [max(values) for values in zip(*(rank.missing() for rank in ranks), strict=True)]
    return {rank.agree(maxima) for rank in ranks}


def persist(rank: EverywherePersisted, generation: int, step: int) -> None:
    """It is durable, and was found to be healthy."""
    rank.persisted(generation, step)
    rank.examined(generation, step, is_healthy=True)


def test_nothing_is_known_before_every_rank_has_persisted_a_step() -> None:
    ranks = [EverywherePersisted(), EverywherePersisted()]
    assert exchange(ranks) == {None}
    for rank in ranks:
        rank.taken(1, 5)
    persist(ranks[0], 1, 5)
    assert exchange(ranks) == {None}
    persist(ranks[1], 1, 5)
    assert exchange(ranks) == {5}
    assert exchange(ranks) == {None}  # it is told once


def test_a_new_generation_begins_without_knowledge() -> None:
    rank = EverywherePersisted()
    rank.taken(1, 5)
    persist(rank, 1, 5)
    assert exchange([rank]) == {5}
    rank.taken(2, 3)
    persist(rank, 1, 5)  # a late message
    assert (rank.step, exchange([rank])) == (None, {None})
    persist(rank, 2, 3)
    assert exchange([rank]) == {3}


def test_a_step_that_was_never_persisted_holds_nothing_up() -> None:
    rank = EverywherePersisted()
    for step in range(1, 4):
        rank.taken(1, step)
    persist(rank, 1, 1)
    persist(rank, 1, 3)
    assert exchange([rank]) == {3}


@given(st.lists(st.sets(st.integers(1, 20)), min_size=1, max_size=4), st.integers(1, 20))
def test_all_ranks_agree_on_the_newest_of_the_last_ones(persisted: list[set[int]], last: int) -> None:
    ranks = [EverywherePersisted() for _ in persisted]
    for rank, steps in zip(ranks, persisted, strict=True):
        for step in range(1, last + 1):
            rank.taken(1, step)
            if step in steps:
                persist(rank, 1, step)
    common = [step for step in range(max(1, last - COUNT + 1), last + 1) if all(step in steps for steps in persisted)]
    assert exchange(ranks) == {max(common, default=None)}
    assert all(len(rank.missing()) == COUNT for rank in ranks)


def keeper(now: list[float]) -> EverywherePersisted:
    """Of a node that copies the parts of another one. `now`: its clock, one element."""
    rank = EverywherePersisted(lambda: now[0])
    rank.keeps_copies = True
    return rank


def test_a_step_without_its_copy_is_not_safe() -> None:
    ranks = [keeper([0.0]), EverywherePersisted()]
    for step in (1, 2):
        for rank in ranks:
            rank.taken(1, step)
            persist(rank, 1, step)
    assert exchange(ranks) == {None}
    ranks[0].copied(1, 1)
    assert exchange(ranks) == {1}
    ranks[0].copied(1, 2)
    assert exchange(ranks) == {2}


def test_a_partner_that_fails_for_ten_minutes_holds_nothing_up() -> None:
    now = [0.0]
    rank = keeper(now)
    for step in range(1, 40):
        rank.taken(1, step)
        persist(rank, 1, step)
        now[0] += 20.0
        assert exchange([rank]) == ({None} if now[0] <= COPY_TIMEOUT_S + 20.0 else {step}), step
    rank.copied(1, 39)  # it is back: from now on copies count again
    assert exchange([rank]) == {None}
    rank.taken(1, 40)
    persist(rank, 1, 40)
    assert exchange([rank]) == {None}
    rank.copied(1, 40)
    assert exchange([rank]) == {40}


def test_rare_snapshots_wait_for_their_copies_too() -> None:
    """The time is counted from the first look at a snapshot that has no copy, not from the last copy."""
    now = [0.0]
    rank = keeper(now)
    rank.taken(1, 1)
    persist(rank, 1, 1)
    rank.copied(1, 1)
    assert exchange([rank]) == {1}
    now[0] = 3600.0
    rank.taken(1, 2)
    persist(rank, 1, 2)
    assert not rank.is_settled(2)
    now[0] += COPY_TIMEOUT_S + 1.0
    assert rank.is_settled(2)


def test_a_step_is_not_safe_before_it_was_examined() -> None:
    """Else the nodes let the healthy step before it go."""
    now = [0.0]
    ranks = [EverywherePersisted(lambda: now[0]), EverywherePersisted(lambda: now[0])]
    for rank in ranks:
        rank.taken(1, 1)
        persist(rank, 1, 1)
    assert exchange(ranks) == {1}
    for rank in ranks:
        rank.taken(1, 2)
        rank.persisted(1, 2)
    ranks[0].examined(1, 2, is_healthy=True)
    assert exchange(ranks) == {None}
    assert [rank.is_settled(2) for rank in ranks] == [True, False]
    ranks[1].examined(1, 2, is_healthy=False)
    assert ranks[1].is_settled(2)  # nothing more will come
    now[0] = VERDICT_TIMEOUT_S + 1
    assert exchange(ranks) == {None}
    for rank in ranks:
        rank.taken(1, 3)
        persist(rank, 1, 3)
    assert exchange(ranks) == {3}


def test_a_verdict_that_does_not_come_holds_nothing_up_for_long() -> None:
    now = [0.0]
    rank = EverywherePersisted(lambda: now[0])
    rank.taken(1, 1)
    rank.persisted(1, 1)
    now[0] = VERDICT_TIMEOUT_S
    assert exchange([rank]) == {None}
    rank.persisted(1, 1)  # heard again: the time goes on
    now[0] += 1
    assert exchange([rank]) == {1}


def test_a_verdict_may_come_first_and_is_not_replaced_by_time() -> None:
    """The part was examined in memory before it was written."""
    rank = EverywherePersisted()
    rank.taken(1, 1)
    rank.examined(1, 1, is_healthy=False)
    rank.persisted(1, 1)
    assert exchange([rank]) == {None}


def test_what_a_step_waits_for_is_named() -> None:
    everywhere = EverywherePersisted(lambda: 0.0)
    everywhere.keeps_copies = True
    everywhere.taken(1, 5)
    everywhere.persisted(1, 5)
    assert "no copy yet" in everywhere.awaited(5)
    everywhere.copied(1, 5)
    assert not everywhere.is_settled(5)
    assert "has not examined its part" in everywhere.awaited(5)
    everywhere.examined(1, 5, is_healthy=True)
    assert everywhere.is_settled(5)
