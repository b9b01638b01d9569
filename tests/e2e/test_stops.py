"""Every kind of stop request: exit code 0, a durable snapshot of the last step, and an exact resume from it."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tierd_client

from tests.support.daemon import Daemon
from tests.support.processes import ENVIRONMENT, ROOT, Script
from tests.support.trainer import Trainer, Training, joined, together
from tests.support.waiting import wait_until

TINY = ["--model-size=tiny", "--threads=1", "--device=cpu", "--batch-size=2", "--block-size=32", "--run=run"]
FOREVER = 1_000_000


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path) as daemon:
        yield daemon


def state_of(daemon: Daemon) -> tuple[str, str]:
    (run,) = daemon.status()["runs"]
    return run["state"], run["reason"]


# ── the example: one process, its exit code, its curve ──


class Example:
    """The example as its user starts it: the same command each time."""

    def __init__(self, daemon: Daemon, steps: int) -> None:
        self.losses = daemon.root / "loss.jsonl"
        self._arguments = [*TINY, f"--steps={steps}", "--every=1000000"]
        self._connected = [f"--socket={daemon.socket}", f"--loss-file={self.losses}"]

    def start(self, *, delay_s: float = 0.02, **environ: str) -> Script:
        return self._start(*self._connected, f"--step-delay-s={delay_s}", **environ)

    def undisturbed(self) -> bytes:
        path = self.losses.with_name("undisturbed.jsonl")
        with self._start("--no-tierd", f"--loss-file={path}") as process:
            assert process.end() == 0, process.stderr
        return path.read_bytes()

    def _start(self, *more: str, **environ: str) -> Script:
        script = ROOT / "examples" / "train_gpt.py"
        environment = {**ENVIRONMENT, **environ}
        return Script(script, [*self._arguments, *more], folder=self.losses.parent, environ=environment)

    @property
    def last_step(self) -> int:
        return json.loads(self.losses.read_bytes().splitlines()[-1])["step"]


def test_stopped_by_sigterm_and_by_its_walltime_it_exits_with_zero_and_resumes_on_the_undisturbed_curve(
    daemon: Daemon,
) -> None:
    example = Example(daemon, steps=150)
    with example.start() as process:
        process.wait_line("step 10 ")
        process.terminate()
        assert process.end() == 0, process.stderr
        assert "stopping at step" in process.stderr
    first = example.last_step
    assert daemon.newest("hot") == first
    assert state_of(daemon) == ("stopped", "a signal")

    # Nine seconds from now, of which more than five are the reserve.
    with example.start(delay_s=0.05, SLURM_JOB_END_TIME=f"{time.time() + 9:.0f}") as process:
        process.wait_line(f"resumed at step {first} ")
        assert process.end() == 0, process.stderr
    second = example.last_step
    assert daemon.newest("hot") == second
    assert first < second < 150, "it stopped by itself, and not at the end"
    assert state_of(daemon) == ("stopped", "the walltime")

    with example.start(delay_s=0) as process:
        process.wait_line(f"resumed at step {second} ")
        assert process.end() == 0, process.stderr
    assert state_of(daemon) == ("finished", "")
    assert example.losses.read_bytes() == example.undisturbed()


def test_second_interrupt_ends_the_trainer_without_a_snapshot(daemon: Daemon) -> None:
    example = Example(daemon, steps=FOREVER)
    with example.start() as process:
        process.wait_line("step 10 ")
        # It cannot stop in order: the daemon hangs before it has a free slot for the last snapshot.
        process.send_signal(signal.SIGUSR1)
        wait_until(lambda: daemon.newest("hot"), "the requested snapshot")
        daemon.signal(signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        # A second signal within half a second counts as an echo of the first. On a busy machine the first may arrive
        # late: then a third one counts.
        for _ in range(3):
            if process.poll() is not None:
                break
            time.sleep(0.7)
            process.send_signal(signal.SIGINT)
        assert process.end() == -signal.SIGINT
        assert "KeyboardInterrupt" in process.stderr
        daemon.signal(signal.SIGCONT)
    wait_until(lambda: state_of(daemon) == ("halted", "interrupted at once"), "the daemon to know the outcome")


# ── in a trainer, where the functions with an underscore run ──


def _loop(training: Training, steps: int, every: int = 0, last: bool = True) -> tuple[list[float], list[int]]:
    """A training loop as a user writes it. Returns the loss of each step and the steps of its snapshots."""
    losses: list[float] = []
    taken: list[int] = []
    with training.client as client:
        while training.step < steps:
            losses += training.train(1)
            if client.due(training.step) or (client.stopping and last) or (every and training.step % every == 0):
                client.snapshot(training.step, training.state)
                taken.append(training.step)
            if client.stopping:
                break
    return losses, taken


def _loop_to_the_exit(training: Training, steps: int) -> None:
    _loop(training, steps)
    sys.exit(0)


def _halt(training: Training) -> None:
    with training.client as client:
        client.halt("loss is nan")


def _fail(training: Training, error: Exception) -> None:
    with training.client:
        raise error


@contextmanager
def connected(daemon: Daemon, **options: Any) -> Generator[Trainer]:
    with Trainer() as trainer:
        trainer.connect(daemon.socket, every_steps=0, **options)
        trainer.enter()
        yield trainer


@contextmanager
def ranks(daemon: Daemon, world_size: int, **options: Any) -> Generator[list[Trainer]]:
    with joined(daemon.root, world_size) as trainers:
        together(trainers, "connect", daemon.socket, every_steps=0, **options)
        together(trainers, "enter")
        yield trainers


def begin(trainers: list[Trainer], work: Callable[..., Any], *arguments: Any) -> None:
    for trainer in trainers:
        trainer.begin("apply", work, *arguments)


def test_sigusr1_requests_a_snapshot_and_training_continues(daemon: Daemon) -> None:
    with connected(daemon) as trainer:
        trainer.begin("apply", _loop, FOREVER)
        trainer.signal(signal.SIGUSR1)
        first = wait_until(lambda: daemon.newest("hot"), "the snapshot")
        trainer.signal(signal.SIGUSR1)
        wait_until(lambda: daemon.newest("hot") > first, "another one")
        assert trainer.is_busy
        trainer.signal(signal.SIGTERM)
        losses, taken = trainer.end()
        assert len(taken) == 3
        assert taken[-1] == len(losses) == daemon.newest("hot")


def test_sigterm_to_one_rank_stops_all_ranks_at_the_same_step_and_they_resume_there(
    daemon: Daemon,
) -> None:
    # Two ranks, whose sum has one order: with more, a new DistributedDataParallel may add gradients in another order.
    world_size = 2
    with ranks(daemon, world_size) as trainers:
        undisturbed = [found[0] for found in together(trainers, "apply", _loop, 60)]
    with ranks(daemon, world_size, run="again") as trainers:
        begin(trainers, _loop, FOREVER)
        trainers[-1].signal(signal.SIGTERM)
        first = [trainer.end() for trainer in trainers]
    step = len(first[0][0])
    assert [(len(losses), taken) for losses, taken in first] == [(step, [step])] * world_size
    assert max(row["step"] for row in daemon.get("/api/v1/checkpoints?run=again")) == step

    steps = max(60, step)
    with ranks(daemon, world_size, run="again") as trainers:
        assert [one.step for one in together(trainers, "restore")] == [step] * world_size
        rest = [found[0] for found in together(trainers, "apply", _loop, steps)]
    whole = [(before + after)[:60] for (before, _), after in zip(first, rest, strict=True)]
    assert whole == undisturbed


def test_walltime_stops_all_ranks_with_exit_code_zero(daemon: Daemon) -> None:
    with ranks(daemon, 2, max_runtime_s=7.0) as trainers:
        begin(trainers, _loop_to_the_exit, FOREVER)
        assert [trainer.wait_exit() for trainer in trainers] == [0, 0]
    assert daemon.newest("hot") > 0
    wait_until(lambda: state_of(daemon) == ("stopped", "the walltime"), "the daemon to know the outcome")


def test_stop_request_waits_for_a_hung_daemon_and_training_does_not(daemon: Daemon) -> None:
    with ranks(daemon, 2) as trainers:
        begin(trainers, _loop, FOREVER)
        daemon.signal(signal.SIGSTOP)
        trainers[1].signal(signal.SIGTERM)
        before = [_cpu_s(trainer.pid) for trainer in trainers]
        wait_until(lambda: all(_cpu_s(one.pid) > was + 0.3 for one, was in zip(trainers, before, strict=True)))
        assert all(trainer.is_busy for trainer in trainers)
        daemon.signal(signal.SIGCONT)
        found = [trainer.end() for trainer in trainers]
    assert found[0][1] == found[1][1] == [len(found[0][0])] == daemon.steps("hot")


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) / 100


def test_stop_request_is_sent_again_after_the_daemon_was_killed(daemon: Daemon) -> None:
    with ranks(daemon, 2) as trainers:
        begin(trainers, _loop, FOREVER)
        daemon.signal(signal.SIGSTOP)
        trainers[1].signal(signal.SIGTERM)
        daemon.kill()
        daemon.start()
        found = [trainer.end() for trainer in trainers]
    assert found[0][1] == found[1][1] == [len(found[0][0])]


def test_last_snapshot_that_is_not_durable_in_time_is_an_error(daemon: Daemon) -> None:
    with connected(daemon, stop_grace_s=0.2) as trainer:
        trainer.begin("apply", _loop, FOREVER)
        daemon.signal(signal.SIGSTOP)
        trainer.signal(signal.SIGTERM)
        with pytest.raises(tierd_client.Transient, match=r"stop at step \d+: the last snapshot was not durable"):
            trainer.end()
        daemon.signal(signal.SIGCONT)
        wait_until(lambda: state_of(daemon)[0] == "failed", "the daemon to know the outcome")
        wait_until(lambda: daemon.newest("hot"), "the sealed snapshot to be durable")


def test_stop_file_stops_all_ranks_once(daemon: Daemon) -> None:
    path = daemon.root / "stop"
    with ranks(daemon, 2, stop_file=str(path)) as trainers:
        begin(trainers, _loop, FOREVER)
        path.touch()
        found = [trainer.end() for trainer in trainers]
        assert found[0][1] == found[1][1]
    assert not path.exists()
    assert state_of(daemon) == ("stopped", "the stop file")


def test_halted_run_exits_with_17_and_status_shows_the_reason(daemon: Daemon) -> None:
    with connected(daemon) as trainer:
        trainer.begin("apply", _halt)
        assert trainer.wait_exit() == 17
    assert state_of(daemon) == ("halted", "loss is nan")
    assert "HALTED: a person must decide (loss is nan)" in daemon.tierd("status").stdout


@pytest.mark.parametrize(
    ("error", "state"), [(tierd_client.Mismatch("it does not fit"), "halted"), (RuntimeError("boom"), "failed")]
)
def test_error_that_ends_the_loop_is_reported_to_the_daemon(daemon: Daemon, error: Exception, state: str) -> None:
    with connected(daemon) as trainer:
        with pytest.raises(type(error)):
            trainer.apply(_fail, error)
        assert state_of(daemon)[0] == state


def test_killed_run_is_shown_as_lost_and_a_restarted_one_as_running(daemon: Daemon) -> None:
    with connected(daemon) as trainer:
        assert state_of(daemon) == ("running", "")
        trainer.kill()
    wait_until(lambda: state_of(daemon)[0] == "lost", "the daemon to notice")
    with connected(daemon):
        assert state_of(daemon) == ("running", "")
