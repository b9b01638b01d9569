"""What a policy needs before there is a checkpoint, compared with counts by hand."""

from __future__ import annotations

import pytest

from tierd.config.sections import ColdPolicy, LifecycleConfig, TierPolicy
from tierd.lifecycle.forecast import GIB, MONTH_S
from tierd.lifecycle.needs import needs

EVERY_S = 600.0


def test_needs_of_hot_and_cold() -> None:
    policy = LifecycleConfig(hot=TierPolicy(keep_last=3), cold=ColdPolicy(keep_last=5, keep_every=10))
    own = {"far": ColdPolicy(keep_last=2, keep_every=0)}
    found = needs(
        policy, cold={"cold": 0.02, "far": 0.0}, own=own, checkpoint_bytes=2 * GIB, interval_s=EVERY_S, steps=100
    )
    by_tier = {one.tier: one for one in found}
    assert by_tier["hot"].steady_gib == 6
    assert by_tier["far"].steady_gib == 4
    assert by_tier["cold"].steady_gib == 10
    assert by_tier["cold"].growth_gib == pytest.approx(2 * MONTH_S / EVERY_S / 10, rel=0.01)
    assert by_tier["cold"].growth_cost == pytest.approx(0.02 * 2 * MONTH_S / EVERY_S / 10, rel=0.01)
    assert by_tier["hot"].growth_gib == by_tier["far"].growth_gib == 0
