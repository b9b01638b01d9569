"""Ids of runs, checkpoints and ranks, the order of checkpoints, and the names of tiers.

A generation is a timeline. After a run goes back to step 500 and trains on, its newest checkpoint is the newest step
of the newest generation. Recency is therefore (generation, step), not the step alone.
"""

from __future__ import annotations

import re
from typing import NewType

import msgspec

from tierd.errors import BadRequest

Run = NewType("Run", str)
Step = NewType("Step", int)
Generation = NewType("Generation", int)
Rank = NewType("Rank", int)

# A run is one component of a path and of an S3 key: no separators, no leading dot.
RUN_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_RUN = re.compile(RUN_PATTERN)
_NAME = re.compile(r"([0-9]{12})-g((?!0000)[0-9]{4}|[1-9][0-9]{4,7})")

STEP_MAX = 10**12 - 1
GENERATION_MAX = 10**8 - 1
GENERATION_SEEN_MAX = 9 * 10**7  # a higher one is foreign: it would leave no numbers to claim
GENERATION_JUMP_MAX = 1000  # starts of the run elsewhere that this daemon may not know of
_RELEASED_MINUTES = 29_450_000  # 2025-12-29: a clock that was reset does not make what was claimed since foreign
WORLD_SIZE_MAX = 1 << 20

AUTO = "auto"  # as the tier of a request: any
MEMORY = "memory"  # the snapshots that the daemon holds
HOT = "hot"
PEER = "peer"  # another node. As the tier of a request: each part that has a copy is read from the copy
# Cold tiers have the names of the config.


class CheckpointId(msgspec.Struct, frozen=True, order=False):
    """One step of one generation of one run."""

    run: Run
    step: Step
    generation: Generation

    @property
    def name(self) -> str:
        """The folder name: `000000018000-g0003`."""
        return f"{self.step:012d}-g{self.generation:04d}"

    @property
    def recency(self) -> tuple[int, int]:
        """The key to sort checkpoints of a run by: the newest has the highest."""
        return (self.generation, self.step)

    def __hash__(self) -> int:
        # msgspec's own hash contains the address of the class: a set would have another order in each process.
        return hash((self.run, self.step, self.generation))

    def __str__(self) -> str:
        return f"{self.run}/{self.name}"


def checkpoint_id(run: str, step: int, generation: int) -> CheckpointId:
    """The id of these parts. Raises BadRequest when one is out of range."""
    if not 0 <= step <= STEP_MAX:
        raise BadRequest(f"step {step} is not between 0 and {STEP_MAX}")
    if not 1 <= generation <= GENERATION_MAX:
        raise BadRequest(f"generation {generation} is not between 1 and {GENERATION_MAX}")
    return CheckpointId(check_run(run), Step(step), Generation(generation))


def check_run(run: str) -> Run:
    """Raises BadRequest unless `run` is 1 to 128 letters, digits, dots, dashes or underscores."""
    if not _RUN.fullmatch(run):
        raise BadRequest(
            f"{run!r} cannot name a run",
            hint="use 1 to 128 letters, digits, '.', '-' or '_', beginning with a letter or digit",
        )
    return Run(run)


def is_run(text: str) -> bool:
    return _RUN.fullmatch(text) is not None


def generation_limit(claimed: int, now_s: float) -> int:
    """The highest generation that is believed of a tier or a peer. `claimed`: the highest that was claimed in the hot
    tier here; `now_s`: Unix time. A claim without listings is the number of minutes since 1970, all others are one more
    than the one before: a generation far above both is forged, and would leave no numbers to claim."""
    return min(GENERATION_SEEN_MAX, max(claimed, _RELEASED_MINUTES, int(now_s / 60)) + GENERATION_JUMP_MAX)


def parse_name(run: Run, name: str) -> CheckpointId | None:
    """The id with this folder name, or None if no checkpoint has such a name."""
    match = _NAME.fullmatch(name)
    return CheckpointId(run, Step(int(match[1])), Generation(int(match[2]))) if match else None
