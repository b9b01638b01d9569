"""Kills a real process at an exact instant, at which it prints "stalled" and waits."""

from __future__ import annotations

import signal
import subprocess
import sys


def kill_when_stalled(code: str, *arguments: str) -> None:
    """Runs Python code in a process of its own, and sends SIGKILL once it has printed `stalled`."""
    with subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        assert line == "stalled\n"
