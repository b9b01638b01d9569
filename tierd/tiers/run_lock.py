"""The lock of one run in the hot directory: who holds it numbers and commits the next adopted checkpoint of the run.

`tierd adopt` runs beside daemons and other commands. Without the lock, two of them could take one sequence. It is the
flock of the run's folder, so it ends with its process.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from tierd.errors import LockHeld
from tierd.tiers.pool import ThreadPool
from tierd.tiers.tree import FOLDER, translated

WAIT_S = 60.0  # a holder lists one run and writes one manifest
PAUSE_S = 0.02


@asynccontextmanager
async def run_lock(pool: ThreadPool, folder: Path, *, wait_s: float = WAIT_S) -> AsyncGenerator[None]:
    """Holds the lock of the run with this folder, which exists. Raises LockHeld after `wait_s`, TierUnreachable."""

    def take() -> int | None:
        fd = os.open(folder, FOLDER | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        return fd

    def discard(fd: int | None) -> None:
        if fd is not None:
            os.close(fd)

    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + wait_s
    with translated(f"lock {folder}"):
        while (held := await pool.query(take, discard=discard)) is None:
            if loop.time() > deadline_s:
                hint = "`tierd adopt` holds it while it commits: is one stopped, or is the disk slow?"
                raise LockHeld(f"lock {folder}: another process has held it for {wait_s:.0f} s", hint=hint)
            await asyncio.sleep(PAUSE_S)
    try:
        yield
    finally:
        os.close(held)
