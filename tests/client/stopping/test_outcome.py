"""How a loop that was left is told of: by a word for people and schedulers, and by the wait for its last snapshot."""

from __future__ import annotations

import pytest
from tierd_client import BadConfig, Corrupt, Full, Halted, Mismatch, SlotsBusy, Stale, Transient, Unsupported
from tierd_client.ranks import Ranks
from tierd_client.snapshot.handle import Shot
from tierd_client.stopping.outcome import ending_of, wait_last
from tierd_client.stopping.requests import StopRequests

from tierd.format import wire


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [
        (None, "stopped", "a signal"),
        (SystemExit(0), "stopped", "a signal"),
        (Halted("loss is nan"), "halted", "loss is nan"),
        (KeyboardInterrupt(), "halted", "interrupted at once"),
        (Mismatch("it does not fit"), "halted", "it does not fit"),
        (Unsupported("x"), "halted", "x"),
        (Stale("x"), "halted", "x"),
        (Corrupt("x"), "halted", "x"),
        (BadConfig("x"), "halted", "x"),
        (SlotsBusy("x"), "failed", "SlotsBusy: x"),
        (Full("x"), "failed", "Full: x"),
        (RuntimeError("CUDA out of memory"), "failed", "RuntimeError: CUDA out of memory"),
        (SystemExit(3), "failed", "SystemExit: 3"),
    ],
)
def test_a_loop_that_is_left_so_has_this_word(error: BaseException | None, state: str, reason: str) -> None:
    told = ending_of(error, "a signal")
    assert (told.state, told.reason) == (state, reason)
    assert told.state in wire.OUTCOMES


def test_a_loop_that_nobody_stopped_is_finished() -> None:
    assert ending_of(None, "") == wire.Goodbye(state="finished", reason="")


def test_halting_ends_a_script_with_seventeen() -> None:
    with pytest.raises(SystemExit) as caught:
        raise Halted("loss is nan")
    assert caught.value.code == 17


def test_a_reason_of_any_length_fits_a_message() -> None:
    assert len(wire.encode(ending_of(RuntimeError("é" * 1_000_000), ""))) < 4096


def stopped_at(step: int) -> StopRequests:
    stops = StopRequests(Ranks(0, 1), signals={}, deadline=None, stop_file=None)
    stops.at(step)
    return stops


def test_a_last_snapshot_that_is_durable_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    shot = Shot(5, 1)
    shot.reached("hot")
    wait_last(stopped_at(5), shot, 0.0)
    assert not caplog.records


def test_one_that_is_not_durable_in_time_is_an_error_never_silence(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(Transient, match="stop at step 5: the last snapshot was not durable 0 s after the loop"):
        wait_last(stopped_at(5), Shot(5, 1), 0.0)
    assert "not durable" in caplog.text


@pytest.mark.parametrize(("newest", "said"), [(3, "the newest is of step 3"), (None, "none was taken")])
def test_a_loop_that_left_without_a_snapshot_of_its_last_step_is_told_of(
    caplog: pytest.LogCaptureFixture, newest: int | None, said: str
) -> None:
    shot = None
    if newest is not None:
        shot = Shot(newest, 1)
        shot.reached("hot")
    wait_last(stopped_at(5), shot, 0.0)
    assert f"stopped at step 5 without a snapshot of it: {said}" in caplog.text
