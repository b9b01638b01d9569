"""`tierd demo`: a training run that loses its trainer, its daemon and its disk, one after the other, and continues.

The processes are real and are killed with SIGKILL. At the end the demo compares the loss curve, byte for byte, with
the curve of the same training run without interruptions. It runs from an installed package, in any directory.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tierd.cli.console import print_note, table
from tierd.cli.demo_nodes import NodesDemo
from tierd.cli.demo_run import RUN, TRAINER, DemoRun, event_row, make_root
from tierd.cli.export import check_torch
from tierd.errors import TierdError
from tierd.format import text
from tierd.format.ids import checkpoint_id

EVERY = 5
TRAINER_DIES = 18
PACE = 0.2  # delay of a paced step, as a share of the time in which the daemon starts


@dataclass(frozen=True, slots=True)
class Scale:
    """The length of the run. A snapshot is taken every EVERY steps; each failure happens between two snapshots."""

    steps: int
    model: str
    daemon_dies: int
    disk_dies: int
    is_paced: bool = False
    """Slow the steps of a small model down: a process must start within few of them, on a busy machine too."""


FULL = Scale(steps=80, model="default", daemon_dies=38, disk_dies=63)
FAST = Scale(steps=60, model="tiny", daemon_dies=33, disk_dies=48, is_paced=True)


def demo(
    context: typer.Context,
    directory: Annotated[
        str | None,
        typer.Option(
            "--dir", metavar="DIR", help="Work there and keep it; default: a folder that is kept if the demo fails."
        ),
    ] = None,
    fast: Annotated[bool, typer.Option("--fast", help="A smaller model and fewer steps.")] = False,
    nodes: Annotated[
        bool, typer.Option("--nodes", help="Over three nodes: one is lost with its disk, then all of them.")
    ] = False,
) -> int:
    """Watch a real training run lose its trainer, its daemon and its disk, and go on."""
    check_torch("run the demo", hint="pip install 'tierd[client]'")
    root = make_root(directory)
    # A Unix socket path is at most 107 bytes long, and the path of `root` may be longer.
    sockets = Path(tempfile.mkdtemp(prefix="tierd-demo-"))
    demo = (
        NodesDemo(root, sockets, is_fast=fast) if nodes else _Demo(root, sockets / "tierd.sock", FAST if fast else FULL)
    )
    is_kept = directory is not None
    try:
        code = demo.run()
        is_kept |= code != 0
        return code
    except TierdError:
        is_kept = True  # the logs say why it failed
        raise
    finally:
        demo.end()
        shutil.rmtree(sockets, ignore_errors=True)
        if not is_kept:
            shutil.rmtree(root, ignore_errors=True)


class _Demo(DemoRun):
    def __init__(self, root: Path, socket: Path, scale: Scale) -> None:
        super().__init__(root, root / "tierd.toml", scale.steps)
        self._scale = scale
        self._socket = socket
        self._hot, self._cold = root / "hot", root / "cold"
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
        self._wait_ended("trainer", "the undisturbed training")

        print_note(f"2/5  the same training with tierd: a snapshot every {EVERY} steps")
        self._start_daemon()
        self._start_trainer()
        rows = [self._lose_trainer(), self._lose_daemon(), self._lose_disk()]

        self._wait_ended("trainer", "the training to end")
        headings = ["EVENT", "RECOVERED FROM", "AT STEP", "WORK LOST", "SECONDS", "VERIFIED"]
        table(headings, rows, right=["AT STEP", "WORK LOST", "SECONDS"])
        return self._compare(undisturbed)

    # ── the three failures: each returns its row of the table ──

    def _lose_trainer(self) -> list[str]:
        self._wait_step(TRAINER_DIES, "trainer")
        print_note(f"3/5  step {self._last_step()}: SIGKILL to the trainer")
        started_s = time.monotonic()
        self._kill("trainer")
        reached = self._last_step()
        self._start_trainer()
        step, tier = self._wait_resumed("trainer")
        return event_row("trainer SIGKILLed", tier, step, reached - step, started_s, "every chunk")

    def _lose_daemon(self) -> list[str]:
        self._wait_step(self._scale.daemon_dies, "trainer")
        print_note(f"4/5  step {self._last_step()}: SIGKILL to the daemon, for {EVERY} steps and more")
        started_s = time.monotonic()
        self._kill("daemon")
        died_at = self._last_step()
        # Train past a snapshot, so that one is staged while there is no daemon.
        self._wait_step(died_at + EVERY + 1, "trainer")
        self._start_daemon()
        self._wait(
            lambda: self._newest(self._hot)["step"] > died_at, "the daemon to persist the staged snapshot", "trainer"
        )
        if not self._is_running("trainer"):
            raise TierdError(
                "run the demo: the trainer stopped when the daemon died", hint=f"see {self._log_of('trainer')}"
            )
        return event_row(
            "daemon SIGKILLed", "hot", self._newest(self._hot)["step"], 0, started_s, "trainer never stopped"
        )

    def _lose_disk(self) -> list[str]:
        self._wait_step(self._scale.disk_dies, "trainer")
        # Replication of the last snapshot takes about a second here.
        wanted = self._scale.disk_dies // EVERY * EVERY
        self._wait(
            lambda: self._newest(self._cold)["step"] >= wanted, f"step {wanted} to reach the cold tier", "trainer"
        )
        print_note(
            f"5/5  step {self._last_step()}: SIGKILL to both, and the hot tier is deleted; only the cold tier is left"
        )
        started_s = time.monotonic()
        self._kill("trainer")
        self._kill("daemon")
        reached = self._last_step()
        shutil.rmtree(self._hot)
        # Restored from cold into the hot tier's directory: a cold checkpoint is a valid hot one.
        newest = self._newest(self._cold)
        checkpoint = checkpoint_id(RUN, newest["step"], newest["generation"])
        print_note(f"     $ tierd restore --tier cold --run {RUN} --to hot/{RUN}/{checkpoint.name}")
        options = "--tier", "cold", "--run", RUN, "--to", str(self._hot / str(checkpoint))
        restored = self._tierd("restore", *options)
        self._start_daemon()
        self._start_trainer()
        step, _ = self._wait_resumed("trainer")
        verified = f"{text.size(restored['size_bytes'])}, every chunk"
        return event_row("hot tier deleted", "cold", step, reached - step, started_s, verified)

    # ── processes ──

    def _train(self, losses: Path, *more: str) -> None:
        scale = self._scale
        self._log_of("trainer").write_bytes(b"")
        length = ("--steps", str(scale.steps), "--every", str(EVERY), "--model-size", scale.model)
        self._start("trainer", TRAINER, *length, "--run", RUN, "--loss-file", str(losses), "--device", "cpu", *more)

    def _start_trainer(self) -> None:
        self._train(self._losses, "--socket", str(self._socket), "--step-delay-s", f"{self._step_delay_s:.3f}")

    def _start_daemon(self) -> None:
        started_s = time.monotonic()
        self._start("daemon", "tierd", "--config", str(self._config), "serve")
        self._wait(self._socket.is_socket, "the daemon to listen")
        if self._scale.is_paced and not self._step_delay_s:
            self._step_delay_s = (time.monotonic() - started_s) * PACE
