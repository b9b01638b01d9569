"""Checkpoints as other programs lay them out, and the comparison of two folders: paths, bytes, modes, links, times."""

from __future__ import annotations

import os
import random
import stat
from pathlib import Path


def write(path: Path, size_bytes: int = 3000, *, mode: int = 0o644) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(random.Random(str(path)).randbytes(size_bytes))
    path.chmod(mode)
    return path


def make_folder(folder: Path) -> Path:
    """One with everything that a checkpoint can hold."""
    write(folder / ".metadata", 700, mode=0o600)
    write(folder / "__0_0.distcp", 70_000)
    write(folder / "global_step5/zero pp=rank_0 model.pt", 9000, mode=0o444)
    write(folder / "manifest.json", 10)
    write(folder / "healthy.json", 10)
    write(folder / "model.partial", 5)
    write(folder / "naïve", 0)
    write(folder / "script.sh", 5, mode=0o755)
    (folder / "empty/inner").mkdir(parents=True)
    (folder / "locked").mkdir()
    write(folder / "locked/a", 20)
    (folder / "locked").chmod(0o555)
    (folder / "latest").symlink_to("global_step5")
    (folder / "global_step5/up").symlink_to("../.metadata")
    folder.chmod(0o750)
    return folder


def contents(folder: Path) -> dict[str, tuple[int, bytes, int]]:
    """By path: mode, the bytes or the target, time of modification of a file."""
    found: dict[str, tuple[int, bytes, int]] = {"": (folder.stat().st_mode, b"", 0)}
    for path in sorted(folder.rglob("*")):
        about = path.lstat()
        if stat.S_ISLNK(about.st_mode):
            found[str(path.relative_to(folder))] = (stat.S_IFLNK, os.readlink(path).encode(), 0)
        elif stat.S_ISREG(about.st_mode):
            found[str(path.relative_to(folder))] = (about.st_mode, path.read_bytes(), about.st_mtime_ns)
        else:
            found[str(path.relative_to(folder))] = (about.st_mode, b"", 0)
    return found
