"""A directory or file that appears whole or not at all: built in `<target>.partial`, moved in place by one rename.

Killed at any instant, it leaves at most `<target>.partial`, which nothing takes for a checkpoint; the next attempt
removes what it cannot use. A target with any content is refused, and so is a second attempt while the first one runs.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Container, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierd.errors import BadConfig, Full, LockHeld, TargetNotEmpty, TierdError
from tierd.format.layout import PARTIAL_SUFFIX
from tierd.tiers.tree import closing_fd, fsync_path, make_folder

_MARK = ".tierd-restore"  # marks a folder as made by tierd
_MARGIN_BYTES = 8 << 20  # for directories, markers and the filesystem's own needs


@dataclass(slots=True)
class AtomicOutput:
    """`partial`: the folder to build in. `is_worth_keeping`: set it to keep the folder for the next attempt when this
    one fails."""

    target: Path
    partial: Path
    is_published: bool = False
    is_worth_keeping: bool = False

    @property
    def taken_bytes(self) -> int:
        """The disk space that `partial` uses already."""
        return sum(path.stat().st_blocks * 512 for path in self.partial.rglob("*") if path.is_file())

    def check_room(self, size_bytes: int) -> None:
        """Raises Full when `partial` cannot grow to `size_bytes`."""
        free = shutil.disk_usage(self.target.parent).free
        needed = size_bytes - self.taken_bytes + _MARGIN_BYTES
        if free < needed:
            message = f"write into {self.target}: {needed} bytes are needed, {free} are free"
            raise Full(message, hint="free space there, or name another disk")

    def publish(self, built: Path) -> None:
        """Moves `built`, a durable file or folder below `partial`, to the target. Durable on return."""
        os.rename(built, self.target)
        self.is_published = True
        fsync_path(self.target.parent.resolve())  # without it the rename itself may be lost on power failure


def make_durable(built: Path) -> None:
    """Fsyncs a file, or a folder and all below it, that another program has written."""
    for path in [*(sorted(built.rglob("*"), reverse=True) if built.is_dir() else ()), built]:
        fsync_path(path)


@contextmanager
def atomic_output(target: Path, *, size_bytes: int, keep: Container[str] = ()) -> Generator[AtomicOutput, Any]:
    """Claims `target` within the block. Raises TargetNotEmpty, Full, LockHeld or BadConfig.

    `keep`: paths below `partial` that an earlier attempt may have left; the disk space they use counts as available.
    """
    output = AtomicOutput(target, target.with_name(target.name + PARTIAL_SUFFIX))
    made: list[Path] = []  # the parents that were missing, innermost first
    try:
        check_target(target)
        made = [path for path in target.parents if not path.exists()]
        make_folder(target.parent)
        with _claimed(output):
            _clear(output.partial, keep)
            output.check_room(size_bytes)
            yield output
    except OSError as error:
        raise _translated(error, target) from error
    finally:
        if not output.is_published:
            for parent in made:
                with contextlib.suppress(OSError):
                    parent.rmdir()


def check_target(target: Path) -> None:
    """Raises TargetNotEmpty when there is anything at the target but an empty directory."""
    if not target.exists() and not target.is_symlink():
        return
    if not target.is_dir():
        raise TargetNotEmpty(f"write into {target}: it exists and is no directory", hint="name a new directory")
    if target.is_mount():
        raise BadConfig(f"write into {target}: it is a mount point", hint=f"name a folder in it: {target / 'restored'}")
    if entries := sorted(path.name for path in target.iterdir()):
        shown = ", ".join(entries[:3]) + (", …" if len(entries) > 3 else "")
        raise TargetNotEmpty(f"write into {target}: it holds {shown}", hint="name a new or empty directory")


@contextmanager
def _claimed(output: AtomicOutput) -> Generator[None, Any]:
    """Locks `partial`, and removes it at the end unless it is worth keeping. The lock ends with its process."""
    partial = output.partial
    partial.mkdir(exist_ok=True)
    with closing_fd(os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = partial.exists() and os.path.samestat(os.fstat(descriptor), partial.stat())
        except BlockingIOError:
            is_ours = False
        if not is_ours:
            raise LockHeld(f"write into {partial}: another process is writing there", hint="wait for it, or stop it")
        entries = os.listdir(partial)
        if entries and _MARK not in entries:
            raise TargetNotEmpty(f"write into {partial}: tierd did not make it", hint="move or delete it")
        try:
            (partial / _MARK).touch()
            yield
        finally:
            if output.is_published or not output.is_worth_keeping:
                _clear(partial, ())
                (partial / _MARK).unlink(missing_ok=True)  # last: killed before this, the rest is still known as ours
                partial.rmdir()


def _clear(partial: Path, keep: Container[str]) -> None:
    """Removes everything but the mark and the files to keep."""
    for folder, folders, files in os.walk(partial, topdown=False):
        for name in (*files, *folders):
            path = Path(folder, name)
            key = path.relative_to(partial).as_posix()
            if path.is_symlink() or not path.is_dir():
                if key != _MARK and (key not in keep or path.is_symlink()):
                    path.unlink()
            elif not os.listdir(path):
                path.rmdir()


def _translated(error: OSError, target: Path) -> TierdError:
    message = f"write into {target}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Full(message, hint="free space there, or name another disk")
    if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
        return TargetNotEmpty(message, hint="another process wrote there meanwhile")
    return TierdError(message, hint="check the path and its permissions")
