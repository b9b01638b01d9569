"""The lifecycle over many snapshots: tiers that fail at random, and a simple model of what a policy keeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from random import Random
from typing import TypeVar

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.policy import plan, sequences, view
from tierd.config.sections import ColdPolicy, LifecycleConfig, TierPolicy
from tierd.format.ids import HOT, CheckpointId, Generation, Run, Step, checkpoint_id
from tierd.lifecycle.policy import Action, CheckpointView, Decision, kept

Policy = TypeVar("Policy", bound=TierPolicy)


class World:
    """The true contents of the tiers, and the daemon's actions on them."""

    def __init__(
        self, policy: LifecycleConfig, cold: Iterable[str], own: Mapping[str, TierPolicy] | None = None
    ) -> None:
        self.policy = policy
        self.own = own or {}
        self.made: list[CheckpointView] = []
        self.tiers: dict[str, set[CheckpointId]] = {HOT: set(), **{name: set() for name in cold}}

    def commit(self, one: CheckpointView) -> None:
        self.made.append(one)
        self.tiers[HOT].add(one.id)

    def policies(self) -> dict[str, TierPolicy]:
        """By cold tier; without one, the policy that hot applies instead."""
        cold = [name for name in self.tiers if name != HOT]
        return {name: self.own.get(name, self.policy.cold) for name in cold} or {"": self.policy.cold}

    def truth(self) -> list[CheckpointView]:
        found: list[CheckpointView] = []
        for one in self.made:
            tiers = frozenset(name for name, held in self.tiers.items() if one.id in held)
            if tiers:
                found.append(with_tiers(one, tiers))
        return found

    def held(self, tier: str) -> list[int]:
        return sequences(self.made, self.tiers[tier])

    def apply(self, decision: Decision) -> None:
        if decision.action is Action.REPLICATE:
            assert decision.checkpoint in self.tiers[HOT]
            self.tiers[decision.tier].add(decision.checkpoint)
        else:
            self.tiers[decision.tier].remove(decision.checkpoint)

    def reconcile(self) -> int:
        cold = {name: True for name in self.tiers if name != HOT}
        actions = plan(self.truth(), self.policy, cold=cold, hot_known=True, own=self.own)
        for action in actions:
            self.apply(action)
        return len(actions)


def with_tiers(one: CheckpointView, tiers: frozenset[str]) -> CheckpointView:
    return replace(one, tiers=tiers)


@pytest.mark.parametrize("reconcile_every", [1, 2, 7, 40])
def test_forty_snapshots_of_the_default_policy(reconcile_every: int) -> None:
    """However rarely the reconciler runs: hot has the last 3; cold the last 3, every tenth, and the milestone."""
    world = World(LifecycleConfig(), ["cold"])
    for sequence in range(1, 41):
        world.commit(view(sequence, milestones=["best"] if sequence == 17 else []))
        if sequence % reconcile_every == 0:
            world.reconcile()
    while world.reconcile():
        pass
    assert world.held(HOT) == [38, 39, 40]
    assert world.held("cold") == [10, 17, 20, 30, 38, 39, 40]


@st.composite
def tier_policies(draw: st.DrawFn, kind: type[Policy]) -> Policy:
    keep_best = draw(st.sampled_from([0, 0, 2]))
    return kind(
        keep_last=draw(st.integers(1, 4)),
        keep_every=draw(st.sampled_from([0, 3, 10])),
        keep_every_steps=draw(st.sampled_from([0, 50])),
        keep_generations=draw(st.integers(0, 3)),
        keep_hourly=draw(st.sampled_from([0, 0, 3])),
        keep_daily=draw(st.sampled_from([0, 0, 2])),
        keep_weekly=draw(st.sampled_from([0, 0, 2])),
        keep_best=keep_best,
        best_metric="loss" if keep_best else "",
        best_mode=draw(st.sampled_from(["min", "max"])),
        milestones=draw(st.booleans()),
        keep_unhealthy=draw(st.sampled_from([0, 1, 2])),
    )


@st.composite
def policies(draw: st.DrawFn) -> LifecycleConfig:
    return LifecycleConfig(hot=draw(tier_policies(TierPolicy)), cold=draw(tier_policies(ColdPolicy)))


