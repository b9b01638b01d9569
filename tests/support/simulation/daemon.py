"""One daemon of the simulation: the real `_Daemon` with its workers, catalog, stores and trainers' socket handlers.

Simulated: the clocks, the S3 client, and the packets between trainer and daemon. Real: everything else; the hot tier
is a DirectoryStore in a folder of its own. Left out: the HTTP listeners, signals, the drain, the lock, the file watch,
and the health examination, which starts a process.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import random
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from aiohttp import web

from tests.support.simulation.bucket import BucketClient, SimulatedBucket
from tests.support.simulation.loop import OWNER, Process
from tests.support.simulation.network import PORT, PeerRequest
from tierd import daemon
from tierd.config.sections import (
    ColdConfig,
    ColdPolicy,
    Config,
    DaemonConfig,
    HealthConfig,
    HotConfig,
    LifecycleConfig,
    LimitsConfig,
    PeersConfig,
    ScrubConfig,
    SnapshotConfig,
    TierPolicy,
)
from tierd.context import DaemonContext
from tierd.format.ids import CheckpointId
from tierd.metrics import Metrics
from tierd.s3.store import S3Store
from tierd.systemd import Systemd
from tierd.tiers.tier import Tier
from tierd.workers.committer import Committer
from tierd.workers.recovery import recover

EPOCH = datetime(2025, 1, 1, tzinfo=UTC)
HOT_KEEP_LAST, COLD_KEEP_LAST, COLD_KEEP_EVERY = 2, 4, 3


def make_config(
    root: Path,
    node: str,
    cold_url: str,
    *,
    cold_list_interval_s: float,
    examines: bool = False,
    has_peers: bool = False,
) -> Config:
    """Small retention counts, so that a short run has deletions."""
    return Config(
        daemon=DaemonConfig(socket=str(root / node / "socket"), node=node, slowdown_max=0.0, memory_grace_s=300.0),
        snapshot=SnapshotConfig(slots=2, slot_wait_s=30.0),
        hot=HotConfig(path=str(root / node / "hot")),
        cold=[ColdConfig(name="cold", url=cold_url)],
        lifecycle=LifecycleConfig(
            hot=TierPolicy(keep_last=HOT_KEEP_LAST),
            cold=ColdPolicy(keep_last=COLD_KEEP_LAST, keep_every=COLD_KEEP_EVERY),
        ),
        peers=PeersConfig(listen=f"{node}:{PORT}" if has_peers else ""),
        health=HealthConfig(examine=examines),
        scrub=ScrubConfig(interval_s=900.0, deep_share=0.3, max_read_mib_s=0.0),
        limits=LimitsConfig(
            reconcile_interval_s=100.0,
            cold_list_interval_s=cold_list_interval_s,
            cold_look_interval_s=0.0,  # it only has a listing begin, and one more task changes what a seed plays
            retry_min_s=1.0,
            retry_max_s=30.0,
        ),
    )


@cache
def _shared_metrics() -> Metrics:
    """One for all daemons: nothing decides by metrics, and to make them is a fifth of a simulation's time."""
    return Metrics(tiers=["hot", "cold"])


class Connection:
    """One end of a connection, with the interface of PacketConnection. A packet arrives at once and in order."""

    peer_pid = 0  # of a process in another PID namespace: the daemon never hands it the slots of a former process

    def __init__(self) -> None:
        self.peer_uid = os.geteuid()
        self.peer: Connection | None = None
        self._packets: asyncio.Queue[tuple[bytes, list[int]]] = asyncio.Queue()
        self._is_ended = False

    async def receive(self) -> tuple[bytes, list[int]]:
        if self._is_ended and self._packets.empty():
            return b"", []
        return await self._packets.get()

    async def send(self, raw: bytes, descriptors: Sequence[int] = ()) -> None:
        if self._is_ended or self.peer is None:
            raise BrokenPipeError
        self.peer._packets.put_nowait((raw, [os.dup(descriptor) for descriptor in descriptors]))

    def has_ended(self) -> bool:
        return self._is_ended

    def ended_by_death(self) -> AbstractContextManager[None]:
        return nullcontext()

    def shutdown(self) -> None:
        for end in (self, self.peer):
            if end is not None and not end._is_ended:
                end._is_ended = True
                end._packets.put_nowait((b"", []))

    close = shutdown


