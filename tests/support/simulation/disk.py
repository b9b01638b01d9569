"""Faults of a disk: while a job of a failing node runs, its system calls on files may fail with EIO or ENOSPC.

The calls are replaced in `os` for the time of a simulation and do what they always do unless `fails` or `is_full` says
otherwise. Not modelled: a write that fails and has written a part, and fsync that forgets what it could not write.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from tierd.tiers import direct_io

READS = ("preadv", "read", "scandir")
WRITES = ("pwrite", "fsync", "rename", "link", "unlink", "mkdir")


@contextmanager
def failing_calls(
    fails: Callable[[], bool],
    *,
    is_full: Callable[[str], bool] = lambda path: False,
    on_no_space: Callable[[], object] = lambda: None,
) -> Iterator[None]:
    """`fails` is asked before each call; `is_full` with the path of a file before space is reserved for it.
    `on_no_space` is called before ENOSPC is raised."""

    def wrap(owner: object, name: str) -> Callable[..., Any]:
        call = getattr(owner, name)

        def wrapped(*args: Any, **options: Any) -> Any:
            has_no_space = name == "fallocate" and is_full(os.readlink(f"/proc/self/fd/{args[0]}"))
            if has_no_space or fails():
                code = errno.ENOSPC if name in ("pwrite", "fallocate", "mkdir") else errno.EIO
                if code == errno.ENOSPC:
                    on_no_space()
                raise OSError(code, os.strerror(code))
            return call(*args, **options)

        return wrapped

    with ExitStack() as patches:
        calls: list[tuple[object, str]] = [(os, name) for name in (*READS, *WRITES)]
        for owner, name in [*calls, (direct_io, "fallocate")]:
            patches.enter_context(patch.object(owner, name, wrap(owner, name)))
        yield
