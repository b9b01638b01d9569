"""Requests from outside, on a single rank: signals, clocks, the stop file, operators."""

from __future__ import annotations

import os
import signal
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


class Clock:
    """Stands for the time module: it advances only by `advance`."""

    def __init__(self) -> None:
        self.now_s = 1_700_000_000.0

    def time(self) -> float:
        return self.now_s

    def monotonic(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


class Lab:
    """StopRequests whose messages to the daemon are kept."""

    def __init__(
        self,
        *,
        signals: Mapping[int, Any] = SIGNALS,
        deadline: Deadline | None = None,
        stop_file: str | None = None,
        every_s: float = 0.0,
        follows_daemon: bool = False,
    ) -> None:
        self.sent: list[wire.ToDaemon] = []
        self.requests = StopRequests(
            Ranks(0, 1),
            self.sent.append,
            signals=signals,
            deadline=deadline,
            stop_file=stop_file,
            answers_operators=lambda: True,
        )
        self.requests.start(every_s, follows_daemon=follows_daemon)

    def receive(self, kind: str, milestone: str | None = None, number: int = 1) -> None:
        self.requests.on_message(wire.Requested(request=number, kind=kind, milestone=milestone))

    def answers(self) -> list[tuple[int, int, str]]:
        answers = [(sent.request, sent.step, sent.kind) for sent in self.sent if isinstance(sent, wire.Answer)]
        self.sent.clear()
        return answers


@pytest.fixture
def lab() -> Iterator[Lab]:
    lab = Lab()
    lab.requests.catch_signals()
    yield lab
    lab.requests.release_signals()


def is_stopping(lab: Lab) -> bool:
    lab.requests.check_between_steps()
    return bool(lab.requests.reason)


# ── signals ──


def test_stop_by_a_signal_long_before_the_walltime_waits_only_the_configured_time(clock: Clock) -> None:
    lab = Lab(deadline=Deadline(clock.time() + 86_400, "$TIERD_DEADLINE"))
    lab.requests.catch_signals()
    signal.raise_signal(signal.SIGTERM)
    lab.requests.release_signals()
    assert is_stopping(lab)
    assert lab.requests.grace_left_s(25.0) == 25.0


def test_time_of_the_last_snapshot_counts_against_the_grace_time(lab: Lab) -> None:
    lab.requests.taken(1, 5.0, None)
    assert lab.requests.grace_left_s(25.0) == 25.0, "the run was not stopping yet"
    signal.raise_signal(signal.SIGTERM)
    assert is_stopping(lab)
    lab.requests.taken(2, 5.0, None)
    assert lab.requests.grace_left_s(25.0) == 20.0
    lab.requests.not_taken(SlotsBusy("no slot"), 100.0)
    assert lab.requests.grace_left_s(25.0) == 0.0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_signal_is_seen_at_once_by_a_single_rank(lab: Lab, number: signal.Signals) -> None:
    assert not lab.requests.due(1)
    signal.raise_signal(number)
    assert is_stopping(lab)
    assert lab.requests.reason == "a signal"
    assert not lab.requests.at(2), "an operator has not asked for a snapshot"


def test_loop_without_due_sees_a_stop_signal_at_once(lab: Lab) -> None:
    lab.requests.at(1)
    lab.requests.taken(1, 0.1, None)
    assert not is_stopping(lab)
    lab.requests.at(2)
    lab.requests.not_taken(SlotsBusy("no slot"), 0.1)
    assert not is_stopping(lab)
    signal.raise_signal(signal.SIGTERM)
    assert is_stopping(lab)


def test_stop_signal_between_two_readings_of_a_step_counts_from_the_next_step(lab: Lab) -> None:
    """Else a loop would take no snapshot by the first reading, and leave by the second."""
    assert not lab.requests.due(1)
    assert not is_stopping(lab)
    signal.raise_signal(signal.SIGTERM)
    assert not is_stopping(lab)
    assert lab.requests.due(2)
    assert is_stopping(lab)


def test_stop_is_due_for_a_loop_that_reads_stopping_before_due(lab: Lab) -> None:
    """As in `if client.stopping or client.due(step):`. The stop may come while the step trains."""
    assert not is_stopping(lab)
    assert not lab.requests.due(1)
    assert not is_stopping(lab)
    signal.raise_signal(signal.SIGTERM)
    assert not is_stopping(lab)
    assert lab.requests.due(2)
    lab.requests.not_taken(SlotsBusy("no slot"), 0.1)
    assert lab.requests.due(3), "the last snapshot is still missing"
    lab.requests.taken(3, 0.1, None)
    assert is_stopping(lab)
    assert not lab.requests.due(4), "a loop that goes on takes no snapshot of each step"


def test_stop_signal_after_the_snapshot_of_a_step_is_seen_at_once(lab: Lab) -> None:
    lab.requests.due(1)
    lab.requests.at(1)
    lab.requests.taken(1, 0.1, None)
    assert not is_stopping(lab)
    signal.raise_signal(signal.SIGTERM)
    assert is_stopping(lab)


def test_stop_signal_after_a_snapshot_that_failed_counts_from_the_next_step(lab: Lab) -> None:
    """That step has no snapshot; the next one waits for a slot as long as the grace time allows."""
    lab.requests.due(1)
    lab.requests.at(1)
    lab.requests.not_taken(SlotsBusy("no slot"), 0.1)
    signal.raise_signal(signal.SIGTERM)
    assert not is_stopping(lab)
    lab.requests.due(2)
    assert is_stopping(lab)


def test_snapshot_signal_makes_the_next_step_due_and_no_other(lab: Lab) -> None:
    signal.raise_signal(signal.SIGUSR1)
    assert lab.requests.at(7)
    assert lab.requests.at(7), "the answer for a step stays the same"
    assert not lab.requests.at(8)
    assert not is_stopping(lab)


def test_snapshot_request_after_the_answer_for_a_step_makes_the_next_step_due(lab: Lab) -> None:
    assert not lab.requests.at(7)
    signal.raise_signal(signal.SIGUSR1)
    assert not is_stopping(lab)
    assert lab.requests.at(8)


def test_second_interrupt_ends_at_once_but_an_echo_of_the_first_does_not(lab: Lab, clock: Clock) -> None:
    signal.raise_signal(signal.SIGINT)
    clock.advance(0.1)
    signal.raise_signal(signal.SIGINT)
    assert is_stopping(lab)
    clock.advance(1.0)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_sigterm_before_sigint_does_not_count_as_the_first_interrupt(lab: Lab, clock: Clock) -> None:
    signal.raise_signal(signal.SIGTERM)
    clock.advance(1.0)
    signal.raise_signal(signal.SIGINT)
    assert is_stopping(lab)


def test_former_handlers_are_restored() -> None:
    lab, former = Lab(), {number: signal.getsignal(number) for number in SIGNALS}
    lab.requests.catch_signals()
    assert all(signal.getsignal(number) != former[number] for number in SIGNALS)
    lab.requests.release_signals()
    assert {number: signal.getsignal(number) for number in SIGNALS} == former


def test_signal_stops_both_clients_of_one_process() -> None:
    """As in `with outer, inner:`."""
    outer, inner = Lab(), Lab()
    outer.requests.catch_signals()
    inner.requests.catch_signals()
    signal.raise_signal(signal.SIGTERM)
    assert is_stopping(outer)
    assert is_stopping(inner)
    inner.requests.release_signals()
    outer.requests.release_signals()


@pytest.mark.parametrize("released_first", [0, 1])
def test_client_that_leaves_takes_no_signal_from_the_other(released_first: int) -> None:
    former = signal.getsignal(signal.SIGTERM)
    labs = [Lab(), Lab()]
    for lab in labs:
        lab.requests.catch_signals()
    labs[released_first].requests.release_signals()
    signal.raise_signal(signal.SIGTERM)
    assert [is_stopping(lab) for lab in labs] == [released_first == 1, released_first == 0]
    labs[1 - released_first].requests.release_signals()
    assert signal.getsignal(signal.SIGTERM) == former


def test_second_interrupt_ends_two_clients_at_once(clock: Clock) -> None:
    labs = [Lab(), Lab()]
    for lab in labs:
        lab.requests.catch_signals()
    try:
        signal.raise_signal(signal.SIGINT)
        assert all(map(is_stopping, labs))
        clock.advance(1.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        for lab in reversed(labs):
            lab.requests.release_signals()


def test_signal_ends_a_forked_child(lab: Lab) -> None:
    """Otherwise a pool of workers that was forked inside `with client:` could not be terminated."""
    child = os.fork()
    if child == 0:
        signal.raise_signal(signal.SIGTERM)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert not is_stopping(lab)


def test_meanings_of_signals_can_be_changed() -> None:
    changed = signals_of({signal.SIGUSR1: "stop", signal.SIGUSR2: "snapshot", signal.SIGINT: None})
    assert changed == {signal.SIGTERM: "stop", signal.SIGUSR1: "stop", signal.SIGUSR2: "snapshot"}
    assert signals_of(None) == SIGNALS


@pytest.mark.parametrize("changes", [{9: "stop"}, {19: "stop"}, {0: "stop"}, {1000: "stop"}, {10: "panic"}])
def test_signal_that_cannot_be_caught_is_refused(changes: dict[int, Any]) -> None:
    with pytest.raises(BadConfig, match="signals"):
        signals_of(changes)


# ── clocks and the file ──


def test_walltime_stops_the_run_when_only_the_reserve_is_left(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    far = Lab(deadline=Deadline(clock.time() + 3600, "$SLURM_JOB_END_TIME"))
    assert not far.requests.at(1)
    assert not is_stopping(far)
    assert not caplog.records

    near = Lab(deadline=Deadline(clock.time() + 3, "$SLURM_JOB_END_TIME"))
    assert "only 3 s are left until $SLURM_JOB_END_TIME" in caplog.text
    assert near.requests.grace_left_s(25.0) == 25.0
    near.requests.at(1)
    assert near.requests.reason == "the walltime"
    assert near.requests.grace_left_s(0.5) == 3, "all that is left"


def test_slow_persist_makes_the_reserve_larger(clock: Clock) -> None:
    lab = Lab(deadline=Deadline(clock.time() + 600, "max_runtime_s=600"))
    lab.requests.on_message(wire.Persisted(step=1, generation=1, seconds=0.0))  # it was committed before, and not timed
    lab.requests.at(1)
    assert not is_stopping(lab)
    lab.requests.on_message(wire.Persisted(step=2, generation=1, seconds=500.0))
    clock.advance(module.POLL_S)
    assert is_stopping(lab)


def test_interval_that_follows_the_daemon_changes_with_its_messages(clock: Clock) -> None:
    persisted = wire.Persisted(step=1, generation=1, seconds=0.1, every_s=30)
    lab = Lab(every_s=60, follows_daemon=True)
    lab.requests.on_message(persisted)
    lab.requests.on_message(wire.Persisted(step=1, generation=1, seconds=0.1))  # of an older daemon: no news
    lab.requests.at(1)
    clock.advance(31)
    assert lab.requests.at(2)
    fixed = Lab(every_s=60)
    fixed.requests.on_message(persisted)
    fixed.requests.at(1)
    clock.advance(31)
    assert not fixed.requests.at(2)
    clock.advance(30)
    assert fixed.requests.at(3)


def test_stop_file_stops_the_run_and_is_removed(clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "stop"
    lab = Lab(stop_file=str(path))
    lab.requests.at(1)
    assert not is_stopping(lab)
    path.touch()
    clock.advance(module.POLL_S)
    lab.requests.at(2)
    assert lab.requests.reason == "the stop file"
    assert not path.exists(), "otherwise the resumed run would stop at once"


def test_stop_file_that_cannot_be_removed_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "stop"
    path.mkdir()
    lab = Lab(stop_file=str(path))
    lab.requests.at(1)
    assert is_stopping(lab)
    assert "or the next start stops at once" in caplog.text


def test_snapshot_due_by_time_stays_due_until_it_is_taken(clock: Clock) -> None:
    lab = Lab(every_s=3600.0)
    assert not lab.requests.at(1)
    clock.advance(3600)
    assert lab.requests.at(2)
    lab.requests.taken(2, 0.01, None)
    assert not lab.requests.at(3)
    lab.requests.not_taken(SlotsBusy("no slot"), 0.0)
    clock.advance(module.POLL_S)
    assert lab.requests.at(4), "a snapshot that could not be taken is still due"


def test_clock_and_file_are_checked_once_a_second(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[str] = []
    lab = Lab(stop_file=str(tmp_path / "stop"))
    exists = os.path.exists
    monkeypatch.setattr(module.os.path, "exists", lambda path: checks.append(path) or exists(path))
    for step in range(1000):
        lab.requests.at(step)
        assert not is_stopping(lab)
        clock.advance(0.003)
    assert len(checks) == 3


# ── operators ──


def test_stop_request_is_answered_with_the_step_of_the_stop(lab: Lab) -> None:
    lab.receive("stop", number=5)
    assert lab.answers() == []
    lab.requests.at(12)
    assert lab.answers() == [(5, 12, "")]
    assert lab.requests.reason == "tierd stop"
    lab.receive("stop", number=6)
    assert lab.answers() == [(6, 12, "")], "the run stops already"


def test_snapshot_request_is_answered_when_the_snapshot_is_taken_and_names_it(lab: Lab) -> None:
    lab.receive("snapshot", "best", number=5)
    lab.receive("snapshot", number=6)
    assert lab.requests.at(3)
    assert lab.requests.milestone(None) == "best"
    assert lab.answers() == []
    lab.requests.taken(3, 0.1, "best")
    assert lab.answers() == [(5, 3, ""), (6, 3, "")]
    assert not lab.requests.at(4)
    assert lab.requests.milestone(None) is None


def test_two_milestone_names_take_two_snapshots_and_the_name_from_the_loop_wins(lab: Lab) -> None:
    for number, name in enumerate(["best", "last"]):
        lab.receive("snapshot", name, number=number)
    assert lab.requests.at(1)
    assert lab.requests.milestone("own") == "own"
    lab.requests.taken(1, 0.1, "own")
    assert lab.answers() == []
    for step, name in ((2, "best"), (3, "last")):
        assert lab.requests.at(step)
        assert lab.requests.milestone(None) == name
        lab.requests.taken(step, 0.1, name)
        assert lab.answers() == [(step - 2, step, "")]
    assert not lab.requests.at(4)


def test_snapshot_that_could_not_be_taken_is_answered_with_the_error(lab: Lab) -> None:
    lab.receive("snapshot", number=5)
    lab.requests.at(3)
    lab.requests.not_taken(SlotsBusy("no slot free"), 0.0)
    assert lab.answers() == [(5, 3, "slots_busy")]


def test_force_interrupts_the_main_thread_at_once(lab: Lab) -> None:
    lab.requests.at(3)
    with pytest.raises(KeyboardInterrupt):
        lab.receive("force", number=5)
    assert lab.answers() == [(5, 3, "")]


def test_stop_request_is_answered_at_the_end_of_the_run_with_its_last_step(lab: Lab) -> None:
    lab.requests.at(3)
    lab.receive("stop", number=5)
    lab.requests.close()
    assert lab.answers() == [(5, 3, "")]


def test_request_before_the_first_step_takes_effect_at_the_first_step() -> None:
    lab = Lab()
    lab.receive("stop", number=5)
    lab.requests.on_attach()
    lab.requests.at(100)
    assert lab.answers() == [(5, 100, "")]


def test_force_of_another_node_interrupts_once_and_is_passed_to_the_daemon(lab: Lab) -> None:
    with pytest.raises(KeyboardInterrupt):
        lab.requests._repeat_force()
    assert lab.sent == [wire.Convene(meeting=0, is_forced=True)]
    lab.requests.on_message(wire.Convened(meeting=0, is_forced=True))  # the daemon calls this rank, too


def test_forced_call_interrupts_the_main_thread_at_once(lab: Lab) -> None:
    with pytest.raises(KeyboardInterrupt):
        lab.requests.on_message(wire.Convened(meeting=0, is_forced=True))
    lab.requests.on_message(wire.Convened(meeting=0, is_forced=True))
