"""What holds for every test."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator

import pytest

# A shell that puts us in the background has us ignore SIGINT, and so would every process that a test starts: then
# none would end by Ctrl-C, whatever its code. A handler of ours is not inherited, so they begin with the default.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def cache_of_its_own() -> Iterator[None]:
    """Neither read nor written: the cache of who runs the tests."""
    with tempfile.TemporaryDirectory(prefix="tierd-cache-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", os.path.abspath(folder))
        yield
