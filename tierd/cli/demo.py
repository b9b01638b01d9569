"""`tierd demo`: a real training loses its trainer, its daemon and its disk, one after the other, and goes on.

Nothing is staged: the processes are real, they die by SIGKILL, and the proof at the end is that the loss curve
equals, byte for byte, the curve of the same training that nothing happened to.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from tierd.cli.console import print_note, print_result, table
from tierd.errors import BadConfig, TargetNotEmpty, TierdError
from tierd.format.ids import Generation, Run, Step, checkpoint_id

TRAINER = Path(__file__).resolve().parents[2] / "examples" / "train_gpt.py"
RUN = Run("demo")
DEADLINE_S = 600.0  # for any one thing that the demo waits for


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is trained. Snapshots come every `every` steps; each event strikes between two of them."""

    steps: int
    every: int
    model: str
    trainer_dies: int
    daemon_dies: int
    disk_dies: int
    step_delay_s: float = 0.0  # so that a model that trains faster than `tierd ls` starts can be watched


FULL = Scale(steps=80, every=5, model="default", trainer_dies=18, daemon_dies=38, disk_dies=63)
FAST = Scale(steps=60, every=5, model="tiny", trainer_dies=18, daemon_dies=33, disk_dies=48, step_delay_s=0.05)


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
    """Runs it all and prints the table; the exit code. With `directory`, what it made is kept there."""
    if not TRAINER.is_file():
        raise BadConfig(f"run the demo: there is no {TRAINER}", hint="run it from a clone of the source")
    if directory is None:
        # On the disk that one works on: /tmp may be in memory, and then nothing here would be durable.
        root = Path(tempfile.mkdtemp(prefix="demo-", dir=Path.cwd()))
    else:
        root = Path(directory).resolve()
        if root.exists() and any(root.iterdir()):
            raise TargetNotEmpty(f"run the demo in {root}: it holds something", hint="choose an empty directory")
        root.mkdir(parents=True, exist_ok=True)
    # Unix socket paths are short (107 bytes): not below a root that may lie deep.
    sockets = Path(tempfile.mkdtemp(prefix="tierd-demo-"))
    demo = _Demo(root, sockets / "tierd.sock", FAST if is_fast else FULL)
    try:
        return demo.run()
    finally:
        demo.end()
        shutil.rmtree(sockets, ignore_errors=True)
        if directory is None:
            shutil.rmtree(root, ignore_errors=True)


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
        self._trainer: subprocess.Popen[bytes] | None = None
        self._daemon: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        scale = self._scale
        self._config.write_text(
            f'[daemon]\nsocket = "{self._socket}"\nlisten = "127.0.0.1:0"\n\n'
            '[hot]\npath = "hot"\n\n[[cold]]\nname = "cold"\nurl = "file://cold"\n'
        )
        print_note(f"working in {self._root}\n1/5  training {scale.steps} steps undisturbed, for comparison")
        undisturbed = self._root / "undisturbed.jsonl"
        self._train(undisturbed, "--no-tierd").wait(DEADLINE_S)

        print_note(f"2/5  the same training with tierd: a snapshot every {scale.every} steps")
        self._start_daemon()
        self._start_trainer()
        recoveries = [self._lose_trainer(), self._lose_daemon(), self._lose_disk()]

        self._wait(lambda: not self._is_running(self._trainer), "the training to end")
        self._table(recoveries)
        return self._compare(undisturbed)

    def end(self) -> None:
        for process in (self._trainer, self._daemon):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()

    # ── the three events ──

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
        # Past a snapshot: that one is staged with no daemon to take it.
        self._wait_step(died_at + self._scale.every + 1)
        self._start_daemon()
        self._wait(lambda: self._newest("hot") > died_at, "the daemon to take what was staged without it")
        if not self._is_running(trainer):
            raise TierdError("run the demo: the trainer stopped when the daemon died", hint=f"see {self._log}")
        return Recovery(
            "daemon SIGKILLed", "hot", self._newest("hot"), 0, time.monotonic() - began, "trainer never stopped"
        )

    def _lose_disk(self) -> Recovery:
        self._wait_step(self._scale.disk_dies)
        # What was snapshotted last should have reached the cold tier: it is a matter of a second here.
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
        """`tierd restore --tier cold`, to where the daemon will find it: a cold checkpoint is a valid hot one."""
        newest = self._newest_row("cold")
        checkpoint = checkpoint_id(RUN, Step(newest["step"]), Generation(newest["generation"]))
        target = self._hot / RUN / checkpoint.name
        print_note(f"     $ tierd restore --tier cold --run {RUN} --to hot/{RUN}/{checkpoint.name}")
        return json.loads(self._tierd("restore", "--tier", "cold", "--run", RUN, "--to", str(target), "--json"))

    # ── processes ──

    def _train(self, losses: Path, *more: str) -> subprocess.Popen[bytes]:
        scale = self._scale
        command = [sys.executable, str(TRAINER), "--steps", str(scale.steps), "--every", str(scale.every)]
        command += ["--model-size", scale.model, "--run", RUN, "--loss-file", str(losses), "--device", "cpu"]
        with self._log.open("ab") as log:
            return subprocess.Popen([*command, *more], stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def _start_trainer(self) -> None:
        self._log.write_bytes(b"")
        delay_s = str(self._scale.step_delay_s)
        self._trainer = self._train(self._losses, "--socket", str(self._socket), "--step-delay-s", delay_s)

    def _start_daemon(self) -> None:
        with (self._root / "daemon.log").open("ab") as log:
            command = [sys.executable, "-m", "tierd", "--config", str(self._config), "serve"]
            self._daemon = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self._wait(self._socket.is_socket, "the daemon to listen")

    def _tierd(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "tierd", "--config", str(self._config), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        if done.returncode:
            raise TierdError(f"run the demo: tierd {' '.join(arguments)} ended with {done.returncode}: {done.stderr}")
        return done.stdout

    def _running(self, process: subprocess.Popen[bytes] | None) -> subprocess.Popen[bytes]:
        if process is None or process.poll() is not None:
            raise TierdError("run the demo: a process ended too early", hint=f"see {self._log}")
        return process

    def _is_running(self, process: subprocess.Popen[bytes] | None) -> bool:
        return process is not None and process.poll() is None

    # ── looking ──

    def _last_step(self) -> int:
        """The last step whose loss the trainer has written whole."""
        if not self._losses.exists():
            return 0
        lines = self._losses.read_bytes().rpartition(b"\n")[0].splitlines()
        return json.loads(lines[-1])["step"] if lines else 0

    def _newest_row(self, tier: str) -> dict[str, Any]:
        """The newest checkpoint of a tier, read from its directory."""
        rows = json.loads(self._tierd("ls", str(self._root / tier), "--json"))
        return rows[0] if rows else {"step": 0, "generation": 0}

    def _newest(self, tier: str) -> int:
        return self._newest_row(tier)["step"]

    def _wait_step(self, step: int) -> None:
        self._wait(lambda: self._last_step() >= step, f"step {step}", needs_trainer=True)

    def _wait_resumed(self) -> tuple[int, str]:
        """(step, tier) that the trainer says it has resumed from."""

        def resumed() -> list[str]:
            lines = self._log.read_text(errors="replace").splitlines()
            return next((line.split() for line in lines if line.startswith("resumed at step ")), [])

        self._wait(lambda: bool(resumed()), "the trainer to resume", needs_trainer=True)
        words = resumed()
        return int(words[3]), words[5]

    def _wait(self, is_so: Callable[[], bool], what: str, *, needs_trainer: bool = False) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not is_so():
            if needs_trainer and not self._is_running(self._trainer):
                text = self._log.read_text(errors="replace")[-2000:]
                raise TierdError(f"run the demo: the trainer ended while waiting for {what}; it said:\n{text}")
            if time.monotonic() > deadline_s:
                raise TierdError(f"run the demo: waited {DEADLINE_S:.0f} s for {what}")
            time.sleep(0.02)

    # ── the proof ──

    def _table(self, recoveries: list[Recovery]) -> None:
        table(
            ["EVENT", "RECOVERED FROM", "AT STEP", "WORK LOST", "SECONDS", "VERIFIED"],
            [
                [one.event, one.tier, str(one.step), f"{one.lost_steps} steps", f"{one.seconds:.1f}", one.verified]
                for one in recoveries
            ],
            right=["AT STEP", "WORK LOST", "SECONDS"],
        )

    def _compare(self, undisturbed: Path) -> int:
        expected, found = undisturbed.read_bytes(), self._losses.read_bytes()
        lines = len(expected.splitlines())
        if expected == found and lines == self._scale.steps:
            print_result(f"\nloss curves identical: {lines} steps, bit for bit")
            return 0
        pairs = zip(expected.splitlines(), found.splitlines(), strict=False)
        first = next(
            (index for index, (a, b) in enumerate(pairs, 1) if a != b), min(lines, len(found.splitlines())) + 1
        )
        print_note(f"loss curves differ from step {first} on: {undisturbed} and {self._losses}")
        return 1