@settings(max_examples=40, deadline=None)
@given(
    policy=policies(),
    cold=st.sampled_from([(), ("cold",), ("cold", "dr")]),
    own=st.none() | tier_policies(ColdPolicy),
    snapshots=st.integers(1, 45),
    seed=st.integers(0, 2**32),
)
def test_deletion_stays_safe_under_any_order_of_failures_and_unlisted_tiers(
    policy: LifecycleConfig, cold: tuple[str, ...], own: ColdPolicy | None, snapshots: int, seed: int
) -> None:
    """Up to forty-five snapshots, some unhealthy, some of new generations; tiers become unknown; actions fail. A number
    may repeat, as after a restart with a full hot tier while cold, which has the newest ones, is silent."""
    world = World(policy, cold, {"dr": own} if own is not None and "dr" in cold else None)
    step, generation = 0, 1
    random = Random(seed)
    at = datetime(2026, 2, 27, tzinfo=UTC)
    sequence = 0
    for _ in range(snapshots):
        sequence = max(1, sequence + 1 - (random.randrange(10) if random.random() < 0.1 else 0))
        step += 10
        if random.random() < 0.06:
            generation, step = generation + 1, max(10, step - 50)
        at += random.choice([timedelta(minutes=7), timedelta(hours=3), timedelta(days=2), -timedelta(minutes=1)])
        world.commit(
            CheckpointView(
                id=CheckpointId(Run("gpt"), Step(step), Generation(generation)),
                sequence=sequence,
                milestones=frozenset({"best"} if random.random() < 0.05 else ()),
                healthy=random.choice([None, True, None, False]),
                tiers=frozenset(),
                created_at=at if random.random() < 0.95 else None,
                metrics=random.choice([{}, {"loss": random.randrange(5)}, {"loss": "nan"}]),
            )
        )
        is_known = {name: random.random() < 0.7 for name in cold}
        hot_known = random.random() < 0.85
        # What was last known of an unlisted tier may be true, stale or wrong.
        seen = [
            with_tiers(
                one,
                frozenset(
                    name
                    for name in world.tiers
                    if (one.id in world.tiers[name] if is_known.get(name, True) else random.random() < 0.5)
                ),
            )
            for one in world.made
        ]
        for action in plan(seen, policy, cold=is_known, hot_known=hot_known, own=world.own):
            if random.random() < 0.3:
                continue  # it failed; the next plan sees the true contents
            check_promises(world, action, is_known=is_known, hot_known=hot_known)
            world.apply(action)
    settle(world)


@settings(max_examples=150, deadline=None)
@given(policy=tier_policies(TierPolicy), numbers=st.lists(st.integers(1, 12), min_size=1, max_size=20))
def test_numbers_that_repeat_change_nothing_but_which_ones_are_tenths(policy: TierPolicy, numbers: list[int]) -> None:
    """The id decides which checkpoint is newer, and which one is deleted. A number decides about its own one alone."""
    unhealthy = Random(len(numbers))
    healthy = [unhealthy.choice([None, True, False]) for _ in numbers]
    views = [view(number, step=10 * at, healthy=healthy[at]) for at, number in enumerate(numbers)]
    unique = [replace(one, sequence=at) for at, one in enumerate(views, start=1)]
    rules = msgspec.structs.replace(policy, keep_every=0)
    without = kept(views, rules)
    assert without == kept(unique, rules)
    fit = [one for one in views if one.healthy is not False]
    tenths = {one.id for one in fit if policy.keep_every and one.sequence % policy.keep_every == 0}
    assert kept(views, policy).keys() == without.keys() | tenths


def check_promises(world: World, decision: Decision, *, is_known: dict[str, bool], hot_known: bool) -> None:
    """Checked against the true contents, not against what the plan knew."""
    if decision.action is Action.REPLICATE:
        assert is_known[decision.tier]
        return
    assert hot_known, "nothing is deleted while hot is unknown"
    assert is_known.get(decision.tier, True), "nothing is deleted in an unknown tier"
    truth = world.truth()
    others = {name for name, held in world.tiers.items() if decision.checkpoint in held} - {decision.tier}
    selects = {name: kept(truth, one) for name, one in world.policies().items()}
    if decision.action is Action.EVICT:
        assert others, "an evicted checkpoint remains in another tier"
    if not others:
        for wanted in (kept(truth, world.policy.hot), *selects.values()):
            assert decision.checkpoint not in wanted, "last_replica"
    if decision.tier == HOT:
        selecting = {name for name, wanted in selects.items() if decision.checkpoint in wanted}
        assert selecting <= others, "the hot replica is kept until the cold copy exists"
    healthy = [one.id for one in world.made if one.healthy is not False]
    newest_healthy = max(healthy, key=lambda one: one.recency, default=None)
    assert others or decision.checkpoint != newest_healthy, "the newest healthy checkpoint is never lost"


def settle(world: World) -> None:
    """With all tiers known and no failures, the tiers converge to what the policy selects."""
    for _ in range(4):
        if not world.reconcile():
            break
    assert world.reconcile() == 0
    truth = world.truth()
    in_hot = [one for one in truth if HOT in one.tiers]
    for name in world.tiers:
        if name != HOT:
            wanted = {one.id for one in in_hot} & set(kept(truth, world.policies()[name]))
            assert wanted <= world.tiers[name]


