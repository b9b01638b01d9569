"""A shot: every wait ends, with the reason that helps most."""

from __future__ import annotations

import threading
import time

import pytest
from tierd_client import DaemonUnreachable, Full, Shot, TierdError, Transient
from tierd_client.snapshot import handle as module


def test_a_wait_returns_when_the_tier_is_reached_before_or_meanwhile() -> None:
    shot = Shot(5, 1)
    assert not shot.is_persisted
    threading.Timer(0.05, shot.reached, ["hot"]).start()
    shot.wait_persisted(10)
    assert shot.is_persisted
    shot.wait_persisted(0)
    shot.reached("dr")
    shot.wait_replicated("dr", 0)


def test_a_wait_that_is_over_says_what_it_waited_for_and_where_to_look() -> None:
    with pytest.raises(Transient, match=r"wait for step 5 in cold: not there after 0\.01 s") as caught:
        Shot(5, 1).wait_replicated("cold", 0.01)
    assert "tierd status" in caught.value.hint


def test_a_failure_that_is_being_retried_is_raised_only_when_the_time_is_over() -> None:
    shot = Shot(5, 1)
    shot.failed(Full("no room"), is_final=False)
    with pytest.raises(Full, match="no room"):
        shot.wait_persisted(0.01)
    shot.reached("hot")
    shot.wait_persisted(0.01)


def test_a_failure_for_good_is_raised_at_once_unless_the_tier_was_reached_before() -> None:
    shot = Shot(5, 1)
    shot.reached("hot")
    shot.failed(TierdError("lost"), is_final=True)
    shot.wait_persisted(0)
    began = time.monotonic()
    with pytest.raises(TierdError, match="lost"):
        shot.wait_replicated("cold", 60)
    assert time.monotonic() - began < 10


def test_a_daemon_that_is_gone_is_the_reason_that_is_told_first() -> None:
    shot = Shot(5, 1, _why_waiting=lambda: DaemonUnreachable("it is gone"))
    shot.failed(Full("no room"), is_final=False)
    with pytest.raises(DaemonUnreachable):
        shot.wait_persisted(0.01)


def test_while_it_waits_it_asks_again_and_an_answer_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ASK_INTERVAL_S", 0.01)
    asked: list[Shot] = []

    def ask(shot: Shot) -> None:
        asked.append(shot)
        if len(asked) == 3:
            shot.reached("hot")

    shot = Shot(5, 1, _ask=ask)
    shot.wait_persisted(10)
    assert asked == [shot] * 3


def test_what_makes_waiting_pointless_is_raised_from_the_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ASK_INTERVAL_S", 0.01)

    def ask(shot: Shot) -> None:
        raise TierdError("closed")

    with pytest.raises(TierdError, match="closed"):
        Shot(5, 1, _ask=ask).wait_persisted(60)
