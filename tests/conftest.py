"""What holds for every test, and the S3 servers that tests of many files use."""

from __future__ import annotations

import gc
import inspect
import os
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.bucket import Bucket, bucket_server
from tests.support.s3 import ENVIRONMENT, moto_server

# A process in the background of a shell ignores SIGINT, and so does every process that it starts: then Ctrl-C would end
# none of them. A handler is not inherited, so with one they start with the default action.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


EXAMPLES = 40  # of a property, where its test names no other number
with suppress(ImportError):  # `make gpu` installs no hypothesis
    from hypothesis import HealthCheck, settings

    # On a busy machine an example may take any time. Each run takes other examples.
    settings.register_profile(
        "tests", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=EXAMPLES
    )
    settings.load_profile("tests")


MEMORY_FOLDER = "/dev/shm"
FILES_BYTES_MAX = 2 << 30
"""Of all workers at a time, with those of failed tests."""


def has_memory_for_files() -> bool:
    """Whether the folders of tests can be in memory, where a sync costs nothing: on a slow disk, tests wait for it most
    of the time. What a sync is for is shown by tests/simulation, which records each, and by a real ext4."""
    from tierd.cgroup import available_bytes

    try:
        folder = os.statvfs(MEMORY_FOLDER)
    except OSError:
        return False
    return folder.f_bavail * folder.f_frsize >= FILES_BYTES_MAX and available_bytes() >= 3 * FILES_BYTES_MAX


def pytest_configure(config: pytest.Config) -> None:
    """Neither the tests nor the processes that they start use the cache and the S3 credentials of the user.

    A hook and not a fixture, because support modules keep a copy of the environment when they are imported.
    """
    if config.option.markexpr == "not long" and has_memory_for_files():  # long tests may write any amount
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY_FOLDER)
    cache = tempfile.TemporaryDirectory(prefix="tierd-cache-", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT"))
    config.add_cleanup(cache.cleanup)
    # The suite starts hundreds of Pythons, and each worker imports all of it: none may compile the source again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    gc.disable()  # while all tests are imported, of which nothing is garbage
    # One thread for torch: with more, the threads of many processes spin while they wait for each other.
    os.environ.update(ENVIRONMENT, XDG_CACHE_HOME=cache.name, OMP_NUM_THREADS="1")


def pytest_collection_finish() -> None:
    """Exempts all that is imported by now from garbage collection: many tests collect, and torch is large."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def frozen_heap() -> None:
    """Exempts the objects of earlier tests from garbage collection, for a module in which every test collects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_blocks_the_event_loop(request: pytest.FixtureRequest) -> Iterator[None]:
    """In a test that is a coroutine, a call of tierd that blocks the event loop raises BlockingError."""
    if inspect.iscoroutinefunction(request.function) and find_spec("blockbuster"):  # `make gpu` installs none
        from tests.support.blocking import blocking_calls_refused

        with blocking_calls_refused():
            yield
    else:
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """pytest-xdist sends reports as UTF-8, but the log of a test may hold a file name that is no text."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report


@pytest.fixture
def disk_path() -> Iterator[Path]:
    """As `tmp_path`, and never in memory: for what tells one from the other."""
    with tempfile.TemporaryDirectory(prefix="tierd-disk-") as folder:
        yield Path(folder)


@pytest.fixture
def checkpoints_examined(monkeypatch: pytest.MonkeyPatch, warm_program: str) -> None:
    """The daemons of tests/support/daemon.py examine checkpoints, as they do by default outside of tests; here the
    program that does it is forked."""
    monkeypatch.setenv("TIERD_HEALTH_EXAMINE", "true")
    monkeypatch.setenv("TESTS_PYTHON", warm_program)


@pytest.fixture(scope="session")
def warm_program() -> Iterator[str]:
    from tests.support.warm_python import warm_python  # `make gpu` collects without what this imports

    with warm_python() as program:
        yield program


@pytest.fixture
def forked_python(monkeypatch: pytest.MonkeyPatch, warm_program: str) -> None:
    """`sys.executable` of the test's process starts by a fork: see tests/support/warm_python.py."""
    monkeypatch.setattr(sys, "executable", warm_program)


@pytest.fixture(scope="session")
def moto() -> Iterator[str]:
    """The URL of a moto server. All tests share its bucket, each below a prefix of its own."""
    with moto_server() as url:
        yield url


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Iterator[Bucket]:
    """An empty bucket of our own server, which accepts small parts. An indirect parameter changes its options."""
    with bucket_server(**{"part_bytes_min": 1024, **getattr(request, "param", {})}) as found:
        yield found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The simulations first, in the same order on each worker: one file may take a minute and a half, and what begins
    late ends last."""
    items.sort(key=lambda item: "/simulation/" not in item.path.as_posix())
