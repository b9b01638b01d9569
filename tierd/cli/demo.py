"""`tierd demo`: a training run that loses its trainer, its daemon and its disk, one after the other, and continues.

The processes are real and are killed with SIGKILL. At the end the demo compares the loss curve, byte for byte, with
the curve of the same training run without interruptions. It runs from an installed package, in any directory.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from tierd.cli.console import print_note, print_result, table
from tierd.cli.export import check_torch
from tierd.errors import BadConfig, TargetNotEmpty, TierdError
from tierd.format.ids import Generation, Run, Step, checkpoint_id

# -P: modules in the current directory do not shadow installed ones.
PYTHON = (sys.executable, "-P", "-m")
TRAINER = "tierd_client.examples.train_gpt"
RUN = Run("demo")
DEADLINE_S = 600.0  # for each wait
PACE = 0.2  # delay of a paced step, as a share of the time in which the daemon starts


@dataclass(frozen=True, slots=True)
class Scale:
    """The length of the run. A snapshot is taken every `every` steps; each failure happens between two snapshots."""

    steps: int
    every: int
    model: str
    trainer_dies: int
    daemon_dies: int
    disk_dies: int
    is_paced: bool = False
    """Slow the steps of a small model down: a process must start within few of them, on a busy machine too."""


FULL = Scale(steps=80, every=5, model="default", trainer_dies=18, daemon_dies=38, disk_dies=63)
FAST = Scale(steps=60, every=5, model="tiny", trainer_dies=18, daemon_dies=33, disk_dies=48, is_paced=True)


@dataclass(frozen=True, slots=True)
class Recovery:
    """One row of the table. `verified`: how the restored bytes were checked."""

    event: str
    tier: str
    step: int
    lost_steps: int
    seconds: float
    verified: str


def demo(
    context: typer.Context,
    directory: Annotated[
        str | None, typer.Option("--dir", metavar="DIR", help="Work there and keep it; default: a temporary one.")
    ] = None,
    fast: Annotated[bool, typer.Option("--fast", help="A smaller model and fewer steps.")] = False,
) -> None:
    """Watch a real training run lose its trainer, its daemon and its disk, and go on."""
    raise typer.Exit(run_demo(directory=directory, is_fast=fast))


def run_demo(*, directory: str | None, is_fast: bool) -> int:
    """Runs the demo, prints its table and returns the exit code. Files are kept only if `directory` is given.

    Raises BadConfig if torch is not installed or the directory is not writable, TargetNotEmpty if it is not empty.
    """
    check_torch("run the demo", hint="pip install 'tierd[client]'")
    root = _make_root(directory)
    # A Unix socket path is at most 107 bytes long, and the path of `root` may be longer.
    sockets = Path(tempfile.mkdtemp(prefix="tierd-demo-"))
    demo = _Demo(root, sockets / "tierd.sock", FAST if is_fast else FULL)
    try:
        return demo.run()
    finally:
        demo.end()
        shutil.rmtree(sockets, ignore_errors=True)
        if directory is None:
            shutil.rmtree(root, ignore_errors=True)


def _make_root(directory: str | None) -> Path:
    try:
        if directory is None:
            # In the current directory, because /tmp may be in memory, and a hot tier there would not be durable.
            return Path(tempfile.mkdtemp(prefix="demo-", dir=Path.cwd()))
        root = Path(directory).resolve()
        root.mkdir(parents=True, exist_ok=True)
        if any(root.iterdir()):
            raise TargetNotEmpty(f"run the demo in {root}: the directory is not empty", hint="choose an empty one")
        return root
    except OSError as error:
        where = directory or "the current directory"
        raise BadConfig(f"run the demo in {where}: {error.strerror}", hint="give a writable one with --dir") from error


class _Demo:
    def __init__(self, root: Path, socket: Path, scale: Scale) -> None:
        self._root = root
        self._scale = scale
        self._socket = socket
        self._hot = root / "hot"
        self._cold = root / "cold"
        self._config = root / "tierd.toml"
        self._losses = root / "loss.jsonl"
        self._log = root / "trainer.log"
        # The user's TIERD_ settings are for the user's own daemon and runs.
        self._environ = {name: value for name, value in os.environ.items() if not name.startswith("TIERD_")}
        self._trainer: subprocess.Popen[bytes] | None = None
        self._daemon: subprocess.Popen[bytes] | None = None
        self._step_delay_s = 0.0

    def run(self) -> int:
        scale = self._scale
        self._config.write_text(
            f'[daemon]\nsocket = "{self._socket}"\nlisten = "127.0.0.1:0"\n\n'
            '[hot]\npath = "hot"\n\n[[cold]]\nname = "cold"\nurl = "file://cold"\n'
        )
        print_note(f"working in {self._root}\n1/5  training {scale.steps} steps undisturbed, for comparison")
        undisturbed = self._root / "undisturbed.jsonl"
        self._trainer = self._train(undisturbed, "--no-tierd")
        self._wait(lambda: not self._is_running(self._trainer), "the undisturbed training", needs_trainer=False)
        if self._trainer.returncode:
            raise self._trainer_failed("the undisturbed training")

        print_note(f"2/5  the same training with tierd: a snapshot every {scale.every} steps")
        self._start_daemon()
        self._start_trainer()
        recoveries = [self._lose_trainer(), self._lose_daemon(), self._lose_disk()]

        self._wait(lambda: not self._is_running(self._trainer), "the training to end", needs_trainer=False)
        self._table(recoveries)
        return self._compare(undisturbed)

    def end(self) -> None:
        for process in (self._trainer, self._daemon):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()

    # ── the three failures ──

    def _lose_trainer(self) -> Recovery:
        self._wait_step(self._scale.trainer_dies)
        print_note(f"3/5  step {self._last_step()}: SIGKILL to the trainer")
        trainer = self._running(self._trainer)
        began = time.monotonic()
        trainer.kill()
        trainer.wait()
        reached = self._last_step()
        self._start_trainer()
        step, tier = self._wait_resumed()
        return Recovery("trainer SIGKILLed", tier, step, reached - step, time.monotonic() - began, "every chunk")

    def _lose_daemon(self) -> Recovery:
        self._wait_step(self._scale.daemon_dies)
        trainer, daemon = self._running(self._trainer), self._running(self._daemon)
        print_note(f"4/5  step {self._last_step()}: SIGKILL to the daemon, for {self._scale.every} steps and more")
        began = time.monotonic()
        daemon.kill()
        daemon.wait()
        died_at = self._last_step()
        # Train past a snapshot, so that one is staged while there is no daemon.
        self._wait_step(died_at + self._scale.every + 1)
        self._start_daemon()
        self._wait(lambda: self._newest("hot") > died_at, "the daemon to persist the staged snapshot")
        if not self._is_running(trainer):
            raise TierdError("run the demo: the trainer stopped when the daemon died", hint=f"see {self._log}")
        return Recovery(
            "daemon SIGKILLed", "hot", self._newest("hot"), 0, time.monotonic() - began, "trainer never stopped"
        )

    def _lose_disk(self) -> Recovery:
        self._wait_step(self._scale.disk_dies)
        # Replication of the last snapshot takes about a second here.
        wanted = self._scale.disk_dies // self._scale.every * self._scale.every
        self._wait(lambda: self._newest("cold") >= wanted, f"step {wanted} to reach the cold tier")
        print_note(
            f"5/5  step {self._last_step()}: SIGKILL to both, and the hot tier is deleted; only the cold tier is left"
        )
        began = time.monotonic()
        for process in (self._running(self._trainer), self._running(self._daemon)):
            process.kill()
            process.wait()
        reached = self._last_step()
        shutil.rmtree(self._hot)
        restored = self._restore_cold()
        self._start_daemon()
        self._start_trainer()
        step, _ = self._wait_resumed()
        verified = f"{restored['size_bytes'] / 1e6:.0f} MB, every chunk"
        return Recovery("hot tier deleted", "cold", step, reached - step, time.monotonic() - began, verified)

    def _restore_cold(self) -> dict[str, Any]:
        """Restores from cold into the hot tier's directory: a cold checkpoint is a valid hot one."""
        newest = self._newest_row("cold")
        checkpoint = checkpoint_id(RUN, Step(newest["step"]), Generation(newest["generation"]))
        target = self._hot / RUN / checkpoint.name
        print_note(f"     $ tierd restore --tier cold --run {RUN} --to hot/{RUN}/{checkpoint.name}")
        return json.loads(self._tierd("restore", "--tier", "cold", "--run", RUN, "--to", str(target), "--json"))

    # ── processes ──

    def _train(self, losses: Path, *more: str) -> subprocess.Popen[bytes]:
        scale = self._scale
        command = [*PYTHON, TRAINER, "--steps", str(scale.steps), "--every", str(scale.every)]
        command += ["--model-size", scale.model, "--run", RUN, "--loss-file", str(losses), "--device", "cpu"]
        with self._log.open("ab") as log:
            return self._start([*command, *more], log)

    def _start(self, command: list[str], log: BinaryIO) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self._environ)

    def _start_trainer(self) -> None:
        self._log.write_bytes(b"")
        delay_s = f"{self._step_delay_s:.3f}"
        self._trainer = self._train(self._losses, "--socket", str(self._socket), "--step-delay-s", delay_s)

    def _start_daemon(self) -> None:
        began = time.monotonic()
        with (self._root / "daemon.log").open("ab") as log:
            self._daemon = self._start([*PYTHON, "tierd", "--config", str(self._config), "serve"], log)
        self._wait(self._socket.is_socket, "the daemon to listen", needs_trainer=False)
        if self._scale.is_paced and not self._step_delay_s:
            self._step_delay_s = (time.monotonic() - began) * PACE

    def _tierd(self, *arguments: str) -> str:
        command = [*PYTHON, "tierd", "--config", str(self._config), *arguments]
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, env=self._environ
        )
        if result.returncode:
            raise TierdError(
                f"run the demo: tierd {' '.join(arguments)} ended with {result.returncode}: {result.stderr}"
            )
        return result.stdout

    def _running(self, process: subprocess.Popen[bytes] | None) -> subprocess.Popen[bytes]:
        if process is None or process.poll() is not None:
            raise TierdError("run the demo: a process ended too early", hint=f"see the logs in {self._root}")
        return process

    def _is_running(self, process: subprocess.Popen[bytes] | None) -> bool:
        return process is not None and process.poll() is None

    # ── progress ──

    def _last_step(self) -> int:
        """The last step with a complete line in the loss file; 0 if there is none."""
        if not self._losses.exists():
            return 0
        lines = self._losses.read_bytes().rpartition(b"\n")[0].splitlines()
        return json.loads(lines[-1])["step"] if lines else 0

    def _newest_row(self, tier: str) -> dict[str, Any]:
        """The newest checkpoint of a tier, as `tierd ls` lists its directory."""
        rows = json.loads(self._tierd("ls", str(self._root / tier), "--json"))
        return rows[0] if rows else {"step": 0, "generation": 0}

    def _newest(self, tier: str) -> int:
        return self._newest_row(tier)["step"]

    def _wait_step(self, step: int) -> None:
        self._wait(lambda: self._last_step() >= step, f"step {step}")

    def _wait_resumed(self) -> tuple[int, str]:
        """(step, tier) that the trainer resumed from, from its log."""

        def resumed() -> list[str]:
            lines = self._log.read_text(errors="replace").splitlines()
            return next((line.split() for line in lines if line.startswith("resumed at step ")), [])

        self._wait(lambda: bool(resumed()), "the trainer to resume")
        words = resumed()
        return int(words[3]), words[5]

    def _wait(self, condition: Callable[[], bool], what: str, *, needs_trainer: bool = True) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            if needs_trainer and not self._is_running(self._trainer):
                raise self._trainer_failed(what)
            if time.monotonic() > deadline_s:
                raise TierdError(f"run the demo: waited {DEADLINE_S:.0f} s for {what}")
            time.sleep(0.02)

    def _trainer_failed(self, what: str) -> TierdError:
        log = self._log.read_text(errors="replace")[-2000:]
        return TierdError(f"run the demo: the trainer ended while the demo waited for {what}. Its log:\n{log}")

    # ── the result ──

    def _table(self, recoveries: list[Recovery]) -> None:
        table(
            ["EVENT", "RECOVERED FROM", "AT STEP", "WORK LOST", "SECONDS", "VERIFIED"],
            [
                [row.event, row.tier, str(row.step), f"{row.lost_steps} steps", f"{row.seconds:.1f}", row.verified]
                for row in recoveries
            ],
            right=["AT STEP", "WORK LOST", "SECONDS"],
        )

    def _compare(self, undisturbed: Path) -> int:
        expected, actual = undisturbed.read_bytes(), self._losses.read_bytes()
        lines = len(expected.splitlines())
        if expected == actual and lines == self._scale.steps:
            print_result(f"\nloss curves identical: {lines} steps, bit for bit")
            return 0
        pairs = zip(expected.splitlines(), actual.splitlines(), strict=False)
        first = next(
            (index for index, (a, b) in enumerate(pairs, 1) if a != b), min(lines, len(actual.splitlines())) + 1
        )
        print_note(f"loss curves differ from step {first} on: {undisturbed} and {self._losses}")
        return 1