class Model:
    """What a policy keeps, written as simply as possible: each rule over the whole list."""

    def __init__(self, views: list[CheckpointView], policy: TierPolicy) -> None:
        self.fit = sorted((one for one in views if one.healthy is not False), key=lambda one: one.id.recency)
        self.views, self.policy = sorted(views, key=lambda one: one.id.recency), policy

    def periods(self, of: Callable[[datetime], object], count: int) -> set[CheckpointId]:
        timed = sorted((one.created_at, one.id.recency, one.id) for one in self.fit if one.created_at is not None)
        newest = {of(at): checkpoint for at, _, checkpoint in timed}  # later ones replace earlier ones
        order = list({of(at): None for at, _, _ in reversed(timed)})
        return {newest[period] for period in order[:count]}

    def best(self) -> set[CheckpointId]:
        values = [(one.metrics.get("loss"), one.id) for one in self.fit]
        numbers = [(value, one) for value, one in values if not isinstance(value, str | None) and math.isfinite(value)]
        numbers.sort(key=lambda one: (one[0] if self.policy.best_mode == "max" else -one[0], one[1].recency))
        return {one for _, one in numbers[len(numbers) - min(self.policy.keep_best, len(numbers)) :]}

    def kept(self) -> set[CheckpointId]:
        policy = self.policy
        found = {one.id for one in self.fit[-policy.keep_last :]}
        found |= {one.id for one in [one for one in self.fit if one.healthy][-1:]}
        sick = [one for one in self.views if one.healthy is False]
        found |= {one.id for one in sick[len(sick) - min(policy.keep_unhealthy, len(sick)) :]}
        if not self.fit:
            found |= {one.id for one in self.views[-1:]}
        found |= {one.id for one in self.fit if policy.keep_every and one.sequence % policy.keep_every == 0}
        steps = policy.keep_every_steps
        found |= {one.id for one in self.fit if steps and one.id.step % steps == 0}
        found |= {one.id for one in self.views if policy.milestones and one.milestones}
        found |= self.periods(lambda at: at.strftime("%Y-%m-%d %H"), policy.keep_hourly)
        found |= self.periods(lambda at: at.strftime("%Y-%m-%d"), policy.keep_daily)
        found |= self.periods(lambda at: at.strftime("%G week %V"), policy.keep_weekly)
        return found | self.best() | self.left_behind()

    def left_behind(self) -> set[CheckpointId]:
        ends = {one.id.generation: one.id for one in self.fit}
        found: set[CheckpointId] = set()
        for generation, end in ends.items():
            further = [other for other in ends.values() if other.step > end.step]
            later = [other for other in ends.values() if other.generation > generation]
            is_passed = not later or any(other.step >= end.step for other in later)
            if not is_passed and len(further) < self.policy.keep_generations:
                found.add(end)
        return found


@st.composite
def histories(draw: st.DrawFn) -> list[CheckpointView]:
    found: list[CheckpointView] = []
    at = datetime(2025, 12, 26, tzinfo=UTC)
    for sequence in range(1, draw(st.integers(1, 30)) + 1):
        at += timedelta(minutes=draw(st.sampled_from([-90, 0, 1, 20, 60, 500, 1440, 9000])))
        found.append(
            CheckpointView(
                id=checkpoint_id("gpt", draw(st.integers(1, 20)) * 10, sequence // 7 + 1),
                sequence=sequence,
                milestones=frozenset(draw(st.sampled_from([(), (), (), ("best",)]))),
                healthy=draw(st.sampled_from([None, True, False])),
                tiers=frozenset(),
                created_at=draw(st.sampled_from([at, at, at, None])),
                metrics=draw(st.sampled_from([{}, {"loss": 1}, {"loss": 2.5}, {"loss": "inf"}, {"loss": math.nan}])),
            )
        )
    return list({one.id: one for one in found}.values())


@settings(max_examples=40, deadline=None)
@given(views=histories(), policy=tier_policies(TierPolicy))
def test_kept_equals_the_union_of_the_rules_applied_one_by_one(views: list[CheckpointView], policy: TierPolicy) -> None:
    assert set(kept(views, policy)) == Model(views, policy).kept()


@settings(max_examples=40, deadline=None)
@given(views=histories(), policy=tier_policies(TierPolicy), among=st.randoms(use_true_random=False))
def test_checkpoint_kept_of_a_set_is_kept_of_every_subset_with_it(
    views: list[CheckpointView], policy: TierPolicy, among: Random
) -> None:
    """This is why an unknown tier may count as empty."""
    part = [one for one in views if among.random() < 0.6]
    assert set(kept(views, policy)) & {one.id for one in part} <= set(kept(part, policy))
