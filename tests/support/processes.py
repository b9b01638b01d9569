"""Processes forked from a warm server that has imported torch, tierd and boto3.

A new Python needs half a second of CPU to import tierd and two seconds for torch; a fork needs milliseconds. Each
forked process has its own environment, standard streams, pid and exit code, so that a test kills the real process.
Each worker of pytest-xdist has a server of its own, which starts with the first process.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'client'}"}

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.support.preloaded"])


class ForkedProcess:
    """Runs `main(*arguments)` in a forked process, with the part of subprocess.Popen's interface that tests use.

    It exits as a script would: 0, the code of SystemExit, 1 after an exception, or minus the signal that killed it.
    """

    def __init__(self, main: Callable[..., object], *arguments: Any) -> None:
        self._process = context.Process(target=main, args=arguments)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_tierd(arguments: list[str], environ: Mapping[str, str], log: str) -> None:
    """The `tierd` command. Runs in a forked process, with both output streams appended to the file `log`."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = ["tierd", *arguments]

    from tierd.cli import main

    main()
