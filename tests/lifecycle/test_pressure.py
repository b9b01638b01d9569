"""Which hot replicas give way when the hot disk is full."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support.policy import explain
from tierd.config.sections import ColdPolicy, LifecycleConfig, TierPolicy
from tierd.format.ids import CheckpointId, checkpoint_id
from tierd.lifecycle.policy import Action, CheckpointView, Decision
from tierd.lifecycle.pressure import hot_deletions_for

SIZE = 100
POLICY = LifecycleConfig(hot=TierPolicy(keep_last=3), cold=ColdPolicy(keep_last=3, keep_every=0))


def view(step: int, *tiers: str, run: str = "run") -> CheckpointView:
    return CheckpointView(
        id=checkpoint_id(run, step, 1),
        sequence=step,
        milestones=frozenset(),
        healthy=None,
        tiers=frozenset(tiers),
    )


def deleted(
    need_bytes: int, views: Sequence[CheckpointView], *, cold: dict[str, bool] | None = None, hot_known: bool = True
) -> list[Decision]:
    known = {"cold": True} if cold is None else cold
    decisions = explain(views, POLICY, cold=known, hot_known=hot_known)
    sizes: dict[CheckpointId, int] = {each.id: SIZE for each in views}
    return hot_deletions_for(need_bytes, decisions, cold=list(known), sizes=sizes)


def steps(decisions: Sequence[Decision]) -> list[int]:
    assert {decision.tier for decision in decisions} <= {"hot"}
    return [decision.checkpoint.step for decision in decisions]


@pytest.mark.parametrize(("need", "evicted"), [(0, []), (1, [1]), (SIZE, [1]), (SIZE + 1, [1, 2]), (9999, [1, 2, 3])])
def test_oldest_replicas_that_cold_holds_give_way_until_there_is_room(need: int, evicted: list[int]) -> None:
    views = [view(step, "hot", "cold") for step in (1, 2, 3)]
    decisions = deleted(need, views)
    assert steps(decisions) == evicted
    assert all(decision.action is Action.EVICT for decision in decisions)
    assert all(decision.reason == "evicted under disk pressure; still in cold" for decision in decisions)


def test_replica_that_no_cold_tier_holds_stays() -> None:
    assert steps(deleted(9999, [view(1, "hot"), view(2, "hot", "cold"), view(3, "hot")])) == [2]


def test_replica_stays_unless_every_cold_tier_holds_it() -> None:
    views = [view(1, "hot", "cold"), view(2, "hot", "cold", "dr"), view(3, "hot", "dr")]
    assert steps(deleted(9999, views, cold={"cold": True, "dr": True})) == [2]


@pytest.mark.parametrize("known", [{"cold": False}, {"cold": True, "dr": False}, {}])
def test_nothing_gives_way_while_a_cold_tier_is_not_known_or_there_is_none(known: dict[str, bool]) -> None:
    assert deleted(9999, [view(step, "hot", "cold", "dr") for step in (1, 2, 3)], cold=known) == []


def test_what_no_policy_keeps_is_deleted_before_anything_gives_way() -> None:
    views = [view(step, "hot", "cold") for step in range(1, 6)]
    decisions = deleted(2 * SIZE, views)
    assert steps(decisions) == [1, 2]
    assert [decision.reason for decision in decisions] == ["not kept in hot; still in cold"] * 2
    assert steps(deleted(3 * SIZE, views)) == [1, 2, 3]


def test_each_run_keeps_its_newest_as_long_as_possible() -> None:
    views = [view(step, "hot", "cold", run=run) for run, step in [("a", 1), ("a", 2), ("a", 3), ("b", 1), ("c", 9)]]
    chosen = [(decision.checkpoint.run, decision.checkpoint.step) for decision in deleted(9999, views)]
    assert chosen == [("a", 1), ("a", 2), ("a", 3), ("b", 1), ("c", 9)]
    assert len(deleted(2 * SIZE, views)) == 2


def test_cold_replica_that_the_same_plan_deletes_does_not_count() -> None:
    """Cold keeps the last of its own contents, and here deletes what only hot's policy keeps."""
    policy = LifecycleConfig(hot=TierPolicy(keep_last=3), cold=ColdPolicy(keep_last=1, keep_every=0))
    views = [view(step, "hot", "cold") for step in (1, 2, 3)]
    decisions = explain(views, policy, cold={"cold": True}, hot_known=True)
    assert {(each.checkpoint.step, each.tier) for each in decisions if each.action is Action.EVICT} == {
        (1, "cold"),
        (2, "cold"),
    }
    sizes = {each.id: SIZE for each in views}
    assert steps(hot_deletions_for(9999, decisions, cold=["cold"], sizes=sizes)) == [3]
