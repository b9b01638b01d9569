"""When trainers that are connected count as silent."""

from __future__ import annotations

from tierd.format.ids import Run
from tierd.memory.progress import SILENT_MIN_S, START_S, UNTIMED_S, Pause, RunProgress

RUN = Run("run42")


def test_a_run_without_a_connected_trainer_has_no_pause() -> None:
    progress = RunProgress()
    progress.sign(RUN, 1.0)
    assert progress.pause(RUN, 2.0) is None
    progress.entered(RUN, 1.0)
    progress.left(RUN)
    assert progress.pause(RUN, 2.0) is None
    assert progress.step_s(RUN) is None


def test_a_pause_is_too_long_after_three_times_the_longest_one_and_never_before_half_a_minute() -> None:
    progress = RunProgress()
    progress.entered(RUN, 0.0)
    assert progress.pause(RUN, 500.0) == Pause(500.0, START_S), "it may compile before its first step"
    progress.sign(RUN, 501.0, step_s=0.5)
    assert progress.pause(RUN, 530.0) == Pause(29.0, SILENT_MIN_S)
    progress.sign(RUN, 502.0, step_s=0.25)
    assert progress.step_s(RUN) == 0.25
    assert (progress.pause(RUN, 540.0) or Pause(0, 0)).is_too_long
    progress.sign(RUN, 602.0)  # an evaluation of 100 s
    assert progress.pause(RUN, 702.0) == Pause(100.0, 300.0)
    assert progress.step_s(RUN) == 0.25
    progress.entered(RUN, 703.0)
    assert progress.pause(RUN, 704.0) == Pause(1.0, 300.0), "a daemon's or a rank's reconnection forgets nothing"


def test_without_step_times_the_interval_between_snapshots_is_what_is_usual() -> None:
    """A loop that calls only `snapshot`. Its first interval is not known before its second snapshot."""
    progress = RunProgress()
    progress.entered(RUN, 0.0)
    for sign_s in (100.0, 101.0):  # the slot is being filled, and sealed
        progress.sign(RUN, sign_s)
    assert progress.pause(RUN, 1900.0) == Pause(1799.0, UNTIMED_S)
    for sign_s in (1901.0, 1902.0):
        progress.sign(RUN, sign_s)
    assert progress.pause(RUN, 3702.0) == Pause(1800.0, 3 * 1800.0)
    often = RunProgress()
    often.entered(RUN, 0.0)
    for sign_s in (1.0, 61.0):
        often.sign(RUN, sign_s)
    assert often.pause(RUN, 62.0) == Pause(1.0, START_S)


def test_a_start_is_told_from_a_connection_that_was_interrupted() -> None:
    progress = RunProgress()
    assert (progress.attached_s(RUN, 1.0), progress.started_s(RUN, 1.0)) == (None, None)
    progress.entered(RUN, 10.0)
    assert (progress.attached_s(RUN, 15.0), progress.started_s(RUN, 15.0)) == (5.0, None)
    progress.entered(RUN, 20.0, is_start=True)
    progress.entered(RUN, 30.0)  # another rank
    assert (progress.attached_s(RUN, 35.0), progress.started_s(RUN, 35.0)) == (25.0, 15.0)
    progress.left(RUN)
    assert progress.started_s(RUN, 36.0) is None
