"""Real daemons and real trainers for end-to-end tests: processes that can be killed, stopped and asked.

A `Daemon` is `tierd serve` on a folder of its own. A `Trainer` is a process that holds a `Training` (a small model
with an optimizer, dropout, data and RNG) and does what the test says, call by call. Trainers are forked from a server
that has torch imported already, so that each costs milliseconds.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import tierd_client
import torch
import torch.distributed as dist
from torch import nn
from typer.testing import CliRunner

from tierd.cli.app import make_app

ROOT = Path(__file__).parents[2]
DEADLINE_S = 100.0  # for anything that a test waits for; nothing should take a tenth of it
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'client'}"}

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["tests.support.runs", "torch._dynamo"])  # what the first optimizer would import


def wait_until(is_so: Callable[[], Any], what: str = "the condition", timeout_s: float = DEADLINE_S) -> Any:
    """Whatever true thing `is_so` returned."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := is_so()):
        assert time.monotonic() < deadline_s, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.01)
    return found


# ── the daemon ────────────────────────────────────────────────────────────────────────────────────────────


class Daemon:
    """`tierd serve` with a hot and a cold directory below `root`. Not started yet."""

    def __init__(self, root: Path, *, more: str = "", cold: str = "file://cold", environ: dict[str, str] | None = None):
        self.root = root
        self.config = root / "tierd.toml"
        self.hot = root / "hot"
        self.cold = root / "cold"
        self.log = root / "daemon.log"
        # Unix socket paths are short: not below a root that may lie deep.
        self._folder = Path(tempfile.mkdtemp(prefix="tierd-"))
        self.socket = str(self._folder / "tierd.sock")
        # Nobody mends by chance what a test damages.
        self._environ = {**ENVIRONMENT, "TIERD_SCRUB_INTERVAL_S": "0", **(environ or {})}
        self.process: subprocess.Popen[bytes] | None = None
        root.mkdir(parents=True, exist_ok=True)
        self.config.write_text(
            f'[daemon]\nsocket = "{self.socket}"\nlisten = "127.0.0.1:0"\n[hot]\npath = "hot"\n'
            f'[[cold]]\nname = "cold"\nurl = "{cold}"\n'
            + ("[limits]\nretry_min_s = 0.05\nreconcile_interval_s = 0.5\n" if "[limits]" not in more else "")
            + more
        )

    def __enter__(self) -> Daemon:
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(self) -> None:
        self.launch()
        wait_until(self._is_ready, "the daemon to be ready")

    def launch(self) -> None:
        """Start it, and do not wait."""
        assert self.process is None
        self.log.write_bytes(b"")
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "tierd", "--config", str(self.config), "serve"]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=self._environ)

    def _is_ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()
        return " serves " in self.log.read_text()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        assert self.process is not None
        self.process.terminate()
        code = self.process.wait(DEADLINE_S)
        self.process = None
        return code

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def url(self) -> str:
        return next(word for word in self.log.read_text().split() if word.startswith("http://"))

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=DEADLINE_S) as answer:
            return json.loads(answer.read())

    def status(self) -> Any:
        return self.get("/api/v1/status")

    def wait_attached(self) -> None:
        """Until a trainer is connected."""
        wait_until(lambda: any(run["ranks_attached"] for run in self.status()["runs"]), "a trainer to be attached")

    def steps(self, tier: str) -> list[int]:
        """What the daemon says that a tier holds, oldest first."""
        rows = self.get("/api/v1/checkpoints")
        return sorted(row["step"] for row in rows if tier in row["tiers"])

    def newest(self, tier: str) -> int:
        return max(self.steps(tier), default=0)

    def metric(self, line: str) -> float:
        """The sample whose name and labels are `line`; 0 where there is none."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=DEADLINE_S) as answer:
            for found in answer.read().decode().splitlines():
                name, _, value = found.rpartition(" ")
                if name == line:
                    return float(value)
        return 0.0

    def tierd(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """A verb of the CLI, answered as by a process, but called in this one: it starts no Python anew. Not for
        threads: only one can be under way."""
        found = CliRunner().invoke(make_app(), ["--config", str(self.config), *map(str, arguments)], env=self._environ)
        return subprocess.CompletedProcess(arguments, found.exit_code, found.stdout, found.stderr)

    def json(self, *arguments: str | Path) -> Any:
        done = self.tierd(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def folder(self, step: int, *, run: str = "run", tier: str = "hot") -> Path:
        """Where the newest checkpoint of that step lies."""
        return sorted((self.root / tier / run).glob(f"{step:012d}-g*"))[-1]


# ── the trainer ───────────────────────────────────────────────────────────────────────────────────────────


class Training:
    """What a trainer's process holds. `width` makes the state larger, `extra` joins it as it is."""

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
        """Become one rank of several: replicated parameters, randomness and data of one's own."""
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
        """Returns how long it took."""
        began = time.monotonic()
        self.shot = self.client.snapshot(self.step if step is None else step, self.state, **more)
        return time.monotonic() - began

    def durable(self, **more: Any) -> None:
        """A snapshot, and the wait for it."""
        self.snapshot(**more)
        self.shot.wait_persisted(DEADLINE_S)

    def wait_persisted(self, timeout_s: float = DEADLINE_S) -> None:
        self.shot.wait_persisted(timeout_s)

    def wait_replicated(self, tier: str = "cold", timeout_s: float = DEADLINE_S) -> None:
        self.shot.wait_replicated(tier, timeout_s)

    def restore(self, **which: Any) -> tierd_client.Found | None:
        found = self.client.restore(self.state, **which)
        self.step = found.step if found else self.step
        return found

    def digest(self) -> str:
        """Of all that training depends on."""
        found = hashlib.sha256()
        for value in [*self.model.state_dict().values(), torch.get_rng_state()]:
            found.update(value.numpy().tobytes())
        for one in self.optimizer.state_dict()["state"].values():
            for value in one.values():
                found.update(value.numpy().tobytes())
        plain = {name: value for name, value in self.extra.items() if isinstance(value, int | float | str)}
        found.update(repr((self.scheduler.state_dict()["last_epoch"], self.step, sorted(plain.items()))).encode())
        return found.hexdigest()

    def is_stopping(self) -> bool:
        return self.client.stopping

    def enter(self) -> None:
        """The beginning of `with client:`."""
        self.client.start()

    def close(self) -> None:
        self.client.close()

    def generation(self) -> int:
        return self.client.generation

    def descriptors(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    def apply(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """`work(self, *arguments)`: a function of a test's module."""
        return work(self, *arguments)


class Trainer:
    """A process with a Training in it. A method of Training called here is called there, and raises here as there."""

    def __init__(self, **options: Any) -> None:
        self._pipe, there = _processes.Pipe()
        self._process = _processes.Process(target=_serve, args=(there, options))
        self._process.start()
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
        """Have it called, and do not wait."""
        self._pipe.send((name, arguments, options))

    def end(self, timeout_s: float = DEADLINE_S) -> Any:
        """The answer to what was begun."""
        assert self._pipe.poll(timeout_s), f"the trainer said nothing for {timeout_s:g} s"
        is_well, result = self._pipe.recv()
        if not is_well:
            raise result
        return result

    @property
    def is_busy(self) -> bool:
        return not self._pipe.poll(0)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._pipe.close()

    def leave(self) -> int | None:
        """Let it end by itself; its exit code."""
        self._pipe.close()
        self._process.join(DEADLINE_S)
        return self._process.exitcode


def _serve(pipe: Connection, options: dict[str, Any]) -> None:
    """The trainer's process: until the test has gone."""
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
    """Trainers that are the ranks of one process group, killed at the end; one alone is no rank of any."""
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
    """The same call on all at once; the answers by rank."""
    for trainer in trainers:
        trainer.begin(name, *arguments, **options)
    return [trainer.end() for trainer in trainers]


def refusals(trainers: Sequence[Trainer], name: str, *arguments: Any, **options: Any) -> list[tierd_client.TierdError]:
    """The same call on all at once, which every one of them must refuse; the errors by rank."""
    for trainer in trainers:
        trainer.begin(name, *arguments, **options)
    found: list[tierd_client.TierdError] = []
    for trainer in trainers:
        try:
            trainer.end()
        except tierd_client.TierdError as error:
            found.append(error)
    assert len(found) == len(trainers), found
    return found
