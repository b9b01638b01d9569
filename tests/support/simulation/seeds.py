"""Runs seeds in child processes, and shrinks the schedule of one that fails. As a program:

    python -m tests.support.simulation.seeds 13                  the trace of seed 13 and its outcome
    python -m tests.support.simulation.seeds 13 --shrink         the same with the shortest schedule that still fails
    python -m tests.support.simulation.seeds 0 --count 300       the outcome of each seed, as one JSON object a line
    python -m tests.support.simulation.seeds 0 --count 400 --shortest 300   of the 300 with the fewest snapshots
    python -m tests.support.simulation.seeds 0 --nodes 16        seed 0 of the scenario "several nodes" with 16 of them

The order of Python's sets depends on PYTHONHASHSEED, so each simulation runs in a process where it is 0.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.support.simulation.nodes_world import simulate
from tests.support.simulation.schedule import (
    SCENARIOS,
    SEVERAL_NODES,
    Schedule,
    make_nodes_schedule,
    make_schedule,
)
from tests.support.simulation.world import Outcome

ROOT = Path(__file__).parents[3]
BATCH = 400  # seeds of one process
ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'client'}"}


@dataclass(frozen=True)
class SeedOutcome:
    """`kind`: the broken promise; empty: none."""

    seed: int
    scenario: str
    kind: str
    message: str

    def __str__(self) -> str:
        return f"seed {self.seed} ({self.scenario}): {self.kind}: {self.message}"


def run_seeds(
    first: int, count: int, *, scenario: str = "", nodes: int = 0, processes: int = 1, shortest: int | None = None
) -> list[SeedOutcome]:
    """The outcomes of `count` seeds. `scenario`: all of this one; empty: the seed decides. `nodes`: over so many nodes;
    0: the seed decides. `shortest`: of each BATCH of seeds, only so many, with the fewest snapshots; None: all."""

    def run(begin: int) -> list[SeedOutcome]:
        size = min(BATCH, first + count - begin)
        which = ["--count", str(size), "--scenario", scenario, "--nodes", str(nodes)]
        which += [] if shortest is None else ["--shortest", str(shortest)]
        printed = run_program(str(begin), *which)
        return [SeedOutcome(**json.loads(line)) for line in printed.splitlines()]

    with ThreadPoolExecutor(processes) as pool:
        return [outcome for batch in pool.map(run, range(first, first + count, BATCH)) for outcome in batch]


def run_program(*arguments: str) -> str:
    """What this file prints as a program. Raises RuntimeError with the end of its errors when it fails."""
    command = [sys.executable, "-m", "tests.support.simulation.seeds", *arguments]
    environment = {**os.environ, **ENVIRONMENT}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(arguments)}:\n{ended.stderr[-4000:]}")
    return ended.stdout


def shrink(schedule: Schedule, fails: Callable[[Schedule], bool]) -> Schedule:
    """Drop events, first in halves, at last one by one, while the schedule fails."""
    count = max(1, len(schedule.events) // 2)
    while True:
        first, has_shrunk = 0, False
        while first < len(schedule.events):
            shorter = schedule.without(first, count)
            if fails(shorter):
                schedule, has_shrunk = shorter, True
            else:
                first += count
        if count > 1:
            count //= 2
        elif not has_shrunk:
            return schedule


def _print_outcomes(schedules: list[Schedule]) -> None:
    gc.collect()
    gc.freeze()  # each simulation collects its own objects, and need not look at those of the imports
    for schedule in schedules:
        violation = simulate(schedule).violation
        kind, message = (violation.kind, violation.message) if violation else ("", "")
        print(json.dumps({"seed": schedule.seed, "scenario": schedule.scenario, "kind": kind, "message": message}))


def _print_trace(schedule: Schedule, outcome: Outcome) -> None:
    print(*schedule.jobs, *schedule.events, *outcome.trace, sep="\n")
    print(
        f"seed {schedule.seed}, {schedule.scenario}: {outcome.steps} callbacks, {outcome.simulated_s:.0f} s simulated"
    )
    print(outcome.violation or "no violation")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int)
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--scenario", choices=["", *SCENARIOS], default="")
    parser.add_argument("--shrink", action="store_true")
    parser.add_argument("--nodes", type=int, default=0)
    parser.add_argument("--shortest", type=int)
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":
        command = [sys.executable, "-m", "tests.support.simulation.seeds", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **ENVIRONMENT})

    def make(seed: int) -> Schedule:
        if options.nodes:
            return make_nodes_schedule(seed, options.nodes, options.scenario or SEVERAL_NODES)
        return make_schedule(seed, options.scenario)

    if options.count:
        schedules = [make(seed) for seed in range(options.seed, options.seed + options.count)]
        _print_outcomes(sorted(schedules, key=lambda schedule: schedule.snapshots)[: options.shortest])
        return
    schedule = make(options.seed)
    outcome = simulate(schedule)
    if options.shrink and outcome.violation is not None:
        kind = outcome.violation.kind

        def fails(shorter: Schedule) -> bool:
            violation = simulate(shorter).violation
            return violation is not None and violation.kind == kind

        schedule = shrink(schedule, fails)
        outcome = simulate(schedule)
    _print_trace(schedule, outcome)


if __name__ == "__main__":
    main()
