"""A directory whose filesystem stops answering, as a hard-mounted NFS does when its server is gone.

The calls of `os` that name a path at or below it block, in their threads, until the server is back. Then they do what
they always do.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

BY_PATH = ("open", "stat", "lstat", "statvfs", "scandir")


class HungDirectory:
    """`blocked`: the names of the calls that block now, in the order in which they began."""

    def __init__(self, root: Path) -> None:
        self.root = str(root.absolute())
        self.blocked: list[str] = []
        self._is_answering = threading.Event()

    def answer(self) -> None:
        self._is_answering.set()

    def wrap(self, name: str) -> Callable[..., Any]:
        call = getattr(os, name)

        def wrapped(path: Any, *args: Any, **options: Any) -> Any:
            if not self._is_answering.is_set() and self._is_below(path):
                self.blocked.append(name)
                self._is_answering.wait()
                self.blocked.remove(name)
            return call(path, *args, **options)

        return wrapped

    def _is_below(self, path: Any) -> bool:
        text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
        return text == self.root or text.startswith(f"{self.root}/")


@contextmanager
def hung_directory(root: Path, *calls: str) -> Generator[HungDirectory]:
    """`calls`: of `os`, those that block; by default all that take a path."""
    hung = HungDirectory(root)
    with ExitStack() as patches:
        for name in calls or BY_PATH:
            patches.enter_context(patch.object(os, name, hung.wrap(name)))
        try:
            yield hung
        finally:
            hung.answer()
