"""A real ext4 file system of 64 MiB in a file, mounted through a loop device. Tests that need it skip without root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SIZE_BYTES = 64 << 20
OPTIONS = "loop,commit=600"  # the journal is written when something is synced, and not by a timer


def make_image(path: Path) -> None:
    """Skips the test where no ext4 can be made or mounted."""
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("a loop device takes root, and mkfs.ext4")
    with path.open("wb") as file:
        file.truncate(SIZE_BYTES)
    run("mkfs.ext4", "-q", "-F", str(path))


@contextmanager
def mounted(image: Path, at: Path) -> Iterator[Path]:
    at.mkdir(exist_ok=True)
    try:
        run("mount", "-o", OPTIONS, str(image), str(at))
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no loop device can be mounted: {error.stderr.strip()}")
    try:
        yield at
    finally:
        run("umount", str(at))


def copy_image(image: Path, to: Path) -> None:
    """What the file system has sent to its device by now: what a loss of power leaves."""
    run("cp", "--sparse=always", str(image), str(to))


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
