"""A training that is killed at random instants and started again by the same command until it ends, and twice after."""

from __future__ import annotations

import hashlib
import os
import random
import signal
from typing import Any

from torch import nn

from tests.support.daemon import Daemon
from tests.support.forks import Done, Forks, write


class Lines:
    """Writes what a training does as lines, and kills its process after `kill_at` of them."""

    def __init__(self, lines: str, kill_at: int | None) -> None:
        self.lines, self.left = lines, kill_at or 0

    def __call__(self, **fields: Any) -> None:
        write(self.lines, **fields)
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def digest(*modules: nn.Module) -> str:
    """A hash of all parameters and buffers."""
    content = hashlib.sha256()
    for module in modules:
        for value in module.state_dict().values():
            content.update(value.numpy().tobytes())
    return content.hexdigest()


def run_killed(
    forks: Forks, name: str, daemon: Daemon, alone: Done, *, kills: int, seed: int, ranks: int = 1, **options: Any
) -> list[Done]:
    """The runs that were killed, the one that ended, and two after it, each checked against the undisturbed `alone`.

    The lines of each run must be a stretch of the lines of `alone` on every rank, without a gap to the previous
    stretch; lines about where it `resumed` do not count. The last line of a run that ended is its result.
    """
    numbers = random.Random(seed)
    command = {**options, "socket": daemon.socket, "ranks": ranks}
    assert set(alone.codes) == {0}, alone.stderr
    expected = [lines[:-1] for lines in alone.lines]
    reached = [0] * ranks
    runs: list[Done] = []
    while True:
        # A later start: the generators of the process differ, and all of them are restored.
        options_now = {**command, "seed": 1 if not runs else seed + len(runs)}
        if len(runs) < kills:
            # The first kill comes after the first snapshot: before it, only the same seed begins the same training.
            least = 1 if runs else len(expected[0]) // 3
            most = min(len(expected[0]) - reached[0], 2 * len(expected[0]) // kills)
            options_now["kill_at"] = numbers.randint(least, max(least, most))
        run = forks.run(name, **options_now)
        run.lines = [[line for line in lines if "resumed" not in line] for lines in run.lines]
        runs.append(run)
        if len(runs) <= kills:
            assert -signal.SIGKILL in run.codes, run.stderr
            reached = [
                max(before, _end(lines, all_lines, before))
                for lines, all_lines, before in zip(run.lines, expected, reached, strict=True)
            ]
            continue
        assert set(run.codes) == {0}, run.stderr
        for lines, all_lines, before in zip(run.lines, expected, reached, strict=True):
            assert _end(lines[:-1], all_lines, before, at_end=True) == len(all_lines)
        assert [lines[-1] for lines in run.lines] == [lines[-1] for lines in alone.lines]
        reached = [len(lines) for lines in expected]
        if len(runs) == kills + 3:
            assert all(len(lines) == 1 for done in runs[-2:] for lines in done.lines)  # trained nothing
            return runs


def _end(lines: list[dict[str, Any]], expected: list[dict[str, Any]], reached: int, *, at_end: bool = False) -> int:
    """The index in `expected` after the stretch `lines`, which begins at or before `reached`."""
    starts = [len(expected) - len(lines)] if at_end else range(min(reached, len(expected) - len(lines)), -1, -1)
    for start in starts:
        if 0 <= start <= reached and expected[start : start + len(lines)] == lines:
            return start + len(lines)
    # For a readable failure: compare from where the first line stands.
    start = next((index for index, line in enumerate(expected) if lines and line == lines[0]), reached)
    for index, line in enumerate(lines):
        assert line == expected[start + index], f"line {start + index}, {index} after the start, {reached} reached"
    raise AssertionError(f"a gap: lines {start} to {start + len(lines)}, reached {reached}")
