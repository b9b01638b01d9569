"""A small file system of its own, which a test can fill."""

from __future__ import annotations

import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

MIB = 1 << 20


@contextmanager
def small_disk(at: Path, *, size_mib: int) -> Generator[Path]:
    """A tmpfs of this size, mounted at a new folder. Skips the test where mounting is not allowed."""
    at.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "none", str(at)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"mounting a small file system takes root: {done.stderr.strip()}")
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)
