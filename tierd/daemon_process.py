"""What concerns the daemon's process as a whole: its priority, and that it ends in time."""

from __future__ import annotations

import contextlib
import os
import threading


def end_within(seconds: float, *, exit_code: int) -> None:
    """Exits after `seconds`, whatever still runs. All durable work is done, and no pending request to an unreachable
    region may keep the process alive."""
    timer = threading.Timer(seconds, os._exit, [exit_code])
    timer.daemon = True
    timer.start()


def lower_priority(nice: int) -> None:
    """Run below the training. A new thread inherits the priority of its creator, and the I/O priority follows the CPU
    priority unless it was set: ioprio_set(2)."""
    if nice:
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.setpriority(os.PRIO_PROCESS, 0, max(nice, os.getpriority(os.PRIO_PROCESS, 0)))
