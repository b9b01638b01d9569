"""A fault of the disk breaks no promise, wherever it happens: trainers are told and train on, and all of it recovers.

Errors of single calls, once and for a while, and calls that hang. After each operation, what is durable in any case is
compared with what was promised, as after a loss of power.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.power_loss.disk_faults import (
    CALLS_OF,
    Fault,
    Moment,
    Outcome,
    fetch,
    repair,
    run_with,
    train,
    with_cold_alone,
    with_damage,
)

ACTIVITIES = {"train": (train, None), "fetch": (fetch, with_cold_alone), "repair": (repair, with_damage)}
SHORT_EVERY = {"train": 20, "fetch": 4, "repair": 4}  # of the calls of an activity, the short run has every so many
STALLS_S = (30.0, 300.0)  # within the deadline of a call, and beyond it
JOBS = {"train": range(10, 90, 32), "fetch": range(2, 26, 8), "repair": range(2, 26, 8)}  # that hang


@pytest.fixture
def memory() -> Iterator[Path]:
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="disk-faults-", dir=shared if shared.is_dir() else None))
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    yield folder
    logging.disable(level)
    shutil.rmtree(folder, ignore_errors=True)


def moments(activity: str, memory: Path) -> dict[Moment, int]:
    """The calls of an activity without a fault: by name, tier and file, the number of the last one."""
    act, prepare = ACTIVITIES[activity]
    outcome, injector = run_with(None, act, memory / "machine", prepare=prepare)
    assert outcome == Outcome(has_hit=False, problems=[])
    return injector.seen


def run_faults(activity: str, faults: list[Fault], memory: Path) -> list[str]:
    """The problems that the faults cause."""
    act, prepare = ACTIVITIES[activity]
    problems: list[str] = []
    for fault in faults:
        outcome, _ = run_with(fault, act, memory / "machine", prepare=prepare)
        assert outcome.has_hit, fault
        problems += [f"{fault}: {problem}" for problem in outcome.problems]
    print(f"{activity}: {len(faults)} faults, {len(problems)} problems")
    return problems


@pytest.mark.parametrize("activity", ACTIVITIES)
def test_no_error_of_a_call_breaks_a_promise(activity: str, memory: Path) -> None:
    """Some calls with one error each, alternately once and for a while. Of a training, every call by its name."""
    faults: list[Fault] = []
    found = list(moments(activity, memory))
    chosen = set(found[:: SHORT_EVERY[activity]])
    if activity == "train":
        chosen |= {*{moment.name: moment for moment in found}.values()}
    for moment in (each for each in found if each in chosen):
        codes = [code for code, names in CALLS_OF.items() if moment.name in names]
        number = len(faults)
        faults.append(Fault(moment, codes[number % len(codes)], is_lasting=number % 2 == 0))
    assert len(faults) >= {"train": 16, "fetch": 7, "repair": 7}[activity]
    assert run_faults(activity, faults, memory) == []


@pytest.mark.parametrize("activity", ACTIVITIES)
def test_no_call_that_hangs_breaks_a_promise(activity: str, memory: Path) -> None:
    faults = [
        Fault(Moment("before" if job % 3 else "after", "", "", job), 0, stall_s=STALLS_S[index % 2])
        for index, job in enumerate(JOBS[activity])
    ]
    assert run_faults(activity, faults, memory) == []


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("activity", ACTIVITIES)
def test_no_fault_of_many_breaks_a_promise(activity: str, memory: Path) -> None:
    """Every error at the first and the last call of each kind, once and for a while."""
    faults = [
        Fault(replace(moment, count=count), code, is_lasting=is_lasting)
        for moment, last in moments(activity, memory).items()
        for count in sorted({0, last})
        for code, names in CALLS_OF.items()
        if moment.name in names
        for is_lasting in (False, True)
    ]
    assert run_faults(activity, faults, memory) == []
