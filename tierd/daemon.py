"""The daemon: builds the workers and the sockets, runs them in one TaskGroup, and drains on SIGTERM.

At start: lock the hot directory, check that no two tiers are one place, recover the hot tier, then open the sockets.
Cold tiers are listed afterwards, so that an unreachable S3 never delays a trainer. At the end: the sockets stay open
until sealed snapshots are durable, in hot or in a cold tier, then everything stops. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import math
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any

import tierd
from tierd import logs
from tierd.api.http_server import HttpServer
from tierd.api.operator import Operator
from tierd.api.packets import open_listener
from tierd.api.peer_parts import SERVED, PeerParts
from tierd.api.trainer import TrainerDoor
from tierd.api.web_pages import WebPages
from tierd.audit import AuditTrail, TrailFiles
from tierd.cadences import Cadences
from tierd.catalog.catalog import Catalog
from tierd.catalog.identity import Identities
from tierd.cold_tier import open_cold_tier
from tierd.config.file import check_user
from tierd.config.reload import reloaded
from tierd.config.sections import ColdConfig, Config
from tierd.context import DaemonContext
from tierd.daemon_process import end_within, lower_priority
from tierd.descriptors import raise_descriptor_limit
from tierd.errors import LockHeld, TierdError
from tierd.format import layout, wire
from tierd.format.digest import preferred
from tierd.format.ids import HOT, Run, check_run
from tierd.health.examiner import Examiner
from tierd.keys.key_file import keyring_of
from tierd.local_checks import start_checks
from tierd.loop_watchdog import LoopWatchdog
from tierd.memory.snapshot_set import SnapshotSet
from tierd.memory.tier import MemoryTier
from tierd.metrics import STAGES, Metrics
from tierd.status.incidents import Incidents
from tierd.status.log_limit import LogLimit
from tierd.systemd import Systemd
from tierd.throttle import WriteThrottle
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.lock import Lock, LockHolder
from tierd.tiers.part_copies import PartCopies
from tierd.tiers.tier import Tier
from tierd.tiers.watch import watch
from tierd.traces import make_traces
from tierd.workers.attached_runs import AttachedRuns
from tierd.workers.committer import Committer
from tierd.workers.copy_scrubber import CopyScrubber
from tierd.workers.drain import drain, drain_error
from tierd.workers.driller import Driller
from tierd.workers.hot_space import no_room
from tierd.workers.lister import Lister
from tierd.workers.lookout import Lookout
from tierd.workers.part_copier import PEERS, PartCopier
from tierd.workers.part_finisher import PartFinisher
from tierd.workers.persister import Persister
from tierd.workers.reaper import Reaper
from tierd.workers.recovery import recover, refuse_signed
from tierd.workers.replicator import Replicator
from tierd.workers.restorer import Restorer
from tierd.workers.run_expirer import RunExpirer
from tierd.workers.scrubber import Scrubber
from tierd.workers.sidecar_follower import SidecarFollower
from tierd.workers.watcher import Watcher
from tierd.workers.worker import Wake, Worker, run_forever
from tierd.workers.write_through import WriteThrough

log = logging.getLogger("tierd")

LOCK_INTERVAL_S = 2.0  # how often the lock of the hot directory is checked
STOP_TIMEOUT_S = 3.0  # from the end of the drain to the end of the process


def serve(config: Config, *, source: str, systemd: Systemd, read_config: Callable[[], Config]) -> None:
    """Run until SIGTERM or SIGINT. `source`: where the config is from. `read_config`: reads it again on SIGHUP.

    Raises LockHeld, BadConfig or TierUnreachable when it cannot start, with nothing changed. Raises Transient at the
    end when a sealed snapshot did not become durable in time.
    """
    logs.configure(LogLimit(STAGES), config.daemon.log_format)
    cold = ", ".join(f"{tier.name} {tier.url}" for tier in config.cold)
    log.info("config: %s; hot tier: %s; cold tiers: %s", source, config.hot.path, cold or "none")
    holder = LockHolder(node=config.daemon.node, socket=config.daemon.socket)
    check_user(config)
    with Lock(config.hot_path, holder, access=config.access) as hot_lock:
        raise_descriptor_limit()
        lower_priority(config.daemon.nice)
        faulthandler.enable()  # stacks on a crash, and on SIGABRT, with which systemd's watchdog ends a blocked daemon
        asyncio.run(_Daemon(config, systemd, read_config).run(hot_lock))


class _Daemon:
    """One daemon. It is the Notifier of its workers."""

    def __init__(self, config: Config, systemd: Systemd, read_config: Callable[[], Config]) -> None:
        self._config, self._systemd, self._read_config = config, systemd, read_config
        self._lock_error: LockHeld | None = None
        names = [HOT, *(cold.name for cold in config.cold)]
        self._metrics = Metrics(tiers=names)
        keyring = self._keyring = keyring_of(config.security.key_file, to_sign=True)
        self._memory = MemoryTier(algorithm="" if keyring is None else preferred())
        writers = [*names, PEERS, SERVED]
        self._throttle = WriteThrottle(
            writers, config.daemon, metrics=self._metrics, on_limit=self._limit_writes, now_s=time.monotonic
        )
        hot_store = DirectoryStore(config.hot_path, timeout_s=config.limits.directory_timeout_s, access=config.access)
        self._wakes: defaultdict[str, Wake] = defaultdict(Wake)  # of a worker that does not run, too
        files, on_event = TrailFiles(config.hot_path, keyring, create=True), self._wakes["audit"].set
        self._copies = PartCopies(config, keyring) if config.peers.listen else None
        context = self._context = DaemonContext(
            config=config,
            catalog=Catalog(names),
            memory=self._memory,
            hot=Tier(HOT, hot_store, limits=config.limits, keyring=keyring),
            hot_store=hot_store,
            cold={cold.name: self._open_cold(cold) for cold in config.cold},
            identities=Identities(config, lambda error: context.incidents.record("list", error)),
            metrics=self._metrics,
            incidents=Incidents(self._metrics, lambda: context.timestamp()),
            throttle=self._throttle,
            notify=self,
            keyring=keyring,
            part_copies=self._copies,
            cadences=Cadences(config.snapshot),
            traces=make_traces(is_on=config.daemon.traces),
            audit=AuditTrail(files, node=config.daemon.node, now=lambda: context.timestamp(), on_event=on_event),
        )
        self._group: asyncio.TaskGroup
        for name in context.cold:
            context.catalog.forget_copying(name)
        self._conversations: set[asyncio.Task[None]] = set()
        self._persist_ended, self._reload_wake = Wake(), Wake()
        intervals_s = {HOT: config.limits.reconcile_interval_s}
        self._listers = {
            name: Lister(context, tier, intervals_s.get(name, config.limits.cold_list_interval_s))
            for name, tier in context.tiers.items()
        }
        self._examiner = Examiner(context)
        copier = self._copier = PartCopier(context, self._copies) if self._copies is not None else None
        self._reaper = Reaper(context, more_room=copier.make_room if copier is not None else no_room)
        context.watched_nodes.update({check_run(each.run): each.node for each in config.watch if each.nodes > 1})
        self._watchers = [
            Watcher(context, each, self._reaper.make_room, on_change=self._wakes[f"watch {each.run}"].set)
            for each in config.watch
        ]
        self._sidecars = SidecarFollower(context) if config.sidecars.path else None
        self._followers = [*self._watchers, *([self._sidecars] if self._sidecars is not None else [])]
        self._workers = self._make_workers()
        restorer = Restorer(context, self._examiner.judge, self._reaper.make_room)
        self._door = TrainerDoor(context, restorer, spawn=self._spawn)
        lag_s = copier.lag_s if copier is not None else lambda run: None
        self._peers = PeerParts(context, restorer, copy_lag_s=lag_s) if config.peers.listen else None
        self._operator = Operator(
            context,
            self._listers,
            pid=os.getpid(),
            peer_lag_s=lag_s,
            watchers=self._watchers,
            sidecars=self._sidecars,
            processes=self._door.processes,
        )

    def _make_workers(self) -> dict[str, Worker]:
        """All workers, by the name as in `_wakes`: the kind, then the tier if there is one worker per tier."""
        context, config, reaper = self._context, self._config, self._reaper
        workers: dict[str, Worker] = {"persist": Persister(context, reaper.make_room), "reap": reaper}
        workers |= {"expire": RunExpirer(context), "audit": context.audit, "runs": AttachedRuns(context)}
        context.memory.outcomes.on_change = self._wakes["runs"].set
        if self._copier is not None:
            workers["copy"] = self._copier
        if config.cold:
            workers["write through"] = WriteThrough(context)
        if config.health.examine:
            workers["examine"] = self._examiner
        if config.scrub.interval_s:
            workers |= {f"scrub {name}": Scrubber(context, tier) for name, tier in context.tiers.items()}
            if self._copies is not None:
                workers[f"scrub {PEERS}"] = CopyScrubber(context, self._copies)
        if config.drill.interval_s:
            workers["drill"] = Driller(context)
        workers |= {f"list {name}": lister for name, lister in self._listers.items()}
        for watcher in self._watchers:
            workers |= {f"watch {watcher.run}": watcher, f"claim {watcher.run}": watcher.claim}
        if self._sidecars is not None:
            workers["sidecar"] = self._sidecars
        for name, tier in context.cold.items():
            workers |= {f"replicate {name}": Replicator(context, tier), f"commit {name}": Committer(context, tier)}
            workers |= {f"look {name}": Lookout(context, tier)} if config.limits.cold_look_interval_s else {}
            if self._copies is not None:
                workers[f"finish {name}"] = PartFinisher(context, self._copies, tier)
        return workers

    # ── running ──

    async def run(self, hot_lock: Lock) -> None:
        """Raises BadConfig, and LockHeld when another daemon has locked the hot directory meanwhile."""
        context, stop = self._context, self._catch_signals()
        missing: list[SnapshotSet] = []
        await refuse_signed(context.hot)
        context.audit.begin()
        await context.identities.begin(context.tiers)
        await recover(context.catalog, context.hot, context.hot_store, now_s=context.now().timestamp())
        if self._copies is not None:
            await self._copies.recover()
        elif await asyncio.to_thread((where := self._config.hot_path / layout.PEERS).is_dir):
            log.warning("copies of other nodes' parts are left in %s: nothing reads them without peers.listen", where)
        await self._door.admission.secrets.load()
        listener = open_listener(self._config.daemon.socket, self._config.socket_access)
        app = self._operator.app()
        WebPages(self._operator).add_to(app)
        http = HttpServer(app, self._config)
        try:
            await http.start()
            if self._peers is not None:
                await self._peers.start()
            hot_lock.describe(listen=http.address)
            async with asyncio.TaskGroup() as group:
                self._group = group
                watchdog = LoopWatchdog(self._metrics, context.incidents, self._systemd)
                rates = self._operator.write_rates
                loops = self._keep_lock(hot_lock, stop), self._reload_on_sighup(), watchdog.run(), rates.run()
                tasks = [*map(group.create_task, (self._door.serve(listener), *loops)), *self.start_workers(group)]
                async with watch(self._config.hot_path, lambda: self._wakes[f"list {HOT}"].set()):
                    self._operator.is_ready = True
                    log.info("tierd %s serves %s, %s", tierd.__version__, self._config.daemon.socket, http.url)
                    self._systemd.notify("READY=1")
                    start_checks(self._config, context.catalog, context.now())
                    await stop.wait()
                    self._systemd.notify("STOPPING=1")
                    if self._lock_error is None:
                        missing = await drain(context, self._persist, self._persist_ended, self._followers)
                exit_code = self._lock_error.exit_code if self._lock_error else 1 if missing else 0
                end_within(STOP_TIMEOUT_S, exit_code=exit_code)
                for task in (*tasks, *self._conversations):
                    task.cancel()
        finally:
            _unlink(self._config.daemon.socket)
            listener.close()
            await http.close()
            if self._peers is not None:
                await self._peers.close()
            for follower in self._followers:
                await follower.close()
            if self._lock_error is None:  # else the trail is the other daemon's
                await context.audit.close()
            for tier in (*context.tiers.values(), *([self._copies.tier] if self._copies is not None else [])):
                await tier.store.close()
        if self._lock_error:
            raise self._lock_error
        if missing:
            raise drain_error(missing, self._config.daemon.drain_timeout_s)

    def start_workers(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        limits, record = self._config.limits, self._context.incidents.record
        loops = (run_forever(worker, self._wakes[name], limits, record) for name, worker in self._workers.items())
        return [*map(group.create_task, loops)]

    async def _keep_lock(self, hot_lock: Lock, stop: asyncio.Event) -> None:
        """End this daemon when another one has locked the hot directory, which someone deleted under this one."""
        while not stop.is_set():
            await asyncio.sleep(LOCK_INTERVAL_S)
            try:
                await asyncio.to_thread(hot_lock.renew)
            except LockHeld as error:
                log.error("ending: %s", error)
                self._lock_error = error
                stop.set()
            except TierdError as error:
                log.warning("%s", error)

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
        loop.add_signal_handler(signal.SIGHUP, self._reload_wake.set)
        return stop

    async def _reload_on_sighup(self) -> None:
        while True:
            await self._reload_wake.wait()
            self._reload_wake.clear()
            await self._reload()

    async def _reload(self) -> None:
        try:
            fresh = await asyncio.to_thread(self._read_config)
        except Exception as error:  # broad: as of a deleted working directory, which must not end the daemon
            log.error("SIGHUP: the config was not changed: %s", error)
            return
        self._config = reloaded(self._config, fresh)
        self._context.reload(self._config)
        for tier in self._config.cold:
            self._limit_writes(tier.name)
        for name in self._workers:  # whoever mends a tier and reloads need not wait for the end of a backoff
            self._wakes[name].set_retry()

    # ── tiers ──

    def _open_cold(self, cold: ColdConfig) -> Tier:
        def on_request(operation: str, code: str) -> None:
            self._metrics.cold_requests_total.labels(tier=cold.name, op=operation, code=code).inc()

        access = self._config.access
        return open_cold_tier(cold, self._config.limits, on_request, access=access, keyring=self._keyring)

    def _limit_writes(self, tier: str) -> None:
        """Apply the lower of the config's upload cap and the write throttle."""
        caps = [cold.max_upload_mib_s for cold in self._config.cold if cold.name == tier and cold.max_upload_mib_s > 0]
        limit_mib_s = 0.0 if (least := min([*caps, self._throttle.limit(tier) / (1 << 20)])) == math.inf else least
        if tier == PEERS:
            if self._copies is not None:
                self._copies.bandwidth.limit(limit_mib_s)
        elif tier == SERVED:
            if self._peers is not None:
                self._peers.limit_copies(limit_mib_s)
        else:
            self._context.tiers[tier].store.limit_writes(limit_mib_s)

    def _persist(self) -> None:
        self._wakes["persist"].set()
        self._wakes["write through"].set()

    # ── Notifier ──

    def send(self, run: Run, message: wire.ToClient) -> None:
        self._door.send(run, message)

    def snapshot_sealed(self) -> None:
        self._throttle.queued(len(self._memory.pending()))
        self._wakes["persist"].set()
        self._wakes["examine"].set()

    def persist_ended(self, run: Run) -> None:
        self._throttle.queued(len(self._memory.pending()))
        self._door.release_slots(run)
        self._door.forget_ended(run)
        self._persist_ended.set()
        self._wakes["copy"].set()
        self.examined()
        self._wakes["examine"].set()

    def replicated(self) -> None:
        self._wakes["reap"].set()

    def part_sent(self, tier: str) -> None:
        self._wakes[f"commit {tier}"].set()

    def examined(self) -> None:
        for name in ("reap", *(f"replicate {tier}" for tier in self._context.cold)):
            self._wakes[name].set()

    def hot_refused(self) -> None:
        self._wakes["write through"].set()

    def space_freed(self) -> None:
        self._wakes["persist"].set()

    def relist(self, tier: str, *, is_wrong: bool = True) -> None:
        self._listers[tier].must_list |= is_wrong
        self._wakes[f"list {tier}"].set()

    def run_forgotten(self, run: Run) -> None:
        self._door.admission.forget_writers(run)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> object:
        task = self._group.create_task(coroutine)
        self._conversations.add(task)
        task.add_done_callback(self._conversations.discard)
        return task


def _unlink(socket: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(socket)
