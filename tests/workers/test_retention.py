"""When the deletion of a retained object is tried again."""

from __future__ import annotations

import math

import pytest

from tierd.errors import Retained
from tierd.format.ids import checkpoint_id
from tierd.workers.retention import ASK_S_MAX, ASK_S_MIN, Retentions

FIRST, OTHER = checkpoint_id("run", 1, 1), checkpoint_id("run", 2, 1)


@pytest.mark.parametrize(
    ("remaining_s", "waits_s"), [(3600, 3600), (1, ASK_S_MIN), (10**7, ASK_S_MAX), (math.inf, ASK_S_MAX)]
)
def test_a_deletion_waits_as_long_as_the_store_says_within_limits(remaining_s: float, waits_s: float) -> None:
    retentions = Retentions()
    retentions.add("cold", FIRST, Retained("x", remaining_s=remaining_s), now_s=100.0)
    assert retentions.holds("cold", FIRST, now_s=100 + waits_s - 1)
    assert not retentions.holds("cold", FIRST, now_s=100 + waits_s)
    assert not retentions.holds("dr", FIRST, now_s=100)
    assert not retentions.holds("cold", OTHER, now_s=100)


def test_the_earliest_retention_is_due_until_a_pass_retries_it() -> None:
    retentions = Retentions()
    assert retentions.due_s == math.inf
    retentions.add("cold", FIRST, Retained("x", remaining_s=100), now_s=0.0)
    retentions.add("cold", OTHER, Retained("x", remaining_s=200), now_s=0.0)
    assert retentions.due_s == 100
    retentions.forget_due(now_s=150.0)
    assert retentions.due_s == 200
    retentions.forget_due(now_s=200.0)
    assert retentions.due_s == math.inf
