"""What the benchmarks share: their usual arguments, a folder that is gone afterwards, ways that take turns, figures of
several rounds, and how it is told: JSON lines on stdout, what a person reads on stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

W = TypeVar("W")

ROOT = Path(__file__).resolve().parent.parent
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


class Figures:
    """What each way came to in each round. The first round is apart: it pays for what later ones find ready."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str], list[float]] = {}

    def add(self, way: str, **values: float) -> None:
        """`values`: figure and unit, as in `stall_s`."""
        for figure, value in values.items():
            self.values.setdefault((way, figure), []).append(value)

    def drop(self, way: str) -> None:
        self.values = {key: values for key, values in self.values.items() if key[0] != way}

    def median(self, way: str, figure: str) -> float:
        return statistics.median(self.values[way, figure][1:])

    def facts(self) -> list[dict[str, Any]]:
        return [
            {
                "way": way,
                "figure": figure,
                "median": round(statistics.median(values[1:]), 4),
                "min": round(min(values[1:]), 4),
                "max": round(max(values[1:]), 4),
                "first": round(values[0], 4),
                "rounds": len(values) - 1,
            }
            for (way, figure), values in self.values.items()
        ]


def fact(**facts: Any) -> None:
    """One JSON line."""
    print(json.dumps(facts), flush=True)


def say(line: str = "") -> None:
    print(line, file=sys.stderr, flush=True)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """The first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]
    for row in [heads, *rows]:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        say("  ".join([row[0].ljust(widths[0]), *cells]))


def spread(one: dict[str, Any], digits: int = 3) -> str:
    return f"{one['median']:.{digits}f} ({one['min']:.{digits}f} to {one['max']:.{digits}f})"


def memory_bytes(line: str) -> int:
    """A line of /proc/meminfo, as "MemAvailable"."""
    found = [text for text in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines() if text.startswith(line)]
    return int(found[0].split()[1]) * 1024


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


def on(where: dict[str, Any]) -> str:
    return f"{where['cores']} cores, {where['cpu']}; {where['filesystem']} on {where['disk']}"
