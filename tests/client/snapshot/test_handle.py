"""The handle of a snapshot: every wait ends, with the most useful error."""

from __future__ import annotations

import threading
import time

import pytest
from tierd_client import DaemonUnreachable, Full, Shot, TierdError, Transient
from tierd_client.snapshot import handle as module


def test_wait_returns_when_the_tier_is_reached_before_or_during_it() -> None:
    shot = Shot(5, 1)
    assert not shot.is_persisted
    threading.Timer(0.05, shot.reached, ["hot"]).start()
    shot.wait_persisted(10)
    assert shot.is_persisted
    shot.wait_persisted(0)
    shot.reached("dr")
    shot.wait_replicated("dr", 0)


def test_timeout_names_step_and_tier_and_where_to_look() -> None:
    with pytest.raises(Transient, match=r"wait for step 5 in cold: not there after 0\.01 s") as caught:
        Shot(5, 1).wait_replicated("cold", 0.01)
    assert "tierd status" in caught.value.hint


def test_error_that_is_being_retried_is_raised_only_at_the_timeout() -> None:
    shot = Shot(5, 1)
    shot.failed(Full("no room"), is_final=False)
    with pytest.raises(Full, match="no room"):
        shot.wait_persisted(0.01)
    shot.reached("hot")
    shot.wait_persisted(0.01)


def test_final_error_is_raised_at_once_unless_the_tier_was_reached_before() -> None:
    shot = Shot(5, 1)
    shot.reached("hot")
    shot.failed(TierdError("lost"), is_final=True)
    shot.wait_persisted(0)
    began = time.monotonic()
    with pytest.raises(TierdError, match="lost"):
        shot.wait_replicated("cold", 60)
    assert time.monotonic() - began < 10


def test_missing_daemon_is_raised_before_an_error_that_is_being_retried() -> None:
    shot = Shot(5, 1, _why_waiting=lambda shot: DaemonUnreachable("it is gone"))
    shot.failed(Full("no room"), is_final=False)
    with pytest.raises(DaemonUnreachable):
        shot.wait_persisted(0.01)


def test_wait_asks_again_until_an_answer_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ASK_INTERVAL_S", 0.01)
    asked: list[Shot] = []

    def ask(shot: Shot) -> None:
        asked.append(shot)
        if len(asked) == 3:
            shot.reached("hot")

    shot = Shot(5, 1, _ask=ask)
    shot.wait_persisted(10)
    assert asked == [shot] * 3


def test_error_of_asking_ends_the_wait() -> None:
    def ask(shot: Shot) -> None:
        raise TierdError("closed")

    with pytest.raises(TierdError, match="closed"):
        Shot(5, 1, _ask=ask).wait_persisted(60)


def test_snapshot_in_a_cold_tier_is_durable_and_not_in_hot() -> None:
    shot = Shot(5, 1)
    assert not shot.is_persisted
    shot.reached("cold")
    assert shot.is_persisted
    shot.wait_persisted(0)
    with pytest.raises(Transient, match="step 5 in hot"):
        shot.wait_replicated("hot", 0)
