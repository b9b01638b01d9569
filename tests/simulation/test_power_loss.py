"""No loss of power breaks a promise: every state that it may leave is recovered from, by model.

The operations of real workers on files are recorded. After each of them, all legal subsets of what is not synced yet
are made real in a folder, the real recovery runs on it, and its operations are treated in the same way. `make test`
takes the first of these after each operation and a part of the others, `make test-long` takes all.
"""

from __future__ import annotations

import logging
import random
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.power_loss import scenarios
from tests.support.power_loss.explorer import explorer_at
from tests.support.power_loss.file_calls import Mark
from tests.support.power_loss.promises import COLD, HOT, Id, Policy
from tests.support.power_loss.scenarios import (
    GENERATION,
    HOT_ALONE,
    RUN,
    TWO_TIERS,
    Recording,
    Scenario,
    killed,
    record,
)

EVERY = 12  # of the states beside the first after each operation, the short run has every so many
STATES = 2_000
STATES_ALL = 10_000
STATES_LONG = 100_000

SCENARIOS: dict[str, tuple[Scenario, Policy, int]] = {
    "first start": (scenarios.first_start, TWO_TIERS, 0),
    "four ranks": (scenarios.four_ranks, TWO_TIERS, 0),
    **{f"four ranks in order {seed}": (scenarios.four_ranks, TWO_TIERS, seed) for seed in range(1, 3)},
    "life": (scenarios.life, TWO_TIERS, 0),
    "one more": (scenarios.one_more, TWO_TIERS, 0),
    "life without a cold tier": (scenarios.life, HOT_ALONE, 0),
    "fetch": (scenarios.fetch, TWO_TIERS, 0),
    "repair": (scenarios.repair, TWO_TIERS, 0),
    "mark": (scenarios.mark, TWO_TIERS, 0),
    "restore": (scenarios.restore, TWO_TIERS, 0),
}
"""By name: what happens, what the tiers keep, and the seed of the order in which concurrent calls are made."""
SCENARIOS_LONG: dict[str, tuple[Scenario, Policy, int]] = {
    f"four ranks in order {seed}": (scenarios.four_ranks, TWO_TIERS, seed) for seed in range(3, 9)
}
KILLS = {
    "killed after the link of a manifest in hot": ("link", HOT, 20),
    "killed after the removal of a manifest in hot": ("unlink", HOT, 10),
}
"""(call, tier, step): the daemon is killed directly after this call on the manifest."""
KILLS_LONG = {"killed after the link of a manifest in cold": ("link", COLD, 10)}


@dataclass
class Explored:
    """`violations`: by scenario. `states`: different ones. `losses`: of power, each with all its states."""

    violations: dict[str, list[str]]
    states: int
    losses: int


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    """A folder in memory: nothing here depends on a real fsync."""
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="power-loss-", dir=shared if shared.is_dir() else None))
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    yield folder
    logging.disable(level)
    shutil.rmtree(folder, ignore_errors=True)


def kill_points(memory: Path, kills: dict[str, tuple[str, str, int]]) -> dict[str, int]:
    """The number of the change before which the daemon is killed."""
    changes = scenarios.changes_of(scenarios.life, memory / "machine")
    manifests = {
        name: (call, f"{tier}/{Id(RUN, GENERATION, step).folder}/manifest.json")
        for name, (call, tier, step) in kills.items()
    }
    return {name: changes.index(change) + 1 for name, change in manifests.items()}


def explore(recordings: dict[str, tuple[Recording, Policy]], memory: Path, every: int) -> Explored:
    violations: dict[str, list[str]] = {}
    states = losses = 0
    for policy in (TWO_TIERS, HOT_ALONE):
        with explorer_at(memory / "explorer", policy, every=every) as explorer:
            for name, (recording, own_policy) in recordings.items():
                if own_policy == policy:
                    explorer.violations = violations[name] = []
                    explorer.explore(recording.log, recording.base)
            states += len(explorer.states)
            losses += explorer.losses
    return Explored(violations, states, losses)


def explore_scenarios(
    recorded: dict[str, tuple[Scenario, Policy, int]],
    kills: dict[str, tuple[str, str, int]],
    memory: Path,
    *,
    every: int = 1,
) -> Explored:
    recordings = {
        name: (record(scenario, memory / "machine", policy, seed=seed), policy)
        for name, (scenario, policy, seed) in recorded.items()
    }
    for name, number in kill_points(memory, kills).items():
        recordings[name] = (record(killed(number), memory / "machine"), TWO_TIERS)
    explored = explore(recordings, memory, every)
    print(f"{explored.states} states after {explored.losses} losses of power in {len(recordings)} scenarios")
    return explored


@pytest.fixture(scope="module")
def explored(memory: Path) -> Explored:
    return explore_scenarios(SCENARIOS, KILLS, memory, every=EVERY)


@pytest.mark.timeout(1200)  # 10 s of one processor; a machine may be busy
@pytest.mark.parametrize("scenario", [*SCENARIOS, *KILLS])
def test_no_loss_of_power_breaks_a_promise(scenario: str, explored: Explored) -> None:
    assert explored.violations[scenario] == []


@pytest.mark.timeout(1200)
def test_the_states_are_many(explored: Explored) -> None:
    assert explored.states >= STATES


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_no_loss_of_power_breaks_a_promise_in_any_state(memory: Path) -> None:
    explored = explore_scenarios(SCENARIOS, KILLS, memory)
    assert {name: found for name, found in explored.violations.items() if found} == {}
    assert explored.states >= STATES_ALL


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_no_loss_of_power_in_more_orders_breaks_a_promise(memory: Path) -> None:
    violations = explore_scenarios(SCENARIOS_LONG, KILLS_LONG, memory).violations
    assert {name: found for name, found in violations.items() if found} == {}
    assert set(violations) == {*SCENARIOS_LONG, *KILLS_LONG}


@pytest.mark.long
@pytest.mark.timeout(0)
def test_no_loss_of_power_after_a_kill_at_any_change_breaks_a_promise(memory: Path) -> None:
    """The daemon is killed before a change of a life, the next one goes on, and then the power is lost. The changes
    come in a random order, until there are enough states."""
    numbers = list(range(len(scenarios.changes_of(scenarios.life, memory / "machine"))))
    random.Random(0).shuffle(numbers)
    with explorer_at(memory / "explorer", TWO_TIERS) as explorer:
        for kills, number in enumerate(numbers, start=1):  # noqa: B007
            recording = record(killed(number), memory / "machine", seed=number)
            first = next(n for n, each in enumerate(recording.log) if isinstance(each, Mark) and each.kind == "killed")
            explorer.explore(recording.log, recording.base, first=first)
            if len(explorer.states) >= STATES_LONG:
                break
    print(f"{len(explorer.states)} states after {explorer.losses} losses of power and {kills} kills")
    assert explorer.violations == []
    assert len(explorer.states) >= STATES_LONG
