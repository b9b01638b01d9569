"""Waiting for what another process or thread does.

A deadline here only ends a test that hangs: it is generous, so that a busy machine never reaches it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
DEADLINE_S = 120.0
POLL_S = 0.01


def wait_until(condition: Callable[[], T], what: str = "the condition", timeout_s: float = DEADLINE_S) -> T:
    """Polls until `condition` returns a true value, and returns that value."""
    deadline_s = time.monotonic() + timeout_s
    while not (result := condition()):
        assert time.monotonic() < deadline_s, f"waited {timeout_s:g} s for {what}"
        time.sleep(POLL_S)
    return result
