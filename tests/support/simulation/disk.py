"""Faults of a disk: while a job of a failing node runs, its system calls on files may fail with EIO or ENOSPC.

The calls are replaced in `os` for the time of a simulation and do what they always do unless `fails` says otherwise.
Not modelled: a write that fails and has written a part, and fsync that forgets what it could not write.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

READS = ("preadv", "read", "scandir")
WRITES = ("pwrite", "fsync", "rename", "link", "unlink", "mkdir", "posix_fallocate")


@contextmanager
def failing_calls(fails: Callable[[], bool]) -> Iterator[None]:
    """`fails` is asked before each call."""

    def wrap(name: str) -> Callable[..., Any]:
        call = getattr(os, name)

        def wrapped(*args: Any, **options: Any) -> Any:
            if fails():
                code = errno.ENOSPC if name in ("pwrite", "posix_fallocate", "mkdir") else errno.EIO
                raise OSError(code, os.strerror(code))
            return call(*args, **options)

        return wrapped

    with ExitStack() as patches:
        for name in (*READS, *WRITES):
            patches.enter_context(patch.object(os, name, wrap(name)))
        yield
