"""The model of a loss of power, confirmed on a real ext4.

While a daemon works, its block device is copied before calls that change files. Each copy is what a loss of power at
that instant leaves. It is mounted, which replays the journal, and must have what the model says to be durable.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.ext4 import copy_image, make_image, mounted
from tests.support.power_loss import scenarios
from tests.support.power_loss.explorer import problems_after_recovery
from tests.support.power_loss.file_calls import CHANGES, Call, FileCalls
from tests.support.power_loss.promises import Expected, Id, contents_of
from tests.support.power_loss.scenarios import Scenario, machine_at, run_simulated
from tests.support.power_loss.volatile_disk import VolatileDisk
from tierd.tiers.tree import fsync_path

EVERY = 16  # calls between two copies


@pytest.fixture
def memory() -> Iterator[Path]:
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="power-loss-", dir=shared if shared.is_dir() else None))
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    yield folder
    logging.disable(level)
    shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Losses:
    """`problems`: with the call before which the power was lost. `count`: of losses."""

    problems: list[str]
    count: int = 0


def lose_power(scenario: Scenario, memory: Path, *, every: int) -> Losses:
    """Runs a scenario on ext4, and loses the power before each `every`-th call that changes a file."""
    image, losses = memory / "image", Losses([])
    make_image(image)
    with ThreadPoolExecutor(1) as thread, mounted(image, memory / "disk") as disk, machine_at(disk / "m") as machine:
        fsync_path(machine.root.parent)
        model = VolatileDisk(machine.calls.base)
        applied = 0
        durable: frozenset[tuple[str, Id]] = frozenset()

        def recovered() -> list[str]:
            with mounted(memory / "copy", memory / "left") as left:
                return problems_after_recovery(left / "m", machine.policy, Expected(durable=durable))

        def before(call: Call) -> int:
            nonlocal applied, durable
            for operation in machine.calls.log[applied:]:
                model.apply(operation)
            applied = len(machine.calls.log)
            if call.name in CHANGES and call.number % every == 0:
                durable |= contents_of(model.durable()).whole
                copy_image(image, memory / "copy")
                # In a thread, because a loop is running in this one.
                losses.problems += [f"before {call}: {problem}" for problem in thread.submit(recovered).result()]
                losses.count += 1
            return 0

        machine.calls.fails = before
        run_simulated(scenario(machine))
    return losses


def test_ext4_keeps_what_the_model_says_to_be_durable(memory: Path) -> None:
    losses = lose_power(scenarios.life, memory, every=EVERY)
    assert losses.problems == []
    assert losses.count >= 15


def test_ext4_loses_what_was_not_synced(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the copies would prove nothing."""

    fsync = FileCalls.fsync

    def only_record(calls: FileCalls, fd: int) -> None:
        inode = calls._of_fd(fd)
        if inode is None:
            fsync(calls, fd)
        else:
            calls.record_sync(inode)

    monkeypatch.setattr(FileCalls, "fsync", only_record)
    losses = lose_power(scenarios.life, memory, every=100)
    assert any("nowhere" in problem for problem in losses.problems)


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    "scenario", [scenarios.life, scenarios.four_ranks, scenarios.killed(130), scenarios.killed(167)]
)
def test_ext4_keeps_it_at_every_call(scenario: Scenario, memory: Path) -> None:
    losses = lose_power(scenario, memory, every=1)
    assert losses.problems == []
    assert losses.count > 50
