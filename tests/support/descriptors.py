"""Fails when a test leaves open descriptors behind."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_descriptor_leaks() -> Iterator[None]:
    """Raises AssertionError when the process has descriptors at the end that it did not have at the beginning."""
    gc.collect()  # garbage of earlier tests, which would close descriptors meanwhile
    before = set(os.listdir("/proc/self/fd"))
    yield
    leaked = set(os.listdir("/proc/self/fd")) - before
    assert leaked == set(), f"descriptors leak: {sorted(leaked)}"
