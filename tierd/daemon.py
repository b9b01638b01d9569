"""The daemon: builds the rooms, wires them, runs them in one TaskGroup, and drains on SIGTERM. Decides nothing else.

Order at start: lock, recover the hot tier, then open the doors; the cold tiers are looked at afterwards, so that
a dead S3 never keeps a trainer waiting. Order at the end: doors stay open while sealed snapshots reach the hot
tier, then everything stops. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any

import msgspec
from aiohttp import web

import tierd
from tierd.api.operator import Operator
from tierd.api.packets import open_listener
from tierd.api.trainer import TrainerDoor
from tierd.catalog import Catalog
from tierd.cold_tier import open_cold_tier
from tierd.config import ColdConfig, Config, differences
from tierd.errors import BadConfig, Transient
from tierd.format import wire
from tierd.format.ids import CheckpointId, Run
from tierd.health.examiner import Examiner
from tierd.incidents import Incidents
from tierd.lifecycle.policy import HOT
from tierd.memory.tier import MemoryTier
from tierd.metrics import Metrics
from tierd.throttle import WriteThrottle
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.lock import lock
from tierd.tiers.tier import Tier
from tierd.tiers.watch import watch
from tierd.workers.driller import Driller
from tierd.workers.persister import Persister
from tierd.workers.reaper import Reaper
from tierd.workers.recovery import Lister, recover
from tierd.workers.replicator import Replicator
from tierd.workers.restorer import Restorer
from tierd.workers.scrubber import Scrubber
from tierd.workers.worker import Wake, Worker, run_forever

log = logging.getLogger("tierd")

DRAIN_LOOK_S = 1.0
STOP_TIMEOUT_S = 3.0  # from the end of the drain to the end of the process


def serve(
    config: Config,
    ready: Callable[[str], None] | None = None,
    *,
    notify_socket: str = "",
    read_config: Callable[[], Config] | None = None,
) -> None:
    """Run until SIGTERM or SIGINT. `ready` is told the address of the HTTP door once all doors are open.
    `notify_socket`: where systemd wants to hear of it. `read_config`: how SIGHUP reads the config anew.

    Raises LockHeld, BadConfig or TierUnreachable when it cannot start; nothing has been changed then. Raises
    Transient at the end when a sealed snapshot did not reach the hot tier in time.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    _raise_descriptor_limit()
    _step_back(config.daemon.nice)
    about = {"node": config.daemon.node, "socket": config.daemon.socket}
    with lock(config.hot_path, about) as held:
        daemon = _Daemon(config, notify_socket, read_config)
        asyncio.run(daemon.run(lambda address: held.describe({**about, "listen": address}), ready))


