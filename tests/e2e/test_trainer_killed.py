"""The trainer is killed at any instant: the last sealed snapshot is restored from memory, bit for bit."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tierd_client import TargetNotEmpty
from tierd_client.snapshot.copying import Copier

from tests.support.daemon import Daemon
from tests.support.trainer import Trainer, Training
from tests.support.waiting import DEADLINE_S, wait_until


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path) as daemon:
        yield daemon


def test_trainer_killed_after_a_snapshot_resumes_there_from_memory(daemon: Daemon) -> None:
    with Trainer() as undisturbed:
        expected = undisturbed.train(12)
    with Trainer() as first:
        first.connect(daemon.socket)
        assert first.restore() is None
        losses = first.train(8)
        first.snapshot()
        digest = first.digest()
        first.train(2)
        first.kill()

    with Trainer(seed=2) as second:
        assert second.connect(daemon.socket) == 2
        found = second.restore()

        assert (found.step, found.generation, found.tier) == (8, 1, "memory")
        assert second.digest() == digest
        assert losses + second.train(4) == expected


def end_with_an_error(training: Training) -> None:
    """The end of a `with client:` whose loop has raised. Runs in the trainer."""
    training.client.stop(RuntimeError("CUDA error"))


def test_finished_trainer_leaves_no_memory_and_one_that_failed_leaves_its_slots(daemon: Daemon) -> None:
    for name in ("first", "second"):
        with Trainer() as trainer:
            trainer.connect(daemon.socket, name)
            trainer.train(1)
            trainer.snapshot()  # persisted before or after the trainer has left
            trainer.close()
        wait_until(lambda: sum(daemon.status()["slots"].values()) == 0, "the memory of a finished run")
    with Trainer() as failing:
        failing.connect(daemon.socket, "third")
        failing.train(1)
        failing.durable()
        failing.apply(end_with_an_error)
    with Trainer(seed=2) as restarted:
        restarted.connect(daemon.socket, "third")
        assert restarted.restore().tier == "memory"
    with Trainer(seed=2) as resumed:
        resumed.connect(daemon.socket, "first")
        assert resumed.restore().tier == "hot"


def stop_when_half_is_copied(training: Training) -> None:
    """From now on the process stops itself in the middle of staging. Runs in the trainer."""
    copy = Copier.copy

    def copy_half(self: Copier, to: Sequence[torch.Tensor], from_: Sequence[torch.Tensor], **more: Any) -> None:
        copy(self, to[::2], from_[::2], **more)
        signal.raise_signal(signal.SIGSTOP)

    Copier.copy = copy_half


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_trainer_killed_while_staging_restores_the_previous_snapshot(daemon: Daemon) -> None:
    with Trainer() as first:
        first.connect(daemon.socket)
        first.train(1)
        first.durable()
        digest = first.digest()
        first.apply(stop_when_half_is_copied)
        first.train(1)
        first.begin("snapshot")
        wait_until(lambda: is_stopped(first.pid), "the trainer to stop in the middle of staging")
        wait_until(lambda: daemon.status()["slots"]["filling"], "the slot to be filling")
        first.kill()
    wait_until(lambda: not daemon.status()["slots"]["filling"], "the daemon to notice the kill")

    with Trainer(seed=2) as second:
        second.connect(daemon.socket)
        found = second.restore()

        assert (found.step, found.tier) == (1, "memory")
        assert second.digest() == digest


def load_with_workers(training: Training) -> list[int]:
    """Starts a data loader with two forked workers and returns their pids. Runs in the trainer."""
    dataset = torch.utils.data.TensorDataset(torch.arange(1000))
    loader = torch.utils.data.DataLoader(dataset, num_workers=2, multiprocessing_context="fork", prefetch_factor=1)
    training.batches = iter(loader)
    next(training.batches)
    return [worker.pid for worker in training.batches._workers]


def test_slots_are_adopted_although_data_loader_workers_of_the_killed_trainer_live_on(daemon: Daemon) -> None:
    with Trainer() as first:
        first.connect(daemon.socket)
        first.train(1)
        first.durable()
        digest = first.digest()
        workers = first.apply(load_with_workers)
        for worker in workers:
            os.kill(worker, signal.SIGSTOP)  # they keep the socket and the slots open
        first.kill()

    try:
        with Trainer(seed=2) as second:
            assert second.connect(daemon.socket) == 2
            assert second.restore().tier == "memory"
            assert second.digest() == digest
            assert daemon.status()["slots"] == {"free": 1, "filling": 0, "sealed": 0, "persisting": 0, "retained": 1}
            for _ in range(3):
                second.train(1)
                second.durable()
            assert "new slots instead" not in daemon.log
    finally:
        for worker in workers:
            os.kill(worker, signal.SIGKILL)


def test_sigterm_requests_a_last_snapshot(daemon: Daemon) -> None:
    with Trainer() as trainer:
        trainer.connect(daemon.socket)
        trainer.enter()
        trainer.train(1)
        trainer.signal(signal.SIGTERM)
        wait_until(trainer.is_stopping, "the request to be seen")
        trainer.snapshot()
        trainer.close()
        assert trainer.leave() == 0
    wait_until(lambda: daemon.steps("hot") == [1], "the last snapshot to be durable")


@pytest.mark.long
def test_repeated_kills_leak_nothing_and_each_start_is_a_generation(daemon: Daemon) -> None:
    def descriptors() -> int:
        return len(os.listdir(f"/proc/{daemon.pid}/fd"))

    before = 0
    for start in range(1, 9):
        with Trainer() as trainer:
            assert trainer.connect(daemon.socket) == start
            found = trainer.restore()
            assert (found.step if found else 0) == start - 1
            trainer.train(1)
            trainer.snapshot()
            trainer.kill()
        if start == 4:
            before = descriptors()
    wait_until(lambda: daemon.steps("hot") == [6, 7, 8], "the lifecycle")
    wait_until(lambda: descriptors() <= before, "the daemon to close descriptors")


def _fork_a_child(training: Training) -> int:
    """As a data loader's worker that outlives the trainer. It holds no lock and ends by itself."""
    child = os.fork()
    if child == 0:
        time.sleep(2 * DEADLINE_S)  # longer than the test waits
        os._exit(0)
    return child


def test_death_of_a_trainer_is_noticed_while_a_forked_child_lives(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon, Trainer() as trainer:
        trainer.connect(daemon.socket)
        trainer.restore()
        trainer.train(1)
        trainer.durable()
        child = trainer.apply(_fork_a_child)
        try:
            trainer.kill()
            wait_until(lambda: daemon.status()["runs"][0]["ranks_attached"] == 0)
            with Trainer(seed=2) as successor:
                successor.connect(daemon.socket)
                assert successor.restore().tier == "memory"
        finally:
            os.kill(child, signal.SIGKILL)


def test_script_that_forgets_to_restore_is_refused_at_its_first_snapshot(tmp_path: Path) -> None:
    with Daemon(tmp_path) as daemon:
        with Trainer() as first:
            first.connect(daemon.socket)
            first.train(3)
            first.durable()  # the run is new: there is nothing to restore
        with Trainer(seed=2) as second:
            second.connect(daemon.socket)
            second.train(1)
            for _ in range(2):
                with pytest.raises(TargetNotEmpty, match=r"step 3 of generation 1, and restore\(\) was not called"):
                    second.snapshot()
            assert second.restore().step == 3
            second.train(1)
            second.durable()
        with Trainer(seed=3) as third:
            third.connect(daemon.socket)
            assert third.restore(resume="scratch", force=True) is None
            third.train(1)
            third.durable()
