"""One daemon per directory: an flock on `.tierd.lock` below its root.

The kernel releases the lock when its holder dies, so there is no stale lock to clear. The content of the file
describes the holder, for messages and for the CLI, which reads the daemon's address there.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from tierd.access import PRIVATE, Access
from tierd.errors import UNDECODABLE, LockHeld, TierUnreachable
from tierd.format import layout
from tierd.peer import process_state
from tierd.tiers.tree import make_folder

log = logging.getLogger("tierd")

_DESCRIPTION_BYTES_MAX = 4096
DEAD_HOLDER_S, POLL_S = 5.0, 0.02  # how long a lock is waited for whose holder is dead


class LockHolder(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the holder describes itself in the lock file. `socket`, `listen`: where the daemon answers trainers, and
    commands over HTTP. `pid`: 0 where the file cannot be read."""

    pid: int = 0
    node: str = ""
    socket: str = ""
    listen: str = ""

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in msgspec.to_builtins(self).items()) or "another process"


class Lock(AbstractContextManager["Lock"]):
    """The lock of a directory, which is made where missing. Held until `release`, or the death of this process.

    `holder`: describes this process, without its id. `access`: of the directory. The file is the user's alone
    in any case: whoever can open it for reading can hold its lock. Raises LockHeld, naming the holder, when another
    process has the lock; TierUnreachable when it cannot be taken.
    """

    def __init__(self, root: Path, holder: LockHolder | None = None, *, access: Access = PRIVATE) -> None:
        path = self._path = root / layout.LOCK
        self._access = access
        self._description = holder or LockHolder()
        try:
            make_folder(root, access)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            self._keep_others_out(root)
        except OSError as error:
            hint = "it must be in a directory that the daemon's user can make and write: check hot.path"
            raise TierUnreachable(f"lock {path}: {error.strerror}", hint=hint) from error
        try:
            self._take()
            self.describe()
        except BlockingIOError as error:
            other = self._holder()
            self.release()
            hint = "stop that process first, or use another directory; docs/RUNBOOK.md#lock-held"
            raise LockHeld(f"lock {path}: held by {other}", hint=hint) from error
        except OSError as error:
            self.release()
            raise TierUnreachable(
                f"lock {path}: {error.strerror}", hint="does the filesystem support flock?"
            ) from error

    def _take(self) -> None:
        """A holder that was just killed was perhaps starting a process, which has the lock until it runs its program.
        Raises BlockingIOError."""
        deadline_s = time.monotonic() + DEAD_HOLDER_S
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline_s or not _has_died(self._holder().pid):
                    raise
            time.sleep(POLL_S)

    def _holder(self) -> LockHolder:
        return _decoded(lambda: os.pread(self._fd, _DESCRIPTION_BYTES_MAX, 0))

    def _keep_others_out(self, root: Path) -> None:
        stat_result = os.fstat(self._fd)
        if stat_result.st_uid not in (os.geteuid(), root.stat().st_uid):
            os.close(self._fd)
            raise TierUnreachable(
                f"lock {self._path}: the file belongs to uid {stat_result.st_uid}",
                hint="that user could hold the lock: delete the file, and take from others the right to write there",
            )
        if stat.S_IMODE(stat_result.st_mode) & 0o077:  # an earlier version made it so
            os.fchmod(self._fd, 0o600)

    def describe(self, *, listen: str = "") -> None:
        """Write the description of the holder, with the address where it listens. On a full disk there is none: the
        lock does not depend on it."""
        holder, node = self._description, self._description.node or os.uname().nodename
        self._description = msgspec.structs.replace(holder, pid=os.getpid(), node=node, listen=listen or holder.listen)
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, msgspec.json.encode(self._description) + b"\n", 0)
        except OSError as error:
            log.warning("describe this daemon in %s: %s; commands do not find it there", self._path, error.strerror)

    def renew(self) -> None:
        """Take the lock again if the directory was deleted and made anew meanwhile: the former file protects nothing.

        Raises as the constructor; LockHeld when another process was faster.
        """
        try:
            is_same = os.path.samestat(self._path.stat(), os.fstat(self._fd))
        except FileNotFoundError:
            is_same = not self._path.parent.is_dir()  # without a directory no other daemon can be there either
        except OSError as error:
            raise TierUnreachable(f"check {self._path}: {error.strerror}") from error
        if not is_same:
            replacement = Lock(self._path.parent, self._description, access=self._access)
            os.close(self._fd)
            self._fd = replacement._fd

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __exit__(self, *error: object) -> None:
        self.release()


def locked_by(root: Path) -> tuple[int, str] | None:
    """The process on this machine that holds the lock of the directory, and its state as `ps` has it, such as "T". None
    where no process is seen to hold it. Does not touch the lock: a daemon that starts now must get it."""
    with contextlib.suppress(OSError, ValueError):
        pid = read_holder(root).pid
        inode = (root / layout.LOCK).stat().st_ino
        # ID: FLOCK ADVISORY WRITE PID MAJOR:MINOR:INODE START END, proc_locks(5); devices differ on btrfs.
        held = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        if any(words[-4] == str(pid) and words[-3].rpartition(":")[2] == str(inode) for words in held):
            state = process_state(pid)
            return None if state is None else (pid, state)
    return None


def read_holder(root: Path) -> LockHolder:
    """As the holder of the directory's lock has described itself, also if it has released the lock since."""
    return _decoded((root / layout.LOCK).read_bytes)


def _decoded(read: Callable[[], bytes]) -> LockHolder:
    try:
        return msgspec.json.decode(read()[:_DESCRIPTION_BYTES_MAX], type=LockHolder)
    except (OSError, *UNDECODABLE):
        return LockHolder()


def _has_died(pid: int) -> bool:
    """Whether there is no such process. One of another machine or container seems to have died, too: then its lock is
    waited for in vain, for a moment."""
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return False
