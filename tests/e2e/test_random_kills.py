"""The trainer, its daemon, or both are killed at random instants, many times, and nothing acknowledged is lost."""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.kills.audit import COLD, HOT, Audit, Folder, Policy
from tests.support.kills.battery import LIMITS, RUN
from tests.support.kills.daemon import KilledDaemon
from tests.support.kills.trainer import SIZE_BYTES, read_notes, take_snapshots
from tests.support.processes import ForkedProcess
from tests.support.waiting import wait_until


def kill_at_random(root: Path, seed: int, count: int, *, delay_max_s: float = 0.3) -> Audit:
    """Starts a daemon and a trainer, `count` times kills one or both, and starts again what was killed."""
    chance = random.Random(seed)
    policy = Policy(cold_every=5)
    places = {HOT: Folder(root / "hot"), COLD: Folder(root / "cold")}
    audit = Audit(RUN, policy, places, (SIZE_BYTES,))
    daemon = KilledDaemon(root, more=LIMITS.format(examine="false") + policy.lines)
    notes = root / "notes"
    with ExitStack() as stack:
        stack.callback(daemon.kill)
        trainer = start_trainer(daemon, notes)
        stack.callback(lambda: trainer.kill())
        for number in range(count):
            if daemon.process is None:
                daemon.launch()
            if trainer.poll() is not None:
                trainer = start_trainer(daemon, notes)
            if chance.random() < 0.5:  # else it may be killed while it starts
                known = len(read_notes(notes, "acknowledged"))
                wait_until(lambda known=known: len(read_notes(notes, "acknowledged")) > known, "a snapshot")
            time.sleep(chance.uniform(0.0, delay_max_s))
            victim = chance.choice(["trainer", "daemon", "both"])
            if victim != "daemon":
                trainer.kill()
                trainer.wait()
            if victim != "trainer":
                daemon.kill()
                take_in(audit, notes)
                audit.observe(f"kill {number} with seed {seed}, of {victim}")
                assert audit.problems == []
        settle(audit, daemon, trainer, notes)
    return audit


def start_trainer(daemon: KilledDaemon, notes: Path) -> ForkedProcess:
    return ForkedProcess(take_snapshots, daemon.socket, RUN, str(notes))


def settle(audit: Audit, daemon: KilledDaemon, trainer: ForkedProcess, notes: Path) -> None:
    """A daemon that nobody kills serves the trainer, and then clears up."""
    if daemon.process is None:
        daemon.launch()
    if trainer.poll() is not None:
        trainer = start_trainer(daemon, notes)
    try:
        acknowledged = len(read_notes(notes, "acknowledged"))
        wait_until(lambda: len(read_notes(notes, "acknowledged")) > acknowledged, "a snapshot after the last kill")
    finally:
        trainer.kill()
        trainer.wait()
    try:
        wait_until(lambda: not audit.unsettled(), timeout_s=20.0)
    except AssertionError:
        audit.problems += audit.unsettled()
    daemon.kill()
    take_in(audit, notes)
    audit.observe("the end")
    audit.check_end()
    assert audit.problems == []


def take_in(audit: Audit, notes: Path) -> None:
    """Tell the audit what the trainers have noted."""
    audit.acknowledged = {audit.id(*note["acknowledged"]) for note in read_notes(notes, "acknowledged")}
    claimed = [note["claimed"] for note in read_notes(notes, "claimed")]
    for generation in claimed[len(audit.generations) :]:
        audit.claim(generation)
    for note in read_notes(notes, "restored"):
        if note["restored"] < note["least"] or not note["is_same"]:
            audit.problems.append(f"restore: {note}")


def test_20_kills_of_trainer_daemon_or_both_lose_nothing(tmp_path: Path) -> None:
    audit = kill_at_random(tmp_path, seed=1, count=20, delay_max_s=0.1)
    assert len(audit.acknowledged) >= 4
    assert len(audit.generations) >= 4


@pytest.mark.long
def test_50_kills_of_trainer_daemon_or_both_lose_nothing(tmp_path: Path) -> None:
    audit = kill_at_random(tmp_path, seed=0, count=50, delay_max_s=0.1)
    assert len(audit.acknowledged) >= 10
    assert len(audit.generations) >= 10


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(1, 10))
def test_no_seed_of_kills_loses_anything(tmp_path: Path, seed: int) -> None:
    audit = kill_at_random(tmp_path, seed=seed, count=60)
    print(f"seed {seed}: {len(audit.acknowledged)} acknowledged by {len(audit.generations)} trainers")
