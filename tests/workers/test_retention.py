"""When what is retained is asked for again."""

from __future__ import annotations

import math

import pytest

from tierd.errors import Retained
from tierd.format.ids import checkpoint_id
from tierd.workers.retention import ASK_S_MAX, ASK_S_MIN, Retentions

ONE, OTHER = checkpoint_id("run", 1, 1), checkpoint_id("run", 2, 1)


@pytest.mark.parametrize(
    ("remaining_s", "waits_s"), [(3600, 3600), (1, ASK_S_MIN), (10**7, ASK_S_MAX), (math.inf, ASK_S_MAX)]
)
def test_it_is_held_for_as_long_as_the_store_says_within_limits(remaining_s: float, waits_s: float) -> None:
    found = Retentions()
    found.add("cold", ONE, Retained("x", remaining_s=remaining_s), now_s=100.0)
    assert found.holds("cold", ONE, now_s=100 + waits_s - 1)
    assert not found.holds("cold", ONE, now_s=100 + waits_s)
    assert not found.holds("dr", ONE, now_s=100)
    assert not found.holds("cold", OTHER, now_s=100)


def test_the_first_that_ends_is_due_until_a_pass_begins_that_asks_for_it() -> None:
    found = Retentions()
    assert found.due_s == math.inf
    found.add("cold", ONE, Retained("x", remaining_s=100), now_s=0.0)
    found.add("cold", OTHER, Retained("x", remaining_s=200), now_s=0.0)
    assert found.due_s == 100
    found.forget_due(now_s=150.0)
    assert found.due_s == 200
    found.forget_due(now_s=200.0)
    assert found.due_s == math.inf
