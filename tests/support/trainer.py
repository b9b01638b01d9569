"""Real trainers for end-to-end tests: processes that can be killed and stopped at any instant.

A `Trainer` is a forked process that holds a `Training`: a small model with an optimizer, dropout, data and generators.
The process does what the test calls, one call at a time.
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import tierd_client
import torch
import torch.distributed as dist
from torch import nn

from tests.support.processes import ForkedProcess, context
from tests.support.waiting import DEADLINE_S


class Training:
    """The state of a trainer's process. A larger `width` makes it larger; `extra` is saved with it."""

    def __init__(self, *, width: int = 16, extra: dict[str, Any] | None = None, seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.model: nn.Module = nn.Sequential(nn.Linear(16, width), nn.Dropout(0.2), nn.GELU(), nn.Linear(width, 16))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.extra: dict[str, Any] = {"seen": 0, **(extra or {})}
        self.step = 0
        self.client: Any = None
        self.shot: Any = None
        self.state = self._state()

    def _state(self) -> tierd_client.TrainingState:
        return tierd_client.TrainingState(
            model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, extra=self.extra
        )

    def join(self, rank: int, world_size: int, rendezvous: str) -> None:
        """Become a rank of a process group: replicated parameters, but generators and data of its own."""
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
        self.model = nn.parallel.DistributedDataParallel(self.model)
        torch.manual_seed(100 + rank)
        self.extra["rank"] = rank
        self.state = self._state()

    def connect(self, socket: str, run: str = "run", **options: Any) -> int:
        self.client = tierd_client.connect(run, socket=socket, **options)
        return self.client.generation

    def train(self, steps: int) -> list[float]:
        losses: list[float] = []
        for _ in range(steps):
            batch = torch.randn(4, 16)
            loss = self.model(batch).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.step += 1
            self.extra["seen"] += len(batch)
            losses.append(loss.item())
        return losses

    def snapshot(self, step: int | None = None, **more: Any) -> float:
        """Returns the duration in seconds."""
        began = time.monotonic()
        self.shot = self.client.snapshot(self.step if step is None else step, self.state, **more)
        return time.monotonic() - began

    def durable(self, **more: Any) -> None:
        """Takes a snapshot and waits until it is in the hot tier."""
        self.snapshot(**more)
        self.shot.wait_persisted(DEADLINE_S)

    def wait_persisted(self, timeout_s: float = DEADLINE_S) -> None:
        self.shot.wait_persisted(timeout_s)

    def wait_everywhere(self, timeout_s: float = DEADLINE_S) -> None:
        self.client.wait_everywhere(timeout_s)

    def wait_replicated(self, tier: str = "cold", timeout_s: float = DEADLINE_S) -> None:
        self.shot.wait_replicated(tier, timeout_s)

    def restore(self, **which: Any) -> tierd_client.Found | None:
        found = self.client.restore(self.state, **which)
        self.step = found.step if found else self.step
        return found

    def digest(self) -> str:
        """A hash of everything that the next steps depend on."""
        digest = hashlib.sha256()
        for value in [*self.model.state_dict().values(), torch.get_rng_state()]:
            digest.update(value.numpy().tobytes())
        for moments in self.optimizer.state_dict()["state"].values():
            for value in moments.values():
                digest.update(value.numpy().tobytes())
        plain = {name: value for name, value in self.extra.items() if isinstance(value, int | float | str)}
        digest.update(repr((self.scheduler.state_dict()["last_epoch"], self.step, sorted(plain.items()))).encode())
        return digest.hexdigest()

    def weights(self) -> str:
        """A hash of the model's parameters."""
        raw = b"".join(value.numpy().tobytes() for value in self.model.state_dict().values())
        return hashlib.sha256(raw).hexdigest()

    def is_stopping(self) -> bool:
        return self.client.stopping

    def enter(self) -> None:
        """Begins the `with client:` of a training loop."""
        self.client.start()

    def close(self) -> None:
        self.client.close()

    def generation(self) -> int:
        return self.client.generation

    def descriptors(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    def apply(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Calls `work(self, *arguments)`, a function of a test's module."""
        return work(self, *arguments)


class Trainer:
    """A process with a Training in it. A method of Training called here runs there, and raises here what it raises."""

    def __init__(self, **options: Any) -> None:
        self._pipe, there = context.Pipe()
        self.process = ForkedProcess(_serve, there, options)
        there.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*arguments: Any, **options: Any) -> Any:
            self.begin(name, *arguments, **options)
            return self.end()

        return call

    def begin(self, name: str, *arguments: Any, **options: Any) -> None:
        """Starts a call without waiting for it."""
        self._pipe.send((name, arguments, options))

    def end(self, timeout_s: float = DEADLINE_S) -> Any:
        """The result of the call that `begin` started."""
        assert self._pipe.poll(timeout_s), f"no answer from the trainer for {timeout_s:g} s"
        is_result, answer = self._pipe.recv()
        if not is_result:
            raise answer
        return answer

    @property
    def is_busy(self) -> bool:
        return not self._pipe.poll(0)

    @property
    def pid(self) -> int:
        return self.process.pid

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._pipe.close()

    def wait_exit(self) -> int:
        """Waits until the process ends by itself; its exit code."""
        return self.process.wait(DEADLINE_S)

    def leave(self) -> int:
        """Lets the process end; its exit code."""
        self._pipe.close()
        return self.wait_exit()


def _serve(pipe: Connection, options: dict[str, Any]) -> None:
    """Runs in the trainer's process, until the test closes the pipe."""
    training = Training(**options)
    while True:
        try:
            name, arguments, more = pipe.recv()
        except EOFError:
            return
        try:
            result = getattr(training, name)(*arguments, **more)
        except Exception as error:
            pipe.send((False, error))
        else:
            pipe.send((True, result))


@contextmanager
def joined(folder: Path, world_size: int, **options: Any) -> Generator[list[Trainer]]:
    """Trainers that are the ranks of one process group, killed at the end; a single one has no process group."""
    with ExitStack() as stack:
        trainers = [stack.enter_context(Trainer(**options)) for _ in range(world_size)]
        if world_size > 1:
            rendezvous = str(folder / f"rendezvous-{trainers[0].pid}")
            for rank, trainer in enumerate(trainers):
                trainer.begin("join", rank, world_size, rendezvous)
            for trainer in trainers:
                trainer.end()
        yield trainers


def together(trainers: Sequence[Trainer], name: str, *arguments: Any, **options: Any) -> list[Any]:
    """The same call on all trainers at once; the results by rank."""
    for trainer in trainers:
        trainer.begin(name, *arguments, **options)
    return [trainer.end() for trainer in trainers]


def refusals(trainers: Sequence[Trainer], name: str, *arguments: Any, **options: Any) -> list[tierd_client.TierdError]:
    """The same call on all trainers at once, which must raise on each; the errors by rank."""
    for trainer in trainers:
        trainer.begin(name, *arguments, **options)
    return errors_of(trainers)


def errors_of(trainers: Sequence[Trainer]) -> list[tierd_client.TierdError]:
    """The errors with which the calls that were begun end, which they must on each trainer; by rank."""
    errors: list[tierd_client.TierdError] = []
    for trainer in trainers:
        try:
            trainer.end()
        except tierd_client.TierdError as error:
            errors.append(error)
    assert len(errors) == len(trainers), errors
    return errors
