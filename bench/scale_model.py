"""What a snapshot costs on 8 to 16,384 GPUs, by calculation: stall, durable, S3 requests, restore, and the first wall.

No measurement at scale: constants that `bench/snapshot.py` measures on one machine, limits that vendors publish, and
arithmetic. Every assumption is an option with its source beside it, and is printed above the table: put in your own.
A rank does nothing for another rank, so a node's times do not grow with their number; what grows is what all nodes
share, which is the bucket. (Ranks that span nodes are refused by this version: the table is what the design bears.)
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass, fields

GB = 1e9
PART_BYTES = 64 << 20  # tierd/format/checksum.py: one chunk, one part
REQUESTS_PER_SHARD = 6  # two HEADs, a look for begun uploads, create, complete, one spare; test_costs.py counts


@dataclass(frozen=True)
class Assumptions:
    gpus_per_node: int = 8
    copy_gb_s: float = 40.0
    nvme_gb_s: float = 6.0
    read_gb_s: float = 10.0
    nic_gb_s: float = 12.5
    bucket_gb_s: float = 0.0
    put_per_s: float = 3500.0
    retry_share: float = 1.1
    gpu_days_per_failure: float = 2111.0
    every_n_to_cold: int = 10
    restart_s: float = 300.0


SOURCES = {
    "gpus_per_node": "as most training nodes have",
    "copy_gb_s": "device or host memory to slot, a node; per GPU PCIe 4 has 25: measure yours with bench/snapshot.py",
    "nvme_gb_s": "O_DIRECT write of the hot tier, a node; `limit: O_DIRECT` of bench/snapshot.py",
    "read_gb_s": "O_DIRECT read of the hot tier, a node",
    "nic_gb_s": "a node to the bucket: 100 Gbit/s",
    "bucket_gb_s": "what the bucket takes from all nodes; 0: no limit known (S3 publishes none, ask your provider)",
    "put_per_s": "S3 gives at least 3,500 a prefix: AWS's user guide, Optimizing Amazon S3 performance",
    "retry_share": "requests sent for each that is needed",
    "gpu_days_per_failure": "Llama 3, arXiv 2407.21783, 3.3.4: 419 unexpected interruptions, 54 days, 16,384 GPUs",
    "every_n_to_cold": "lifecycle.cold.keep_every; while cold keeps up, the last three go there too, and can wait",
    "restart_s": "from a failure to the first step of the restarted job, without the restore",
}


def calculate(gpus: int, gb_per_node: float, at: Assumptions) -> dict[str, float | int | str]:
    """One row. Times in seconds, rates in GB/s (1e9 bytes) and requests per second."""
    nodes = max(1, gpus // at.gpus_per_node)
    ranks = min(gpus, nodes * at.gpus_per_node)
    stall_s = gb_per_node / at.copy_gb_s
    durable_s = gb_per_node / at.nvme_gb_s
    failure_s = at.gpu_days_per_failure * 86400 / gpus
    # Young 1974, doi.org/10.1145/361147.361115; never sooner than the disk can follow.
    interval_s = max(math.sqrt(2 * stall_s * failure_s), durable_s)
    total_gb = gb_per_node * nodes
    node_gb_s = min(at.nic_gb_s, at.bucket_gb_s / nodes if at.bucket_gb_s else math.inf)
    shard_bytes = gb_per_node * GB * nodes / ranks
    parts = ranks * math.ceil(shard_bytes / PART_BYTES)
    requests = (parts + ranks * REQUESTS_PER_SHARD) * at.retry_share
    # A bucket that is asked too often says SlowDown, and the sender does: requests then take their time.
    lag_s = max(gb_per_node / node_gb_s, requests / at.put_per_s)
    cold_every_s = interval_s * at.every_n_to_cold
    restore = {
        "memory": gb_per_node / at.copy_gb_s,
        "hot": gb_per_node / at.read_gb_s,
        "cold": gb_per_node / node_gb_s + gb_per_node / at.nvme_gb_s,
    }
    lost_s = interval_s / 2 + at.restart_s + restore["hot"]
    walls = {
        "request rate of one prefix": requests / at.put_per_s / cold_every_s,
        "write rate of the disk": durable_s / interval_s,
        "network to the bucket": gb_per_node / node_gb_s / cold_every_s,
        "10,000 parts a shard": shard_bytes / PART_BYTES / 10_000,
    }
    wall, load = max(walls.items(), key=lambda one: one[1])
    return {
        "gpus": gpus,
        "gb_per_node": gb_per_node,
        "stall_s": stall_s,
        "durable_s": durable_s,
        "interval_s": interval_s,
        "stall_share": stall_s / interval_s,
        "lost_share": min(1.0, lost_s / failure_s),
        "lag_s": lag_s,
        "put_per_s": requests / cold_every_s,
        "cold_gb_s": total_gb / cold_every_s,
        "restore_memory_s": restore["memory"],
        "restore_hot_s": restore["hot"],
        "restore_cold_s": restore["cold"],
        "load": load,
        "wall": wall,
    }


def table(rows: list[dict[str, float | int | str]]) -> str:
    lines = [
        f"{'GPUs':>6} {'GB/node':>7} {'stall':>7} {'durable':>8} {'every':>7} {'stalled':>8} {'lost':>6} {'lag':>9} "
        + f"{'PUT/s':>8} {'GB/s':>7}   {'restore: memory':>15} {'hot':>7} {'cold':>7}   nearest wall"
    ]
    for row in rows:
        at = {name: value for name, value in row.items() if not isinstance(value, str)}
        lines.append(
            f"{at['gpus']:>6,} {at['gb_per_node']:>7,.0f} {at['stall_s']:>6.2f}s {at['durable_s']:>7.1f}s "
            f"{at['interval_s']:>6.0f}s {at['stall_share']:>8.2%} {at['lost_share']:>6.1%} {at['lag_s']:>8.1f}s "
            f"{at['put_per_s']:>8,.0f} {at['cold_gb_s']:>7,.1f}   {at['restore_memory_s']:>14.1f}s "
            f"{at['restore_hot_s']:>6.1f}s {at['restore_cold_s']:>6.1f}s   "
            f"{row['wall']} at {at['load']:.0%}{' !' if at['load'] > 1 else ''}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Assumptions):
        kind = type(field.default)
        flag = f"--{field.name.replace('_', '-')}"
        parser.add_argument(flag, type=kind, default=field.default, help=SOURCES[field.name].replace("%", "%%"))
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64, 512, 2048, 16384])
    parser.add_argument("--gb-per-node", type=float, nargs="+", default=[1, 10, 100, 1000])
    found = vars(parser.parse_args())
    gpus, sizes = found.pop("gpus"), found.pop("gb_per_node")
    at = Assumptions(**found)
    rows = [calculate(number, size, at) for size in sizes for number in gpus]
    for row in rows:
        print(json.dumps(row))
    print("assumed:", file=sys.stderr)
    for name, value in asdict(at).items():
        print(f"  {name} = {value:g}  ({SOURCES[name]})", file=sys.stderr)
    print(f"\n{table(rows)}", file=sys.stderr)


if __name__ == "__main__":
    main()
