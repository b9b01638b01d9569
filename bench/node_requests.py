"""What the nodes of a run ask a bucket for to commit one checkpoint, and how long that takes.

Real daemons on one machine send to `rclone serve s3`, and their metrics count the requests; trainers without torch seal
a few bytes each. The time is that from the last node file to the manifest. With --simulated so many nodes are the real
committer over a simulated bucket in virtual time: each node has sent its part within a minute. A page of a listing is a
request, and has 1,000 keys. JSON lines on stdout, the table on stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import re
import statistics
import sys
import tempfile
import urllib.request
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import msgspec
from rounds import ROOT, fact, machine, say, table
from serving import Daemon, daemon

sys.path[:0] = [str(ROOT), str(ROOT / "client")]

from tests.support.cli import make_manifest  # noqa: E402
from tests.support.rooms import RUN, Rooms  # noqa: E402
from tests.support.s3 import ACCESS_KEY, BUCKET, SECRET_KEY, rclone_server  # noqa: E402
from tests.support.simulation.bucket import BucketClient, SimulatedBucket  # noqa: E402
from tests.support.wire_peer import Peer  # noqa: E402
from tierd.config.sections import ColdConfig, Config, HotConfig, LimitsConfig  # noqa: E402
from tierd.format import checksum, layout, wire  # noqa: E402
from tierd.format.ids import Generation, Rank, checkpoint_id  # noqa: E402
from tierd.format.manifest import FileEntry, Head  # noqa: E402
from tierd.format.node_file import NodeFile  # noqa: E402
from tierd.s3.store import S3Store  # noqa: E402
from tierd.tiers.checkpoint_copy import copy_part  # noqa: E402
from tierd.tiers.store import Source, Store  # noqa: E402
from tierd.tiers.tier import Tier  # noqa: E402
from tierd.workers.committer import Committer  # noqa: E402

KEYS = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY, "AWS_EC2_METADATA_DISABLED": "true"}
SHARD = b"x"
CRC = checksum.encode(checksum.crc64nvme(SHARD))
COLLECTED = 64  # simulated nodes whose memory is freed together: a collection visits the objects of all nodes
SENT_S = 60.0  # within which all simulated nodes have sent their parts


def counted(url: str) -> Counter[str]:
    """The requests of a daemon to its bucket since it started, by operation."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    found = re.findall(r'^tierd_cold_requests_total\{.*op="(\w+)".*\} (\S+)$', text, re.MULTILINE)
    return sum((Counter({operation: int(float(count))}) for operation, count in found), Counter())


class Nodes:
    """Daemons, and at each one rank."""

    def __init__(self, stack: ExitStack, folder: Path, count: int, url: str) -> None:
        self.cold = folder / "served" / BUCKET
        self.daemons: list[Daemon] = []
        for number in range(count):
            (folder / str(number)).mkdir()
            more = (
                f'[[cold]]\nname = "cold"\nurl = "s3://{BUCKET}"\nendpoint_url = "{url}"\nregion = "us-east-1"\n'
                "[lifecycle.cold]\nkeep_every = 1\n[health]\nexamine = false\n[scrub]\ninterval_s = 0\n"
            )
            self.daemons.append(stack.enter_context(daemon(folder / str(number), more, "", KEYS)))
        self.ranks = [stack.enter_context(Peer(each.socket)) for each in self.daemons]
        lowest = list(range(count))

        def hello(rank: int, generation: int | None, claim: str, base: int) -> Any:
            node = wire.NodeRanks(ranks=[rank], lowest=lowest, claim=claim, base=base)
            asked = self.ranks[rank].hello("run", rank=rank, world_size=count, generation=generation)
            self.ranks[rank].send(msgspec.structs.replace(asked, node=node))
            return self.ranks[rank].hear(wire.Welcome)

        welcome = hello(0, None, "", 0)
        for rank in lowest[1:]:
            hello(rank, welcome.generation, welcome.claim, welcome.base)
        for rank in self.ranks:
            rank.attach(0)
            rank.attach(1)

    def requests(self) -> Counter[str]:
        return sum((counted(each.url) for each in self.daemons), Counter())

    def save(self, step: int) -> float:
        """One checkpoint. Seconds from the last node file in the bucket to the manifest."""
        for rank, peer in enumerate(self.ranks):
            created_at = f"2026-01-01T00:00:{step:02d}.000+00:00"  # the same on all nodes
            peer.seal(step % 2, step, f"rank {rank} step {step}".encode(), number=step, created_at=created_at)
        for peer in self.ranks:
            while peer.hear(wire.Replicated).step != step:
                pass
        (folder,) = (self.cold / "run").glob(f"{step:012d}-*")
        last_s = max(path.stat().st_mtime for path in folder.glob("node-*"))
        return (folder / layout.MANIFEST).stat().st_mtime - last_s


def real(folder: Path, count: int, checkpoints: int) -> dict[str, Any]:
    with ExitStack() as stack:
        url = stack.enter_context(rclone_server(folder / "served"))
        nodes = Nodes(stack, folder, count, url)
        nodes.save(1)
        before = nodes.requests()
        seconds = [nodes.save(step) for step in range(2, 2 + checkpoints)]
        after = nodes.requests()
    each = {name: (after[name] - before[name]) / checkpoints for name in after}
    return {"nodes": count, "way": "daemons", "requests": each, "commit_s": statistics.median(seconds)}


