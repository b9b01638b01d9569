"""Fails when a test leaves open descriptors behind."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def no_descriptor_leaks() -> Iterator[None]:
    """Raises AssertionError when the process has descriptors at the end that it did not have at the beginning. Garbage
    that is still to be collected is none."""
    gc.collect()  # garbage of earlier tests, which would close descriptors meanwhile
    before = _open_descriptors()
    yield
    if _open_descriptors().keys() - before.keys():
        gc.collect()
    after = _open_descriptors()
    leaked = {number: file for number, file in after.items() if number not in before}
    assert leaked == {}, f"descriptors leak: {leaked}"


def _open_descriptors() -> dict[int, str]:
    """What is open, by number."""
    found: dict[int, str] = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of this listing
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found
