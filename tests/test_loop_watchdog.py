"""The watchdog of the event loop: lag, stacks of a blocked loop, systemd's watchdog."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

import tierd.daemon
import tierd.loop_watchdog
from tests.support.daemon import Daemon, serving
from tests.support.processes import run_tierd
from tests.support.waiting import wait_until
from tierd.loop_watchdog import INTERVAL_S, LoopWatchdog
from tierd.metrics import Metrics
from tierd.status.incidents import Incidents
from tierd.systemd import Systemd

WATCHDOG_S = 0.5
RELEASE = "RELEASE_FOR_TESTS"
STALLS = 'tierd_failures_total{kind="transient",stage="loop"}'


def run_blockable(arguments: list[str], environ: Mapping[str, str], log: str) -> None:
    """`tierd serve`, whose event loop SIGHUP blocks until a file exists."""
    release = environ[RELEASE]

    async def block_the_loop(daemon: object) -> None:
        while not os.path.exists(release):  # noqa: ASYNC240
            time.sleep(0.02)  # noqa: ASYNC251

    tierd.daemon._Daemon._reload = block_the_loop  # type: ignore[method-assign]
    tierd.loop_watchdog.STUCK_S = 1.0
    run_tierd(arguments, environ, log)


@pytest.fixture
def systemd(tmp_path: Path) -> socket.socket:
    """A socket that receives the datagrams of sd_notify(3)."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(20)
        yield sock


def blockable(tmp_path: Path) -> Daemon:
    """A daemon whose loop a SIGHUP blocks until the file `release` exists."""
    environ = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": str(int(WATCHDOG_S * 1e6))}
    daemon = serving(tmp_path, environ={**environ, RELEASE: str(tmp_path / "release")})
    daemon.run_with(run_blockable)
    return daemon


def received(systemd: socket.socket) -> list[bytes]:
    """The datagrams that have arrived."""
    systemd.setblocking(False)
    messages: list[bytes] = []
    while True:
        try:
            messages.append(systemd.recv(100))
        except BlockingIOError:
            return messages


def test_a_blocked_loop_logs_all_stacks_once_feeds_systemd_nothing_and_is_recorded_afterwards(
    tmp_path: Path, systemd: socket.socket
) -> None:
    with blockable(tmp_path) as daemon:
        messages = [systemd.recv(100) for _ in range(4)]
        assert messages.count(b"WATCHDOG=1") == 3
        assert daemon.metric(STALLS) == 0
        daemon.signal(signal.SIGHUP)
        daemon.wait_log("block_the_loop")
        assert daemon.log.count("Thread 0x") >= 3, "the stacks of the other threads too"
        received(systemd)
        time.sleep(2 * WATCHDOG_S)
        assert received(systemd) == [], "systemd must notice that the loop is blocked"
        (tmp_path / "release").touch()
        daemon.wait_log("a call blocked it for")
        assert daemon.log.count("the event loop has not run") == 1
        assert daemon.metric(STALLS) == 1
        assert daemon.status()["failures"][0]["stage"] == "loop"
        wait_until(lambda: b"WATCHDOG=1" in received(systemd), "systemd's watchdog to be fed again")
        assert daemon.stop() == 0


def test_a_stopped_process_is_no_blocked_loop(tmp_path: Path) -> None:
    """SIGSTOP and a suspended machine stop the thread that watches, too."""
    with blockable(tmp_path) as daemon:
        daemon.signal(signal.SIGSTOP)
        time.sleep(1.5)
        daemon.signal(signal.SIGCONT)
        assert daemon.metric(STALLS) == 0
        assert daemon.metric("tierd_event_loop_lag_seconds_sum") > 1.0
        assert "stacks" not in daemon.log


async def test_lag_is_the_time_by_which_the_loop_runs_late() -> None:
    metrics = Metrics()
    watchdog = LoopWatchdog(metrics, Incidents(metrics, lambda: "now"), Systemd())
    task = asyncio.create_task(watchdog.run())
    await asyncio.sleep(INTERVAL_S / 2)
    time.sleep(1.0)  # noqa: ASYNC251
    await asyncio.sleep(INTERVAL_S / 2)
    task.cancel()
    late = metrics.registry.get_sample_value("tierd_event_loop_lag_seconds_sum") or 0.0
    assert late >= 1.0 - INTERVAL_S
