"""What appears whole or not at all, a directory or a file: built in `<target>.partial`, put in place by one rename.

Killed at any instant it leaves at most `<target>.partial`, which nothing takes for a checkpoint. The next attempt
removes of it what it does not ask to keep. Refuses a target that holds anything, and a second attempt while the first
one still runs.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Container, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tierd.errors import BadConfig, Full, LockHeld, TargetNotEmpty, TierdError
from tierd.format.layout import PARTIAL_SUFFIX

_MARK = ".tierd-restore"  # tells a leftover of ours from somebody's folder that happens to have this name
_ROOM_MARGIN_BYTES = 8 << 20  # for directories, markers and the file system's own needs


class AtomicOutput:
    """`partial` is the folder to build in. Nothing is seen at `target` before `publish`. `is_worth_keeping`: set it to
    leave what is built for the next attempt, should this one break off."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.partial = target.with_name(target.name + PARTIAL_SUFFIX)
        self.is_published = False
        self.is_worth_keeping = False

    @property
    def taken_bytes(self) -> int:
        """The room that `partial` takes already."""
        return sum(one.stat().st_blocks * 512 for one in self.partial.rglob("*") if one.is_file())

    def check_room(self, size_bytes: int) -> None:
        """Raises Full when `partial` cannot grow to `size_bytes`."""
        free = shutil.disk_usage(self.target.parent).free
        needed = size_bytes - self.taken_bytes + _ROOM_MARGIN_BYTES
        if free < needed:
            raise Full(
                f"write into {self.target}: {needed} bytes are needed, {free} are free",
                hint="make room, or name another disk",
            )

    def publish(self, built: Path) -> None:
        """Puts `built`, a durable file or folder below `partial`, at the target. Durable on return."""
        os.rename(built, self.target)
        self.is_published = True
        descriptor = os.open(self.target.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)  # without it the rename itself may be lost on power failure
        finally:
            os.close(descriptor)


def make_durable(built: Path) -> None:
    """What another program has written there, a file or a folder with all below it, outlives a power failure."""
    for one in [*(sorted(built.rglob("*"), reverse=True) if built.is_dir() else ()), built]:
        descriptor = os.open(one, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def atomic_output(target: Path, *, size_bytes: int, keep: Container[str] = ()) -> Generator[AtomicOutput, Any]:
    """Claims `target` for the length of the block. Raises TargetNotEmpty, Full, LockHeld or BadConfig.

    `keep`: paths below `partial` that may stay from an earlier attempt; the room they take counts as there.
    """
    found = AtomicOutput(target)
    made: list[Path] = []
    try:
        check_target(target)
        made = _make_parents(target.parent)
        with _claimed(found):
            _clear(found.partial, keep)
            found.check_room(size_bytes)
            yield found
    except OSError as error:
        raise _explained(error, target) from error
    finally:
        if not found.is_published:
            for parent in made:
                with contextlib.suppress(OSError):
                    parent.rmdir()


def check_target(target: Path) -> None:
    """Raises TargetNotEmpty when there is anything at the target but an empty directory."""
    if not target.exists() and not target.is_symlink():
        return
    if not target.is_dir():
        raise TargetNotEmpty(f"write into {target}: it is there and is no directory", hint="name a new directory")
    if target.is_mount():
        raise BadConfig(f"write into {target}: it is a mount point", hint=f"name a folder in it: {target / 'restored'}")
    if entries := sorted(one.name for one in target.iterdir()):
        shown = ", ".join(entries[:3]) + (", …" if len(entries) > 3 else "")
        raise TargetNotEmpty(f"write into {target}: it holds {shown}", hint="name a new or empty directory")


def _make_parents(parent: Path) -> list[Path]:
    """The directories that had to be made, innermost first."""
    missing = [one for one in (parent, *parent.parents) if not one.exists()]
    parent.mkdir(parents=True, exist_ok=True)
    return missing


@contextmanager
def _claimed(found: AtomicOutput) -> Generator[None, Any]:
    """`partial` is ours alone, removed at the end unless it is worth keeping. A dead process has no claim."""
    partial = found.partial
    partial.mkdir(exist_ok=True)
    descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = partial.exists() and os.path.samestat(os.fstat(descriptor), partial.stat())
        except BlockingIOError:
            is_ours = False
        if not is_ours:
            raise LockHeld(f"write into {partial}: another one is at work there", hint="wait for it, or stop it")
        entries = os.listdir(partial)
        if entries and _MARK not in entries:
            raise TargetNotEmpty(f"write through {partial}: it is there and not ours", hint="move it out of the way")
        try:
            (partial / _MARK).touch()
            yield
        finally:
            if found.is_published or not found.is_worth_keeping:
                _clear(partial, ())
                (partial / _MARK).unlink(missing_ok=True)  # last: killed here, the rest is still known to be ours
                partial.rmdir()
    finally:
        os.close(descriptor)


def _clear(partial: Path, keep: Container[str]) -> None:
    """Removes everything but the mark and what is kept."""
    for folder, folders, files in os.walk(partial, topdown=False):
        for name in (*files, *folders):
            one = Path(folder, name)
            path = one.relative_to(partial).as_posix()
            if one.is_symlink() or not one.is_dir():
                if path != _MARK and (path not in keep or one.is_symlink()):
                    one.unlink()
            elif not os.listdir(one):
                one.rmdir()


def _explained(error: OSError, target: Path) -> TierdError:
    message = f"write into {target}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Full(message, hint="make room, or name another disk")
    if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
        return TargetNotEmpty(message, hint="something else wrote there meanwhile")
    return TierdError(message, hint="check the path and its permissions")
