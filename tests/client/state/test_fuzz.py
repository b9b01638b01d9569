"""Random states: what a snapshot accepts, a restore gives back bit for bit; everything else is refused by name.

Each seed is one case, the same on every machine. A failure names the call that replays its seed.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
from tierd_client.restore.replica import Replica

from tests.support.contents import Objects, checkpoint, difference
from tests.support.random_states import Unbuildable, differing_rank, random_objects, scramble, share_memory
from tests.support.state import Files
from tierd.errors import Mismatch, TierdError

CASES = 40
CASES_LONG = 2480
CASES_PER_TEST = 40
SECTION = re.compile(r"\b(model|optimizer|scheduler|scaler|ema|dataloader|extra)\b")
EXACT_MIN = 0.5
"""The part of the cases that must be accepted: a fuzzer whose states are all refused shows nothing."""


class Finding(AssertionError):
    """A case that was neither exact nor refused by name."""


def restored(replica: Replica, into: Objects, rank: int = 0, world_size: int = 1) -> bool:
    """Whether the objects were restored. False after a Mismatch, which must change nothing."""
    before = into.contents()
    try:
        replica.read_into_state(into.state(), rank, world_size)
    except Mismatch as error:
        if changed := difference(into.contents(), before):
            raise Finding(f"a Mismatch changed the state: {changed}") from error
        return False
    return True


def expect_exact(objects: Objects, expected: dict[str, object], where: str) -> None:
    if found := difference(objects.contents(), expected):
        raise Finding(f"{where}: {found}")


def check_case(seed: int, files: Files) -> str:
    """Checks the states of one seed. Returns "exact" or "refused". Raises Finding, or the error that was not typed."""
    objects = random_objects(seed, seed)
    expected = objects.contents()
    try:
        replica = checkpoint(files, [objects])
    except TierdError as error:
        if objects.model is not None and not SECTION.search(error.message):
            raise Finding(f"the refusal names no entry: {error.message}") from error
        return "refused"
    with replica:
        fresh = random_objects(seed, seed + 1)
        if not restored(replica, fresh):
            raise Finding("a state of the same structure was a Mismatch")
        expect_exact(fresh, expected, "into a fresh state")
        scramble(objects, seed)
        if not restored(replica, objects):
            raise Finding("the changed state was a Mismatch")
        expect_exact(objects, expected, "into the changed state")
        other = random_objects(seed, seed + 2)
        share_memory(other, seed)
        if restored(replica, other):
            expect_exact(other, expected, "into a state that shares memory")
    return "exact"


def check_two_ranks(seed: int, files: Files) -> str:
    """As `check_case`, of two ranks, restored on two and on one."""
    ranks = [random_objects(seed, seed), random_objects(seed, seed)]
    differing_rank(ranks[1], seed)
    expected = [objects.contents() for objects in ranks]
    try:
        replica = checkpoint(files, ranks)
    except TierdError:
        return "refused"
    with replica:
        for rank in range(2):
            fresh = random_objects(seed, seed + 1)
            if not restored(replica, fresh, rank, 2):
                raise Finding("a state of the same structure was a Mismatch on two ranks")
            expect_exact(fresh, expected[rank], f"into rank {rank} of 2")
        alone = random_objects(seed, seed + 2)
        if restored(replica, alone):
            for rank in range(2):
                expect_exact(alone, expected[rank], f"from rank {rank} of 2 into 1")
    return "exact"


def check_seeds(first: int, folder: Path) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(first, first + CASES_PER_TEST):
        files = Files(folder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check = check_two_ranks if seed % 3 == 2 else check_case
            try:
                outcomes[check(seed, files)] += 1
            except Unbuildable:
                outcomes["unbuildable"] += 1
            except Exception as error:
                raise Finding(f"{check.__name__}({seed}, Files(Path('/tmp'))) raised {error!r}") from error
            finally:
                files.close()
    assert outcomes["exact"] >= EXACT_MIN * CASES_PER_TEST, outcomes


@pytest.fixture(autouse=True)
def _keep_generators() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("first", range(0, CASES, CASES_PER_TEST))
def test_random_state_is_exact_or_refused(first: int, tmp_path: Path) -> None:
    check_seeds(first, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("first", range(CASES, CASES + CASES_LONG, CASES_PER_TEST))
def test_many_random_states_are_exact_or_refused(first: int, tmp_path: Path) -> None:
    check_seeds(first, tmp_path)