class SimulatedDaemon(daemon._Daemon):
    """`process` is killed with all that the daemon has started. `bucket` None: the cold tier is a directory."""

    def __init__(self, config: Config, bucket: SimulatedBucket | None) -> None:
        self.process = Process(config.daemon.node)
        self._bucket = bucket
        self.is_listening = False
        self._connections: list[Connection] = []
        self._is_serving = False
        self.crash: Exception | None = None
        loop = asyncio.get_running_loop()
        clocks = partial(
            DaemonContext, now=lambda: EPOCH + timedelta(seconds=loop.time()), monotonic_s=lambda: loop.time()
        )
        with (
            patch.object(daemon, "DaemonContext", clocks),
            patch.object(daemon, "Metrics", lambda tiers: _shared_metrics()),
        ):
            super().__init__(config, Systemd(), lambda: config)
        for worker in self._workers.values():
            if isinstance(worker, Committer):
                worker._random = random.Random(f"{config.daemon.node} {loop.time()}")
        self._own_context = contextvars.copy_context()
        self._own_context.run(OWNER.set, self.process)

    def _open_cold(self, cold: ColdConfig) -> Tier:
        tier = super()._open_cold(cold)
        if self._bucket is not None and isinstance(tier.store, S3Store):
            tier.store.requests.client = BucketClient(cold, self._bucket, self.process.name)
        return tier

    def start(self) -> None:
        self._own_context.run(asyncio.get_running_loop().create_task, self._serve())

    async def _serve(self) -> None:
        try:
            await self._recover_and_serve()
        except Exception as error:  # the real process would end, and its supervisor would start it again
            self.crash = error
            self.kill()

    async def _recover_and_serve(self) -> None:
        context = self._context
        await recover(context.catalog, context.hot, context.hot_store, now_s=context.now().timestamp())
        if self._copies is not None:
            await self._copies.recover()
            context.peer_key.address = context.config.peers.listen
        async with asyncio.TaskGroup() as group:
            self._group = group
            self.start_workers(group)
            self._is_serving = self.is_listening = True

    def kill(self) -> None:
        """SIGKILL: nothing of it runs again, and its connections end."""
        self.process.is_alive = self.is_listening = False
        for connection in self._connections:
            connection.shutdown()

    def connect(self) -> Connection | None:
        """A trainer's end of a new connection; None when nothing listens."""
        if not self._is_serving or not self.process.is_alive:
            return None
        ours, theirs = Connection(), Connection()
        ours.peer, theirs.peer = theirs, ours
        self._connections.append(ours)
        self._door._connections += 1
        self._own_context.run(self._spawn, self._door._serve_peer(ours))
        return theirs

    def answer_peer(self, request: PeerRequest) -> None:
        """Start to answer another daemon."""
        self._own_context.run(self._spawn, self._answer_peer(request))

    async def _answer_peer(self, request: Any) -> None:
        """As HttpServer does."""
        assert self._peers is not None
        answer = self._peers._check(request) or await self._peers._answer(request)
        if isinstance(answer, web.Response):
            assert isinstance(answer.body, bytes)
            request.begin(answer.status)
            request.write(answer.body)
            request.end()

    def unreadable(self) -> list[tuple[str, CheckpointId]]:
        """(tier, checkpoint) of the replicas that its status reports as unreadable."""
        return list(self._context.catalog.unreadable())

    def losses(self) -> list[str]:
        """The messages of incidents about checkpoints that disappeared."""
        return [incident.message for incident in self._context.incidents.recent() if incident.kind == "lost"]

    def bugs(self) -> list[str]:
        """The messages of incidents that are no TierdError."""
        return [incident.message for incident in self._context.incidents.recent() if incident.kind == "bug"]
