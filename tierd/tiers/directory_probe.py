"""Looks at a directory as `tierd doctor` does: whether it can be written, what it lies on, how much room there is."""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from pathlib import Path

from tierd.errors import Full
from tierd.tiers.advice import Advice

_IN_MEMORY = {"tmpfs", "ramfs"}
_OF_A_CONTAINER = {"overlay", "aufs"}
_NETWORK = re.compile(r"nfs4?|cifs|smb3|9p|ceph|lustre|gpfs|beegfs|fuse\..*")
_MOUNTS = Path("/proc/self/mountinfo")


def probe_directory(about: str, path: Path, *, is_hot: bool) -> list[Advice]:
    """Leaves nothing behind, and makes nothing: a directory that is not there yet is looked at where it would be."""
    found: list[Advice] = []
    there = _existing(path)
    if there != path:
        message = f"{path} does not exist yet; `tierd serve` makes it"
        found.append(Advice("directory", about, "note", message))
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            found.append(Advice("directory", about, "ok", f"{there} can be written"))
            if is_hot:
                found.append(_direct(about, there, file.fileno()))
    except OSError as error:
        message = f"{there} cannot be written: {error.strerror}"
        hint = "give it to the daemon's user, or run this as that user"
        return [*found, Advice("directory", about, "problem", message, hint)]
    if is_hot:
        found.append(_filesystem(about, there))
    return found


def probe_space(about: str, path: Path, *, checkpoint_bytes: int, used_bytes: int, keep_last: int) -> Advice:
    """Whether there is room for `keep_last` checkpoints of this size, one that comes and one that goes."""
    room = os.statvfs(_existing(path))
    free_bytes = room.f_bavail * room.f_frsize
    needed_bytes = (keep_last + 2) * checkpoint_bytes - used_bytes
    free = f"{free_bytes / 1e9:.3g} GB free"
    if checkpoint_bytes == 0:
        message = f"{free}; room for {keep_last + 2} checkpoints is needed"
        return Advice("space", about, "note", message)
    message = f"{free}; {max(needed_bytes, 0) / 1e9:.3g} GB more are needed for {keep_last + 2} checkpoints in all"
    if needed_bytes <= free_bytes:
        return Advice("space", about, "ok", message)
    hint = "docs/RUNBOOK.md#disk-full"
    if free_bytes < checkpoint_bytes:
        code = Full.exit_code
        return Advice("space", about, "problem", message, hint, code)
    return Advice("space", about, "warning", message, hint)


def is_same_disk(one: Path, other: Path) -> bool:
    return os.stat(_existing(one)).st_dev == os.stat(_existing(other)).st_dev


def filesystem_of(path: Path, mounts: str) -> str:
    """The type of the filesystem that `path` lies on. `mounts`: what /proc/self/mountinfo says."""
    best, kind = "", ""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        if len(fields := before.split()) < 5 or not after:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        # The last of several on one point lies on top.
        if path.is_relative_to(point) and len(point) >= len(best):
            best, kind = point, after.split()[0]
    return kind


def _filesystem(about: str, path: Path) -> Advice:
    kind = filesystem_of(path.resolve(), _MOUNTS.read_text()) if _MOUNTS.exists() else ""
    trouble = {
        kind in _IN_MEMORY: ("memory: it is gone with the machine", "set hot.path to a local disk"),
        kind in _OF_A_CONTAINER: ("the container's own layer: it is gone with the container", "mount a volume there"),
        _NETWORK.fullmatch(kind) is not None: ("a network", "set hot.path to a local disk; a network is for [[cold]]"),
    }
    if True not in trouble:
        message = f"{path} lies on {kind or 'a filesystem that is not told'}"
        return Advice("filesystem", about, "ok", message)
    what, hint = trouble[True]
    message = f"{path} lies on {kind}, which is {what}"
    return Advice("filesystem", about, "warning", message, hint)


def _direct(about: str, path: Path, fd: int) -> Advice:
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        message = f"{path} takes no O_DIRECT: what is persisted goes through the page cache, and is slower"
        hint = "ext4 and xfs on a local disk take it"
        return Advice("o_direct", about, "warning", message, hint)
    return Advice("o_direct", about, "ok", f"{path} takes O_DIRECT")


def _existing(path: Path) -> Path:
    """The path, or the nearest above it that is there."""
    return next(one for one in (path, *path.parents) if one.exists())
