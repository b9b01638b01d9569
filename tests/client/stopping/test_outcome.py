"""The outcome of a run as the daemon records it, and the wait for the last snapshot after a stop."""

from __future__ import annotations

import pytest
from tierd_client import BadConfig, Corrupt, Full, Halted, Mismatch, SlotsBusy, Stale, Transient, Unsupported
from tierd_client.snapshot.handle import Shot
from tierd_client.stopping.outcome import outcome_of, wait_last_snapshot

from tierd.format import wire
from tierd.format.run_state import OUTCOMES


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
def test_outcome_of_a_stopped_loop_follows_from_its_error(error: BaseException | None, state: str, reason: str) -> None:
    outcome = outcome_of(error, "a signal")
    assert (outcome.state, outcome.reason) == (state, reason)
    assert outcome.state in OUTCOMES


def test_loop_without_stop_request_is_finished() -> None:
    assert outcome_of(None, "") == wire.Goodbye(state="finished", reason="")


def test_halted_exits_with_code_17() -> None:
    with pytest.raises(SystemExit) as caught:
        raise Halted("loss is nan")
    assert caught.value.code == 17


def test_long_reason_is_cut_to_fit_a_message() -> None:
    assert len(wire.encode(outcome_of(RuntimeError("é" * 1_000_000), ""))) < 4096


def test_durable_last_snapshot_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    shot = Shot(5, 1)
    shot.reached("hot")
    wait_last_snapshot(5, shot, 0.0)
    assert not caplog.records


def test_last_snapshot_that_is_not_durable_in_time_raises_transient(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(Transient, match="stop at step 5: the last snapshot was not durable 0 s after the loop"):
        wait_last_snapshot(5, Shot(5, 1), 0.0)
    assert "not durable" in caplog.text


@pytest.mark.parametrize(("newest", "said"), [(3, "the newest is of step 3"), (None, "none was taken")])
def test_missing_snapshot_of_the_last_step_is_logged(
    caplog: pytest.LogCaptureFixture, newest: int | None, said: str
) -> None:
    shot = None
    if newest is not None:
        shot = Shot(newest, 1)
        shot.reached("hot")
    wait_last_snapshot(5, shot, 0.0)
    assert f"stopped at step 5 without a snapshot of it: {said}" in caplog.text
