"""Processes forked from a warm server that has imported torch, tierd and boto3.

A new Python needs half a second of CPU to import tierd and two seconds for torch; a fork needs milliseconds. Each
forked process has its own environment, output streams, pid and exit code, so that a test kills the real process.
Each worker of pytest-xdist has a server of its own, which starts with the first process.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support.waiting import DEADLINE_S, wait_until

ROOT = Path(__file__).parents[2]
PYTHON = "TESTS_PYTHON"  # an environment variable: the Python that daemons start their programs with
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'client'}"}

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.support.preloading", "tests.support.preloaded"])


class ForkedProcess:
    """Runs `main(*arguments)` in a forked process, with the part of subprocess.Popen's interface that tests use.

    It exits as a script would: 0, the code of SystemExit, 1 after an exception, or minus the signal that killed it.
    """

    def __init__(self, main: Callable[..., object], *arguments: Any) -> None:
        self._process = context.Process(target=_begin, args=(main, *arguments))
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
            with suppress(ProcessLookupError):  # it has just ended, and the fork server has not said so yet
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _begin(main: Callable[..., object], *arguments: Any) -> None:
    """Calls `main` in a process that starts its own processes as a script does.

    A fork server makes itself the default there: a DataLoader would start one of its own, and each worker import torch.
    """
    multiprocessing.set_start_method(None, force=True)
    main(*arguments)


def run_tierd(arguments: list[str], environ: Mapping[str, str], log: str) -> None:
    """The `tierd` command. Runs in a forked process, with both output streams appended to the file `log`."""
    _redirect(log, log)
    _run_main(arguments, environ)


def _run_main(arguments: list[str], environ: Mapping[str, str]) -> None:
    _become(["tierd", *arguments], environ)
    sys.executable = environ.get(PYTHON, sys.executable)

    from tierd.cli import main

    main()


class Command(ForkedProcess):
    """The `tierd` command in a forked process, with its output in two pipes, as of a subprocess.Popen of text."""

    def __init__(self, arguments: Sequence[str]) -> None:
        with ExitStack() as stack:
            pipes = [context.Pipe(duplex=False) for _ in range(2)]
            for end in (end for pipe in pipes for end in pipe):
                stack.enter_context(end)
            self.stdout, self.stderr = (os.fdopen(os.dup(reader.fileno()), encoding="utf-8") for reader, _ in pipes)
            super().__init__(_run_with_pipes, list(arguments), dict(os.environ), *(writer for _, writer in pipes))

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Waits until it ends; what it has written, and was not read yet."""
        with ThreadPoolExecutor(2) as pool, self.stdout, self.stderr:
            texts = [pool.submit(file.read) for file in (self.stdout, self.stderr)]
            try:
                self.wait(timeout)
            finally:
                self.kill()  # without effect unless it is too late
            stdout, stderr = (text.result() for text in texts)
        return stdout, stderr


def _run_with_pipes(arguments: list[str], environ: Mapping[str, str], stdout: Connection, stderr: Connection) -> None:
    for number, pipe in ((1, stdout), (2, stderr)):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    _run_main(arguments, environ)


class Script(ForkedProcess):
    """A Python script in a forked process. Its output goes to two files in `folder`."""

    def __init__(self, path: Path, arguments: Sequence[str], *, folder: Path, environ: Mapping[str, str]) -> None:
        name = f"{path.stem}-{time.monotonic_ns()}"
        self._stdout, self._stderr = folder / f"{name}.stdout", folder / f"{name}.stderr"
        super().__init__(_run_script, [str(path), *arguments], environ, str(self._stdout), str(self._stderr))

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.wait()

    @property
    def stdout(self) -> str:
        return self._stdout.read_text() if self._stdout.exists() else ""

    @property
    def stderr(self) -> str:
        return self._stderr.read_text() if self._stderr.exists() else ""

    def wait_line(self, begins: str) -> None:
        """Until a line of its output begins with that."""
        wait_until(lambda: f"\n{begins}" in f"\n{self.stdout}" or self.poll() is not None, f"the line {begins!r}")
        assert f"\n{begins}" in f"\n{self.stdout}", self.stderr

    def end(self) -> int:
        """Waits until it ends by itself; its exit code."""
        return self.wait(DEADLINE_S)


def _run_script(argv: list[str], environ: Mapping[str, str], stdout: str, stderr: str) -> None:
    _redirect(stdout, stderr)
    _become(argv, environ)
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except KeyboardInterrupt:  # a Python that Ctrl-C ends is killed by the signal, for its parent to see
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


def _redirect(stdout: str, stderr: str) -> None:
    """Appends the output streams of the forked process to two files."""
    for number, path in ((1, stdout), (2, stderr)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)


def _become(argv: list[str], environ: Mapping[str, str]) -> None:
    """Gives the forked process its own arguments and environment."""
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = argv
