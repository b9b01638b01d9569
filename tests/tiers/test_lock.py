"""The lock of a directory when its holder was killed: what the holder was starting may have it for a moment."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tierd.errors import LockHeld
from tierd.tiers import lock
from tierd.tiers.lock import Lock


def killed_holder(root: Path, *, child_lives_s: float) -> None:
    """A process takes the lock, forks a child, which inherits its descriptor, and is killed."""
    reader, writer = os.pipe()
    holder = os.fork()
    if holder == 0:
        Lock(root)
        if os.fork() == 0:
            os.write(writer, b"x")
            time.sleep(child_lives_s)
            os._exit(0)
        time.sleep(60)
        os._exit(1)
    os.read(reader, 1)
    os.close(reader)
    os.close(writer)
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_killed_holder_is_followed_as_soon_as_its_last_child_lets_go(tmp_path: Path) -> None:
    killed_holder(tmp_path, child_lives_s=0.5)
    with Lock(tmp_path):
        pass


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_dead_holder_is_not_waited_for_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "DEAD_HOLDER_S", 0.1)
    killed_holder(tmp_path, child_lives_s=3.0)
    with pytest.raises(LockHeld, match="held by pid"):
        Lock(tmp_path)


def test_a_holder_that_lives_is_not_waited_for(tmp_path: Path) -> None:
    began_s = time.monotonic()
    with Lock(tmp_path), pytest.raises(LockHeld, match=f"held by pid {os.getpid()}"):
        Lock(tmp_path)
    assert time.monotonic() - began_s < lock.DEAD_HOLDER_S
