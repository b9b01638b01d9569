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
POLL_MAX_S = 0.1


def wait_until(condition: Callable[[], T], what: str = "the condition", timeout_s: float = DEADLINE_S) -> T:
    """Polls until `condition` returns a true value, and returns that value.

    Sleeps longer after a condition that took longer, such as a request to a daemon: else the polls of some tests would
    take the processors from the processes that all of them wait for.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        began_s = time.monotonic()
        if result := condition():
            return result
        now_s = time.monotonic()
        assert now_s < deadline_s, f"waited {timeout_s:g} s for {what}"
        time.sleep(min(max(POLL_S, 2 * (now_s - began_s)), POLL_MAX_S))
