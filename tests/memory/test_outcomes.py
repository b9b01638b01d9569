"""What the daemon says of a run: that it runs, or the gravest word that one of its ranks left with."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.errors import BadRequest
from tierd.format.ids import Generation, Rank, Run
from tierd.format.wire import ENDINGS
from tierd.memory import outcomes as module
from tierd.memory.outcomes import RunOutcomes

RUN = Run("run42")
FIRST = Generation(1)


def test_nobody_has_come_so_nothing_is_known() -> None:
    found = RunOutcomes()
    found.said(RUN, Rank(0), "stopped", "")
    found.left(RUN, Rank(0))
    assert found.of(RUN) is None


@given(st.lists(st.sampled_from([*ENDINGS, None]), min_size=1, max_size=5))
def test_the_gravest_word_of_any_rank_counts_once_all_have_left(words: list[str | None]) -> None:
    found = RunOutcomes()
    for rank in range(len(words)):
        found.entered(RUN, FIRST, Rank(rank))
    for rank, word in enumerate(words):
        assert found.of(RUN) == ("running", "")
        if word is not None:
            found.said(RUN, Rank(rank), word, f"rank {rank}")
        found.left(RUN, Rank(rank))
    state, _ = found.of(RUN) or ("", "")
    assert state == max((word or "lost" for word in words), key=ENDINGS.index)


def test_a_rank_that_comes_back_has_not_ended_and_a_new_generation_begins_afresh() -> None:
    found = RunOutcomes()
    found.entered(RUN, FIRST, Rank(0))
    found.left(RUN, Rank(0))
    assert (found.of(RUN) or ("",))[0] == "lost"
    found.entered(RUN, FIRST, Rank(0))
    assert found.of(RUN) == ("running", "")
    found.said(RUN, Rank(0), "failed", "x")
    found.left(RUN, Rank(0))

    found.entered(RUN, Generation(2), Rank(0))
    found.said(RUN, Rank(0), "finished", "")
    found.left(RUN, Rank(0))
    assert found.of(RUN) == ("finished", "")


def test_a_word_that_there_is_not_is_refused() -> None:
    with pytest.raises(BadRequest, match="ends as 'well'"):
        RunOutcomes().said(RUN, Rank(0), "well", "")


def test_only_so_many_runs_are_remembered_those_heard_of_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RUNS_MAX", 2)
    found = RunOutcomes()
    for name in ("a", "b", "a", "c"):
        found.entered(Run(name), FIRST, Rank(0))
    assert [found.of(Run(name)) is None for name in "abc"] == [False, True, False]
