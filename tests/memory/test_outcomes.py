"""The state of a run: running, or the most severe outcome of its ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.errors import BadRequest
from tierd.format.ids import Generation, Rank, Run
from tierd.format.run_state import OUTCOMES, RunState
from tierd.memory import outcomes as module
from tierd.memory.outcomes import RunOutcomes

RUN = Run("run42")
FIRST = Generation(1)


def test_a_run_that_no_rank_has_entered_has_no_state() -> None:
    outcomes = RunOutcomes()
    outcomes.rank_exited(RUN, Rank(0), RunState.STOPPED, "")
    outcomes.rank_disconnected(RUN, Rank(0))
    assert outcomes.state(RUN) is None


def test_what_a_former_daemon_left_counts_until_a_rank_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = RunOutcomes()
    assert outcomes.restore(RUN, FIRST, RunState.LOST, "gone", ended_s=3.0)
    assert (outcomes.state(RUN), outcomes.ended_s(RUN)) == (("lost", "gone"), 3.0)
    assert not outcomes.is_in_good_order(RUN, 1)
    outcomes.rank_entered(RUN, FIRST, Rank(0))
    assert outcomes.state(RUN) == ("running", "")
    assert outcomes.restored() == []
    outcomes.rank_exited(RUN, Rank(0), RunState.FINISHED, "")
    outcomes.rank_disconnected(RUN, Rank(0))
    assert outcomes.state(RUN) == ("finished", "")
    assert not outcomes.restore(RUN, FIRST, RunState.LOST, "gone", ended_s=3.0), "its ranks have said more since"
    monkeypatch.setattr(module, "RUNS_MAX", 1)
    assert not outcomes.restore(Run("other"), FIRST, RunState.LOST, "gone", ended_s=3.0), "bounded"


@given(st.lists(st.sampled_from([*OUTCOMES, None]), min_size=1, max_size=5))
def test_the_state_is_the_most_severe_outcome_after_all_ranks_have_disconnected(
    of_ranks: list[RunState | None],
) -> None:
    outcomes = RunOutcomes()
    for rank in range(len(of_ranks)):
        outcomes.rank_entered(RUN, FIRST, Rank(rank))
    for rank, outcome in enumerate(of_ranks):
        assert outcomes.state(RUN) == ("running", "")
        if outcome is not None:
            outcomes.rank_exited(RUN, Rank(rank), outcome, f"rank {rank}")
        outcomes.rank_disconnected(RUN, Rank(rank))
    state, _ = outcomes.state(RUN) or ("", "")
    assert state == max((outcome or RunState.LOST for outcome in of_ranks), key=OUTCOMES.index)


def test_ranks_that_have_ended_badly_while_others_train_are_named() -> None:
    outcomes = RunOutcomes()
    assert outcomes.ended_badly(RUN) == ""
    for rank in range(5):
        outcomes.rank_entered(RUN, FIRST, Rank(rank))
    outcomes.rank_exited(RUN, Rank(4), RunState.FINISHED, "")
    outcomes.rank_disconnected(RUN, Rank(4))
    assert outcomes.ended_badly(RUN) == ""
    outcomes.rank_disconnected(RUN, Rank(2))
    assert outcomes.ended_badly(RUN) == "rank 2 lost: it ended without a message: killed or crashed"
    outcomes.rank_exited(RUN, Rank(1), RunState.FAILED, "ValueError: x")
    outcomes.rank_disconnected(RUN, Rank(1))
    assert outcomes.ended_badly(RUN) == "ranks 1-2 failed: ValueError: x"
    outcomes.rank_entered(RUN, FIRST, Rank(1))
    outcomes.rank_entered(RUN, FIRST, Rank(2))
    assert outcomes.ended_badly(RUN) == ""
    for rank in range(4):
        outcomes.rank_disconnected(RUN, Rank(rank))
    assert outcomes.ended_badly(RUN) == "", "the run has ended"


def test_a_reconnect_and_a_new_generation_discard_earlier_outcomes() -> None:
    outcomes = RunOutcomes()
    outcomes.rank_entered(RUN, FIRST, Rank(0))
    outcomes.rank_disconnected(RUN, Rank(0))
    assert (outcomes.state(RUN) or ("",))[0] == "lost"
    outcomes.rank_entered(RUN, FIRST, Rank(0))
    assert outcomes.state(RUN) == ("running", "")
    outcomes.rank_exited(RUN, Rank(0), RunState.FAILED, "x")
    outcomes.rank_disconnected(RUN, Rank(0))

    outcomes.rank_entered(RUN, Generation(2), Rank(0))
    outcomes.rank_exited(RUN, Rank(0), RunState.FINISHED, "")
    outcomes.rank_disconnected(RUN, Rank(0))
    assert outcomes.state(RUN) == ("finished", "")


def test_a_state_that_is_no_outcome_is_refused() -> None:
    with pytest.raises(BadRequest, match="running is not one of finished, stopped"):
        RunOutcomes().rank_exited(RUN, Rank(0), RunState.RUNNING, "")


def test_only_the_most_recent_runs_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RUNS_MAX", 2)
    outcomes = RunOutcomes()
    for name in ("a", "b", "a", "c"):
        outcomes.rank_entered(Run(name), FIRST, Rank(0))
    assert [outcomes.state(Run(name)) is None for name in "abc"] == [False, True, False]
