"""A real daemon for tests: `tierd serve` in a process of its own, on a folder of its own."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from tests.support.processes import ENVIRONMENT, PYTHON, ForkedProcess, run_tierd
from tests.support.waiting import DEADLINE_S, wait_until
from tierd.cli.app import called, make_app
from tierd.failpoints import VARIABLE

EXAMINE = "TIERD_HEALTH_EXAMINE"


class Daemon:
    """One with a hot directory below `root`, and with a cold tier unless `cold` is empty. `with` starts and kills it.

    `cold` holds further lines of the section [[cold]].
    It examines checkpoints if `more` says so, or in a test with the fixture `checkpoints_examined`.
    `more` is appended to the config; its first lines belong to [limits]. `environ` is added to the environment. The
    process is forked, unless `command` says how to start it: the arguments of Python before those of `tierd`.
    """

    def __init__(
        self,
        root: Path,
        *,
        cold: str = 'url = "file://cold"',
        more: str = "",
        environ: dict[str, str] | None = None,
        command: tuple[str, ...] = (),
    ) -> None:
        self.root = root
        self.config = root / "tierd.toml"
        self.socket = str(root / "tierd.sock")
        self.hot = root / "hot"
        self.cold = root / "cold"
        self.process: ForkedProcess | subprocess.Popen[bytes] | None = None
        self._log = root / "not-started.log"
        self._command = command
        self._main: Callable[..., object] = run_tierd
        # No scrub unless a test asks for one: it would repair what the test damages. No examination either: it starts a
        # Python with numpy for each checkpoint. No lower priority than that of the tests, which would all wait for it.
        self._environ = {**ENVIRONMENT, "TIERD_SCRUB_INTERVAL_S": "0", "TIERD_DAEMON_NICE": "0", **(environ or {})}
        if PYTHON in os.environ:
            self._environ.setdefault(PYTHON, os.environ[PYTHON])
        if "[health]" not in more:
            self._environ.setdefault(EXAMINE, os.environ.get(EXAMINE, "false"))
        root.mkdir(parents=True, exist_ok=True)
        cold_tier = f'[[cold]]\nname = "cold"\n{cold}' if cold else ""
        self.config.write_text(
            f"""
            [daemon]
            socket = "tierd.sock"
            listen = "127.0.0.1:0"
            node = "here"
            [hot]
            path = "hot"
            {cold_tier}
            [limits]
            reconcile_interval_s = 1.0
            retry_min_s = 0.05
            retry_max_s = 0.2
            {more}
            """
        )

    def __enter__(self) -> Daemon:
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    # ── the process ──

    def launch(self) -> None:
        """Starts it without waiting."""
        assert self.process is None
        self._log = self.root / f"daemon-{time.monotonic_ns()}.log"
        self._log.touch()
        arguments = ["--config", str(self.config), "serve"]
        if self._command:
            command = [sys.executable, *self._command, *arguments]
            with self._log.open("ab") as log:
                self.process = subprocess.Popen(command, stdout=log, stderr=log, env=self._environ)
        else:
            self.process = ForkedProcess(self._main, arguments, self._environ, str(self._log))

    def start(self) -> None:
        """Starts it and waits until it is ready."""
        self.launch()
        self.wait_log(" serves ")

    def restart_armed(self, failpoints: str) -> None:
        """`failpoints` as in $TIERD_FAILPOINTS; empty: none."""
        self.kill()
        self._environ[VARIABLE] = failpoints
        self.start()

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def wait_exit(self) -> int:
        """Waits until it ends by itself; its exit code."""
        assert self.process is not None
        code = self.process.wait(DEADLINE_S)
        self.process = None
        return code

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait_exit()

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def descriptors(self) -> int:
        """The number of open file descriptors."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def resident_mb(self) -> float:
        """The memory that it has, in MB."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE") / 1e6

    @property
    def log(self) -> str:
        """What it has written to its standard streams since it was last started."""
        return self._log.read_text()

    def wait_log(self, text: str) -> None:
        """Until the log contains `text`."""
        wait_until(lambda: text in self.log or self.process is None or self.process.poll() is not None, repr(text))
        assert text in self.log, f"the daemon ended without {text!r}:\n{self.log}"

    # ── its HTTP API ──

    @property
    def url(self) -> str:
        return next(word for word in self.log.split() if word.startswith("http://"))

    def request(self, path: str) -> tuple[int, bytes, str]:
        """(status, body, content type)"""
        try:
            with urllib.request.urlopen(self.url + path, timeout=DEADLINE_S) as answer:
                return answer.status, answer.read(), answer.headers["Content-Type"]
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read(), error.headers["Content-Type"]

    def get(self, path: str) -> Any:
        """The decoded JSON."""
        return json.loads(self.request(path)[1])

    def status(self) -> Any:
        return self.get("/api/v1/status")

    def metric(self, sample: str) -> float:
        """The value of a sample, by its name and labels; NaN where there is none."""
        lines = self.request("/metrics")[1].decode().splitlines()
        return next((float(line.rpartition(" ")[2]) for line in lines if line.rpartition(" ")[0] == sample), math.nan)

    def steps(self, tier: str, run: str | None = None) -> list[int]:
        """The steps in a tier as the daemon reports them, of one run or of all, oldest first."""
        rows = self.get("/api/v1/checkpoints" + (f"?run={run}" if run else ""))
        return sorted(row["step"] for row in rows if tier in row["tiers"])

    def newest(self, tier: str) -> int:
        return max(self.steps(tier), default=0)

    def wait_attached(self) -> None:
        """Until a trainer is connected."""
        wait_until(lambda: any(run["ranks_attached"] for run in self.status()["runs"]), "a trainer to be attached")

    # ── commands, and files ──

    def tierd(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """A command of the CLI with this config, run in the test's process. Not for threads: one at a time."""
        words = ["--config", str(self.config), *map(str, arguments)]
        result = CliRunner().invoke(make_app(called(words)), words, env=self._environ)
        return subprocess.CompletedProcess(arguments, result.exit_code, result.stdout, result.stderr)

    def run_with(self, main: Callable[..., object]) -> None:
        """What its process runs at the next start instead of `run_tierd`, with the same arguments."""
        self._main = main

    def json(self, *arguments: str | Path) -> Any:
        """The decoded output of a command with --json, which must succeed."""
        done = self.tierd(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def folder(self, step: int, *, run: str = "run", tier: str = "hot") -> Path:
        """The folder of the newest checkpoint of a step."""
        return sorted((self.root / tier / run).glob(f"{step:012d}-g*"))[-1]


def serving(root: Path, **options: Any) -> Daemon:
    """A daemon with a hot tier only, unless `more` adds others."""
    return Daemon(root, cold="", **options)
