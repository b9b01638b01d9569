"""Trainings of a framework as processes of their own, forked from one that has imported it: seconds are paid once.

A script for it has a `main(options)`, and ends with `forks.serve(main)`.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.runs import DEADLINE_S, ENVIRONMENT


class Forks:
    """Processes that run `main(options)` of a script in this folder."""

    def __init__(self, script: str, root: Path) -> None:
        self.root = root
        self._server = subprocess.Popen(
            [sys.executable, "-m", f"tests.support.{script}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENVIRONMENT, text=True,
        )  # fmt: skip

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()  # it ends when its input does
        self._server.wait(DEADLINE_S)
        if self._server.stdout is not None:
            self._server.stdout.close()

    def run(self, name: str, *, ranks: int = 1, **options: Any) -> Done:
        """One process, or `ranks` of them; returns when all have ended. Its lines follow those of runs before it."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        files = [self.root / f"{name}-{rank}.jsonl" for rank in range(ranks)]
        before = [len(read(file)) for file in files]
        errors = self.root / f"{name}.stderr"
        port = str(free_port()) if ranks > 1 else ""
        members = [
            {"options": {**options, "lines": str(file)}, "environ": launched(rank, ranks, port), "stderr": str(errors)}
            for rank, file in enumerate(files)
        ]
        self._server.stdin.write(json.dumps(members) + "\n")
        self._server.stdin.flush()
        codes = json.loads(self._server.stdout.readline())
        lines = [read(file)[count:] for file, count in zip(files, before, strict=True)]
        return Done(codes, lines, errors.read_text())


class Done:
    """`codes`: by rank, negative for a signal. `lines`: by rank, what was written. `stderr`: of all."""

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
        """What it wrote about the steps from `first` to `last`, by rank."""
        return [[line for line in lines if first <= line.get("step", -1) <= last] for lines in self.lines]


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def write(lines: str, **what: Any) -> None:
    with open(lines, "a", encoding="utf-8") as file:
        file.write(json.dumps(what) + "\n")


def launched(rank: int, ranks: int, port: str) -> dict[str, str]:
    """What torchrun would say to a rank."""
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
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def serve(main: Callable[[dict[str, Any]], None]) -> None:
    """For each line of members on stdin, fork them all, and write their exit codes when all have ended."""
    for line in sys.stdin:
        pids = [fork(main, member) for member in json.loads(line)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps(codes), flush=True)


def fork(main: Callable[[dict[str, Any]], None], member: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.dup2(os.open(member["stderr"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
        os.dup2(2, 1)  # the answers on stdout are the server's
        os.environ.update(member["environ"])
        main(member["options"])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
