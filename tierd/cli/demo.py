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
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import typer

from tierd.cli.console import print_note, print_result, table
from tierd.cli.export import check_torch
from tierd.errors import BadConfig, TargetNotEmpty, TierdError
from tierd.format.ids import Run, checkpoint_id

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


def demo(
    context: typer.Context,
    directory: Annotated[
        str | None, typer.Option("--dir", metavar="DIR", help="Work there and keep it; default: a temporary one.")
    ] = None,
    fast: Annotated[bool, typer.Option("--fast", help="A smaller model and fewer steps.")] = False,
) -> int:
    """Watch a real training run lose its trainer, its daemon and its disk, and go on."""
    check_torch("run the demo", hint="pip install 'tierd[client]'")
    root = _make_root(directory)
    # A Unix socket path is at most 107 bytes long, and the path of `root` may be longer.
    sockets = Path(tempfile.mkdtemp(prefix="tierd-demo-"))
    demo = _Demo(root, sockets / "tierd.sock", FAST if fast else FULL)
    try:
        return demo.run()
    finally:
        demo.end()
        shutil.rmtree(sockets, ignore_errors=True)
        if directory is None:
            shutil.rmtree(root, ignore_errors=True)


def _make_root(directory: str | None) -> Path:
    """Raises BadConfig if the directory is not writable, TargetNotEmpty if it is not empty."""
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
        self._config = root / "tierd.toml"
        self._losses = root / "loss.jsonl"
        self._log = root / "trainer.log"
        # The user's TIERD_ settings are for the user's own daemon and runs.
        self._environ = {name: value for name, value in os.environ.items() if not name.startswith("TIERD_")}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}  # trainer and daemon: the last of each
        self._step_delay_s = 0.0

    def run(self) -> int:
        """Print the table of the three failures. Returns the exit code: 0 if the two loss curves are the same."""
        scale = self._scale
        self._config.write_text(
            f'[daemon]\nsocket = "{self._socket}"\nlisten = "127.0.0.1:0"\n\n'
            '[hot]\npath = "hot"\n\n[[cold]]\nname = "cold"\nurl = "file://cold"\n'
        )
        print_note(f"working in {self._root}", f"1/5  training {scale.steps} steps undisturbed, for comparison")
        undisturbed = self._root / "undisturbed.jsonl"
        self._train(undisturbed, "--no-tierd")
        self._wait_trainer_ended("the undisturbed training")

        print_note(f"2/5  the same training with tierd: a snapshot every {scale.every} steps")
        self._start_daemon()
        self._start_trainer()
        rows = [self._lose_trainer(), self._lose_daemon(), self._lose_disk()]

        self._wait_trainer_ended("the training to end")
        headings = ["EVENT", "RECOVERED FROM", "AT STEP", "WORK LOST", "SECONDS", "VERIFIED"]
        table(headings, rows, right=["AT STEP", "WORK LOST", "SECONDS"])
        return self._compare(undisturbed)

    def end(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    # ── the three failures: each returns its row of the table ──

    def _lose_trainer(self) -> list[str]:
        self._wait_step(self._scale.trainer_dies)
        print_note(f"3/5  step {self._last_step()}: SIGKILL to the trainer")
        began_s = time.monotonic()
        self._kill("trainer")
        reached = self._last_step()
        self._start_trainer()
        step, tier = self._wait_resumed()
        return _row("trainer SIGKILLed", tier, step, reached - step, began_s, "every chunk")

    def _lose_daemon(self) -> list[str]:
        self._wait_step(self._scale.daemon_dies)
        print_note(f"4/5  step {self._last_step()}: SIGKILL to the daemon, for {self._scale.every} steps and more")
        began_s = time.monotonic()
        self._kill("daemon")
        died_at = self._last_step()
        # Train past a snapshot, so that one is staged while there is no daemon.
        self._wait_step(died_at + self._scale.every + 1)
        self._start_daemon()
        self._wait(lambda: self._newest("hot")["step"] > died_at, "the daemon to persist the staged snapshot")
        if not self._is_running("trainer"):
            raise TierdError("run the demo: the trainer stopped when the daemon died", hint=f"see {self._log}")
        return _row("daemon SIGKILLed", "hot", self._newest("hot")["step"], 0, began_s, "trainer never stopped")

    def _lose_disk(self) -> list[str]:
        self._wait_step(self._scale.disk_dies)
        # Replication of the last snapshot takes about a second here.
        wanted = self._scale.disk_dies // self._scale.every * self._scale.every
        self._wait(lambda: self._newest("cold")["step"] >= wanted, f"step {wanted} to reach the cold tier")
        print_note(
            f"5/5  step {self._last_step()}: SIGKILL to both, and the hot tier is deleted; only the cold tier is left"
        )
        began_s = time.monotonic()
        self._kill("trainer")
        self._kill("daemon")
        reached = self._last_step()
        shutil.rmtree(self._hot)
        # Restored from cold into the hot tier's directory: a cold checkpoint is a valid hot one.
        newest = self._newest("cold")
        checkpoint = checkpoint_id(RUN, newest["step"], newest["generation"])
        print_note(f"     $ tierd restore --tier cold --run {RUN} --to hot/{RUN}/{checkpoint.name}")
        restored = self._tierd("restore", "--tier", "cold", "--run", RUN, "--to", str(self._hot / str(checkpoint)))
        self._start_daemon()
        self._start_trainer()
        step, _ = self._wait_resumed()
        verified = f"{restored['size_bytes'] / 1e6:.0f} MB, every chunk"
        return _row("hot tier deleted", "cold", step, reached - step, began_s, verified)

    # ── processes ──

    def _start(self, name: str, *command: str) -> None:
        with (self._root / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [*PYTHON, *command], stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self._environ
            )

    def _train(self, losses: Path, *more: str) -> None:
        scale = self._scale
        self._log.write_bytes(b"")
        length = ("--steps", str(scale.steps), "--every", str(scale.every), "--model-size", scale.model)
        self._start("trainer", TRAINER, *length, "--run", RUN, "--loss-file", str(losses), "--device", "cpu", *more)

    def _start_trainer(self) -> None:
        self._train(self._losses, "--socket", str(self._socket), "--step-delay-s", f"{self._step_delay_s:.3f}")

    def _start_daemon(self) -> None:
        began_s = time.monotonic()
        self._start("daemon", "tierd", "--config", str(self._config), "serve")
        self._wait(self._socket.is_socket, "the daemon to listen", needs_trainer=False)
        if self._scale.is_paced and not self._step_delay_s:
            self._step_delay_s = (time.monotonic() - began_s) * PACE

    def _tierd(self, *arguments: str) -> Any:
        """What a command prints with --json."""
        command = [*PYTHON, "tierd", "--config", str(self._config), *arguments, "--json"]
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, env=self._environ
        )
        if result.returncode:
            raise TierdError(
                f"run the demo: tierd {' '.join(arguments)} ended with {result.returncode}: {result.stderr}"
            )
        return json.loads(result.stdout)

    def _is_running(self, name: str) -> bool:
        return self._processes[name].poll() is None

    def _kill(self, name: str) -> None:
        if not self._is_running(name):
            raise TierdError(f"run the demo: the {name} ended too early", hint=f"see the logs in {self._root}")
        self._processes[name].kill()
        self._processes[name].wait()

    # ── progress ──

    def _last_step(self) -> int:
        """The last step with a complete line in the loss file; 0 if there is none."""
        if not self._losses.exists():
            return 0
        lines = self._losses.read_bytes().rpartition(b"\n")[0].splitlines()
        return json.loads(lines[-1])["step"] if lines else 0

    def _newest(self, tier: str) -> dict[str, Any]:
        """The newest checkpoint of a tier, as `tierd ls` lists its directory."""
        rows = self._tierd("ls", str(self._root / tier))
        return rows[0] if rows else {"step": 0, "generation": 0}

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

    def _wait_trainer_ended(self, what: str) -> None:
        self._wait(lambda: not self._is_running("trainer"), what, needs_trainer=False)
        if self._processes["trainer"].returncode:
            raise self._trainer_failed(what)

    def _wait(self, condition: Callable[[], bool], what: str, *, needs_trainer: bool = True) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            if needs_trainer and not self._is_running("trainer"):
                raise self._trainer_failed(what)
            if time.monotonic() > deadline_s:
                raise TierdError(f"run the demo: waited {DEADLINE_S:.0f} s for {what}")
            time.sleep(0.02)

    def _trainer_failed(self, what: str) -> TierdError:
        print_note(*self._log.read_text(errors="replace")[-2000:].splitlines())
        return TierdError(f"run the demo: the trainer ended while the demo waited for {what}; its log is above")

    def _compare(self, undisturbed: Path) -> int:
        expected, actual = (path.read_bytes().splitlines(keepends=True) for path in (undisturbed, self._losses))
        if expected == actual and len(expected) == self._scale.steps:
            print_result("", f"loss curves identical: {len(expected)} steps, bit for bit")
            return 0
        lines = enumerate(zip_longest(expected, actual), 1)
        first = next((number for number, (one, other) in lines if one != other), len(expected) + 1)
        print_note(f"loss curves differ from step {first} on: {undisturbed} and {self._losses}")
        return 1


def _row(event: str, tier: str, step: int, lost_steps: int, began_s: float, verified: str) -> list[str]:
    """`verified`: how the restored bytes were checked."""
    return [event, tier, str(step), f"{lost_steps} steps", f"{time.monotonic() - began_s:.1f}", verified]
