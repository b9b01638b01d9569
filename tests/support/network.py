"""Machines of a network, each a network namespace of Linux with an address of its own: links that break, or are slow.

All are connected to one bridge. Only their networks are apart: processes and files are those of this machine.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from tests.support.processes import run_tierd
from tests.support.waiting import wait_until

SUBNET = "10.77.0"
NEW_NETWORK = 0x40000000  # CLONE_NEWNET
NOTHING_PASSES = ("tbf", "rate", "1kbit", "burst", "10", "limit", "10")  # every packet is larger than the burst


@cache
def why_not() -> str:
    """Why this machine has no network namespaces for a test; empty if it has."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    try:
        with network(1) as (host,):
            host.set_link(*NOTHING_PASSES)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces here: {error}"
    return ""


class Host:
    """`address`: on its only link, eth0. The other end of the link is `port`, at the bridge."""

    def __init__(self, name: str, bridge: str, number: int) -> None:
        self.name = name
        self.address = f"{SUBNET}.{number}"
        self._bridge = bridge
        self._port = f"port{number}"

    def make(self) -> None:
        _ip("netns", "add", self.name)
        _ip("-n", self.name, "link", "add", "eth0", "type", "veth", "peer", "name", self._port, "netns", self._bridge)
        _ip("-n", self._bridge, "link", "set", self._port, "master", "bridge", "up")
        _ip("-n", self.name, "address", "add", f"{self.address}/24", "dev", "eth0")
        for link in ("eth0", "lo"):
            _ip("-n", self.name, "link", "set", link, "up")

    def popen(self, command: Sequence[str], *, log: Path, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, *command], stdout=output, stderr=output, env=environ
            )

    def run_tierd(self, arguments: list[str], environ: Mapping[str, str], log: str) -> None:
        """For `Daemon.run_with`."""
        _enter(self.name)
        run_tierd(arguments, environ, log)

    def pids(self) -> list[int]:
        return [int(pid) for pid in _ip("netns", "pids", self.name).split()]

    def kill(self) -> None:
        """SIGKILL to all of its processes."""
        while pids := self.pids():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            wait_until(lambda: not set(pids) & set(self.pids()), f"the processes of {self.name} to end")

    # ── its link ──

    def unplug(self) -> None:
        _ip("-n", self._bridge, "link", "set", self._port, "down")

    def plug(self) -> None:
        _ip("-n", self._bridge, "link", "set", self._port, "up")

    def set_link(self, *queue: str) -> None:
        """What leaves the host goes through this queue of `tc`."""
        _run("ip", "netns", "exec", self.name, "tc", "qdisc", "replace", "dev", "eth0", "root", *queue)

    def clear_link(self) -> None:
        _run("ip", "netns", "exec", self.name, "tc", "qdisc", "delete", "dev", "eth0", "root")


@contextmanager
def network(count: int) -> Generator[list[Host]]:
    """Hosts that reach each other. At the end their processes are killed."""
    prefix = f"tierd-{os.getpid()}"
    bridge = f"{prefix}-bridge"
    hosts = [Host(f"{prefix}-{number}", bridge, number) for number in range(1, count + 1)]
    try:
        _ip("netns", "add", bridge)
        _ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
        _ip("-n", bridge, "link", "set", "bridge", "up")
        for host in hosts:
            host.make()
        yield hosts
    finally:
        for host in hosts:
            if Path("/run/netns", host.name).exists():
                host.kill()
        for name in (*(host.name for host in hosts), bridge):
            if Path("/run/netns", name).exists():
                _ip("netns", "delete", name)


def _enter(name: str) -> None:
    """The network of the calling thread, and of the processes that it starts."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as namespace:
        if libc.setns(namespace.fileno(), NEW_NETWORK) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), name)


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout
