"""Refuses calls of tierd that block the event loop: blockbuster, with what it lacks and what tierd may call there."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from blockbuster import BlockBuster, BlockBusterFunction

# Calls that wait for a disk, and that blockbuster does not know.
OPENS = ("os.open", "builtins.open", "io.open")
WAITS = ("os.lstat", "os.scandir", "os.fsync", "os.fdatasync", "fcntl.flock")

ALLOWED = [
    ("prometheus_client/process_collector.py", {"_boot_time", "collect"}, "reads /proc, which is no disk"),
    ("subprocess.py", {"_get_devnull"}, "opens /dev/null"),
    ("tierd/descriptors.py", {"reopen_read_only"}, "opens memory by way of /proc, which is no disk"),
    ("tierd/systemd.py", {"notify"}, "has a deadline; systemd reads at once"),
    ("tierd/api/packets.py", {"open_listener"}, "at the start, before anything is served"),
    ("tierd/daemon.py", {"_unlink"}, "at the end, when everything is drained"),
    ("tierd/tiers/lock.py", {"describe"}, "at the start, before anything is served"),
]
"""(file, functions, reason): calls in these functions, and in what they call, may block."""

_ROOT = Path(__file__).parents[2]
_TESTS, _TIERD = f"{_ROOT / 'tests'}/", f"{_ROOT / 'tierd'}/"


@functools.cache
def detector() -> BlockBuster:
    blockbuster = BlockBuster("tierd")
    for name in (*OPENS, *WAITS):
        blockbuster.functions[name] = BlockBusterFunction(None, name, scanned_modules="tierd")
    for name in OPENS:
        blockbuster.functions[name].can_block_predicate = lambda opened, *_, **__: isinstance(opened, int)
    del blockbuster.functions["os.path.samestat"]  # compares what was read before
    for function in blockbuster.functions.values():
        function.can_block_predicate = _or_called_by_a_test(function.can_block_predicate)
        for file, allowed, _ in ALLOWED:
            function.can_block_in(file, allowed)
    return blockbuster


def _or_called_by_a_test(may_block: Callable[..., bool]) -> Callable[..., bool]:
    def is_allowed(*arguments: object, **options: object) -> bool:
        return may_block(*arguments, **options) or _is_called_by_a_test()

    return is_allowed


def _is_called_by_a_test() -> bool:
    """Whether a function of the tests, which tierd may have called, is nearer than one of tierd."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_TIERD):
            return False
        if file.startswith(_TESTS) and file != __file__:
            return True
        frame = frame.f_back
    return False


@contextmanager
def blocking_calls_refused() -> Iterator[None]:
    """Within the block, such a call raises BlockingError when it runs on an event loop."""
    detector().activate()
    try:
        yield
    finally:
        detector().deactivate()
