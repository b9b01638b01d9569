"""The lifecycle policy: single cases."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from tests.support.policy import brief, by_replica, explain, plan, sequences, view
from tierd.config.sections import ColdPolicy, LifecycleConfig, TierPolicy
from tierd.format.ids import HOT
from tierd.lifecycle.policy import Action, CheckpointView, Decision, kept

DEFAULT = LifecycleConfig()


# ── what one policy keeps ──


def test_keep_last_keeps_the_newest_and_gives_the_reason() -> None:
    views = [view(n) for n in (1, 2, 3, 4)]
    assert kept(views, TierPolicy(keep_last=2)) == {views[3].id: "last 2", views[2].id: "last 2"}


def test_input_order_does_not_matter() -> None:
    views = [view(n) for n in range(1, 25)]
    policy = TierPolicy(keep_last=2, keep_every=10)
    assert kept(views, policy) == kept(reversed(views), policy)


def test_newest_is_the_newest_step_of_the_newest_generation() -> None:
    abandoned = view(1, step=900, generation=1)
    resumed = view(2, step=500, generation=2)
    assert list(kept([abandoned, resumed], TierPolicy(keep_last=1, keep_generations=0))) == [resumed.id]


def test_every_nth_goes_by_sequence_and_every_nth_step_by_step() -> None:
    views = [view(n, step=n * 7) for n in range(1, 21)]
    assert sequences(views, kept(views, TierPolicy(keep_last=1, keep_every=8))) == [8, 16, 20]
    assert sequences(views, kept(views, TierPolicy(keep_last=1, keep_every_steps=35))) == [5, 10, 15, 20]


def test_milestones_count_only_where_the_policy_asks_for_them() -> None:
    views = [view(1, milestones=["best", "a"]), view(2), view(3)]
    assert views[0].id not in kept(views, TierPolicy(keep_last=1))
    assert kept(views, TierPolicy(keep_last=1, milestones=True))[views[0].id] == "milestone a, best"


def test_reason_that_holds_longest_is_reported() -> None:
    newest = view(10, milestones=["final"])
    policy = TierPolicy(keep_last=3, keep_every=10, keep_every_steps=100, milestones=True)
    assert kept([newest], policy) == {newest.id: "milestone final"}
    assert kept([view(10)], policy) == {view(10).id: "every 10th"}
    assert kept([view(20, step=100)], TierPolicy(keep_every_steps=100)) == {view(20, step=100).id: "every 100 steps"}


@pytest.mark.parametrize(
    ("number", "word"), [(1, "1st"), (2, "2nd"), (3, "3rd"), (10, "10th"), (11, "11th"), (22, "22nd"), (112, "112th")]
)
def test_ordinals_read_as_english(number: int, word: str) -> None:
    one = view(number)
    assert kept([one], TierPolicy(keep_every=number)) == {one.id: f"every {word}"}


def test_unhealthy_checkpoints_do_not_count_for_keep_last() -> None:
    views = [view(1), view(2, healthy=True), view(3, healthy=False), view(4, healthy=False)]
    assert sequences(views, kept(views, TierPolicy(keep_last=2, keep_unhealthy=0))) == [1, 2]


def test_unhealthy_checkpoint_does_not_count_for_keep_every_but_is_kept_as_a_milestone() -> None:
    views = [view(10, healthy=False), view(20, healthy=False, milestones=["odd"]), view(30), view(31, healthy=True)]
    policy = TierPolicy(keep_last=1, keep_every=10, keep_every_steps=100, milestones=True, keep_unhealthy=0)
    assert sequences(views, kept(views, policy)) == [20, 30, 31]


def test_newest_unhealthy_checkpoints_are_kept_as_evidence() -> None:
    views = [view(1, healthy=False), view(2, healthy=True), view(3, healthy=False), view(4, healthy=False)]
    found = kept(views, TierPolicy(keep_last=1, keep_unhealthy=2))
    assert sequences(views, found) == [2, 3, 4]
    assert found[views[3].id] == "newest unhealthy, as evidence"
    assert sequences(views, kept(views, TierPolicy(keep_last=1))) == [2, 4]


def test_newest_found_healthy_is_kept_however_many_unexamined_ones_are_newer() -> None:
    views = [view(1, healthy=True), view(2, healthy=True), *(view(n) for n in range(3, 20))]
    found = kept(views, TierPolicy(keep_last=3))
    assert sequences(views, found) == [2, 17, 18, 19]
    assert found[views[1].id] == "newest that was found healthy"


def test_newest_is_kept_if_all_are_unhealthy() -> None:
    views = [view(n, healthy=False) for n in (1, 2, 3)]
    policy = TierPolicy(keep_last=2, keep_unhealthy=0)
    assert kept(views, policy) == {views[2].id: "newest, though none is healthy"}


def test_newest_healthy_is_kept_even_with_keep_last_0() -> None:
    views = [view(1), view(2), view(3, healthy=False)]
    assert sequences(views, kept(views, TierPolicy(keep_last=0, keep_unhealthy=0))) == [2]


def test_no_checkpoints_keep_nothing() -> None:
    assert kept([], TierPolicy(keep_every=10, milestones=True)) == {}


# ── by time ──


def test_newest_of_each_of_the_last_hours_days_and_weeks_with_one_is_kept() -> None:
    views = [
        view(1, at="2026-03-01T10:00"),  # a Sunday
        view(2, at="2026-03-02T10:00"),
        view(3, at="2026-03-08T23:59:59"),
        view(4, at="2026-03-09T00:00"),
        view(5, at="2026-03-09T00:59:59.999"),
        view(6, at="2026-03-09T01:00"),
        view(7, at="2026-03-09T05:00"),
    ]
    last = {7: "last 1"}

    def reasons(policy: TierPolicy) -> dict[int, str]:
        return {one.id.step // 10: why for one in views if (why := kept(views, policy).get(one.id))}

    hourly, daily, weekly = "hourly, of the last 3", "daily, of the last 2", "weekly, of the last 3"
    assert reasons(TierPolicy(keep_last=1, keep_hourly=3)) == {5: hourly, 6: hourly, 7: hourly}
    assert reasons(TierPolicy(keep_last=1, keep_daily=2)) == {3: daily, 7: daily}
    assert reasons(TierPolicy(keep_last=1, keep_weekly=3)) == {1: weekly, 3: weekly, 7: weekly}
    assert reasons(TierPolicy(keep_last=1)) == last


def test_run_that_paused_for_a_year_loses_nothing() -> None:
    views = [view(1, at="2025-01-01T10:00"), view(2, at="2025-01-01T11:00"), view(3, at="2026-01-01T10:00")]
    assert sequences(views, kept(views, TierPolicy(keep_last=1, keep_hourly=3))) == [1, 2, 3]


def test_week_that_spans_two_years_counts_once() -> None:
    views = [view(1, at="2025-12-29T00:00"), view(2, at="2026-01-01T00:00"), view(3, at="2026-01-05T00:00")]
    assert sequences(views, kept(views, TierPolicy(keep_last=1, keep_weekly=9))) == [2, 3]


def test_checkpoints_unhealthy_or_without_a_time_do_not_count_for_rules_by_time() -> None:
    views = [
        view(1, at="2026-03-01T10:10"),
        view(2, at="2026-03-01T10:20", healthy=False),
        view(3),
        view(4, at="2026-03-01T11:00", healthy=False),
        view(5, at="2026-03-01T12:00"),
    ]
    policy = TierPolicy(keep_last=1, keep_hourly=2, keep_unhealthy=0)
    assert sequences(views, kept(views, policy)) == [1, 5]


# ── by metric ──


LOSSES = {1: 3.0, 2: 1.0, 3: "nan", 4: 1.0, 5: math.inf, 6: "-inf", 7: 2.0, 8: math.nan}


@pytest.mark.parametrize(("mode", "best"), [("min", [2, 4, 7]), ("max", [1, 4, 7])])
def test_best_by_metric_are_kept_and_of_equal_ones_the_newer(mode: Any, best: list[int]) -> None:
    views = [*(view(n, metrics={"loss": loss}) for n, loss in LOSSES.items()), view(9, metrics={"other": 0.0})]
    policy = TierPolicy(keep_last=1, keep_best=3, best_metric="loss", best_mode=mode)
    assert sequences(views, kept(views, policy)) == [*best, 9]
    two = kept(views, msgspec.structs.replace(policy, keep_best=2, best_mode="min"))
    assert two[views[3].id] == "best 1 of 2 by min loss: 1"
    assert two[views[1].id] == "best 2 of 2 by min loss: 1"
    assert "loss: 3" in kept(views, msgspec.structs.replace(policy, keep_best=1, best_mode="max"))[views[0].id]


def test_unhealthy_checkpoint_does_not_count_for_keep_best() -> None:
    views = [view(1, metrics={"loss": 2}), view(2, metrics={"loss": 1}, healthy=False), view(3)]
    policy = TierPolicy(keep_last=1, keep_best=1, best_metric="loss", keep_unhealthy=0)
    assert sequences(views, kept(views, policy)) == [1, 3]


# ── a cold tier with a lifecycle of its own ──


OWN = {"dr": ColdPolicy(keep_last=1, keep_every=0)}
BOTH = {"cold": True, "dr": True}


def test_each_cold_tier_gets_what_its_own_policy_selects() -> None:
    views = [view(n, HOT) for n in (10, 11, 12, 13)]
    copies = [one for one in brief(plan(views, DEFAULT, cold=BOTH, hot_known=True, own=OWN)) if one[0] == "replicate"]
    assert sorted(copies) == [*(("replicate", n, "cold") for n in (10, 11, 12, 13)), ("replicate", 13, "dr")]


def test_hot_waits_only_for_the_tiers_that_select_it() -> None:
    views = [view(10, HOT, "cold"), *(view(n, HOT, "cold", "dr") for n in (11, 12, 13))]
    actions = plan(views, DEFAULT, cold=BOTH, hot_known=True, own=OWN)
    assert brief(actions) == [("evict", 10, HOT), ("evict", 11, "dr"), ("evict", 12, "dr")]
    assert plan(views, DEFAULT, cold={"cold": False, "dr": True}, hot_known=True, own=OWN) == [
        Decision(view(11).id, "dr", Action.EVICT, "not kept in dr; still in hot"),
        Decision(view(12).id, "dr", Action.EVICT, "not kept in dr; still in hot"),
    ]


def test_last_replica_of_what_another_cold_tier_would_keep_stays() -> None:
    views = [view(10, "dr"), *(view(n, HOT, "cold", "dr") for n in (11, 12, 13))]
    found = explain(views, DEFAULT, cold=BOTH, hot_known=True, own=OWN)
    assert by_replica(found)[10, "dr"] == (Action.KEEP, "last replica of what cold keeps: every 10th")


# ── what the plan does ──


def test_no_checkpoints_need_no_actions() -> None:
    assert plan([], DEFAULT, cold={"cold": True}, hot_known=True) == []


def test_selected_checkpoint_is_copied_to_every_cold_tier_that_lacks_it() -> None:
    views = [view(1, HOT, "dr")]
    actions = plan(views, DEFAULT, cold={"cold": True, "dr": True}, hot_known=True)
    assert actions == [Decision(views[0].id, "cold", Action.REPLICATE, "last 3")]


@pytest.mark.parametrize(
    ("newer", "is_sent"), [(None, False), (True, False), (False, True)], ids=["unexamined", "healthy", "unhealthy"]
)
def test_a_tier_gets_what_it_has_deleted_again_if_newer_ones_were_found_unhealthy(
    newer: bool | None, *, is_sent: bool
) -> None:
    """It is the newest healthy one then. No policy deletes that, so no two daemons send and delete it in turns."""
    policy = LifecycleConfig(hot=TierPolicy(keep_last=2), cold=ColdPolicy(keep_last=2, keep_every=0))
    views = [view(0, HOT, gone=["cold"]), view(1, HOT, gone=["cold"]), view(2, HOT, "cold", healthy=newer)]
    assert ("replicate", 0, "cold") not in brief(plan(views, policy, cold={"cold": True}, hot_known=True))
    assert (("replicate", 1, "cold") in brief(plan(views, policy, cold={"cold": True}, hot_known=True))) == is_sent


def test_a_part_that_a_tier_has_deleted_is_not_sent_again() -> None:
    """Its checkpoint never became whole there."""
    policy = LifecycleConfig()
    (decision,) = explain([view(1, HOT, gone=["cold"], is_part=True)], policy, cold={"cold": True}, hot_known=True)
    assert (decision.tier, decision.action) == (HOT, Action.KEEP)


def test_milestones_are_copied_before_newer_ones() -> None:
    views = [view(n, HOT, milestones=["best"] if n == 2 else []) for n in range(1, 6)]
    actions = plan(views, DEFAULT, cold={"cold": True}, hot_known=True)
    copies = [one for one in brief(actions) if one[0] == "replicate"]
    assert copies == [("replicate", n, "cold") for n in (2, 5, 4, 3)]


def test_nothing_is_copied_that_is_not_in_hot() -> None:
    views = [view(1, "cold")]
    assert plan(views, DEFAULT, cold={"cold": True, "dr": True}, hot_known=True) == []


def test_hot_replica_is_kept_until_the_cold_copy_exists() -> None:
    views = [view(10, HOT), view(11, HOT, "cold"), view(12, HOT, "cold"), view(13, HOT, "cold")]
    actions = plan(views, DEFAULT, cold={"cold": True}, hot_known=True)
    assert brief(actions) == [("replicate", 10, "cold")]


def test_hot_replica_is_evicted_once_every_cold_tier_has_the_checkpoint() -> None:
    views = [view(10, HOT, "cold", "dr"), *(view(n, HOT, "cold", "dr") for n in (11, 12, 13))]
    actions = plan(views, DEFAULT, cold={"cold": True, "dr": True}, hot_known=True)
    assert actions == [Decision(views[0].id, HOT, Action.EVICT, "not kept in hot; still in cold, dr")]


def test_replicas_in_an_unknown_cold_tier_do_not_count() -> None:
    views = [view(10, HOT, "cold"), *(view(n, HOT, "cold") for n in (11, 12, 13))]
    assert plan(views, DEFAULT, cold={"cold": False}, hot_known=True) == []


def test_checkpoint_that_no_policy_keeps_expires_oldest_first() -> None:
    views = [view(n, HOT) for n in range(1, 6)]
    actions = plan(views, DEFAULT, cold={}, hot_known=True)
    assert actions == [
        Decision(views[0].id, HOT, Action.EXPIRE, "no policy keeps it"),
        Decision(views[1].id, HOT, Action.EXPIRE, "no policy keeps it"),
    ]


def test_checkpoint_in_two_tiers_that_no_policy_keeps_is_evicted_then_expired() -> None:
    views = [view(1, HOT, "cold"), *(view(n, HOT, "cold") for n in (2, 3, 4))]
    actions = plan(views, DEFAULT, cold={"cold": True}, hot_known=True)
    assert brief(actions) == [("evict", 1, HOT), ("expire", 1, "cold")]


def test_unknown_hot_tier_stops_all_deletion_but_no_copy() -> None:
    views = [view(n, HOT, *(["cold"] if n < 8 else [])) for n in range(1, 9)]
    actions = plan(views, DEFAULT, cold={"cold": True}, hot_known=False)
    assert brief(actions) == [("replicate", 8, "cold")]


def test_nothing_is_copied_to_or_deleted_from_an_unknown_cold_tier() -> None:
    views = [view(n, HOT, "cold", "dr") for n in range(1, 9)]
    actions = plan(views, DEFAULT, cold={"cold": True, "dr": False}, hot_known=True)
    assert not [one for one in actions if one.tier == "dr"]


def test_last_known_cold_replica_is_kept_while_another_tier_cannot_be_listed() -> None:
    views = [view(1, "cold"), *(view(n, HOT, "cold") for n in (2, 3, 4))]
    assert plan(views, DEFAULT, cold={"cold": True, "dr": False}, hot_known=True) == []


def test_cold_outage_does_not_fill_the_hot_disk_with_what_no_policy_keeps() -> None:
    views = [view(n, HOT) for n in range(1, 41)]
    actions = plan(views, DEFAULT, cold={"cold": False}, hot_known=True)
    dropped = {one.checkpoint.step // 10 for one in actions}
    assert dropped == set(range(1, 38)) - {10, 20, 30}


def test_without_a_cold_tier_hot_holds_what_the_cold_policy_keeps() -> None:
    views = [view(n, HOT, milestones=["best"] if n == 5 else []) for n in range(1, 24)]
    actions = plan(views, DEFAULT, cold={}, hot_known=True)
    assert all(one.action is Action.EXPIRE for one in actions)
    left = set(range(1, 24)) - {one.checkpoint.step // 10 for one in actions}
    assert left == {5, 10, 20, 21, 22, 23}


def test_cold_tier_that_lags_keeps_its_newest_until_newer_ones_arrive() -> None:
    views = [*(view(n, "cold") for n in (1, 2, 3)), *(view(n, HOT) for n in (4, 5, 6))]
    actions = plan(views, DEFAULT, cold={"cold": True}, hot_known=True)
    assert brief(actions) == [("replicate", n, "cold") for n in (6, 5, 4)]


def test_loss_of_the_hot_tier_deletes_nothing_in_cold() -> None:
    views = [view(n, "cold") for n in (10, 20, 28, 29, 30)]
    assert plan(views, DEFAULT, cold={"cold": True}, hot_known=True) == []


def test_last_replica_of_what_hot_would_keep_stays_in_cold() -> None:
    policy = LifecycleConfig(hot=TierPolicy(keep_last=5), cold=ColdPolicy(keep_last=1, keep_every=0, milestones=False))
    views = [view(n, "cold") for n in range(1, 7)]
    actions = plan(views, policy, cold={"cold": True}, hot_known=True)
    assert brief(actions) == [("expire", 1, "cold")]


def test_tier_that_is_no_longer_configured_does_not_count() -> None:
    views = [view(10, HOT, "old-bucket"), *(view(n, HOT, "cold") for n in (11, 12, 13))]
    assert brief(plan(views, DEFAULT, cold={"cold": True}, hot_known=True)) == [("replicate", 10, "cold")]


def test_keep_last_counts_each_run_alone() -> None:
    views = [view(n, HOT, run=run) for run in ("a", "b") for n in (1, 2, 3)]
    assert not [one for one in plan(views, DEFAULT, cold={}, hot_known=True) if one.action is not Action.REPLICATE]


def test_same_state_gives_the_same_plan_in_any_order() -> None:
    views = [view(n, HOT, run=run, milestones=["m"] if n == 4 else []) for run in ("a", "b") for n in range(1, 13)]
    forwards = plan(views, DEFAULT, cold={"cold": True, "dr": True}, hot_known=True)
    assert forwards == plan(views[::-1], DEFAULT, cold={"cold": True, "dr": True}, hot_known=True)


def test_ten_thousand_checkpoints_are_planned_at_once() -> None:
    views = [view(n, HOT, "cold") for n in range(1, 10_001)]
    actions = plan(views, DEFAULT, cold={"cold": True}, hot_known=True)
    assert sum(one.action is Action.EXPIRE for one in actions) == 10_000 - 1000 - 2


# ── why ──


def test_explanation_covers_every_replica_and_every_selected_one() -> None:
    views = [view(9, HOT), view(10, HOT, "cold"), view(11, HOT), view(12, HOT), view(13, HOT)]
    found = by_replica(explain(views, DEFAULT, cold={"cold": True, "dr": False}, hot_known=True))
    assert found[9, HOT] == (Action.EXPIRE, "no policy keeps it")
    assert found[10, HOT] == (Action.KEEP, "every 10th; not yet known to be in dr")
    assert found[10, "cold"] == (Action.KEEP, "every 10th")
    assert found[10, "dr"] == (Action.WAIT, "every 10th; dr cannot be listed now")
    assert found[13, HOT] == (Action.KEEP, "last 3")
    assert found[13, "cold"] == (Action.REPLICATE, "last 3")
    assert (9, "cold") not in found


def test_explanation_says_why_a_halted_tier_deletes_nothing() -> None:
    views = [view(n, HOT) for n in range(1, 6)]
    found = by_replica(explain(views, DEFAULT, cold={}, hot_known=False))
    assert found[1, HOT] == (Action.KEEP, "nothing is deleted while hot cannot be listed")


def test_explanation_says_that_hot_stands_in_for_a_missing_cold_tier() -> None:
    views = [view(n, HOT, milestones=["best"] if n == 1 else []) for n in range(1, 6)]
    found = by_replica(explain(views, DEFAULT, cold={}, hot_known=True))
    assert found[1, HOT] == (Action.KEEP, "milestone best; there is no cold tier to hold it")


# ── generations ──


def _kept_steps(views: list[CheckpointView], **policy: Any) -> set[tuple[int, int]]:
    return {(found.generation, found.step) for found in kept(views, TierPolicy(**policy))}


def _steps(generation: int, *steps: int, sequence: int = 0, **more: Any) -> list[CheckpointView]:
    return [view(sequence + index, "hot", generation=generation, step=step, **more) for index, step in enumerate(steps)]


def test_new_start_does_not_push_out_what_an_older_one_reached() -> None:
    old = _steps(1, 1000, 2000, 3000)
    assert _kept_steps(old + _steps(2, 1, 2, 3, 4, sequence=10)) == {(1, 3000), (2, 2), (2, 3), (2, 4)}
    passed = _steps(2, 2990, 3000, 3010, sequence=10)
    assert _kept_steps(old + passed) == {(2, 2990), (2, 3000), (2, 3010)}
    assert _kept_steps(old + _steps(2, 1, 2, 3, sequence=10), keep_generations=0) == {(2, 1), (2, 2), (2, 3)}


def test_resumed_run_keeps_no_more_than_before() -> None:
    views = _steps(1, 10, 20, 30) + _steps(2, 40, 50, sequence=10) + _steps(3, 60, 70, 80, 90, sequence=20)
    assert _kept_steps(views) == {(3, 70), (3, 80), (3, 90)}


def test_many_short_starts_do_not_push_out_the_furthest_one() -> None:
    views = _steps(1, 500) + _steps(2, 3000, sequence=5)
    for generation in range(3, 12):
        views += _steps(generation, 3, 5, sequence=10 * generation)
    assert (2, 3000) in _kept_steps(views, keep_last=1)
    assert _kept_steps(views, keep_last=1) == {(2, 3000), (11, 5)}


def test_unhealthy_end_of_a_generation_is_not_kept_for_it() -> None:
    views = [*_steps(1, 100, 200), *_steps(1, 300, sequence=4, healthy=False), *_steps(2, 1, sequence=10)]
    assert _kept_steps(views, keep_last=1, keep_unhealthy=0) == {(1, 200), (2, 1)}
