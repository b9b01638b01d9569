"""A run over several nodes without torch: real daemons that read from each other, a handmade rank on each."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from pathlib import Path
from typing import Any

import msgspec

from tests.support.daemon import Daemon
from tests.support.processes import run_tierd
from tests.support.waiting import wait_until
from tests.support.wire_peer import Peer
from tierd.descriptors import sealed_memory
from tierd.format import layout, wire
from tierd.format.ids import Rank
from tierd.format.peers import NodeAddress
from tierd.workers import committer

RUN = "run"
SHARD_BYTES = 200_000
SENDS_NOTHING = "max_upload_mib_s = 1e-6"  # to the cold tier, so that nothing is committed there


def shard(step: int, rank: int) -> bytes:
    return f"step {step} rank {rank} ".encode() * (SHARD_BYTES // 16)


class HandmadeNodes:
    """The i-th daemon has rank i. Each copies the part of the node that is half of the nodes away. `run`: as of
    `Daemon.run_with`."""

    def __init__(
        self,
        root: Path,
        count: int,
        *,
        more: str = "",
        sends: bool = False,
        run: Callable[..., object] | None = None,
    ) -> None:
        cold = f'url = "file://{root / "cold"}"' + ("" if sends else f"\n{SENDS_NOTHING}")
        peers = '[peers]\nlisten = "127.0.0.1:0"'
        self.daemons = [Daemon(root / f"node-{i}", cold=cold, more=f"{more}\n{peers}") for i in range(count)]
        for daemon in self.daemons:
            daemon.run_with(run or _run_tierd)
        self.ranks: list[Peer] = []
        self.addresses: list[NodeAddress] = []

    def half(self, first: int, last: int) -> HandmadeNodes:
        """A start of the run on these daemons alone."""
        return self.start_on(self.daemons[first:last])

    def start_on(self, daemons: Sequence[Daemon], *, tells: bool = True) -> HandmadeNodes:
        """A later start of the run, with a rank on each of these daemons. `tells`: as of `join`."""
        start = copy(self)
        start.daemons, start.ranks, start.addresses = list(daemons), [], []
        start.join(tells=tells)
        return start

    def join(self, *, tells: bool = True) -> None:
        """All ranks join. `tells`: they tell their daemons the nodes, as they do at the first snapshot."""
        count = len(self.daemons)
        node = wire.NodeRanks(ranks=[0], lowest=list(range(count)))
        generation: int | None = None
        for rank, daemon in enumerate(self.daemons):
            self.ranks.append(peer := Peer(daemon.socket))
            hello = peer.hello(RUN, rank=rank, world_size=count, generation=generation)
            peer.send(msgspec.structs.replace(hello, node=msgspec.structs.replace(node, ranks=[rank])))
            welcome = peer.hear(wire.Welcome)
            if rank == 0:
                generation = welcome.generation
                node = msgspec.structs.replace(node, claim=welcome.claim, base=welcome.base)
            self.addresses.append(NodeAddress(ranks=[rank], peer=welcome.peer))
            peer.attach(0, size_bytes=1 << 18)
            peer.attach(1, size_bytes=1 << 18)
        if not tells:
            return
        self.tell_roster()
        for rank, peer in enumerate(self.ranks):
            owner = (rank + count // 2) % count
            address = self.addresses[owner].peer
            assert address is not None
            peer.send(wire.Partner(peer=address, node_file=layout.node_file_name(Rank(owner), count)))

    def tell_roster(self) -> None:
        for peer in self.ranks:
            descriptor = sealed_memory("nodes", msgspec.json.encode(self.addresses))
            peer.send(wire.Roster(), descriptor)
            os.close(descriptor)

    def close(self) -> None:
        """All ranks leave."""
        for peer in self.ranks:
            peer.close()

    def seal(self, rank: int, step: int, **fields: Any) -> None:
        self.ranks[rank].seal(step % 2, step, shard(step, rank), number=step, **fields)

    def save(self, step: int, *, copied: bool = True, **fields: Any) -> None:
        """All ranks seal it; it is in every hot, and copied."""
        for rank in range(len(self.ranks)):
            self.seal(rank, step, **fields)
        for peer in self.ranks:
            while peer.hear(wire.Persisted).step != step:
                pass
        if copied:
            for daemon in self.daemons:
                wait_until(lambda daemon=daemon: (daemon.hot / ".peers" / RUN / layout_name(step)).exists(), "the copy")
                files = daemon.hot / ".peers" / RUN / layout_name(step)
                wait_until(
                    lambda files=files: any(each.name.startswith("node-") for each in files.iterdir()), "the copy"
                )

    def part(self, rank: int, step: int) -> Path:
        """The folder of a part in hot."""
        return self.daemons[rank].hot / RUN / layout_name(step)


def _run_tierd(*arguments: Any) -> None:
    """Runs in the daemon's process, which looks for the parts of other nodes as often as for its own work."""
    committer.HOME_S = committer.Committer.interval_s
    run_tierd(*arguments)


def layout_name(step: int, generation: int = 1) -> str:
    return f"{step:012d}-g{generation:04d}"


@contextmanager
def handmade_nodes(root: Path, count: int, **options: Any) -> Generator[HandmadeNodes]:
    """Started, with ranks that have joined."""
    nodes = HandmadeNodes(root, count, **options)
    with ExitStack() as stack:
        for daemon in nodes.daemons:
            stack.enter_context(daemon)
        stack.callback(nodes.close)
        nodes.join()
        yield nodes
