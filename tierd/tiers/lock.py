"""One daemon per directory: an flock on `.tierd.lock` below its root.

The kernel drops the lock when its holder dies, however it dies, so there is no stale lock to clear. What the
file says about the holder is for people, for the message, and for the CLI, which finds the daemon's address in it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import msgspec

from tierd.errors import LockHeld, TierUnreachable
from tierd.format import layout


class Lock:
    """Held from construction by `lock` until `release`, or the death of this process."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def describe(self, holder: Mapping[str, object]) -> None:
        """Say anew who holds it: what was only known after the lock was taken."""
        about = {"pid": os.getpid(), "node": os.uname().nodename, **holder}
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, msgspec.json.encode(about) + b"\n", 0)

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Lock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def lock(root: Path, holder: Mapping[str, object] | None = None) -> Lock:
    """Takes the directory, making it where missing. `holder`: more to say of us than process id and node.

    Raises LockHeld, naming the holder, when another process has it; TierUnreachable when it cannot be taken at all.
    """
    path = root / layout.LOCK
    try:
        root.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as error:
        hint = "the daemon's user must be able to write there"
        raise TierUnreachable(f"lock {path}: {error.strerror}", hint=hint) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held = Lock(fd)
        held.describe(holder or {})
    except BlockingIOError as error:
        found = _describe(fd)
        os.close(fd)
        raise LockHeld(f"lock {path}: held by {found}", hint="is a tierd daemon running there already?") from error
    except OSError as error:
        os.close(fd)
        raise TierUnreachable(f"lock {path}: {error.strerror}", hint="does the filesystem know flock?") from error
    return held


def _describe(fd: int) -> str:
    try:
        about = msgspec.json.decode(os.pread(fd, 4096, 0), type=dict[str, str | int | float])
    except (msgspec.DecodeError, OSError):
        return "another process"
    return ", ".join(f"{name} {value}" for name, value in about.items()) or "another process"
