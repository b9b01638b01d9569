"""A daemon for a benchmark, and what processes have used: processor time and memory, their children included."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from rounds import ROOT, say

READY_TIMEOUT_S = 60.0
SETTLE_S = 0.3  # before each measure: the daemon evicts, the filesystem frees what the way before has left
QUIET_S = 0.2  # as long as nothing may be used to be called quiet
QUIET_TIMEOUT_S = 30.0
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("TIERD_")},
    "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'client'}",
}


@dataclass(frozen=True)
class Daemon:
    socket: str
    url: str
    config: Path
    pid: int
    ready_s: float


@contextmanager
def daemon(
    folder: Path, more: str = "", cold: str = "cold = []\n", settings: Mapping[str, str] = MappingProxyType({})
) -> Generator[Daemon]:
    """With its hot tier under `folder`. `more` joins its configuration, `settings` its environment."""
    with tempfile.TemporaryDirectory(prefix="tierd-bench-", dir="/tmp") as short:  # socket paths have 107 bytes at most
        config, log = folder / "tierd.toml", folder / "daemon.log"
        config.write_text(
            f'{cold}[daemon]\nsocket = "{short}/tierd.sock"\nlisten = "127.0.0.1:0"\n[hot]\npath = "hot"\n{more}',
            encoding="utf-8",
        )
        with log.open("wb") as output:
            command = [sys.executable, "-m", "tierd", "--config", str(config), "serve"]
            began = time.perf_counter()
            environment = {**ENVIRONMENT, **settings}
            child = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            url = wait_ready(child, log)
            yield Daemon(f"{short}/tierd.sock", url, config, child.pid, time.perf_counter() - began)
        finally:
            child.terminate()
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def wait_ready(child: subprocess.Popen[bytes], log: Path) -> str:
    """Where it answers HTTP."""
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while not (found := re.search(r" serves .*?(http://\S+)", log.read_text())):
        if child.poll() is not None or time.monotonic() > deadline_s:
            raise SystemExit(f"start the daemon: it is not ready\n{log.read_text()[-4000:]}")
        time.sleep(0.005)
    return found[1]


def family(pids: Iterable[int]) -> dict[int, list[str]]:
    """The fields of /proc/PID/stat from the third on, of these processes and all that they have started."""
    fields: dict[int, list[str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields[int(entry.name)] = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it ended meanwhile
                continue
    found = set(pids) & fields.keys()
    while more := {pid for pid, of in fields.items() if int(of[1]) in found} - found:
        found |= more
    return {pid: fields[pid] for pid in found}


def cpu_s(pids: Iterable[int]) -> float:
    """Used by them and all that they have started, what has ended included."""
    return sum(int(ticks) for of in family(pids).values() for ticks in of[11:15]) / os.sysconf("SC_CLK_TCK")


def memory_of(pid: int) -> dict[str, int]:
    """Bytes of one process: what it alone has touched, and what of the slots it has mapped."""
    status = Path(f"/proc/{pid}/status").read_text()
    return {name: int(re.search(rf"{name}:\s+(\d+)", status)[1]) * 1024 for name in ("RssAnon", "RssFile", "RssShmem")}  # type: ignore[index]


def wait_quiet(pids: Iterable[int]) -> None:
    """Until they use no processor: what one way goes on to do is neither lost nor laid at another's door."""
    pids = list(pids)
    deadline_s = time.monotonic() + QUIET_TIMEOUT_S
    used = cpu_s(pids)
    while time.monotonic() < deadline_s:
        time.sleep(QUIET_S)
        before, used = used, cpu_s(pids)
        if used - before <= 0.02:
            return
    say(f"not quiet after {QUIET_TIMEOUT_S:g} s: {pids}")
