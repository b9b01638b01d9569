"""When trainers that are connected count as silent."""

from __future__ import annotations

from tierd.format.ids import Run
from tierd.memory.progress import SILENT_MIN_S, START_S, Pause, RunProgress

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
    progress.sign(RUN, 501.0)
    assert progress.pause(RUN, 530.0) == Pause(29.0, SILENT_MIN_S)
    progress.sign(RUN, 502.0, step_s=0.25)
    assert progress.step_s(RUN) == 0.25
    assert (progress.pause(RUN, 540.0) or Pause(0, 0)).is_too_long
    progress.sign(RUN, 602.0)  # an evaluation of 100 s
    assert progress.pause(RUN, 702.0) == Pause(100.0, 300.0)
    assert progress.step_s(RUN) == 0.25
    progress.entered(RUN, 703.0)
    assert progress.pause(RUN, 704.0) == Pause(1.0, 300.0), "a daemon's or a rank's reconnection forgets nothing"
