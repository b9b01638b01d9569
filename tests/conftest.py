"""What holds for every test, and the S3 servers that tests of many files ask for."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator

import pytest

from tests.support.bucket import Bucket, bucket_server
from tests.support.s3 import ENVIRONMENT, moto_server

# A shell that puts us in the background has us ignore SIGINT, and so would every process that a test starts: then
# none would end by Ctrl-C, whatever its code. A handler of ours is not inherited, so they begin with the default.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Of who runs the tests neither the cache nor the S3 credentials are used, in no process that they start either.
    A hook and no fixture, for modules of ours keep the environment of such processes, and are imported first."""
    cache = tempfile.TemporaryDirectory(prefix="tierd-cache-")
    config.add_cleanup(cache.cleanup)
    # torch with one thread: with more, those of each of our many processes spin while they wait for each other.
    os.environ.update(ENVIRONMENT, XDG_CACHE_HOME=cache.name, OMP_NUM_THREADS="1")


@pytest.fixture(scope="session")
def moto() -> Iterator[str]:
    """Its URL. All tests share its bucket, each below a prefix that no other uses."""
    with moto_server() as url:
        yield url


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Iterator[Bucket]:
    """A bucket of our own server, empty, which takes small parts; other manners are an indirect parameter."""
    with bucket_server(**{"part_bytes_min": 1024, **getattr(request, "param", {})}) as found:
        yield found
