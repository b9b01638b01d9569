"""The daemon's HTTP server: /metrics, /healthz, /readyz and read-only JSON; the reports also for the status pages.

Every answer is derived from the catalog, the memory tier and the incidents at the moment of the request, so status and
metrics cannot disagree. Nothing here changes anything; with `?fresh`, the status waits for new listings of the tiers,
with `?nodes` for the other nodes of each run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence, Set
from contextlib import suppress

import msgspec
from aiohttp import web
from msgspec import UNSET

import tierd
from tierd.api.forecasts import Forecasts
from tierd.api.gauges import refresh_gauges
from tierd.api.queue_reports import WriteRates, queue_reports
from tierd.catalog.decisions import decisions, forecasting, halted, to_reap
from tierd.catalog.entry import Entry
from tierd.context import DaemonContext
from tierd.format.ids import HOT, MEMORY, CheckpointId, Run, is_run, parse_name
from tierd.format.manifest import Manifest
from tierd.format.node_file import NodeFile
from tierd.format.run_state import RunState
from tierd.format.text import printable, printable_json
from tierd.memory.progress import Pause
from tierd.memory.slot import SlotState
from tierd.status.alarm_rules import alarms
from tierd.status.checkpoint_report import (
    CheckpointReport,
    CheckpointRow,
    CheckpointRows,
    checkpoint_report,
    read_diagnosis,
)
from tierd.status.disks import free_bytes, on_disk_of
from tierd.status.lifecycle_report import LifecycleReport, PlannedAction, planned_action
from tierd.status.node_reports import (
    NewestPart,
    NodesReport,
    PartnerReport,
    awaited_report,
    everywhere_report,
    newest_part_report,
    newest_report,
)
from tierd.status.report import (
    LOOK_S,
    CadenceReport,
    HolderReport,
    LostReplica,
    RunReport,
    StatusReport,
    costs_report,
    foreign_sentences,
    run_report,
    set_unhealthy,
    sources_of,
    tier_report,
)
from tierd.status.work_at_risk import RiskReport, work_at_risk
from tierd.workers.lister import Lister
from tierd.workers.roster_reader import RosterReader
from tierd.workers.sidecar_follower import SidecarFollower
from tierd.workers.watcher import Watcher

ROWS_AT_ONCE, RUNS_AT_ONCE = 256, 64  # some milliseconds each


class Operator:
    """`listers`: by tier; they list it when a request asks for a fresh answer."""

    def __init__(
        self,
        context: DaemonContext,
        listers: Mapping[str, Lister],
        *,
        pid: int,
        peer_lag_s: Callable[[Run], float | None] = lambda run: None,
        watchers: Sequence[Watcher] = (),
        sidecars: SidecarFollower | None = None,
        processes: Callable[[Run], list[HolderReport]] = lambda run: [],
    ) -> None:
        self._context = context
        self._peer_lag_s = peer_lag_s
        self._rosters = RosterReader(context, peer_lag_s)
        self._listers = listers
        self._watchers = watchers
        self.write_rates = WriteRates(context.throttle.written_bytes, context.monotonic_s)
        self._forecasts = Forecasts(context)
        self._sidecars = sidecars
        self._processes = processes
        self._catalog = context.catalog
        self._memory = context.memory
        self._now = context.now
        self._pid = pid
        self._started_s = time.monotonic()
        self.is_ready = False

    def app(self) -> web.Application:
        app = web.Application(client_max_size=4096)
        app.router.add_get("/metrics", self._metrics_text)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/api/v1/status", self._status)
        app.router.add_get("/api/v1/checkpoints", self._checkpoints)
        app.router.add_get("/api/v1/checkpoints/{run}/{name}", self._checkpoint)
        app.router.add_get("/api/v1/lifecycle", self._lifecycle)
        return app

    async def status(self, *, with_nodes: bool = False, nodes_of: str = "") -> StatusReport:
        """`with_nodes`: with what the other nodes of the runs answer; `nodes_of`: of this run."""
        status = await self._status_now()
        await asyncio.gather(*(self._add_roster(run) for run in status.runs if with_nodes or run.run == nodes_of))
        status.alarms = alarms(status, self._now())
        return status

    async def _status_now(self) -> StatusReport:
        slot_counts = self._memory.slot_counts()
        tiers = self._context.tiers
        free, on_hot_disk = await asyncio.gather(
            asyncio.gather(*map(free_bytes, tiers.values())),
            on_disk_of(tiers[HOT], self._context.cold.values()),
        )
        forecasts = await self._forecasts.read(dict(zip(tiers, free, strict=True)), on_hot_disk)
        runs = [report async for report in self._runs(on_hot_disk)]
        left = to_reap(self._catalog, self._context.config)
        await asyncio.sleep(0)
        queues = queue_reports(self._context, forecasts.due_every_s)
        await asyncio.sleep(0)
        rates = self.write_rates.rates()
        return StatusReport(
            version=tierd.__version__,
            node=self._context.config.daemon.node,
            pid=self._pid,
            uptime_s=round(time.monotonic() - self._started_s, 1),
            is_ready=self.is_ready,
            peer_address=self._context.peer_key.address,
            peer_fingerprint=self._context.peer_key.fingerprint,
            halted=[str(halt) for halt in halted(self._catalog)],
            foreign=foreign_sentences(self._catalog),
            lost=[
                LostReplica(**msgspec.to_builtins(checkpoint), tier=tier)
                for tier, lister in self._listers.items()
                for checkpoint in lister.lost
            ],
            runs=runs,
            tiers=[
                tier_report(
                    self._catalog,
                    name,
                    tier.store.url,
                    tier_free_bytes,
                    listed_age_s=self._listed_age_s(name),
                    to_reap=left.get(name),
                    is_on_hot_disk=name in on_hot_disk,
                    write_bytes_per_s=rates.get(name),
                    disk=forecasts.disk(name, self._now()),
                )
                for (name, tier), tier_free_bytes in zip(tiers.items(), free, strict=True)
            ],
            queues=queues,
            watches=[watcher.report() for watcher in self._watchers],
            sidecars=None if self._sidecars is None else self._sidecars.report(),
            slots={state.value: slot_counts[state] for state in SlotState},
            costs=costs_report(self._context.metrics),
            failures=self._context.incidents.recent(),
        )

    async def _runs(self, on_hot_disk: Set[str]) -> AsyncIterator[RunReport]:
        """By name. Other tasks go on meanwhile."""
        costs = self._context.metrics.mean_s(self._context.metrics.restore_seconds)
        restore_s = {tier: mean_s for tier, (mean_s, _) in costs.items()}
        for count, run in enumerate(sorted({*self._catalog.runs(), *self._memory.runs()}), start=1):
            yield self._run(run, on_hot_disk, restore_s)
            if count % RUNS_AT_ONCE == 0:
                await asyncio.sleep(0)

    def _listed_age_s(self, tier: str) -> float | None:
        lister = self._listers.get(tier)
        if lister is None or lister.listed_s is None:
            return None
        return round(self._context.monotonic_s() - lister.listed_s, 1)

    async def _look(self) -> None:
        """Wait until every tier was listed again, for LOOK_S at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await asyncio.gather(*(lister.look() for lister in self._listers.values()))

    def _run(self, run: Run, on_hot_disk: Set[str], restore_s: Mapping[str, float]) -> RunReport:
        report = run_report(self._catalog, run, self._now())
        newest = self._memory.newest_restorable(run)
        in_memory = newest and newest_report(newest.id, newest.head.created_at, self._now())
        node = self._memory.node(run)
        if node is not None:
            parts = report.nodes.parts if report.nodes is not UNSET else {}
            if newest is not None and newest.node is not None:
                in_memory, parts = None, {MEMORY: newest_part_report(newest.make_node_file(), self._now())} | parts
            report.nodes = NodesReport(
                ranks=node.ranks,
                world_size=self._memory.world_size(run),
                parts=parts,
                everywhere=everywhere_report(self._catalog, run, self._now()),
                copied=self._newest_copy(run),
                partner=self._partner(run),
                awaited=awaited_report(self._catalog, run, self._now()),
            )
        elif run in self._memory.runs():  # on this node alone now
            report.nodes = UNSET
        elif report.nodes is not UNSET:
            report.nodes.awaited = awaited_report(self._catalog, run, self._now())
        report.tiers = {MEMORY: in_memory, **report.tiers}
        if generation := self._memory.generation(run):
            report.generation = max(report.generation, generation)
            report.world_size = self._memory.world_size(run)
        report.ranks_attached = len(self._memory.present(run))
        choice = self._context.cadences.choice(run, self._context.monotonic_s())
        if choice is not None and report.ranks_attached:
            report.cadence = CadenceReport(every_s=round(choice.every_s, 3), reasons=list(choice.reasons))
        report.state, report.reason = self._memory.outcomes.state(run) or (None, "")
        report.reason = report.reason or self._memory.outcomes.ended_badly(run)
        now_s = self._context.monotonic_s()
        if (ended_s := self._memory.outcomes.ended_s(run)) is not None:
            report.ended_age_s = round(now_s - ended_s, 1)
        if (attached_s := self._memory.progress.attached_s(run, now_s)) is not None:
            report.attached_s = round(attached_s, 1)
        if (pause := self._memory.progress.pause(run, now_s)) is not None:
            report.pause = Pause(round(pause.seconds, 1), round(pause.limit_s, 1))
            report.processes = self._processes(run) if pause.is_too_long else []
        report.newer_generation = self._context.newer_generations().get(run)
        report.at_risk = self._at_risk(run, report, on_hot_disk, restore_s)
        # A snapshot in memory may be diagnosed before there is a marker.
        unhealthy = {*self._catalog.unhealthy(run)}
        unhealthy |= {
            snapshot_set.id for snapshot_set in self._memory.complete(run) if snapshot_set.is_healthy is False
        }
        set_unhealthy(report, unhealthy)
        return report

    def _at_risk(
        self, run: Run, report: RunReport, on_hot_disk: Set[str], restore_s: Mapping[str, float]
    ) -> list[RiskReport]:
        sources, progress = sources_of(report), self._memory.progress
        has_saved = any(source.generation == report.generation for source in sources.values())
        return work_at_risk(
            sources,
            world_size=report.world_size or 1,
            is_running=report.state == RunState.RUNNING,
            step_s=progress.step_s(run),
            restore_s=restore_s,
            on_hot_disk=on_hot_disk,
            started_s=None if has_saved else progress.started_s(run, self._context.monotonic_s()),
            silent_s=report.pause.seconds if report.pause is not None and report.pause.is_too_long else 0.0,
        )

    def _partner(self, run: Run) -> PartnerReport | None:
        partner, own = self._context.partners.get(run), self._context.config.lifecycle_digest
        if partner is None:
            return None
        return PartnerReport(
            address=partner.peer.address,
            fingerprint=partner.peer.fingerprint,
            has_same_lifecycle=partner.lifecycle in ("", own),
        )

    def _newest_copy(self, run: Run) -> NewestPart | None:
        copies = self._context.part_copies
        newest = next(iter(copies.of_run(run)), None) if copies is not None else None
        return newest and newest_part_report(newest, self._now())

    async def rows(self, run: Run | None = None) -> list[CheckpointRow]:
        """As `tierd ls` shows them. Other tasks go on meanwhile."""
        verdicts = [(snapshot_set, snapshot_set.is_healthy) for snapshot_set in self._memory.complete()]
        # That this node's part is healthy says nothing about the others.
        health = {each.id: verdict for each, verdict in verdicts if verdict is False or (verdict and each.node is None)}
        made = CheckpointRows(self._catalog, run, self._in_memory(), health)
        rows: list[CheckpointRow] = []
        for begin in range(0, len(made.ids), ROWS_AT_ONCE):
            rows += made.make(made.ids[begin : begin + ROWS_AT_ONCE])
            await asyncio.sleep(0)
        return rows

    def parents(self, run: Run | None = None) -> dict[CheckpointId, CheckpointId | None]:
        """The checkpoint that each one continues."""
        in_memory = {manifest.id: manifest.parent for manifest in self._in_memory() if run in (None, manifest.run)}
        return in_memory | {entry.id: entry.manifest.parent for entry in self._catalog.entries(run)}

    def planned(self, checkpoint: CheckpointId) -> list[PlannedAction]:
        """What the lifecycle does with it, also where it keeps it, and why."""
        return list(map(planned_action, decisions(self._catalog, self._context.config, only=checkpoint)))

    async def report(self, run: str, name: str) -> CheckpointReport | None:
        """As `tierd show` shows it. None if there is none of this name."""
        checkpoint = parse_name(Run(run), name)
        in_memory = next((manifest for manifest in self._in_memory() if manifest.id == checkpoint), None)
        entry = self._catalog.get(checkpoint) if checkpoint else None
        if entry is None and in_memory is not None:
            entry = Entry(in_memory.id, in_memory)
        if entry is None:
            return None
        snapshot_set = self._memory.find(entry.id)
        diagnosis = (snapshot_set and snapshot_set.diagnosis) or await read_diagnosis(entry, self._context.tiers)
        is_whole_in_memory = in_memory is not None and not isinstance(in_memory, NodeFile)
        whole_in = [tier for tier in self._context.tiers if entry.is_whole_in(tier)]
        return checkpoint_report(self._catalog, entry, [MEMORY] * is_whole_in_memory + whole_in, diagnosis, in_memory)

    def _in_memory(self) -> list[Manifest]:
        """The memory tier's checkpoints as manifests, and parts as node files. Sizes are exact; checksums may be
        missing."""
        return [
            snapshot_set.make_node_file()
            if snapshot_set.node is not None
            else snapshot_set.manifest
            or snapshot_set.make_manifest(sequence=self._catalog.sequence_max(snapshot_set.id.run) + 1)
            for snapshot_set in self._memory.complete()
        ]

    # ── routes ──

    async def _metrics_text(self, _: web.Request) -> web.Response:
        status = await self.status()
        await asyncio.sleep(0)
        refresh_gauges(self._context, status, self._peer_lag_s)
        body, content_type = self._context.metrics.render()
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _healthz(self, _: web.Request) -> web.Response:
        """Alive: the event loop answers. An unreachable S3 does not count, because a restart would not help."""
        return web.Response(text="alive\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        """Ready: recovered, listening, and the hot tier can be listed."""
        known = self._catalog.tiers[HOT]
        if self.is_ready and known.is_known:
            return web.Response(text="ready\n")
        return web.Response(status=503, text=f"not ready: {printable(known.error or 'recovering')}\n")

    async def _status(self, request: web.Request) -> web.Response:
        if "fresh" in request.query:
            await self._look()
        return _json(await self.status(with_nodes="nodes" in request.query))

    async def _add_roster(self, report: RunReport) -> None:
        if report.nodes is not UNSET:
            roster = await self._rosters.read(Run(report.run))
            report.nodes.roster = UNSET if roster is None else roster

    async def _checkpoints(self, request: web.Request) -> web.Response:
        run = request.query.get("run")
        rows = await self.rows(Run(run) if run else None)
        return _as_json(await asyncio.to_thread(_encoded, rows))

    async def _checkpoint(self, request: web.Request) -> web.Response:
        run, name = request.match_info["run"], request.match_info["name"]
        report = await self.report(run, name) if is_run(run) else None
        if report is None:
            return _json({"error": f"there is no checkpoint {run}/{name}"}, status=404)
        return _json(report)

    async def _lifecycle(self, _: web.Request) -> web.Response:
        planned = list(map(planned_action, decisions(self._catalog, self._context.config, with_kept=False)))
        forecasts = await asyncio.to_thread(forecasting(self._catalog, self._context.config))
        report = LifecycleReport(planned=planned, forecast=forecasts)
        return _as_json(await asyncio.to_thread(_encoded, report))


def _json(content: object, status: int = 200) -> web.Response:
    return _as_json(_encoded(content), status)


def _as_json(text: str, status: int = 200) -> web.Response:
    return web.Response(text=text, status=status, content_type="application/json")


def _encoded(content: object) -> str:
    return printable_json(msgspec.json.encode(content))
