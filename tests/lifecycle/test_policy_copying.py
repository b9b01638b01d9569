"""The lifecycle while copies are in progress: their order, and what stays for them."""

from __future__ import annotations

from tests.support.policy import brief, by_replica, explain, plan, view
from tierd.config.sections import ColdPolicy, LifecycleConfig
from tierd.format.ids import HOT
from tierd.lifecycle.policy import Action, copies, lasting

DEFAULT = LifecycleConfig()
BOTH = {"cold": True, "dr": True}


def test_lasting_checkpoints_are_copied_after_milestones_and_before_newer_ones() -> None:
    views = [view(n, HOT, milestones=["best"] if n == 2 else []) for n in range(1, 25)]
    decisions = explain(views, DEFAULT, cold={"cold": True}, hot_known=True)
    milestones = {one.id for one in views if one.milestones}
    order = [copy.checkpoint.step // 10 for copy in copies(decisions, milestones, lasting(views, DEFAULT.cold))]
    assert order == [2, 20, 10, 24, 23, 22]


def test_newest_of_an_earlier_hour_lasts_and_the_newest_of_all_does_not() -> None:
    views = [view(n, HOT, at=f"2026-03-01T{10 + n // 6}:{n % 6}0") for n in range(1, 15)]
    cold = ColdPolicy(keep_every=0, keep_hourly=3)
    decisions = explain(views, LifecycleConfig(cold=cold), cold={"cold": True}, hot_known=True)
    order = [copy.checkpoint.step // 10 for copy in copies(decisions, (), lasting(views, cold))]
    assert order == [11, 5, 14, 13, 12]


def test_checkpoint_that_is_being_copied_stays_in_hot_and_is_copied_however_old_it_is() -> None:
    views = [view(n, HOT) for n in range(1, 7)]
    actions = plan(views, DEFAULT, cold={"cold": True}, hot_known=True, copying={"cold": {views[1].id}})
    assert brief(actions) == [
        *(("replicate", n, "cold") for n in (6, 5, 4, 2)),
        *(("expire", n, HOT) for n in (1, 3)),
    ]


def test_copy_to_one_cold_tier_does_not_select_the_checkpoint_for_another() -> None:
    views = [view(n, HOT, *(["cold"] if n == 2 else [])) for n in range(1, 7)]
    found = by_replica(explain(views, DEFAULT, cold=BOTH, hot_known=True, copying={"dr": {views[1].id}}))
    assert found[2, HOT] == (Action.KEEP, "it is being copied; not yet known to be in dr")
    assert found[2, "dr"][0] is Action.REPLICATE
    assert found[1, HOT][0] is Action.EXPIRE
    found = by_replica(explain(views[:1], DEFAULT, cold=BOTH, hot_known=True, copying={"dr": {views[1].id}}))
    assert (2, "dr") not in found


def test_copy_stays_in_hot_while_its_tier_cannot_be_listed() -> None:
    views = [view(n, HOT) for n in range(1, 7)]
    found = by_replica(explain(views, DEFAULT, cold={"cold": False}, hot_known=True, copying={"cold": {views[1].id}}))
    assert (found[2, HOT][0], found[2, "cold"][0]) == (Action.KEEP, Action.WAIT)


def test_unhealthy_checkpoint_is_not_kept_for_its_copy() -> None:
    views = [view(1, HOT, healthy=False), view(2, HOT, healthy=False), *(view(n, HOT) for n in range(3, 7))]
    actions = plan(views, DEFAULT, cold={"cold": True}, hot_known=True, copying={"cold": {views[0].id}})
    assert ("expire", 1, HOT) in brief(actions)
