"""What `tierd doctor` checks of a directory: whether it can be written, its filesystem, its free space.

Also defines `Advice`, the result of every check of `tierd doctor`.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from tierd.access import Access
from tierd.cgroup import MemoryLimit
from tierd.errors import Full, TierdError
from tierd.format import text
from tierd.format.ids import HOT
from tierd.lifecycle.pressure import ROOM_CHECKPOINTS
from tierd.tiers.direct_io import set_direct

Severity = Literal["ok", "note", "warning", "problem"]
"""note: worth knowing, or could not be checked; warning: works, but will cause trouble; problem: does not work."""

_IN_MEMORY = {"tmpfs", "ramfs"}
_OF_A_CONTAINER = {"overlay", "aufs"}
_NETWORK = re.compile(r"nfs4?|cifs|smb3|9p|ceph|lustre|gpfs|beegfs|fuse\..*")
_MOUNTS = Path("/proc/self/mountinfo")


class Advice(msgspec.Struct, frozen=True):
    check: str
    """A stable name of what was checked: `put`, `lifecycle`, `space`."""

    about: str
    """The tier, or config, watch, socket, daemon, machine."""

    verdict: Severity
    message: str
    hint: str = ""
    exit_code: int = 1
    """The exit code of the command when this is a problem."""


def problem_of(check: str, about: str, error: TierdError) -> Advice:
    return Advice(check, about, "problem", error.message, error.hint, error.exit_code)


def probe_directory(about: str, path: Path, *, is_hot: bool) -> Iterator[Advice]:
    """Creates nothing that stays. A directory that does not exist yet is checked at its nearest existing parent."""
    existing = nearest_existing(path)
    if existing != path:
        yield Advice("directory", about, "note", f"{path} does not exist yet; `tierd serve` makes it")
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            yield Advice("directory", about, "ok", f"{existing} can be written")
            if is_hot:
                yield _direct_io(about, existing, file.fileno())
    except OSError as error:
        message = f"{existing} cannot be written: {error.strerror}"
        yield Advice("directory", about, "problem", message, "give it to the daemon's user, or run this as that user")
        return
    if is_hot:
        yield _filesystem(about, existing)


def write_rate(folder: Path, count_bytes: int) -> float:
    """Bytes per second of a temporary file in `folder`, with fsync. Raises OSError."""
    piece = os.urandom(1 << 20)
    with tempfile.TemporaryFile(dir=folder) as file:
        started_s = time.monotonic()
        for _ in range(count_bytes >> 20):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
        return count_bytes / max(time.monotonic() - started_s, 1e-6)


def probe_exposure(about: str, path: Path, access: Access) -> Iterator[Advice]:
    """Whether other users can reach what is in a directory that exists."""
    if path.is_dir() and (problem := access.exposure(path)):
        hint = f"chmod -R go-rwx {path}" if access.group is None else f"chmod -R g-w,o-rwx {path}, and chgrp -R"
        message = f"other users can reach the checkpoints in {path}: {problem}"
        yield Advice("exposure", about, "warning", message, hint)


def probe_space(hot: Path, *, checkpoint_bytes: int, used_bytes: int, keep_last: int, room_bytes: int) -> Advice:
    """Whether `keep_last` checkpoints of this size fit in hot, with `room_bytes` for the next ones."""
    free_bytes = free_bytes_at(hot)
    count = keep_last + ROOM_CHECKPOINTS
    free = f"{text.size(free_bytes)} free"
    if checkpoint_bytes == 0:
        return Advice("space", HOT, "note", f"{free}; space for {count} checkpoints is needed")
    needed_bytes = max(keep_last * checkpoint_bytes + room_bytes - used_bytes, 0)
    message = f"{free}; {text.size(needed_bytes)} more are needed for {count} checkpoints in all"
    if needed_bytes <= free_bytes:
        return Advice("space", HOT, "ok", message)
    hint = "docs/RUNBOOK.md#disk-full"
    if free_bytes < checkpoint_bytes:
        return Advice("space", HOT, "problem", message, hint, Full.exit_code)
    return Advice("space", HOT, "warning", message, hint)


def probe_memory(limit: MemoryLimit | None, *, checkpoint_bytes: int, slots: int) -> Advice:
    """Whether the memory limit here has room for the slots of a run with checkpoints of this size; 0: not known.

    Never worse than a note, because the trainers may run in another container than this command.
    """
    needed_bytes = slots * checkpoint_bytes
    needs = f"{text.size(needed_bytes)} for its slots" if checkpoint_bytes else f"{slots} times its state for slots"
    if limit is None:
        return Advice("memory", "machine", "ok", f"no memory limit here; a run needs {needs}")
    message = f"the memory limit here is {text.size(limit.limit_bytes)} ({limit.path}); a run needs {needs}"
    if 0 < needed_bytes <= limit.limit_bytes:
        return Advice("memory", "machine", "ok", message)
    hint = "the trainers' limit must have room for the slots beside the training: run this in their container too"
    return Advice("memory", "machine", "note", message, hint)


def is_same_disk(path: Path, other: Path) -> bool:
    return os.stat(nearest_existing(path)).st_dev == os.stat(nearest_existing(other)).st_dev


def filesystem_of(path: Path, mounts: str) -> str:
    """The type of the filesystem of `path`. `mounts`: the content of /proc/self/mountinfo."""
    mount_point, kind = "", ""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        if len(fields := before.split()) < 5 or not after:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        # Of several mounts on one point, the last one is visible.
        if path.is_relative_to(point) and len(point) >= len(mount_point):
            mount_point, kind = point, after.split()[0]
    return kind


def _filesystem(about: str, path: Path) -> Advice:
    kind = filesystem_of(path.resolve(), _MOUNTS.read_text(errors="surrogateescape")) if _MOUNTS.exists() else ""
    if kind in _IN_MEMORY:
        what, hint = "memory: it is lost with the machine", "set hot.path to a local disk"
    elif kind in _OF_A_CONTAINER:
        what, hint = "the container's own layer: it is lost with the container", "mount a volume there"
    elif _NETWORK.fullmatch(kind):
        what, hint = "a network filesystem", "set hot.path to a local disk; use a network filesystem for [[cold]]"
    else:
        return Advice("filesystem", about, "ok", f"{path} is on {kind or 'an unknown filesystem'}")
    return Advice("filesystem", about, "warning", f"{path} is on {kind}, which is {what}", hint)


def _direct_io(about: str, path: Path, fd: int) -> Advice:
    if set_direct(fd):
        return Advice("o_direct", about, "ok", f"{path} supports O_DIRECT")
    message = f"{path} does not support O_DIRECT: snapshots are persisted through the page cache, which is slower"
    return Advice("o_direct", about, "warning", message, "ext4 and xfs on a local disk support it")


def nearest_existing(path: Path) -> Path:
    """The path itself, or its nearest parent that exists."""
    return next(candidate for candidate in (path, *path.parents) if candidate.exists())


def free_bytes_at(path: Path) -> int:
    """Of the disk where the path is, or will be made."""
    return shutil.disk_usage(nearest_existing(path)).free
