"""Retention as a state machine: the catalog, the lifecycle, the reaper and the replicators, interleaved at every await.

A reference model of 30 lines says what each tier must keep. It holds promises, not decisions: what must exist somewhere
at any instant, and what each tier holds at rest.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.support.simulation.retention import Id, Replica, RetentionWorld, folder_in_memory
from tierd.config.sections import ColdPolicy, LifecycleConfig, TierPolicy
from tierd.lifecycle import policy
from tierd.lifecycle.policy import CheckpointView
from tierd.workers.leftovers import GRACE_S, SEND_AGAIN_S
from tierd.workers.reaper import Reaper
from tierd.workers.replicator import Replicator

HOT, COLD, DR = "hot", "cold", "dr"
STEPS_MAX = 20  # rules of one example
REAL_S = 120.0  # one example takes less; the files have real times
DECIDED_S = 0.25  # simulated: the reaper lists up to four folders after its decision, and deletes


# ── the reference model ──


@dataclass(frozen=True)
class Rules:
    """What one tier keeps: the keys of a policy that this test uses."""

    last: int
    every: int
    generations: int
    evidence: int
    milestones: bool


RULES = {HOT: Rules(2, 0, 1, 1, False), COLD: Rules(2, 3, 2, 0, True), DR: Rules(1, 0, 0, 0, True)}


@dataclass(frozen=True)
class Facts:
    """What is known of the run. `sequences`: of all checkpoints that ever existed. `marked`: by tier."""

    sequences: dict[Id, int]
    healthy: frozenset[Id] = frozenset()
    unhealthy: frozenset[Id] = frozenset()
    marked: tuple[tuple[str, frozenset[Id]], ...] = ()
    unmounted: frozenset[str] = frozenset()

    def keeps(self, tier: str, among: set[Id] | None = None, *, marks_of: tuple[str, ...] = ()) -> set[Id]:
        """What the tier must keep of these checkpoints; by default, of all that ever existed. `marks_of`: other tiers
        whose markers count too."""
        rules, every = RULES[tier], sorted(self.sequences if among is None else among)
        fit = [each for each in every if each not in self.unhealthy]
        unfit = [each for each in every if each in self.unhealthy]
        keep = {*fit[-rules.last :], *unfit[len(unfit) - rules.evidence :]} if rules.evidence else {*fit[-rules.last :]}
        keep |= {*every[-1:]} if not fit else set()
        keep |= {*[each for each in fit if each in self.healthy][-1:]}
        keep |= {each for each in fit if rules.every and self.sequences[each] % rules.every == 0}
        marked = {each for name, those in self.marked if name in (tier, *marks_of) for each in those}
        keep |= marked & {*every} if rules.milestones else set()
        ends = {each.generation: each for each in fit}.values()
        furthest = sorted((end.step for end in ends), reverse=True)[: rules.generations]
        for end in ends:
            later = [other for other in ends if other.generation > end.generation]
            if later and max(other.step for other in later) < end.step and end.step in furthest:
                keep.add(end)
        return keep

    def allows(self, tier: str, deleted: Id, left: dict[str, dict[Id, Replica]]) -> bool:
        """Whether the tier may delete the checkpoint, when this is left elsewhere."""
        reachable = {other for other in left if deleted in left[other] and other not in self.unmounted}
        keeping = {other for other in RULES if deleted in self.keeps(other, marks_of=(tier,))}
        if tier != HOT and tier in keeping:
            return False
        if tier == HOT and not keeping - {HOT} <= reachable:
            return False
        return bool(reachable) or not keeping


# ── the machine ──

PASSES = st.tuples(st.sets(st.integers(0, 5), min_size=1, max_size=6), st.integers(0, 200))
"""(workers that begin a pass, callbacks that run then)."""


class Retention(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.versions = [(0.0, Facts({}))]  # since when, and what was known; the last one is now
        self.broken: list[str] = []
        self.generation, self.step = 1, 0

    @initialize(
        seed=st.integers(0, 2**32),
        snapshots=st.integers(0, 8),
        copied_to_dr=st.sampled_from([1, 2, 3, 5]),
        reaped=st.sampled_from([2, 4, 9]),
    )
    def start(self, seed: int, snapshots: int, copied_to_dr: int, reaped: int) -> None:
        """Begins with some snapshots. Cold copies each of them, DR each `copied_to_dr`-th one. The reaper runs after
        each `reaped`-th one."""
        logging.disable(logging.CRITICAL)
        self.stack.callback(logging.disable, logging.NOTSET)
        lifecycle = LifecycleConfig(hot=TierPolicy(keep_last=2, keep_generations=1, keep_unhealthy=1))
        own = {
            COLD: ColdPolicy(keep_last=2, keep_every=3, keep_generations=2),
            DR: ColdPolicy(keep_last=1, keep_every=0, keep_generations=0),
        }
        root = self.stack.enter_context(folder_in_memory())
        self.before: dict[str, dict[Id, Replica]] = {tier: {} for tier in RULES}
        self.world = RetentionWorld(root, lifecycle, own, seed=seed, on_change=self.observe)
        self.stack.callback(self.world.close)
        for number in range(1, snapshots + 1):
            self.take_snapshots(1, 1, 0)
            self.world.run_until_idle()
            self.world.begin_pass("replicate cold")
            if number % copied_to_dr == 0:
                self.world.begin_pass("replicate dr")
            self.world.run_until_idle()
            if number % reaped == 0:
                self.world.begin_pass("reap")
                self.world.run_until_idle()

    def teardown(self) -> None:
        try:
            if hasattr(self, "world"):
                self.settle()
        finally:
            self.stack.close()

    # ── observation ──

    @property
    def facts(self) -> Facts:
        return self.versions[-1][1]

    def learn(self, **facts: object) -> None:
        known = replace(self.facts, **facts)  # type: ignore[arg-type]
        if known != self.facts:
            self.versions.append((self.world.loop.time(), known))

    def recent(self) -> list[Facts]:
        """What a deletion that ends now may have been decided on: it was decided at most DECIDED_S ago."""
        ends_s = [until_s for until_s, _ in self.versions[1:]] + [float("inf")]
        return [
            known
            for (_, known), until_s in zip(self.versions, ends_s, strict=True)
            if until_s >= self.world.loop.time() - DECIDED_S
        ]

    def observe(self, contents: dict[str, dict[Id, Replica]]) -> None:
        before, self.before = self.before, contents
        for tier in RULES:
            for deleted in before[tier].keys() - contents[tier].keys():
                if not any(facts.allows(tier, deleted, contents) for facts in self.recent()):
                    self.broken.append(f"{tier} deleted {deleted}; left: {[*map(sorted, contents.values())]}")
                verdicts = [contents[other][deleted].verdict for other in RULES if deleted in contents[other]]
                if before[tier][deleted].verdict is not None and {*verdicts} == {None}:
                    self.broken.append(f"{tier} deleted the only verdict of {deleted}")
        now = self.facts
        sequences = now.sequences | {
            new: self.world.sequence(tier, new)
            for tier in RULES
            for new in contents[tier].keys() - now.sequences.keys()
        }
        verdicts = {
            verdict: frozenset(
                c for tier in RULES for c, replica in contents[tier].items() if replica.verdict is verdict
            )
            for verdict in (True, False)
        }
        marked = tuple((t, frozenset(c for c, replica in contents[t].items() if replica.has_milestone)) for t in RULES)
        self.learn(
            sequences=sequences,
            healthy=now.healthy | verdicts[True],
            unhealthy=now.unhealthy | verdicts[False],
            marked=marked,
        )

    # ── rules ──

    @rule(count=st.integers(1, 3), milestone=st.integers(0, 5), callbacks=st.integers(0, 60))
    def take_snapshots(self, count: int, milestone: int, callbacks: int) -> None:
        """Each begins to be persisted when the one before is durable. The last one may be under way afterwards."""
        for number in range(count):
            self.world.advance_until(lambda: not self.world.is_running("persist"))
            self.step += 1
            self.world.persist(Id(self.generation, self.step), milestone=number == milestone)
            self.world.advance(callbacks)

    @rule(back=st.integers(0, 4))
    def begin_generation(self, back: int) -> None:
        """The trainer starts again at an older step."""
        self.world.advance_until(lambda: not self.world.is_running("persist"))
        self.generation, self.step = self.generation + 1, max(0, self.step - back)

    @precondition(lambda self: self.before[HOT] and not self.world.is_running("examine"))
    @rule(choices=st.sets(st.integers(0, 5), min_size=1, max_size=3), is_healthy=st.booleans(), passes=PASSES)
    def examine(self, choices: set[int], is_healthy: bool, passes: tuple[set[int], int]) -> None:
        newest_first = sorted(self.before[HOT], reverse=True)
        for choice in sorted(choices):
            self.world.examine(newest_first[choice % len(newest_first)], is_healthy=is_healthy)
            self.world.advance_until(lambda: not self.world.is_running("examine"))
        self.begin_passes(passes)

    @precondition(lambda self: any(self.before.values()))
    @rule(choice=st.integers(0, 9), is_in_all=st.booleans())
    def mark_milestone(self, choice: int, is_in_all: bool) -> None:
        there = sorted({each for replicas in self.before.values() for each in replicas})
        checkpoint = there[choice % len(there)]
        tiers = [tier for tier in RULES if checkpoint in self.before[tier] and tier not in self.world.unmounted]
        self.world.mark(checkpoint, tiers if is_in_all else tiers[:1])

    @precondition(lambda self: not self.world.unmounted)
    @rule(
        tier=st.sampled_from([COLD, DR]),
        copied=st.sampled_from([0, 3]),
        is_late=st.booleans(),
        passes=PASSES,
        is_back=st.booleans(),
    )
    def unmount(self, tier: str, copied: int, is_late: bool, passes: tuple[set[int], int], is_back: bool) -> None:
        """`copied`: as many snapshots are taken before and copied to the cold tiers, so that hot has some to evict.
        `is_late`: the passes begin when no deletion may rest on the time before."""
        if copied:
            self.take_snapshots(copied, copied, 0)
            self.world.run_until_idle()
            self.world.begin_pass("replicate cold")
            self.world.begin_pass("replicate dr")
            self.world.run_until_idle()
        self.world.unmount(tier)
        self.learn(unmounted=frozenset({tier}))
        if is_late:
            self.world.wait(2 * DECIDED_S)
        self.begin_passes(passes)
        if is_back:
            self.mount()

    @precondition(lambda self: self.world.unmounted)
    @rule()
    def mount(self) -> None:
        for tier in list(self.world.unmounted):
            self.world.mount(tier)
        self.learn(unmounted=frozenset())

    @rule(passes=PASSES)
    def begin_passes(self, passes: tuple[set[int], int]) -> None:
        workers, callbacks = passes
        for number in workers:
            name = self.world.workers[number]
            if not self.world.is_running(name):
                self.world.begin_pass(name)
        self.world.advance(callbacks)

    @rule(callbacks=st.integers(1, 300))
    def advance(self, callbacks: int) -> None:
        self.world.advance(callbacks)

    # Not while a tier is unmounted: a daemon that starts then takes the mount point for an empty tier.
    @precondition(lambda self: not self.world.unmounted)
    @rule()
    def kill_and_restart(self) -> None:
        self.world.kill()
        self.world.start()

    # ── promises ──

    @invariant()
    def no_deletion_breaks_a_promise(self) -> None:
        assert not self.broken, f"a promise: {self.broken}"
        if hasattr(self, "world"):
            self.world.check()

    @invariant()
    def what_any_tier_keeps_exists(self) -> None:
        facts = self.facts
        kept = set[Id]().union(*(facts.keeps(tier) for tier in RULES)) if facts.sequences else set[Id]()
        if not facts.unhealthy:  # what was deleted before a newer one was found unhealthy is not expected back
            assert kept <= {each for replicas in self.before.values() for each in replicas}, "a promise"

    def settle(self) -> None:
        """With every tier mounted and enough time, each tier holds what its policy keeps, and nothing else."""
        world = self.world
        world.run_until_idle()
        self.mount()
        # What was deleted in cold and is needed there since is sent again: a milestone and the newest healthy one after
        # an hour, others, which are selected because newer ones were found unhealthy, after a day.
        for wait_s in (SEND_AGAIN_S, SEND_AGAIN_S, 0.0, 0.0):
            self.pass_all(wait_s and wait_s + REAL_S)
        self.cold_tiers_have_the_newest_healthy_one()
        for wait_s in (GRACE_S, GRACE_S, 0.0, 0.0):
            self.pass_all(wait_s and wait_s + REAL_S)
        self.no_deletion_breaks_a_promise()
        facts = self.facts
        hot, every = set(self.before[HOT]), set[Id]().union(*self.before.values())
        for tier, replicas in self.before.items():
            held = set(replicas)
            # When newer ones that were deleted turn out to be missing, an older one takes their place.
            needed = {
                each for other in RULES for among in (set(facts.sequences), every) for each in facts.keeps(other, among)
            }
            only_here = {
                each for each in held if all(each not in self.before[other] for other in RULES if other != tier)
            }
            assert held == facts.keeps(tier, held) | (held & needed & only_here), f"{tier} at rest"
            if tier != HOT:
                # Of all that exist: an older healthy checkpoint of another tier replaces unhealthy ones in hot.
                assert hot & facts.keeps(tier, every) <= held, f"{tier} lacks what its policy selects"
            if not facts.unhealthy:
                assert facts.keeps(tier) <= held, f"{tier} at rest"

    def pass_all(self, wait_s: float) -> None:
        if wait_s:
            self.world.wait(wait_s)
        for name in sorted(self.world.workers):
            self.world.begin_pass(name)
            self.world.run_until_idle()

    def cold_tiers_have_the_newest_healthy_one(self) -> None:
        healthy = {each for replicas in self.before.values() for each in replicas} - self.facts.unhealthy
        if healthy and (newest := max(healthy)) in self.before[HOT]:
            assert newest in self.before[COLD], "a promise: cold has the newest healthy one"
            assert newest in self.before[DR], "a promise: dr has the newest healthy one"


def run(examples: int, **options: Any) -> None:
    run_state_machine_as_test(
        Retention,
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS_MAX,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            **options,
        ),
    )


def test_no_order_of_events_breaks_a_promise_of_retention() -> None:
    run(8, derandomize=True)  # 1 s of one processor; the long battery takes other examples each time


policy_keeps_in, policy_kept_forever = policy._RunPolicy._keeps_in, policy.kept_forever


def evict_before_the_copy(*arguments: Any) -> str | None:
    reason = policy_keeps_in(*arguments)
    return None if reason and "not yet known to be in" in reason else reason


async def trust_the_last_listing(*_: object) -> bool:
    return True


def forget_verdicts(*_: object) -> bool:
    return False


async def copy_no_markers(*_: object) -> None:
    pass


def forget_milestones(view: CheckpointView, rules: TierPolicy) -> str | None:
    return policy_kept_forever(view, msgspec.structs.replace(rules, milestones=False))


def forget_every_third(view: CheckpointView, rules: TierPolicy) -> str | None:
    return policy_kept_forever(view, msgspec.structs.replace(rules, keep_every=0))


@pytest.mark.parametrize(
    ("target", "name", "broken"),
    [
        (policy._RunPolicy, "_keeps_in", evict_before_the_copy),
        pytest.param(Reaper, "_is_elsewhere", trust_the_last_listing, marks=pytest.mark.long),
        pytest.param(Reaper, "_has_only_verdict", forget_verdicts, marks=pytest.mark.long),
        pytest.param(Replicator, "_mark", copy_no_markers, marks=pytest.mark.long),
        pytest.param(policy, "kept_forever", forget_milestones, marks=pytest.mark.long),
        pytest.param(policy, "kept_forever", forget_every_third, marks=pytest.mark.long),
        pytest.param(policy, "_left_behind", lambda *_: {}, id="forget_former_generations", marks=pytest.mark.long),
        pytest.param(
            Reaper, "_is_still_decided", lambda *_: True, id="delete_what_was_planned", marks=pytest.mark.long
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_broken_daemon_is_caught(target: object, name: str, broken: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, name, broken)
    with pytest.raises(AssertionError, match=r"a promise|at rest|policy selects"):
        run(300, derandomize=True, database=None, phases=[Phase.generate])


def test_what_a_tier_has_deleted_is_sent_again_when_newer_ones_are_unhealthy() -> None:
    """Found by the long run."""
    machine = Retention()
    machine.start(seed=0, snapshots=2, copied_to_dr=1, reaped=2)
    machine.examine(choices={0}, is_healthy=False, passes=({0}, 0))
    machine.teardown()


@pytest.mark.long
@pytest.mark.timeout(0)
def test_no_order_of_events_of_many_breaks_a_promise_of_retention() -> None:
    run(10_000)