class _Daemon:
    """All rooms of one daemon, built once."""

    def __init__(self, config: Config, notify_socket: str, read_config: Callable[[], Config] | None) -> None:
        self._config = config
        self._notify_socket = notify_socket
        self._read_config = read_config
        limits = config.limits
        names = [HOT, *(cold.name for cold in config.cold)]
        self._metrics = Metrics(tiers=names)
        self._incidents = Incidents(self._metrics, _timestamp)
        self._catalog = Catalog(names)
        self._memory = MemoryTier()
        self._hot_store = DirectoryStore(config.hot_path)
        self._hot = Tier(HOT, self._hot_store)
        self._cold = {one.name: self._open_cold(one) for one in config.cold}
        self._tiers = {HOT: self._hot, **self._cold}
        self._wakes: dict[str, Wake] = {}
        self._group: asyncio.TaskGroup | None = None
        self._conversations: set[asyncio.Task[None]] = set()
        self._settled = Wake()

        self._neighbour = WriteThrottle(
            names, config.daemon, metrics=self._metrics, on_limit=self._limit_writes, now_s=time.monotonic
        )
        self._persister = Persister(
            self._memory,
            self._hot,
            self._catalog,
            metrics=self._metrics,
            incidents=self._incidents,
            neighbour=self._neighbour,
            tell=self._tell,
            on_settled=self._on_settled,
        )
        self._listers = {name: Lister(self._catalog, tier, self._look_interval_s(name))
                         for name, tier in self._tiers.items()}  # fmt: skip
        self._replicators = {
            name: Replicator(
                self._catalog,
                self._hot,
                tier,
                config,
                metrics=self._metrics,
                incidents=self._incidents,
                neighbour=self._neighbour,
                tell=self._tell,
                on_committed=lambda: self._wake("reap"),
                now=_timestamp,
            )
            for name, tier in self._cold.items()
        }
        self._reaper = Reaper(
            self._catalog,
            self._memory,
            self._tiers,
            config,
            incidents=self._incidents,
            on_freed=lambda: self._wake("persist"),
            on_lost=lambda name: self._wake(f"list {name}"),
            on_forgotten=lambda run: self._door.forget(run),
        )
        self._examiner = Examiner(
            self._memory,
            self._catalog,
            self._hot,
            self._hot_store,
            interval_s=limits.reconcile_interval_s,
            metrics=self._metrics,
            incidents=self._incidents,
            now=_timestamp,
            on_judged=self._on_judged,
        )
        self._scrubbers = {
            name: Scrubber(
                self._catalog,
                tier,
                self._tiers,
                config.scrub,
                limits,
                metrics=self._metrics,
                incidents=self._incidents,
                on_mended=lambda name=name: self._wake(f"list {name}"),
                now_s=time.monotonic,
            )
            for name, tier in self._tiers.items()
        }
        self._driller = Driller(
            self._catalog,
            self._tiers,
            config,
            metrics=self._metrics,
            incidents=self._incidents,
            now_s=time.monotonic,
            timestamp_s=lambda: datetime.now(UTC).timestamp(),
        )
        restorer = Restorer(
            self._memory,
            self._catalog,
            self._hot,
            self._hot_store,
            self._cold,
            [self._listers[name].has_listed for name in self._cold],
            metrics=self._metrics,
            incidents=self._incidents,
            judge=self._judge,
        )
        self._door = TrainerDoor(
            self._memory,
            self._catalog,
            self._hot,
            restorer,
            config,
            metrics=self._metrics,
            incidents=self._incidents,
            neighbour=self._neighbour,
            on_whole=self._on_whole,
            spawn=self._spawn,
            now=lambda: datetime.now(UTC),
        )
        self._operator = Operator(
            config,
            self._catalog,
            self._memory,
            self._tiers,
            self._incidents,
            self._metrics,
            now=lambda: datetime.now(UTC),
            pid=os.getpid(),
        )
        self._limits = limits

    # ── running ──

    async def run(self, describe: Callable[[str], None], ready: Callable[[str], None] | None) -> None:
        """`describe` and `ready` are told the HTTP door's address: before and after all doors are open."""
        stop = self._catch_signals()
        missing: list[CheckpointId] = []
        await recover(self._catalog, self._hot, self._hot_store, now_s=datetime.now(UTC).timestamp())
        listener = open_listener(self._config.daemon.socket)
        runner = web.AppRunner(self._operator.app(), access_log=None, shutdown_timeout=1.0)
        try:
            address = await self._open_http(runner)
            describe(address)
            async with asyncio.TaskGroup() as group:
                self._group = group
                tasks = [group.create_task(self._door.serve(listener)), *self._start_workers(group)]
                with watch(self._config.hot_path, lambda: self._wake(f"list {HOT}")):
                    self._operator.is_ready = True
                    log.info("tierd %s serves %s, http://%s", tierd.__version__, self._config.daemon.socket, address)
                    self._notify_systemd("READY=1")
                    if ready is not None:
                        ready(address)
                    await stop.wait()
                    self._notify_systemd("STOPPING=1")
                    missing = await self._drain()
                _end_within(STOP_TIMEOUT_S, exit_code=1 if missing else 0)
                for task in (*tasks, *self._conversations):
                    task.cancel()
        finally:
            with contextlib.suppress(OSError):
                os.unlink(self._config.daemon.socket)
            listener.close()
            await runner.cleanup()
            for tier in self._tiers.values():
                await tier.store.close()
        if missing:
            raise Transient(
                f"drain: {', '.join(map(str, missing))} did not reach the hot tier within "
                f"{self._config.daemon.drain_timeout_s:.0f} s",
                hint="a trainer that still runs will send it again to the next daemon",
            )

    def _start_workers(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        workers: dict[str, Worker] = {"persist": self._persister, "reap": self._reaper}
        if self._config.health.examine:
            workers["examine"] = self._examiner
        if self._config.scrub.interval_s:
            workers |= {f"scrub {name}": scrubber for name, scrubber in self._scrubbers.items()}
        if self._config.drill.interval_s:
            workers["drill"] = self._driller
        workers |= {f"list {name}": lister for name, lister in self._listers.items()}
        workers |= {f"replicate {name}": replicator for name, replicator in self._replicators.items()}
        self._wakes = {name: Wake() for name in workers}
        return [
            group.create_task(run_forever(worker, self._wakes[name], self._limits, self._incidents.record))
            for name, worker in workers.items()
        ]

    async def _open_http(self, runner: web.AppRunner) -> str:
        host, port = self._config.listen_address
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise BadConfig(
                f"listen on {self._config.daemon.listen}: {error.strerror}",
                hint="set daemon.listen to a free port; port 0 takes any",
            ) from error
        found_host, found_port = runner.addresses[0][:2]
        return f"{found_host}:{found_port}"

    async def _drain(self) -> list[CheckpointId]:
        """Wait until every sealed snapshot is in the hot tier, within the time that the config gives. Returns
        those that are not."""
        self._neighbour.hurry(self)
        log.info("draining: %d checkpoints on their way to the hot tier", len(self._memory.pending()))
        deadline_s = time.monotonic() + self._config.daemon.drain_timeout_s
        while self._memory.pending() and time.monotonic() < deadline_s:
            self._wake("persist")  # this is the last chance: no backoff
            await self._settled.wait(DRAIN_LOOK_S)
        return [one.id for one in self._memory.pending()]

    def _notify_systemd(self, state: str) -> None:
        """sd_notify(3): one datagram, if systemd started us."""
        path = self._notify_socket
        if not path:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
            sock.connect("\0" + path[1:] if path.startswith("@") else path)
            sock.send(state.encode())

    def _catch_signals(self) -> asyncio.Event:
        stop = asyncio.Event()

        def on_signal(number: signal.Signals) -> None:
            if stop.is_set():
                log.warning("second %s: ending at once", number.name)
                os._exit(128 + number)
            log.info("%s: draining, then ending", number.name)
            stop.set()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal, number)
        if self._read_config is not None:
            loop.add_signal_handler(signal.SIGHUP, self._reload, self._read_config)
        return stop

    def _reload(self, read_config: Callable[[], Config]) -> None:
        """Upload caps may change while it runs; of any other key that has changed, the log says that it has not."""
        try:
            fresh = read_config()
        except BadConfig as error:
            log.error("SIGHUP: nothing was changed: %s", error)
            return
        caps = {one.name: one.max_upload_mib_s for one in fresh.cold}
        cold: list[ColdConfig] = []
        for one in self._config.cold:
            cap = caps.get(one.name, one.max_upload_mib_s)
            if cap != one.max_upload_mib_s:
                log.info("SIGHUP: max_upload_mib_s of %s is %g now, was %g", one.name, cap, one.max_upload_mib_s)
            cold.append(msgspec.structs.replace(one, max_upload_mib_s=cap))
        others = differences(msgspec.structs.replace(self._config, cold=cold), fresh)
        if others:
            log.warning("SIGHUP: changed, and not in force before a restart: %s", ", ".join(others))
        elif cold == self._config.cold:
            log.info("SIGHUP: nothing has changed in the config")
        self._config = msgspec.structs.replace(self._config, cold=cold)
        for one in cold:
            self._limit_writes(one.name)

    # ── wiring ──

    def _open_cold(self, cold: ColdConfig) -> Tier:
        def on_request(operation: str, code: str) -> None:
            self._metrics.cold_requests_total.labels(tier=cold.name, op=operation, code=code).inc()

        return open_cold_tier(cold, self._config.limits, on_request)

    def _limit_writes(self, tier: str) -> None:
        """The least of what the config allows and what the trainers beside leave."""
        caps = [one.max_upload_mib_s for one in self._config.cold if one.name == tier and one.max_upload_mib_s > 0]
        limit_mib_s = min([*caps, self._neighbour.limit(tier) / (1 << 20)])
        self._tiers[tier].store.limit_writes(limit_mib_s if limit_mib_s < math.inf else 0.0)

    def _look_interval_s(self, tier: str) -> float:
        limits = self._config.limits
        return limits.reconcile_interval_s if tier == HOT else limits.cold_list_interval_s

    def _wake(self, worker: str) -> None:
        if worker in self._wakes:
            self._wakes[worker]()

    def _tell(self, run: Run, message: wire.ToClient) -> None:
        self._door.tell(run, message)

    def _on_whole(self) -> None:
        """All ranks have sealed a snapshot."""
        self._neighbour.queued(len(self._memory.pending()))
        self._wake("persist")
        self._wake("examine")

    def _on_settled(self, run: Run) -> None:
        """A checkpoint was persisted, or could not be."""
        self._neighbour.queued(len(self._memory.pending()))
        self._door.settle(run)
        self._settled()
        self._on_judged()
        self._wake("examine")

    def _on_judged(self) -> None:
        """What the lifecycle decides may be something else now."""
        for name in self._wakes:
            if name == "reap" or name.startswith("replicate"):
                self._wake(name)

    async def _judge(self, checkpoint: CheckpointId) -> bool | None:
        health = self._config.health
        return await self._examiner.is_healthy(checkpoint, health.restore_wait_s) if health.examine else None

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> object:
        if self._group is None:
            raise RuntimeError("the daemon is not running")
        task = self._group.create_task(coroutine)
        self._conversations.add(task)
        task.add_done_callback(self._conversations.discard)
        return task


def _timestamp() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _end_within(seconds: float, *, exit_code: int) -> None:
    """What has to be safe is safe, and the rest may be killed at any instant: no request to a region that does not
    answer keeps the process alive."""
    timer = threading.Timer(seconds, os._exit, [exit_code])
    timer.daemon = True
    timer.start()


def _step_back(nice: int) -> None:
    """Behind whoever trains. Each thread begins with the priority of the one that starts it, and the disk's follows
    the processor's where nobody has set it: ioprio_set(2)."""
    if nice:
        with contextlib.suppress(OSError):  # a sandbox may forbid it, and it is only a courtesy
            os.setpriority(os.PRIO_PROCESS, 0, max(nice, os.getpriority(os.PRIO_PROCESS, 0)))


def _raise_descriptor_limit() -> None:
    """Each slot takes two descriptors, each connection two; the usual soft limit of 1024 is for select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
