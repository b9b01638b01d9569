"""What the benchmarks share: their usual arguments, a folder that is gone afterwards, ways that take turns, and how
it is told: JSON lines on stdout, what a person reads on stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

W = TypeVar("W")

MIB = 1 << 20


def arguments(description: str, *, mib: int, rounds: int, first: str) -> argparse.ArgumentParser:
    """`first`: what becomes of the first round."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--mib", type=int, default=mib, help="how much is moved each time")
    parser.add_argument("--rounds", type=int, default=rounds, help=f"after the first, which {first}")
    parser.add_argument("--dir", type=Path, default=Path(), help="on the disk to measure (default: here)")
    return parser


def add_threads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="of the memory copy")


@contextmanager
def run_of(parser: argparse.ArgumentParser) -> Generator[tuple[argparse.Namespace, Path]]:
    """The arguments, and a folder below --dir; usage errors end here."""
    args = parser.parse_args()
    if min(args.rounds, args.mib, getattr(args, "threads", 1)) < 1:
        parser.error("--rounds, --mib and --threads are 1 or more")
    folder = Path(tempfile.mkdtemp(prefix=".tierd-bench-", dir=args.dir)).resolve()
    try:
        yield args, folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def in_turn(ways: Sequence[W], number: int) -> list[W]:
    """All of them, in another order each round: what one leaves behind does not always hit the same other."""
    turn = number % len(ways)
    return [*ways[turn:], *ways[:turn]]


def fact(**facts: Any) -> None:
    """One JSON line."""
    print(json.dumps(facts), flush=True)


def say(line: str = "") -> None:
    print(line, file=sys.stderr, flush=True)


def machine(folder: Path) -> dict[str, Any]:
    def first(path: str, word: str) -> str:
        found = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.startswith(word)]
        return found[0].partition(":")[2].strip() if found else "unknown"

    device = os.stat(folder).st_dev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    mounts = [line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    under = [fields for fields in mounts if folder.is_relative_to(fields[1])]
    return {
        "cpu": first("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory": first("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "disk": block.resolve().name if block.exists() else "unknown",
        "filesystem": max(under, key=lambda fields: len(fields[1]))[2] if under else "unknown",
        "python": platform.python_version(),
    }
