"""Trainings of a framework as processes of their own, forked from one that has imported it once.

The script of a framework has a `main(options)`, which writes lines of JSON with `write`. It returns its modules, which
stay alive until the process exits: torch can deadlock when the last reference to a DistributedDataParallel is also the
last one to its process group, whose destructor joins a thread that may wait for the GIL.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support.processes import ForkedProcess, context
from tests.support.waiting import DEADLINE_S


class Forks:
    """Runs `main(options)` of a module, in one process or in several ranks. A name without a dot is in this folder."""

    def __init__(self, script: str, root: Path) -> None:
        self.root = root
        self._pipe, there = context.Pipe()
        self._server = ForkedProcess(_serve, script, there)
        there.close()

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._server.kill()
        self._server.wait()

    def run(self, name: str, *, ranks: int = 1, **options: Any) -> Done:
        """Returns when all ranks have ended. Runs of the same `name` append to the same files."""
        files = [self.root / f"{name}-{rank}.jsonl" for rank in range(ranks)]
        before = [len(read(file)) for file in files]
        errors = self.root / f"{name}.stderr"
        port = str(free_port()) if ranks > 1 else ""
        members = [
            {"options": {**options, "lines": str(file)}, "environ": launched(rank, ranks, port), "stderr": str(errors)}
            for rank, file in enumerate(files)
        ]
        self._pipe.send(members)
        assert self._pipe.poll(DEADLINE_S), f"{name} does not end: {errors.read_text()}"
        codes = self._pipe.recv()
        lines = [read(file)[count:] for file, count in zip(files, before, strict=True)]
        return Done(codes, lines, errors.read_text())


class Done:
    """`codes`: by rank, negative for a signal. `lines`: by rank, those that it wrote. `stderr`: of all ranks."""

    def __init__(self, codes: list[int], lines: list[list[dict[str, Any]]], stderr: str) -> None:
        self.codes = codes
        self.lines = lines
        self.stderr = stderr

    @property
    def resumed(self) -> int:
        return self.lines[0][0]["resumed"]

    @property
    def result(self) -> dict[str, Any]:
        assert set(self.codes) == {0}, self.stderr
        return self.lines[0][-1]

    def steps(self, first: int, last: int = sys.maxsize) -> list[list[dict[str, Any]]]:
        """The lines about the steps from `first` to `last`, by rank."""
        return [[line for line in lines if first <= line.get("step", -1) <= last] for lines in self.lines]


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def write(lines: str, **fields: Any) -> None:
    with open(lines, "a", encoding="utf-8") as file:
        file.write(json.dumps(fields) + "\n")


def launched(rank: int, ranks: int, port: str) -> dict[str, str]:
    """The environment that torchrun gives to a rank."""
    if ranks == 1:
        return {}
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }


def free_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return int(unused.getsockname()[1])


_kept: list[object] = []


def _serve(script: str, pipe: Connection) -> None:
    """Forks the ranks of each run and sends their exit codes when all have ended."""
    main = importlib.import_module(script if "." in script else f"tests.support.{script}").main
    while True:
        try:
            members = pipe.recv()
        except EOFError:
            return
        pids = [_fork(main, member) for member in members]
        pipe.send([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])


def _fork(main: Callable[[dict[str, Any]], object], member: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.dup2(os.open(member["stderr"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
        os.dup2(2, 1)
        os.environ.update(member["environ"])
        _kept.append(main(member["options"]))
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
