"""The operators' door: /metrics, /healthz, /readyz, a status page and read-only JSON, on one HTTP server.

Everything shown is derived at the moment of asking from the catalog, the memory tier and the incidents, so
status, metrics and reality cannot drift apart. Nothing here changes anything.
"""

from __future__ import annotations

import html
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec
from aiohttp import web

import tierd
from tierd.catalog import MEMORY, Catalog
from tierd.config import Config
from tierd.errors import TierdError
from tierd.format import checksum, layout
from tierd.format.health import Diagnosis
from tierd.format.ids import CheckpointId, Run, is_run, parse_name
from tierd.format.manifest import FileEntry, Manifest
from tierd.incidents import Incidents
from tierd.lifecycle.policy import HOT, Verdict
from tierd.memory.slot_states import SlotState
from tierd.memory.tier import MemoryTier, SnapshotSet
from tierd.metrics import HALT_REASONS, Metrics
from tierd.tiers.tier import Tier
from tierd.workers.persister import manifest_of
from tierd.workers.reaper import decisions, forecasts, halted
from tierd.workers.replicator import waiting

Json = dict[str, Any]


class Operator:
    def __init__(
        self,
        config: Config,
        catalog: Catalog,
        memory: MemoryTier,
        tiers: Mapping[str, Tier],
        incidents: Incidents,
        metrics: Metrics,
        *,
        now: Callable[[], datetime],
        pid: int,
    ) -> None:
        self._config = config
        self._catalog = catalog
        self._memory = memory
        self._tiers = tiers
        self._incidents = incidents
        self._metrics = metrics
        self._now = now
        self._pid = pid
        self._began_s = time.monotonic()
        self.is_ready = False

    def app(self) -> web.Application:
        app = web.Application(client_max_size=4096)
        app.router.add_get("/", self._page)
        app.router.add_get("/metrics", self._metrics_text)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/api/v1/status", self._status)
        app.router.add_get("/api/v1/checkpoints", self._checkpoints)
        app.router.add_get("/api/v1/checkpoints/{run}/{name}", self._checkpoint)
        app.router.add_get("/api/v1/lifecycle", self._lifecycle)
        return app

    # ── what is told ──

    async def status(self) -> Json:
        """What `tierd status --json` prints."""
        return {
            "version": tierd.__version__,
            "node": self._config.daemon.node,
            "pid": self._pid,
            "uptime_s": round(time.monotonic() - self._began_s, 1),
            "is_ready": self.is_ready,
            "halted": halted(self._catalog),
            "runs": [self._run(run) for run in sorted({*self._catalog.runs(), *self._memory.runs()})],
            "tiers": [await self._tier(name) for name in self._tiers],
            "queues": self._queues(),
            "slots": {state.value: count for state, count in self._slots().items()},
            "failures": self._incidents.recent(),
        }

    def in_memory(self) -> list[Manifest]:
        """The memory tier's checkpoints, described as manifests; the sizes are true, checksums may be missing."""
        return [
            one.manifest or manifest_of(one, _files(one), sequence=self._catalog.sequence_max(one.id.run) + 1)
            for one in self._memory.complete()
        ]

    def _run(self, run: Run) -> Json:
        whole = self._memory.newest_restorable(run)
        tiers: dict[str, Json | None] = {MEMORY: self._where(whole.id, whole.head.created_at) if whole else None}
        for name in self._tiers:
            newest = self._catalog.newest(run, name)
            tiers[name] = self._where(newest.id, newest.created_at) if newest else None
        is_here = self._memory.generation(run) > 0
        state, reason = self._memory.outcomes.state(run) or (None, "")
        return {
            "run": run,
            "generation": max(self._catalog.generation_max(run), self._memory.generation(run)),
            "world_size": self._memory.world_size(run) if is_here else None,
            "ranks_attached": len(self._memory.present(run)),
            "state": state,
            "reason": reason,
            "tiers": tiers,
            "unhealthy_steps": self._unhealthy_steps(run),
        }

    def _unhealthy_steps(self, run: Run) -> list[int]:
        """Oldest first; in memory as well, where a verdict may be known before there is a marker."""
        found = {entry.id for entry in self._catalog.entries(run) if entry.healthy is False}
        found |= {
            one.id for one in self._memory.complete(run) if one.diagnosis is not None and not one.diagnosis.healthy
        }
        return [checkpoint.step for checkpoint in sorted(found, key=lambda one: one.recency)]

    def _where(self, checkpoint: CheckpointId, created_at: str) -> Json:
        return {
            "step": checkpoint.step,
            "generation": checkpoint.generation,
            "created_at": created_at,
            "age_s": self._age_s(created_at),
        }

    def _age_s(self, created_at: str) -> float | None:
        """None when it is not known: a foreign manifest may say anything."""
        try:
            made = datetime.fromisoformat(created_at)
            return round(max(0.0, (self._now() - made).total_seconds()), 1)
        except (ValueError, TypeError):
            return None

    async def _tier(self, name: str) -> Json:
        knowledge = self._catalog.tiers[name]
        held = self._catalog.held(name)
        return {
            "name": name,
            "url": self._tiers[name].store.url,
            "is_known": knowledge.is_known,
            "error": knowledge.error,
            "checkpoints": len(held),
            "used_bytes": sum(manifest.size_bytes for manifest in held),
            "free_bytes": await self._free_bytes(name),
        }

    async def _free_bytes(self, tier: str) -> int | None:
        try:
            return await self._tiers[tier].store.free_bytes()
        except TierdError:
            return None

    def _queues(self) -> list[Json]:
        """What has yet to reach each tier."""
        unpersisted = self._memory.pending()
        ages = [time.monotonic() - one.sealed_at_s for one in unpersisted]
        queues: list[Json] = [_queue(HOT, ages)]
        for tier, checkpoints in waiting(self._catalog, self._config).items():
            manifests = [self._catalog.manifest(one) for one in checkpoints]
            queues.append(_queue(tier, [self._age_s(one.created_at) for one in manifests if one]))
        return queues

    def _slots(self) -> dict[SlotState, int]:
        counts = self._memory.slot_counts()
        return {state: counts[state] for state in SlotState}

    async def refresh_gauges(self) -> None:
        """Set every gauge from what is true now."""
        metrics = self._metrics
        free_bytes = {name: await self._free_bytes(name) for name in self._tiers}
        # No await from here on: two scrapes at once must not see each other's cleared gauges.
        for gauge in (
            metrics.last_committed_step,
            metrics.last_committed_timestamp_seconds,
            metrics.checkpoints,
            metrics.unhealthy_checkpoints,
            metrics.tier_free_bytes,
        ):
            gauge.clear()
        for run in sorted({*self._catalog.runs(), *self._memory.runs()}):
            metrics.begin_run(run)
            unhealthy = [entry for entry in self._catalog.entries(run) if entry.healthy is False]
            metrics.unhealthy_checkpoints.labels(run).set(len(unhealthy))
        for name, free in free_bytes.items():
            held = self._catalog.held(name)
            metrics.tier_used_bytes.labels(name).set(sum(manifest.size_bytes for manifest in held))
            if free is not None:
                metrics.tier_free_bytes.labels(name).set(free)
            metrics.damaged_checkpoints.labels(name).set(len(self._catalog.tiers[name].damaged))
            counts = Counter(manifest.run for manifest in held)
            for run in self._catalog.runs():
                metrics.checkpoints.labels(run, name).set(counts[run])
                newest = self._catalog.newest(run, name)
                if newest is None:
                    continue
                metrics.last_committed_step.labels(run, name).set(newest.step)
                age_s = self._age_s(newest.created_at)
                if age_s is not None:
                    made_s = self._now().timestamp() - age_s
                    metrics.last_committed_timestamp_seconds.labels(run, name).set(made_s)
        for queue in self._queues():
            metrics.queue_checkpoints.labels(queue["tier"]).set(queue["checkpoints"])
            metrics.queue_oldest_age_seconds.labels(queue["tier"]).set(queue["oldest_age_s"])
        for state, count in self._slots().items():
            metrics.slots.labels(state.value).set(count)
        reasons = halted(self._catalog)
        for reason in HALT_REASONS:
            metrics.halted.labels(reason).set(any(one.startswith(reason) for one in reasons))

    # ── routes ──

    async def _metrics_text(self, _: web.Request) -> web.Response:
        await self.refresh_gauges()
        body, content_type = self._metrics.render()
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _healthz(self, _: web.Request) -> web.Response:
        """Alive: the event loop answers. S3 plays no part: a restart would help nothing."""
        return web.Response(text="alive\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        """Ready: recovered, listening, and the hot tier can be listed."""
        known = self._catalog.tiers[HOT]
        if self.is_ready and known.is_known:
            return web.Response(text="ready\n")
        return web.Response(status=503, text=f"not ready: {known.error or 'recovering'}\n")

    async def _status(self, _: web.Request) -> web.Response:
        return _json(await self.status())

    async def _checkpoints(self, request: web.Request) -> web.Response:
        run = request.query.get("run")
        diagnoses = {one.id: one.diagnosis.healthy for one in self._memory.complete() if one.diagnosis is not None}
        return _json(self._catalog.facts(self.in_memory(), Run(run) if run else None, diagnoses))

    async def _checkpoint(self, request: web.Request) -> web.Response:
        run, name = request.match_info["run"], request.match_info["name"]
        checkpoint = parse_name(Run(run), name) if is_run(run) else None
        in_memory = {one.id: one for one in self.in_memory()}
        if checkpoint is None or (self._catalog.get(checkpoint) is None and checkpoint not in in_memory):
            return _json({"error": f"there is no checkpoint {run}/{name}"}, status=404)
        entry = self._catalog.get(checkpoint)
        manifest = entry.manifest if entry else in_memory[checkpoint]
        tiers = [name for name in self._tiers if entry and name in entry.tiers]
        diagnosis = await self._diagnosis(checkpoint)
        return _json(
            {
                "manifest": msgspec.to_builtins(manifest),
                "tiers": [*([MEMORY] if checkpoint in in_memory else []), *tiers],
                "milestones": sorted(entry.all_milestones) if entry else [],
                "healthy": diagnosis.healthy if diagnosis else None,
                "diagnosis": msgspec.to_builtins(diagnosis),
            }
        )

    async def _diagnosis(self, checkpoint: CheckpointId) -> Diagnosis | None:
        held, entry = self._memory.find(checkpoint), self._catalog.get(checkpoint)
        if held is not None and held.diagnosis is not None:
            return held.diagnosis
        for tier, is_healthy in entry.diagnoses.items() if entry else ():
            return await self._tiers[tier].diagnosis(checkpoint, is_healthy=is_healthy)
        return None

    async def _lifecycle(self, _: web.Request) -> web.Response:
        """What `tierd lifecycle --json` prints."""
        planned = [
            {
                "run": one.checkpoint.id.run,
                "step": one.checkpoint.id.step,
                "generation": one.checkpoint.id.generation,
                "tier": one.tier,
                "action": one.verdict.value,
                "reason": one.reason,
            }
            for one in decisions(self._catalog, self._config)
            if one.verdict is not Verdict.KEEP
        ]
        found = forecasts(self._catalog, self._config)
        return _json({"planned": planned, "forecast": [msgspec.to_builtins(one) for one in found]})

    async def _page(self, _: web.Request) -> web.Response:
        return web.Response(text=_render(await self.status()), content_type="text/html")


def _files(one: SnapshotSet) -> list[FileEntry]:
    """Names and sizes of what is not written yet; its checksums are not known."""
    return [
        FileEntry(
            name=layout.shard_name(rank, one.world_size),
            size_bytes=snapshot.sealed.size_bytes,
            crc64nvme="",
            chunk_bytes=checksum.CHUNK_BYTES,
            chunks=[],
        )
        for rank, snapshot in sorted(one.snapshots.items())
    ]


def _queue(tier: str, ages_s: Sequence[float | None]) -> Json:
    oldest_s = max((age for age in ages_s if age is not None), default=0.0)
    return {"tier": tier, "checkpoints": len(ages_s), "oldest_age_s": round(oldest_s, 1)}


def _json(content: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), status=status, content_type="application/json")


def _render(status: Json) -> str:
    """The status page: what is safe and where, one table; no script, no style from elsewhere."""
    tiers = [MEMORY, *(tier["name"] for tier in status["tiers"])]
    rows: list[list[str]] = []
    for run in status["runs"]:
        told = f"{run['state'] or 'not seen'}{': ' if run['reason'] else ''}{run['reason']}"
        cells = [run["run"], str(run["generation"]), told, f"{run['ranks_attached']} of {run['world_size'] or '?'}"]
        for tier in tiers:
            found = run["tiers"].get(tier)
            ago = f", {found['age_s']:.0f} s ago" if found and found["age_s"] is not None else ""
            cells.append(f"step {found['step']}{ago}" if found else "none")
        cells.append(", ".join(map(str, run["unhealthy_steps"])))
        rows.append(cells)
    places = [
        [t["name"], t["url"], "known" if t["is_known"] else f"not known: {t['error']}", str(t["checkpoints"]),
         f"{t['used_bytes'] / 2**30:.2f} GiB", "" if t["free_bytes"] is None else f"{t['free_bytes'] / 2**30:.1f} GiB"]
        for t in status["tiers"]
    ]  # fmt: skip
    queues = [[q["tier"], str(q["checkpoints"]), f"{q['oldest_age_s']:.0f} s"] for q in status["queues"]]
    failures = [[f["at"], f["stage"], f["kind"], f["message"], f["hint"]] for f in status["failures"]]
    halted_text = "; ".join(status["halted"]) or "no"
    return (
        "<!doctype html><meta charset=utf-8><meta http-equiv=refresh content=5><title>tierd</title>"
        "<style>body{font:15px system-ui;margin:2em;max-width:75em}table{border-collapse:collapse;margin:0 0 2em}"
        "td,th{border:1px solid #bbb;padding:.3em .7em;text-align:left}</style>"
        f"<h1>tierd on {html.escape(status['node'])}</h1><p>version {status['version']}, up "
        f"{status['uptime_s']:.0f} s; deletion halted: {html.escape(halted_text)}</p>"
        + _table("Newest restorable step", ["run", "generation", "state", "ranks", *tiers, "unhealthy steps"], rows)
        + _table("Tiers", ["tier", "where", "listing", "checkpoints", "used", "free"], places)
        + _table("Still to be copied", ["to", "checkpoints", "oldest"], queues)
        + _table("Failures, newest first", ["at", "stage", "kind", "what", "hint"], failures)
    )


def _table(title: str, heads: list[str], rows: list[list[str]]) -> str:
    head = "".join(f"<th>{html.escape(one)}" for one in heads)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}" for cell in row) for row in rows)
    return f"<h2>{html.escape(title)}</h2><table><tr>{head}{body or '<tr><td>none'}</table>"
