"""What a tier will hold and cost, compared with a simulated training of that length."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from tierd.config.sections import ColdPolicy, LifecycleConfig, TierPolicy
from tierd.format.ids import HOT, checkpoint_id
from tierd.lifecycle.forecast import GIB, MONTH_S, Forecast, RunInTier, forecast, full_in_s, goes_on, needs
from tierd.lifecycle.policy import CheckpointView, kept

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
COLD = "cold"


def made(
    count: int, interval: timedelta, *, steps: int = 10, first: int = 1, tiers: Iterable[str] = (HOT, COLD)
) -> list[CheckpointView]:
    """The checkpoints of a training, one at each interval."""
    return [
        CheckpointView(
            id=checkpoint_id("gpt", number * steps, 1),
            sequence=number,
            milestones=frozenset({"best"} if number % 50 == 0 else ()),
            healthy=None,
            tiers=frozenset(tiers),
            created_at=BEGAN + number * interval,
            metrics={"loss": 1.0 / number},
        )
        for number in range(first, first + count)
    ]


def forecast_by_tier(
    views: list[CheckpointView], policy: LifecycleConfig, *, price: float | None = 0.0, own: TierPolicy | None = None
) -> dict[str, Forecast]:
    """By tier; each checkpoint has 1 GiB. `price` None: there is no cold tier."""
    found = forecast(
        views,
        dict.fromkeys((one.id for one in views), GIB),
        policy,
        cold={} if price is None else {COLD: price},
        own={} if own is None else {COLD: own},
    )
    return {one.tier: one for one in found}


FORGETTING = {
    "last": ColdPolicy(keep_last=7, keep_every=0, milestones=False),
    "hours": ColdPolicy(keep_last=3, keep_hourly=24, keep_every=0, milestones=False),
    "restic": ColdPolicy(keep_last=3, keep_hourly=24, keep_daily=7, keep_weekly=5, keep_every=0, milestones=False),
    "best": ColdPolicy(keep_last=2, keep_best=3, best_metric="loss", best_mode="max", keep_every=0, milestones=False),
}


@pytest.mark.parametrize("minutes", [7, 60, 150, 60 * 40])
@pytest.mark.parametrize("policy", FORGETTING.values(), ids=FORGETTING)
def test_steady_size_equals_that_of_a_long_training(policy: ColdPolicy, minutes: int) -> None:
    interval = timedelta(minutes=minutes)
    views = made(10, interval)
    long = made(max(1000, int(timedelta(weeks=8) / interval)), interval)
    found = forecast_by_tier(views, LifecycleConfig(cold=policy))[COLD]
    assert found.interval_s == minutes * 60
    assert found.steady_gib == pytest.approx(len(kept(long, policy)), abs=2)
    assert found.growth_gib == 0


@pytest.mark.parametrize(
    "policy",
    [
        ColdPolicy(keep_every=10),
        ColdPolicy(keep_every=0, keep_every_steps=700),
        ColdPolicy(keep_every=7, keep_every_steps=1000),
    ],
)
def test_monthly_growth_equals_that_of_a_month_of_training(policy: ColdPolicy) -> None:
    interval = timedelta(minutes=10)
    views = made(400, interval)
    month = made(30 * 24 * 6, interval, first=401)
    found = forecast_by_tier(views, LifecycleConfig(cold=policy))[COLD]
    grown = len(kept([*views, *month], policy)) - len(kept(views, policy))
    assert found.growth_gib == pytest.approx(grown, rel=0.02)


def test_steady_size_includes_what_is_kept_forever_so_far() -> None:
    views = made(100, timedelta(minutes=10))
    found = forecast_by_tier(views, LifecycleConfig(cold=ColdPolicy(keep_last=3, keep_every=10)))
    assert found[COLD].steady_gib == 3 + 10, "two of the ten are also milestones"
    assert (found[HOT].steady_gib, found[HOT].growth_gib, found[HOT].held_gib) == (3, 0, 100)


def test_without_a_cold_tier_hot_grows_like_a_cold_one() -> None:
    views = made(100, timedelta(minutes=10), tiers=[HOT])
    found = forecast_by_tier(views, LifecycleConfig(), price=None)
    assert list(found) == [HOT]
    assert found[HOT].steady_gib == 3 + 10
    assert found[HOT].growth_gib == pytest.approx(432), "all milestones are also tenths"


def test_growth_assumes_milestones_at_their_past_rate() -> None:
    views = made(100, timedelta(minutes=10))
    found = forecast_by_tier(views, LifecycleConfig(cold=ColdPolicy(keep_every=0)))[COLD]
    assert (found.steady_gib, found.growth_gib) == (3 + 2, pytest.approx(30 * 144 * 2 / 100))


def test_cost_follows_the_price_and_the_tiers_own_policy() -> None:
    views = made(20, timedelta(hours=1))
    own = ColdPolicy(keep_last=5, keep_every=2, milestones=False)
    found = forecast_by_tier(views, LifecycleConfig(), price=0.023, own=own)
    assert found[COLD].steady_cost == pytest.approx((5 + 10) * 0.023)
    assert found[COLD].growth_cost == pytest.approx(360 * 0.023)
    assert (found[HOT].steady_cost, found[HOT].growth_cost) == (None, None)
    assert forecast_by_tier(views, LifecycleConfig())[COLD].steady_cost is None, "there is no price"


def test_gaps_pauses_and_restarts_do_not_change_the_pace() -> None:
    """Cold holds every tenth and the last three, from before and after a pause."""
    interval = timedelta(minutes=10)
    rested = [*made(60, interval), *made(60, interval, first=61)]
    rested = [
        one if one.sequence <= 60 else view_at(one, one.created_at + timedelta(hours=9))  # type: ignore[operator]
        for one in rested
        if one.sequence % 10 == 0 or one.sequence > 117
    ]
    assert forecast_by_tier(rested, LifecycleConfig())[COLD].interval_s == pytest.approx(600)


def view_at(one: CheckpointView, created_at: datetime | None) -> CheckpointView:
    return CheckpointView(
        id=one.id,
        sequence=one.sequence,
        milestones=one.milestones,
        healthy=one.healthy,
        tiers=one.tiers,
        created_at=created_at,
    )


@pytest.mark.parametrize(
    "views",
    [
        made(1, timedelta(hours=1)),
        [view_at(one, None) for one in made(5, timedelta(hours=1))],
        [view_at(one, BEGAN) for one in made(5, timedelta(hours=1))],
        made(5, timedelta(hours=-1)),
    ],
    ids=["one", "no times", "all at once", "backwards"],
)
def test_forecast_without_a_pace_reports_only_the_present_size(views: list[CheckpointView]) -> None:
    found = forecast_by_tier(views, LifecycleConfig(), price=1.0)[COLD]
    assert found.held_gib == len(views)
    assert (found.interval_s, found.steady_gib, found.growth_gib, found.steady_cost) == (None, None, None, None)


def test_forecast_of_very_large_rules_is_fast() -> None:
    policy = ColdPolicy(keep_last=10**9, keep_weekly=10**6, keep_hourly=10**9)
    found = forecast_by_tier(made(5, timedelta(milliseconds=1)), LifecycleConfig(cold=policy))[COLD]
    assert found.steady_gib is not None


def test_forecast_of_no_checkpoints_is_empty() -> None:
    assert forecast([], {}, LifecycleConfig(), cold={COLD: 1.0}, own={}) == []


def held(views: list[CheckpointView], *rules: TierPolicy, tier: str = HOT) -> RunInTier:
    return RunInTier(tier=tier, views=views, sizes=dict.fromkeys((one.id for one in views), GIB), rules=rules)


def test_a_disk_is_full_when_the_last_ones_that_are_kept_do_not_fit() -> None:
    views = made(3, timedelta(minutes=10))
    rules = TierPolicy(keep_last=10)
    assert full_in_s([held(views, rules)], 7 * GIB) == math.inf, "three are there, so seven more"
    found = full_in_s([held(views, rules)], 4.5 * GIB)
    assert found == pytest.approx(5 * 600, abs=60)
    assert full_in_s([held(views, rules)], -1.0) == 0.0
    both = [held(views, rules), held(views, rules, tier=COLD)]
    assert full_in_s(both, 9.5 * GIB) == pytest.approx(5 * 600, abs=60), "one disk has both"


@pytest.mark.parametrize("policy", FORGETTING.values(), ids=FORGETTING)
def test_a_disk_is_full_as_early_as_in_a_simulated_training(policy: TierPolicy) -> None:
    interval, past, free = timedelta(minutes=40), 20, 8.5
    views = made(past, interval)
    there = kept(views, policy)
    views = [view if view.id in there else replace(view, tiers=frozenset()) for view in views]
    found = full_in_s([held(views, policy)], free * GIB)
    more = [replace(view, metrics={}) for view in made(600, interval, first=past + 1)]
    grown = (number for number in range(1, 600) if len(kept([*views, *more[:number]], policy)) - len(there) > free)
    number = next(grown, None)
    expected_s = math.inf if number is None else number * interval.total_seconds()
    assert found == pytest.approx(expected_s, rel=0.1)


def test_what_is_kept_forever_fills_a_disk_later() -> None:
    rules = TierPolicy(keep_last=3, keep_every=10, milestones=False)
    views = made(40, timedelta(hours=1))
    there = kept(views, rules)
    views = [view if view.id in there else replace(view, tiers=frozenset()) for view in views]
    assert full_in_s([held(views, rules)], 20 * GIB) == pytest.approx(200 * 3600, rel=0.06)
    assert full_in_s([held(views, rules)], 1000 * GIB) == math.inf


def test_without_a_pace_it_is_unknown_when_a_disk_will_be_full() -> None:
    assert full_in_s([held(made(1, timedelta(hours=1)), TierPolicy(keep_last=3))], 1.0) is None
    assert full_in_s([], 1.0) == math.inf


def test_a_run_goes_on_until_its_next_checkpoint_is_long_overdue() -> None:
    views = made(5, timedelta(hours=1))
    newest_at = BEGAN + timedelta(hours=5)
    assert goes_on(views, newest_at + timedelta(hours=2))
    assert not goes_on(views, newest_at + timedelta(hours=4))
    assert not goes_on(views[:1], newest_at)


def test_a_run_of_a_clock_that_was_far_ahead_does_not_go_on_until_that_time_comes() -> None:
    ahead = made(5, timedelta(hours=1))
    assert not goes_on(ahead, BEGAN - timedelta(days=30))
    mended = [*ahead, view_at(made(1, timedelta(hours=1), first=6)[0], BEGAN - timedelta(days=30))]
    assert goes_on(mended, BEGAN - timedelta(days=30)), "its newest one has the right time"


def test_the_pace_is_that_of_the_newest_checkpoints() -> None:
    hourly = made(40, timedelta(hours=1))
    changed = [view_at(one, BEGAN + timedelta(hours=30, minutes=one.sequence - 30)) for one in hourly[30:]]
    assert forecast_by_tier([*hourly[:30], *changed], LifecycleConfig())[COLD].interval_s == pytest.approx(60)


def test_no_number_that_is_kept_makes_the_forecast_slow() -> None:
    rules = TierPolicy(keep_last=10**9)
    began_s = time.process_time()
    assert full_in_s([held(made(6, timedelta(minutes=1)), rules)], 10_000 * GIB) == pytest.approx(600_000, rel=0.03)
    assert time.process_time() - began_s < 1.0


def test_needs_of_hot_and_cold_before_there_is_a_checkpoint() -> None:
    policy = LifecycleConfig(hot=TierPolicy(keep_last=3), cold=ColdPolicy(keep_last=5, keep_every=10))
    own = {"far": ColdPolicy(keep_last=2, keep_every=0)}
    found = needs(
        policy, cold={"cold": 0.02, "far": 0.0}, own=own, checkpoint_bytes=2 * GIB, interval_s=600.0, steps=100
    )
    by_tier = {each.tier: each for each in found}
    assert by_tier["hot"].steady_gib == 6
    assert by_tier["far"].steady_gib == 4
    assert by_tier["cold"].steady_gib == 10
    assert by_tier["cold"].growth_gib == pytest.approx(2 * MONTH_S / 600.0 / 10, rel=0.01)
    assert by_tier["cold"].growth_cost == pytest.approx(0.02 * 2 * MONTH_S / 600.0 / 10, rel=0.01)
    assert by_tier["hot"].growth_gib == by_tier["far"].growth_gib == 0
