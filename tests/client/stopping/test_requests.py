"""What is wished for from outside, on a rank by itself: signals, clocks, the stop file, operators."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tierd_client import BadConfig, SlotsBusy
from tierd_client.ranks import Ranks
from tierd_client.stopping import requests as module
from tierd_client.stopping.deadline import Deadline
from tierd_client.stopping.requests import SIGNALS, StopRequests, signals_of

from tierd.format import wire


class Lab:
    """StopRequests whose messages to the daemon are kept."""

    def __init__(
        self,
        *,
        signals: Mapping[int, Any] = SIGNALS,
        deadline: Deadline | None = None,
        stop_file: str | None = None,
        every_s: float = 0.0,
    ) -> None:
        self.stops = StopRequests(Ranks(0, 1), signals=signals, deadline=deadline, stop_file=stop_file)
        self.sent: list[wire.ToDaemon] = []
        self.stops.start(self.sent.append, every_s)

    def request(self, kind: str, milestone: str | None = None, number: int = 1) -> None:
        self.stops.on_message(wire.Requested(request=number, kind=kind, milestone=milestone))

    def answers(self) -> list[tuple[int, int, str]]:
        found = [(one.request, one.step, one.kind) for one in self.sent if isinstance(one, wire.Answer)]
        self.sent.clear()
        return found


@pytest.fixture
def lab() -> Iterator[Lab]:
    lab = Lab()
    lab.stops.catch_signals()
    yield lab
    lab.stops.release_signals()


def test_a_signal_long_before_the_walltime_waits_for_the_last_snapshot_no_longer_than_told() -> None:
    lab = Lab(deadline=Deadline(time.time() + 86_400, "$TIERD_DEADLINE"))
    lab.stops.catch_signals()
    signal.raise_signal(signal.SIGTERM)
    lab.stops.release_signals()
    assert is_stopping(lab)
    assert lab.stops.grace_s(25.0) == 25.0


def is_stopping(lab: Lab) -> bool:
    lab.stops.look()
    return bool(lab.stops.reason)


# ── signals ──


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_means_stop_is_seen_at_once_by_a_rank_by_itself(lab: Lab, number: signal.Signals) -> None:
    assert not lab.stops.at(1)
    assert not is_stopping(lab)
    signal.raise_signal(number)
    assert is_stopping(lab)
    assert lab.stops.reason == "a signal"
    assert not lab.stops.at(2), "a stop by itself is no wish for a snapshot: the loop asks `stopping`"


def test_a_signal_that_means_snapshot_makes_the_next_step_due_and_only_that(lab: Lab) -> None:
    signal.raise_signal(signal.SIGUSR1)
    assert lab.stops.at(7)
    assert lab.stops.at(7), "asked twice, it is the same answer"
    assert not lab.stops.at(8)
    assert not is_stopping(lab)


def test_a_wish_for_a_snapshot_that_comes_after_a_step_was_asked_for_makes_the_next_one_due(lab: Lab) -> None:
    assert not lab.stops.at(7)
    signal.raise_signal(signal.SIGUSR1)
    assert not is_stopping(lab)
    assert lab.stops.at(8)


def test_a_second_interrupt_ends_at_once_but_an_echo_of_the_first_does_not(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    assert is_stopping(lab)
    monkeypatch.setattr(module, "ECHO_S", 0.0)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_terminate_before_an_interrupt_does_not_count_as_one(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ECHO_S", 0.0)
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    assert is_stopping(lab)


def test_former_reactions_are_back_afterwards() -> None:
    lab, former = Lab(), {number: signal.getsignal(number) for number in SIGNALS}
    lab.stops.catch_signals()
    assert all(signal.getsignal(number) != former[number] for number in SIGNALS)
    lab.stops.release_signals()
    assert {number: signal.getsignal(number) for number in SIGNALS} == former


def test_a_forked_child_ends_when_it_is_told_to(lab: Lab) -> None:
    """Else a pool of workers that was forked inside `with client:` could not be ended."""
    child = os.fork()
    if child == 0:
        signal.raise_signal(signal.SIGTERM)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert not is_stopping(lab)


def test_what_signals_mean_can_be_changed() -> None:
    changed = signals_of({signal.SIGUSR1: "stop", signal.SIGUSR2: "snapshot", signal.SIGINT: None})
    assert changed == {signal.SIGTERM: "stop", signal.SIGUSR1: "stop", signal.SIGUSR2: "snapshot"}
    assert signals_of(None) == SIGNALS


@pytest.mark.parametrize("changes", [{9: "stop"}, {19: "stop"}, {0: "stop"}, {1000: "stop"}, {10: "panic"}])
def test_what_cannot_be_caught_is_refused(changes: dict[int, Any]) -> None:
    with pytest.raises(BadConfig, match="signals"):
        signals_of(changes)


# ── clocks and the file ──


def test_the_walltime_stops_it_when_no_more_than_the_reserve_is_left(caplog: pytest.LogCaptureFixture) -> None:
    far = Lab(deadline=Deadline(time.time() + 3600, "$SLURM_JOB_END_TIME"))
    assert not far.stops.at(1)
    assert not is_stopping(far)
    assert not caplog.records

    near = Lab(deadline=Deadline(time.time() + 3, "$SLURM_JOB_END_TIME"))
    assert "only 3 s are left until $SLURM_JOB_END_TIME" in caplog.text
    assert near.stops.grace_s(25.0) == 25.0
    near.stops.at(1)
    assert near.stops.reason == "the walltime"
    assert near.stops.grace_s(0.5) > 2, "all that is left may be used"


def test_a_slow_persist_makes_the_reserve_larger() -> None:
    lab = Lab(deadline=Deadline(time.time() + 600, "max_runtime_s=600"))
    lab.stops.on_message(wire.Persisted(step=1, generation=1, seconds=0.0))  # found committed: nothing was measured
    lab.stops.at(1)
    assert not is_stopping(lab)
    lab.stops.on_message(wire.Persisted(step=2, generation=1, seconds=500.0))
    lab.stops._next_look_s = 0.0
    assert is_stopping(lab)


def test_the_stop_file_stops_it_and_is_consumed(tmp_path: Path) -> None:
    path = tmp_path / "stop"
    lab = Lab(stop_file=str(path))
    lab.stops.at(1)
    assert not is_stopping(lab)
    path.touch()
    lab.stops._next_look_s = 0.0
    lab.stops.at(2)
    assert lab.stops.reason == "the stop file"
    assert not path.exists(), "else the resumed run would stop at once"


def test_a_stop_file_that_cannot_be_removed_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "stop"
    path.mkdir()
    lab = Lab(stop_file=str(path))
    lab.stops.at(1)
    assert is_stopping(lab)
    assert "or the next start stops at once" in caplog.text


def test_by_time_a_snapshot_is_due_until_it_is_taken_and_then_not() -> None:
    lab = Lab(every_s=3600.0)
    assert not lab.stops.at(1)
    lab.stops._timed_s -= 3600
    lab.stops._next_look_s = 0.0
    assert lab.stops.at(2)
    lab.stops.taken(2, 0.01, None)
    assert not lab.stops.at(3)
    lab.stops.not_taken(SlotsBusy("no slot"))
    lab.stops._next_look_s = 0.0
    assert lab.stops.at(4), "what could not be taken is still due"


def test_within_a_second_neither_clock_nor_file_is_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []
    lab = Lab(stop_file=str(tmp_path / "stop"))
    exists = os.path.exists
    monkeypatch.setattr(module.os.path, "exists", lambda path: looks.append(path) or exists(path))
    for step in range(1000):
        lab.stops.at(step)
    assert 1 <= len(looks) <= 3


# ── operators ──


def test_a_stop_that_was_asked_for_is_answered_with_its_step(lab: Lab) -> None:
    lab.request("stop", number=5)
    assert lab.answers() == []
    lab.stops.at(12)
    assert lab.answers() == [(5, 12, "")]
    assert lab.stops.reason == "tierd stop"
    lab.request("stop", number=6)
    assert lab.answers() == [(6, 12, "")], "it stops already"


def test_a_snapshot_that_was_asked_for_is_answered_when_it_is_sealed_and_gets_its_name(lab: Lab) -> None:
    lab.request("snapshot", "best", number=5)
    lab.request("snapshot", number=6)
    assert lab.stops.at(3)
    assert lab.stops.milestone(None) == "best"
    assert lab.answers() == []
    lab.stops.taken(3, 0.1, "best")
    assert lab.answers() == [(5, 3, ""), (6, 3, "")]
    assert not lab.stops.at(4)
    assert lab.stops.milestone(None) is None


def test_two_names_take_two_snapshots_and_the_loops_own_name_comes_first(lab: Lab) -> None:
    for number, name in enumerate(["best", "last"]):
        lab.request("snapshot", name, number=number)
    assert lab.stops.at(1)
    assert lab.stops.milestone("own") == "own"
    lab.stops.taken(1, 0.1, "own")
    assert lab.answers() == []
    for step, name in ((2, "best"), (3, "last")):
        assert lab.stops.at(step)
        assert lab.stops.milestone(None) == name
        lab.stops.taken(step, 0.1, name)
        assert lab.answers() == [(step - 2, step, "")]
    assert not lab.stops.at(4)


def test_a_snapshot_that_could_not_be_taken_is_answered_with_why(lab: Lab) -> None:
    lab.request("snapshot", number=5)
    lab.stops.at(3)
    lab.stops.not_taken(SlotsBusy("no slot free"))
    assert lab.answers() == [(5, 3, "slots_busy")]


def test_force_interrupts_the_main_thread_at_once(lab: Lab) -> None:
    lab.stops.at(3)
    with pytest.raises(KeyboardInterrupt):
        lab.request("force", number=5)
    assert lab.answers() == [(5, 3, "")]


def test_a_run_that_ends_before_it_has_agreed_to_stop_answers_with_its_last_step(lab: Lab) -> None:
    lab.stops.at(3)
    lab.request("stop", number=5)
    lab.stops.close()
    assert lab.answers() == [(5, 3, "")]


def test_a_request_before_the_first_step_comes_true_there() -> None:
    lab = Lab()
    lab.request("stop", number=5)
    lab.stops.on_attach()
    lab.stops.at(100)
    assert lab.answers() == [(5, 100, "")]
