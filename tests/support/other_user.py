"""A second user of the machine, for attacks: a process with another user id, where the tests run as root."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ForkedProcess, context
from tests.support.waiting import DEADLINE_S

OTHER_UID = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")


class OtherUser:
    """A process of the other user, in `groups`. `call` runs a function there; it ends with the block."""

    def __init__(self, uid: int = OTHER_UID, groups: Sequence[int] = ()) -> None:
        self._pipe, there = context.Pipe()
        self._process = ForkedProcess(_serve, there, uid, groups)
        there.close()

    def __enter__(self) -> OtherUser:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of the function, which must be at the top of a module. Raises the OSError that it raises."""
        self._pipe.send((function, arguments))
        assert self._pipe.poll(DEADLINE_S), f"no answer from {function.__name__}"
        error, result = self._pipe.recv()
        if error:
            raise OSError(error, os.strerror(error))
        return result


def become(uid: int, groups: Sequence[int] = ()) -> None:
    """Makes this process one of the user, for good."""
    os.setgroups(groups)
    os.setgid(uid)
    os.setuid(uid)


def _serve(pipe: Connection, uid: int, groups: Sequence[int]) -> None:
    become(uid, groups)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((0, function(*arguments)))
        except OSError as error:
            pipe.send((error.errno, None))


@contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that every user can write into: those of pytest are closed to other users."""
    folder = Path(tempfile.mkdtemp(prefix="tierd-open-"))
    folder.chmod(0o777)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
