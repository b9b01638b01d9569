"""What the demos have in common: real processes that are killed, a training with a loss curve, and its comparison."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tierd.cli.console import print_note, print_result
from tierd.errors import BadConfig, TargetNotEmpty, TierdError
from tierd.format.ids import Run

# -P: modules in the current directory do not shadow installed ones.
PYTHON = (sys.executable, "-P", "-m")
RUN = Run("demo")
TRAINER = "tierd_client.examples.train_gpt"
DEADLINE_S = 600.0  # for each wait


def make_root(directory: str | None) -> Path:
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


class DemoRun:
    """A training with tierd below `root`. `steps`: its length. `config`: of a daemon."""

    def __init__(self, root: Path, config: Path, steps: int) -> None:
        self._root = root
        self._config = config
        self._steps = steps
        self._losses = root / "loss.jsonl"
        # The user's TIERD_ settings are for the user's own daemon and runs.
        self._environ = {name: value for name, value in os.environ.items() if not name.startswith("TIERD_")}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}  # the last of each name

    def end(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    # ── processes ──

    def _start(self, name: str, *command: str, **environ: str) -> None:
        """Start a process whose output is appended to <name>.log."""
        with self._log_of(name).open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [*PYTHON, *command], stdout=log, stderr=log, stdin=subprocess.DEVNULL, env={**self._environ, **environ}
            )

    def _log_of(self, name: str) -> Path:
        return self._root / f"{name}.log"

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

    def _wait_step(self, step: int, *trainers: str) -> None:
        self._wait(lambda: self._last_step() >= step, f"step {step}", *trainers)

    def _wait_resumed(self, trainer: str) -> tuple[int, str]:
        """(step, tier) that the trainer resumed from, from its log."""

        def resumed() -> list[str]:
            lines = self._log_of(trainer).read_text(errors="replace").splitlines()
            return next((line.split() for line in lines if line.startswith("resumed at step ")), [])

        self._wait(lambda: bool(resumed()), "the trainer to resume", trainer)
        words = resumed()
        return int(words[3]), words[5]

    def _wait_ended(self, trainer: str, what: str) -> None:
        self._wait(lambda: not self._is_running(trainer), what)
        if self._processes[trainer].returncode:
            raise self._trainer_failed(trainer, what)

    def _wait(self, condition: Callable[[], bool], what: str, *trainers: str) -> None:
        """`trainers`: that must be running meanwhile."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            for trainer in trainers:
                if not self._is_running(trainer) and not condition():
                    raise self._trainer_failed(trainer, what)
            if time.monotonic() > deadline_s:
                raise TierdError(
                    f"run the demo: waited {DEADLINE_S:.0f} s for {what}",
                    hint=f"is the machine busy? --fast trains a smaller model; the logs are in {self._root}",
                )
            time.sleep(0.02)

    def _trainer_failed(self, trainer: str, what: str) -> TierdError:
        print_note(*self._log_of(trainer).read_text(errors="replace")[-2000:].splitlines())
        return TierdError(f"run the demo: the {trainer} ended while the demo waited for {what}; its log is above")

    def _tierd(self, *arguments: str) -> Any:
        """What a command prints with --json."""
        result = subprocess.run(
            [*PYTHON, "tierd", "--config", str(self._config), *arguments, "--json"],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
            env=self._environ,
        )
        if result.returncode:
            raise TierdError(
                f"run the demo: tierd {' '.join(arguments)} ended with {result.returncode}: {result.stderr}"
            )
        return json.loads(result.stdout)

    def _newest(self, directory: Path) -> dict[str, Any]:
        """The newest checkpoint of a tier, as `tierd ls` lists its directory."""
        rows = self._tierd("ls", str(directory))
        return rows[0] if rows else {"step": 0, "generation": 0}

    def _compare(self, undisturbed: Path) -> int:
        expected, actual = (path.read_bytes().splitlines(keepends=True) for path in (undisturbed, self._losses))
        if expected == actual and len(expected) == self._steps:
            print_result("", f"loss curves identical: {len(expected)} steps, bit for bit")
            return 0
        lines = enumerate(zip_longest(expected, actual), 1)
        first = next((number for number, (one, other) in lines if one != other), len(expected) + 1)
        print_note(f"loss curves differ from step {first} on: {undisturbed} and {self._losses}")
        return 1


def event_row(event: str, tier: str, step: int, lost_steps: int, started_s: float, verified: str) -> list[str]:
    """`verified`: how the restored bytes were checked."""
    return [event, tier, str(step), f"{lost_steps} steps", f"{time.monotonic() - started_s:.1f}", verified]
