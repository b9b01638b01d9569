"""A directory or file that appears whole or not at all: built in `<target>.partial`, moved in place by one rename.

Killed at any instant, it leaves at most `<target>.partial`, which nothing takes for a checkpoint; the next attempt
removes what it cannot use. A target with any content is refused, and so is a second attempt while the first one runs.
Others may be able to write beside the target: after `partial` is opened, it is named by its descriptor only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Container, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierd.access import PRIVATE, Access, others_can_write
from tierd.errors import BadConfig, Full, LockHeld, TargetNotEmpty, TierdError
from tierd.format.layout import PARTIAL_SUFFIX
from tierd.format.text import listed
from tierd.tiers.tree import FOLDER, closing_fd, make_folder

_MARK = ".tierd-restore"  # marks a folder as made by tierd
_MARGIN_BYTES = 8 << 20  # for directories, markers and the filesystem's own needs


@dataclass(slots=True, kw_only=True)
class AtomicOutput:
    """`folder`: where to build, by its descriptor, which a child process may inherit. `partial`: its path, for
    messages. `is_worth_keeping`: set it to keep the folder for the next attempt when this one fails."""

    target: Path
    access: Access
    above: int
    """The open parent of the target."""

    descriptor: int = -1
    is_published: bool = False
    is_worth_keeping: bool = False

    @property
    def partial(self) -> Path:
        return self.target.with_name(self.target.name + PARTIAL_SUFFIX)

    @property
    def folder(self) -> Path:
        return Path(f"/proc/self/fd/{self.descriptor}")

    @property
    def is_begun(self) -> bool:
        """Whether `partial` holds anything: at first, what an earlier attempt has left."""
        return any(path.name != _MARK for path in self.folder.rglob("*") if path.is_file())

    @property
    def taken_bytes(self) -> int:
        """The disk space that `partial` uses already."""
        return sum(path.stat().st_blocks * 512 for path in self.folder.rglob("*") if path.is_file())

    def check_room(self, size_bytes: int) -> None:
        """Raises Full when `partial` cannot grow to `size_bytes`."""
        free = shutil.disk_usage(f"/proc/self/fd/{self.above}").free
        needed = size_bytes - self.taken_bytes + _MARGIN_BYTES
        if free < needed:
            message = f"write into {self.target}: {needed} bytes are needed, {free} are free"
            raise Full(message, hint="free space there, or name another disk")

    def publish(self, built: Path) -> None:
        """Moves `built`, a durable file or folder below `folder`, to the target. Durable on return."""
        os.rename(built, self.target.name, dst_dir_fd=self.above)
        self.is_published = True
        os.fsync(self.above)  # without it the rename itself may be lost on power failure


def make_durable(built: Path, access: Access = PRIVATE) -> None:
    """Fsyncs a file, or a folder and all below it, that another program has written, and gives it to the group."""
    for path in [*(sorted(built.rglob("*"), reverse=True) if built.is_dir() else ()), built]:
        with closing_fd(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)) as fd:
            access.share(fd)
            os.fsync(fd)


@contextmanager
def atomic_output(
    target: Path, *, size_bytes: int, keep: Container[str] = (), access: Access = PRIVATE
) -> Generator[AtomicOutput, Any]:
    """Claims `target` within the block. Raises TargetNotEmpty, Full, LockHeld or BadConfig.

    `keep`: paths below `partial` that an earlier attempt may have left; the disk space they use counts as available.
    """
    with ExitStack() as cleanup:
        try:
            check_target(target)
            made = [path for path in target.parents if not path.exists()]
            existing = cleanup.enter_context(closing_fd(os.open(target.parents[len(made)], FOLDER)))
            make_folder(target.parent, access)
            above = cleanup.enter_context(closing_fd(_open_below(existing, [path.name for path in reversed(made)])))
            output = AtomicOutput(target=target, access=access, above=above)
            try:
                with _claimed(output, keep):
                    output.check_room(size_bytes)
                    yield output
            finally:
                if not output.is_published:
                    for path in made:  # the innermost first
                        names = [above.name for above in reversed(path.parents) if above in made]
                        with contextlib.suppress(OSError), closing_fd(_open_below(existing, names)) as parent:
                            os.rmdir(path.name, dir_fd=parent)
        except OSError as error:
            raise output_error(error, target) from error


def check_target(target: Path) -> None:
    """Raises TargetNotEmpty when there is anything at the target but an empty directory."""
    if not target.exists() and not target.is_symlink():
        return
    if not target.is_dir():
        raise TargetNotEmpty(
            f"write into {target}: it exists and is not a directory", hint="name a path where nothing is"
        )
    if target.is_mount():
        raise BadConfig(f"write into {target}: it is a mount point", hint=f"name a folder in it: {target / 'restored'}")
    if entries := sorted(path.name for path in target.iterdir()):
        raise TargetNotEmpty(f"write into {target}: it holds {listed(entries)}", hint="name a new or empty directory")


def clear_abandoned(folder: Path, is_abandoned: Callable[[set[str]], bool]) -> list[str]:
    """Removes what killed processes of this user left in `folder`, and returns the names. `is_abandoned`: called with
    the names of what is in one; False keeps it for a later attempt. What another process is writing now stays."""
    cleared: list[str] = []
    with closing_fd(os.open(folder, FOLDER | os.O_NOFOLLOW)) as above:
        for name in sorted(name for name in os.listdir(above) if name.endswith(PARTIAL_SUFFIX)):
            with contextlib.suppress(OSError), closing_fd(os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=above)) as fd:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                inside = set(os.listdir(fd))
                is_ours = os.fstat(fd).st_uid == os.geteuid() and _MARK in inside
                if is_ours and is_abandoned(inside - {_MARK}):
                    _clear(fd, ())
                    os.unlink(_MARK, dir_fd=fd)
                    os.rmdir(name, dir_fd=above)
                    cleared.append(name)
    return cleared


def _open_below(folder: int, names: list[str]) -> int:
    """A descriptor of the folder with these names below an open one, without following a link."""
    opened = os.dup(folder)
    for name in names:
        with closing_fd(opened):
            opened = os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=opened)
    return opened


@contextmanager
def _claimed(output: AtomicOutput, keep: Container[str]) -> Generator[None, Any]:
    """Opens and locks `partial`, and removes it at the end unless it is worth keeping. The lock ends with its
    process."""
    partial, name = output.partial, output.partial.name
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, output.access.folder_mode, dir_fd=output.above)
    with closing_fd(os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=output.above)) as descriptor:
        stat_result = os.fstat(descriptor)
        if stat_result.st_uid != os.geteuid():
            raise TargetNotEmpty(
                f"write into {partial}: the folder belongs to uid {stat_result.st_uid}, and this command runs as "
                f"{os.geteuid()}",
                hint="delete it, or name a target in a directory where only you can write",
            )
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = os.path.samestat(stat_result, os.stat(name, dir_fd=output.above, follow_symlinks=False))
        except (BlockingIOError, FileNotFoundError):
            is_ours = False
        if not is_ours:
            raise LockHeld(f"write into {partial}: another process is writing there", hint="wait for it, or stop it")
        entries = os.listdir(descriptor)
        if entries and _MARK not in entries:
            raise TargetNotEmpty(f"write into {partial}: tierd did not make it", hint="move or delete it")
        if others_can_write(stat_result):
            keep = ()  # nothing there is known to be ours
        os.fchmod(descriptor, 0o700)
        output.access.share(descriptor)
        output.descriptor = descriptor
        try:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(_MARK, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=descriptor))
            _clear(descriptor, keep)
            yield
        finally:
            if output.is_published or not output.is_worth_keeping:
                _clear(descriptor, ())
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(_MARK, dir_fd=descriptor)  # last: killed before this, the rest is still known as ours
                os.rmdir(name, dir_fd=output.above)


def _clear(partial: int, keep: Container[str]) -> None:
    """Removes everything but the mark and the files to keep."""
    for folder, folders, files, descriptor in os.fwalk(".", topdown=False, dir_fd=partial):
        for name in (*files, *folders):
            key = os.path.normpath(os.path.join(folder, name))
            if stat.S_ISDIR(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode):
                with contextlib.suppress(OSError):  # not empty
                    os.rmdir(name, dir_fd=descriptor)
            elif key != _MARK and key not in keep:
                os.unlink(name, dir_fd=descriptor)


def output_error(error: OSError, target: Path) -> TierdError:
    """What is raised where a file or folder that a command writes cannot be written."""
    message = f"write into {target}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Full(message, hint="free space there, or name another disk")
    if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
        return TargetNotEmpty(message, hint="another process wrote there meanwhile")
    return TierdError(message, hint="check the path and its permissions")
