"""Overlapped snapshots in real processes: a kill during the copy, an exact resume, a tear on one rank of two."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from tierd_client import Torn
from tierd_client.snapshot.copying import Copier

from tests.support.daemon import Daemon
from tests.support.processes import ENVIRONMENT
from tests.support.trainer import Trainer, Training, joined, refusals, together
from tests.support.waiting import DEADLINE_S, wait_until

WIDTH = 1024  # weights of 64 KiB: large enough to be copied later


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path) as daemon:
        yield daemon


def copy_half(training: Training) -> None:
    """From now on a deferred copy does not end while the process lives."""

    def start(
        copier: Copier, to: Sequence[torch.Tensor], from_: Sequence[torch.Tensor], running: list[Future[None]]
    ) -> None:
        def work() -> None:
            copier.copy(to[::2], from_[::2])
            threading.Event().wait(DEADLINE_S)

        running.append(copier._pool.submit(work))

    Copier.start = start


def wait_filling(daemon: Daemon) -> None:
    """A slot is filling until the training thread hands the deferred copy over."""
    wait_until(lambda: daemon.status()["slots"]["filling"] == 1, "the slot to be filling")


def change(training: Training) -> None:
    with torch.no_grad():
        for parameter in training.model.parameters():  # this rank writes some of them
            parameter.mul_(2)


def wait_staged(training: Training) -> None:
    training.client.wait_staged()


def test_losses_after_resuming_from_overlapped_snapshots_equal_those_of_an_undisturbed_run(
    daemon: Daemon,
) -> None:
    with Trainer(width=WIDTH) as undisturbed:
        expected = undisturbed.train(16)
    losses: list[float] = []
    for start, steps in ((1, 5), (2, 6)):
        with Trainer(width=WIDTH, seed=start) as trainer:
            assert trainer.connect(daemon.socket, staging="overlap") == start
            found = trainer.restore()
            losses = losses[: found.step if found else 0]
            for _ in range(steps):
                losses += trainer.train(1)
                trainer.snapshot()
            wait_filling(daemon)
            losses += trainer.train(1)  # the last snapshot is handed over in its step
            trainer.kill()
    with Trainer(width=WIDTH, seed=3) as last:
        last.connect(daemon.socket, staging="overlap")
        found = last.restore()
        assert (found.step, found.tier) == (11, "memory")
        assert losses[:11] + last.train(5) == expected


def test_trainer_killed_during_an_overlapped_copy_restores_the_previous_snapshot(daemon: Daemon) -> None:
    with Trainer(width=WIDTH) as first:
        first.connect(daemon.socket, staging="overlap")
        first.train(1)
        first.durable()
        digest = first.digest()
        first.apply(copy_half)
        first.train(1)
        first.snapshot()
        first.begin("train", 1)  # waits in its step
        wait_filling(daemon)
        assert first.is_busy
        first.kill()
    wait_until(lambda: not daemon.status()["slots"]["filling"], "the daemon to notice the kill")

    with Trainer(width=WIDTH, seed=2) as second:
        second.connect(daemon.socket)
        found = second.restore()
        assert (found.step, found.tier) == (1, "memory")
        assert second.digest() == digest


def test_snapshot_torn_on_one_rank_fails_on_all_and_frees_its_slots(daemon: Daemon) -> None:
    with joined(daemon.root, 2, width=WIDTH) as ranks:
        together(ranks, "connect", daemon.socket, staging="overlap", slot_wait_s=20.0)
        together(ranks, "train", 1)
        together(ranks, "durable")
        for step in (2, 3):
            together(ranks, "snapshot", step)
            if step == 2:
                ranks[1].apply(change)
            together(ranks, "apply", wait_staged)
            if step == 2:
                assert all(isinstance(error, Torn) for error in refusals(ranks, "wait_persisted"))
            else:
                together(ranks, "wait_persisted")
            if step == 2:
                ranks[0].apply(change)  # again the same weights on both
        assert daemon.steps("hot") == [1, 3]
        together(ranks, "train", 1)
        together(ranks, "snapshot", 4)
        together(ranks, "wait_persisted")


@pytest.mark.long
def test_script_that_ends_without_closing_hands_over_its_overlapped_snapshot(daemon: Daemon) -> None:
    script = f"""
import tierd_client, torch
model = torch.nn.Linear(2048, 2048)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 2048)).sum().backward()
optimizer.step()
client = tierd_client.connect("run", socket={daemon.socket!r}, staging="overlap")
client.snapshot(7, tierd_client.TrainingState(model=model, optimizer=optimizer))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    wait_until(lambda: daemon.steps("hot") == [7], "the checkpoint")


def test_staging_mode_comes_from_the_daemons_configuration(tmp_path: Path) -> None:
    with Daemon(tmp_path, more='[snapshot]\nstaging = "overlap"\n') as daemon, Trainer(width=WIDTH) as trainer:
        trainer.connect(daemon.socket)
        trainer.train(1)
        trainer.snapshot()
        wait_filling(daemon)
        trainer.wait_persisted()
