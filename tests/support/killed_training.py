"""Kills a training at random instants, starts it again by the same command, and compares all that it leaves behind."""

from __future__ import annotations

import itertools
import random
import signal
from pathlib import Path
from typing import Any

from tests.support.daemon import Daemon
from tests.support.forks import Done, Forks

INSTANTS = ("step begins", "gradients", "step ends")


def random_kills(seed: str, *, first: int, last: int, count: int = 3) -> list[list[Any]]:
    """`count` steps in order, 3 or more apart, each with an instant in it."""
    chance = random.Random(seed)
    while True:
        steps = sorted(chance.sample(range(first, last), count))
        if all(later - earlier >= 3 for earlier, later in itertools.pairwise(steps)):
            return [[step, "SIGKILL", 0, chance.choice(INSTANTS)] for step in steps]


def check_killed_training(
    forks: Forks, root: Path, kills: list[list[Any]], *, ranks: int = 1, every: int = 2, **settings: Any
) -> Done:
    """Losses, logs, evaluations, the result and the weights equal those of a training without tierd, bit for bit.

    Starts it twice more when it is finished: it trains no more and has the same result. Returns the undisturbed one.
    """
    alone = forks.run(f"alone-{root.name}", ranks=ranks, socket=None, output=str(root / "alone"), **settings)
    assert alone.result
    with Daemon(root) as daemon:
        command = {"socket": daemon.socket, "output": str(root / "run"), "connect": {"every_steps": every}, **settings}
        runs = [forks.run(root.name, ranks=ranks, **command, signals=[kill]) for kill in kills]
        for killed in runs:
            assert -signal.SIGKILL in killed.codes, killed.stderr
        runs += [forks.run(root.name, ranks=ranks, **command) for _ in range(3)]
        assert daemon.newest("hot") == alone.result["end"]
    resumed = [run.resumed for run in runs]
    assert resumed == sorted(resumed)
    assert resumed[1] > 0
    for run in runs:
        for lines, expected in zip(run.steps(run.resumed + 1), alone.steps(run.resumed + 1), strict=True):
            assert lines == expected[: len(lines)]
    for finished in runs[-3:]:
        for name, expected in alone.result.items():
            assert finished.result[name] == expected, (name, finished.result[name], expected)
    for again in runs[-2:]:
        assert again.resumed == alone.result["end"]
        assert not [line for line in again.lines[0] if "loss" in line]
    return alone
