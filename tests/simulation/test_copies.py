"""Nodes that keep copies of each other's parts, under simulated time and injected faults: no seed breaks a promise.

A failure names its seed: `python -m tests.support.simulation.seeds SEED --scenario copies --shrink`.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from tests.simulation.test_nodes import pass_without_work, unexpected
from tests.support.simulation.copying_trainers import everywhere
from tests.support.simulation.nodes_world import simulate
from tests.support.simulation.schedule import (
    COPIES,
    Event,
    Job,
    Schedule,
    make_nodes_schedule,
    make_three_node_schedules,
)
from tests.support.simulation.seeds import run_seeds
from tierd.format import layout, wire
from tierd.tiers.part_copies import PartCopies
from tierd.transfer.fetch import Fetch
from tierd.workers.part_copier import PartCopier

SEEDS = 1
SEEDS_LONG = int(os.environ.get("TIERD_SIMULATION_SEEDS", "20000")) // 20
THREE_EVERY = 1480  # of the worlds of three nodes, the short run has every so many, which is one
MUTATED_SEEDS = range(12)
LONG = ("old copies stay", "parts go by the policy alone")  # take most of the time

pytestmark = pytest.mark.timeout(600)


@pytest.mark.long
def test_no_seed_with_copies_breaks_a_promise() -> None:
    assert unexpected(run_seeds(0, SEEDS, scenario=COPIES)) == []


@pytest.mark.long
@pytest.mark.timeout(0)
def test_no_seed_of_many_with_copies_breaks_a_promise() -> None:
    assert unexpected(run_seeds(SEEDS, SEEDS_LONG, scenario=COPIES, processes=os.cpu_count() or 1)) == []


def broken_promises(every: int) -> list[str]:
    schedules = make_three_node_schedules()[every - 1 :: every]
    outcomes = [(schedule, simulate(schedule).violation) for schedule in schedules]
    return [f"{', '.join(map(str, schedule.events))}: {violation}" for schedule, violation in outcomes if violation]


@pytest.mark.filterwarnings("ignore")  # of files that killed daemons leave open
def test_some_orders_of_events_on_three_nodes_break_no_promise() -> None:
    assert broken_promises(THREE_EVERY) == []


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.filterwarnings("ignore")
def test_no_order_of_three_events_on_three_nodes_breaks_a_promise() -> None:
    assert broken_promises(1) == []


# ── daemons that are broken on purpose ──


def nothing_is_needed(*arguments: Any, **options: Any) -> set[Any]:
    return set()


async def all_copies(copier: PartCopier, run: Any, *, is_full: bool) -> list[Any]:
    return list(copier._copies.sizes(run))


async def announce_only(copier: PartCopier, own: Any, partner: Any) -> None:
    copier._context.notify.send(own.id.run, wire.Copied(step=own.step, generation=own.generation))


async def finish_nothing(fetch: Fetch) -> None:
    return None


async def commit_first(copies: PartCopies, part: Any, raw: bytes, *, peer: Any) -> None:
    """Of only one shard of each part."""
    await copies.store.delete([layout.file_key(part.id, part.files[-1].name)])
    await commit(copies, part, raw, peer=peer)


def no_copies(*arguments: Any) -> list[Any]:
    return []


commit = PartCopies.commit

NEEDED = "a node deleted what a restart may need"
UNHEALTHY = "an unhealthy step counts as safe"
RESTORABLE = "what is safe on every node can not be restored"

MUTATIONS: dict[str, tuple[object, str, object, set[str]]] = {
    "copies are deleted at once": (PartCopier, "_not_needed", all_copies, {NEEDED}),
    "parts go by the policy alone": ("tierd.catalog.part_decisions", "parts_needed", nothing_is_needed, {NEEDED}),
    "what was not copied is announced": (PartCopier, "_copy", announce_only, {RESTORABLE}),
    "a copy has no shards": (Fetch, "finish", finish_nothing, {"a node file without whole files"}),
    "a copy lacks a shard": (PartCopies, "commit", commit_first, {"a node file without whole files"}),
    "old copies stay": (PartCopier, "_delete_old", pass_without_work, {"a copy stays that nobody needs"}),
    "copies are not told of": (
        PartCopies,
        "of_run",
        no_copies,
        {"a restore gave an older checkpoint", "a restore found nothing"},
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "defect", [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in MUTATIONS]
)
def test_a_daemon_is_caught_that_breaks_a_promise_about_copies(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, broken, kinds = MUTATIONS[defect]
    if isinstance(owner, str):
        monkeypatch.setattr(f"{owner}.{name}", broken)
    else:
        monkeypatch.setattr(owner, name, broken)
    for seed in MUTATED_SEEDS:
        violation = simulate(make_nodes_schedule(seed, nodes=2, scenario=COPIES)).violation
        if violation is not None:
            assert violation.kind in kinds
            return
    pytest.fail("no seed has shown it")


def unhealthy_schedule(seed: int) -> Schedule:
    """Two nodes, and a NaN in every other snapshot. Examinations take up to 80 s, snapshots are taken every 20 s."""
    events = [Event(1.0, "start job", "job", 0.1), *(Event(40.0, "unhealthy", "node2") for _ in range(4))]
    job = Job(name="job", run="run", world_size=4, interval_s=20.0, nodes=2)
    base = make_nodes_schedule(seed, nodes=2, scenario=COPIES)
    return replace(base, jobs=[job], ignores_conditions=False, is_slow=False, nodes=base.nodes[:2], events=events)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_a_step_that_counts_as_safe_before_it_was_examined_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    assert simulate(unhealthy_schedule(0)).violation is None
    monkeypatch.setattr(everywhere.EverywherePersisted, "_is_examined", lambda *arguments: True)
    violations = (simulate(unhealthy_schedule(seed)).violation for seed in MUTATED_SEEDS)
    found = next((violation for violation in violations if violation is not None), None)
    assert found is not None
    assert found.kind == UNHEALTHY
