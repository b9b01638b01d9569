"""Step times: only the time of the training itself, without the steps that waited for a snapshot or copied one."""

from __future__ import annotations

import pytest
from tierd_client.step_times import StepTimes


class Loop:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.times = StepTimes(lambda: self.now_s)

    def train(self, seconds: float) -> None:
        self.now_s += seconds

    def call(self, step: int, seconds: float = 0.0) -> None:
        with self.times.outside_steps(step):
            self.now_s += seconds


def test_step_lasts_from_the_end_of_the_last_call_to_the_first_call_of_the_next_step() -> None:
    loop = Loop()
    for step in range(1, 6):
        loop.train(0.5)
        loop.call(step, seconds=2.0)  # due()
        loop.train(30.0)  # an evaluation
        loop.call(step, seconds=7.0)  # snapshot()
    assert loop.times.report(1.0) == pytest.approx(0.5)


def test_report_is_the_median_since_the_last_report_and_due_at_an_interval() -> None:
    loop = Loop()
    loop.call(0)
    for step, seconds in enumerate((0.1, 0.1, 0.5), 1):
        loop.train(seconds)
        loop.call(step)
    assert loop.times.report(1.0) is None
    assert loop.times.report(0.0) is None
    assert loop.times.report(0.5) == pytest.approx(0.1)
    assert loop.times.report(0.5) is None
    loop.train(0.9)
    loop.call(4)
    assert loop.times.report(0.5) == pytest.approx(0.9)


def test_loop_that_calls_after_every_third_step_reports_a_third_of_the_time() -> None:
    loop = Loop()
    for step in (3, 6, 9):
        loop.train(0.6)
        loop.call(step)
    assert loop.times.report(1.0) == pytest.approx(0.2)


def test_skipped_step_is_left_out_and_no_other() -> None:
    loop = Loop()
    loop.call(1)
    loop.train(50.0)
    loop.times.is_skipped = True
    loop.call(2)
    assert loop.times.report(1.0) is None
    loop.train(0.25)
    loop.call(3)
    assert loop.times.report(1.0) == pytest.approx(0.25)


def test_return_to_an_earlier_step_is_not_counted() -> None:
    loop = Loop()
    loop.call(9)
    loop.train(5.0)
    loop.call(3)
    assert loop.times.report(1.0) is None


def test_time_in_a_call_that_raises_is_not_counted() -> None:
    loop = Loop()
    with pytest.raises(ZeroDivisionError), loop.times.outside_steps(1):
        loop.train(1 / 0)
    loop.call(1, seconds=9.0)
    loop.train(0.5)
    loop.call(2)
    assert loop.times.report(0.1) == pytest.approx(0.5)