# ── simulated ──


class Clock:
    now_s = 0.0


class Shards:
    """The hot tier of a simulated node: shards of a byte."""

    def source(self, key: str) -> Source:
        async def read(offset: int, buffer: memoryview) -> None:
            buffer[:] = SHARD[offset : offset + len(buffer)]

        return Source(read)


async def simulated(count: int, ranks: int, seed: int) -> dict[str, Any]:
    """`count` nodes with `ranks` each: requests until every node knows of the commit."""
    rng, asked, clock, bucket = random.Random(seed), Counter[str](), Clock(), SimulatedBucket(random.Random(seed))
    cold = ColdConfig(name="cold", url="s3://bucket")
    store = S3Store(cold, LimitsConfig(), on_request=lambda operation, _: asked.update([operation]))
    store.requests.client = BucketClient(cold, bucket, "node")
    hot = Tier("hot", cast(Store, Shards()))
    tier, world_size, lowest = Tier("cold", store), count * ranks, list(range(0, count * ranks, ranks))
    config = Config(hot=HotConfig(path="/nowhere"), cold=[ColdConfig(name="cold", url="file:///nowhere")])
    nodes: list[tuple[float, Rooms, Committer, NodeFile]] = []
    for number, first in enumerate(lowest):
        rooms = Rooms(config, monotonic_s=lambda: clock.now_s)
        rooms.cold["cold"] = tier
        part = part_of(list(range(first, first + ranks)), world_size)
        ranks_of = wire.NodeRanks(ranks=part.ranks, lowest=lowest, claim=part.claim, base=0)
        rooms.memory.enter(RUN, Generation(1), Rank(first), world_size, ranks_of)
        nodes.append((rng.uniform(0, SENT_S), rooms, Committer(rooms.context, tier, rng=random.Random(number)), part))
    nodes.sort(key=lambda each: each[0])
    last_s, manifest_key, committed_s = nodes[-1][0], layout.manifest_key(nodes[0][3].id), 0.0
    unsent, let_go = list(nodes), 0
    while nodes:
        clock.now_s += 1.0
        while unsent and unsent[0][0] <= clock.now_s:
            _, rooms, _, part = unsent.pop(0)
            await copy_part(part, hot, tier, lambda sent=part: sent)
            rooms.catalog.part_sent("cold", part)
        waiting, nodes = nodes, []
        while waiting:  # a node that knows of the commit is let go: each has the manifest, of megabytes
            node = waiting.pop(0)
            if node[0] <= clock.now_s:
                await node[2].run_once()
            if node[0] > clock.now_s or node[1].catalog.sent_parts("cold"):
                nodes.append(node)
                continue
            let_go += 1
            if let_go % COLLECTED == 0:
                gc.collect()
        if not committed_s and manifest_key in bucket.objects:
            committed_s = clock.now_s
    return {
        "nodes": count,
        "way": f"simulated, {ranks} ranks each",
        "requests": dict(asked),
        "commit_s": committed_s - last_s,
    }


def part_of(ranks: list[int], world_size: int) -> NodeFile:
    """The node file of a part with shards of a byte."""
    entries = [
        FileEntry(
            name=layout.shard_name(Rank(rank), world_size),
            size_bytes=len(SHARD),
            crc64nvme=CRC,
            chunk_bytes=1 << 26,
            chunks=[CRC],
        )
        for rank in ranks
    ]
    manifest = make_manifest(checkpoint_id(RUN, 10, 1), entries, sequence=1)
    fields = {name: getattr(manifest, name) for name in Head.__struct_fields__} | {"world_size": world_size}
    return NodeFile(**fields, files=entries, claim="0" * 32, ranks=ranks, is_healthy=None, milestone="")


def report(found: list[dict[str, Any]]) -> None:
    say("\nrequests of all nodes for one checkpoint, with those for the shards\n")
    kinds = ["put_object", "head_object", "get_object", "list_objects_v2"]
    rows = [
        [
            f"{each['nodes']} {each['way']}",
            *(f"{each['requests'].get(kind, 0):.1f}" for kind in kinds),
            f"{each['commit_s']:.1f}",
        ]
        for each in found
    ]
    table(["nodes", "PUT", "HEAD", "GET", "LIST", "seconds to the manifest"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="*", default=[4, 16], help="so many daemons")
    parser.add_argument("--simulated", type=int, nargs="*", default=[4, 16, 64, 2048], help="so many in virtual time")
    parser.add_argument("--ranks", type=int, default=8, help="of a simulated node")
    parser.add_argument("--checkpoints", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=Path(), help="on the disk to measure (default: here)")
    args = parser.parse_args()
    found: list[dict[str, Any]] = []
    for count in args.nodes:
        with tempfile.TemporaryDirectory(prefix=".tierd-bench-", dir=args.dir) as folder:
            fact(machine=machine(Path(folder)))
            found.append(real(Path(folder).resolve(), count, args.checkpoints))
            fact(**found[-1])
    for count in args.simulated:
        found.append(asyncio.run(simulated(count, args.ranks, seed=1)))
        fact(**found[-1])
    report(found)


if __name__ == "__main__":
    main()
