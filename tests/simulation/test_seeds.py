"""Whole daemons under simulated time and injected faults: no seed breaks a promise.

A failure names its seed. `python -m tests.support.simulation.seeds SEED --shrink` replays it with as few events as it
needs.
"""

from __future__ import annotations

import gc
import os

import pytest

from tests.support.simulation.schedule import Event, Schedule, make_schedule
from tests.support.simulation.seeds import SeedOutcome, run_program, run_seeds, shrink
from tests.support.simulation.world import simulate

DRAWN, SEEDS = 120, 90  # make test simulates the seeds with the fewest snapshots, which take half of the time
SEEDS_FULL = range(2, 3)  # with a full disk: one that takes less time than most
SEEDS_LONG = int(os.environ.get("TIERD_SIMULATION_SEEDS", "20000"))

pytestmark = pytest.mark.timeout(1200)  # on a busy machine


@pytest.fixture(scope="module")
def outcomes() -> list[SeedOutcome]:
    return run_seeds(0, DRAWN, shortest=SEEDS)


def check(outcomes: list[SeedOutcome]) -> None:
    broken = [str(outcome) for outcome in outcomes if outcome.kind]
    assert not broken, "\n".join(broken)  # pytest would cut a list short


def test_no_seed_breaks_a_promise(outcomes: list[SeedOutcome]) -> None:
    assert len(outcomes) == SEEDS
    check(outcomes)


def test_a_full_disk_breaks_no_promise() -> None:
    check(run_seeds(SEEDS_FULL.start, len(SEEDS_FULL), scenario="full disk"))


@pytest.mark.long
@pytest.mark.timeout(0)
def test_no_seed_of_many_breaks_a_promise() -> None:
    check(run_seeds(0, SEEDS_LONG, processes=os.cpu_count() or 1))


@pytest.mark.long
@pytest.mark.timeout(0)
def test_a_full_disk_breaks_no_promise_in_many_seeds() -> None:
    check(run_seeds(0, 500, scenario="full disk", processes=os.cpu_count() or 1))


@pytest.mark.long
@pytest.mark.timeout(0)
def test_no_seed_of_a_shared_run_breaks_a_promise() -> None:
    check(run_seeds(3000, 1000, scenario="shared run", processes=os.cpu_count() or 1))


def test_no_object_of_a_simulation_closes_a_descriptor_of_another_test() -> None:
    """A mapped slot that outlived the simulation closed the memfd of a test that ran an hour later."""
    gc.disable()
    try:
        simulate(make_schedule(1))
        others = [os.memfd_create("other") for _ in range(200)]  # have the numbers that the simulation had
    finally:
        gc.enable()
    gc.collect()
    for descriptor in others:
        os.close(descriptor)  # raises OSError unless it is still open


def test_a_seed_replays_exactly() -> None:
    traces = [run_program("2"), run_program("2")]
    assert traces[0] == traces[1]
    assert len(traces[0].splitlines()) > 20
    assert simulate(make_schedule(6)).trace != simulate(make_schedule(2)).trace


def test_shrinking_leaves_the_events_that_matter() -> None:
    schedule = make_schedule(1)
    needed = [schedule.events[1], schedule.events[-1]]

    def fails(shorter: Schedule) -> bool:
        return [(event.action, event.target) for event in needed] == [
            (event.action, event.target) for event in shorter.events if at(shorter, event) in times
        ]

    times = {at(schedule, event) for event in needed}
    shortest = shrink(schedule, fails)
    assert [at(shortest, event) for event in shortest.events] == sorted(times)


def at(schedule: Schedule, event: Event) -> float:
    """When an event happens, rounded: the delays of dropped events are added in another order."""
    before = schedule.events[: 1 + next(n for n, each in enumerate(schedule.events) if each is event)]
    return round(sum(each.after_s for each in before), 6)
