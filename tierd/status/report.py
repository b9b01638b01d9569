"""The report model: what `tierd status`, `ls`, `show` and `lifecycle` print as JSON and the daemon answers over HTTP.

Filled from a catalog, by the daemon or by a CLI verb that has listed the tiers; the daemon adds what only it knows.
Rendered by the CLI, by the page `/` and as JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from tierd.catalog.catalog import Catalog
from tierd.catalog.decisions import room_bytes
from tierd.catalog.entry import sum_up_foreign
from tierd.config.sections import directory_of
from tierd.format.ids import HOT, MEMORY, PEER, CheckpointId, Run, checkpoint_id
from tierd.format.layout import parse_key
from tierd.format.node_file import NodeFile
from tierd.format.run_state import RunState
from tierd.memory.progress import Pause
from tierd.metrics import Metrics
from tierd.status.folder_reports import SidecarReport, WatchReport
from tierd.status.node_reports import (
    NewestCheckpoint,
    NewestPart,
    NodesReport,
    PartReport,
    everywhere_report,
    newest_part_report,
    newest_report,
)
from tierd.status.work_at_risk import RestartPoint, RiskReport

LOOK_S = 5.0  # how long the daemon's answer to a command waits for fresh listings of the tiers
FOREIGN_LISTED_MAX = 50  # an attacker can write any number


class CadenceReport(msgspec.Struct, kw_only=True):
    """Of `snapshot.cadence = "auto"`: the interval between snapshots, in seconds, and how it follows from what the
    daemon has measured."""

    every_s: float
    reasons: list[str]


class HolderReport(msgspec.Struct, kw_only=True):
    """A process: one that holds the lock of the hot directory, or a trainer. `state`: as of `ps`, such as T, which is
    stopped."""

    pid: int
    state: str

    @property
    def is_stopped(self) -> bool:
        return self.state in ("T", "t")


class RunReport(msgspec.Struct, kw_only=True):
    """`world_size`, `ranks_attached`, `attached_s` (how long any is), `state`, `reason` and `ended_age_s` (how the
    trainers are, or ended, and when), `pause`, `cadence` and `newer_generation` (begun elsewhere), of trainers that are
    attached: only the daemon knows. `tiers`: what each has whole. `at_risk`: what a loss now costs.
    `unhealthy_generation`: of the last of `unhealthy_steps`. `nodes`: only of a run over several nodes."""

    run: str
    generation: int
    world_size: int | None = None
    ranks_attached: int | None = None
    attached_s: float | None = None
    state: RunState | None = None
    reason: str = ""
    ended_age_s: float | None = None
    pause: Pause | None = None
    newer_generation: int | None = None
    cadence: CadenceReport | None = None
    processes: list[HolderReport] = []  # of trainers that are silent, as far as the daemon sees them
    at_risk: list[RiskReport] = []
    tiers: dict[str, NewestCheckpoint | None] = {}
    unhealthy_steps: list[int] = []
    unhealthy_generation: int | None = None
    nodes: NodesReport | UnsetType = UNSET


class DiskForecast(msgspec.Struct, kw_only=True):
    """Whether what the policy will keep fits on the disk, if the runs that go on keep their pace: "fits" for the next
    six months, "full" by then, or "unknown" before a run has shown its pace. `full_at`: ISO 8601, in UTC. `waits_for`:
    the cold tiers that do not get all copies in time, so that hot keeps more until it is full."""

    verdict: Literal["fits", "full", "unknown"]
    full_at: str | None = None
    full_in_s: float | None = None
    waits_for: list[str] = []


class TierReport(msgspec.Struct, kw_only=True):
    """`checkpoints`, and `used_bytes` of their files: None if the tier could never be listed. `room_bytes`: of hot, the
    free space that it needs for the next checkpoints; None in other tiers.

    `listed_age_s`: since the last listing that succeeded began; only the daemon knows. `to_reap`: the checkpoints
    that no policy keeps there and that wait for `tierd reap`; None where the daemon deletes them itself. `parts`: how
    many of `checkpoints` are only this node's part of one over several nodes; not set if none is. `is_on_hot_disk`: it
    is a cold tier on the file system of hot, and is lost with it. `write_bytes_per_s`: over the last minute; None: only
    the daemon knows. `disk`: None where no run goes on, for a bucket, and for a tier on hot's disk, which counts in
    hot."""

    name: str
    url: str
    is_known: bool
    error: str | None = None
    checkpoints: int | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    room_bytes: int | None = None
    listed_age_s: float | None = None
    to_reap: int | None = None
    parts: int | UnsetType = UNSET
    is_on_hot_disk: bool = False
    write_bytes_per_s: float | None = None
    disk: DiskForecast | None = None

    @property
    def directory(self) -> Path | None:
        return directory_of(self.url)


class LostReplica(msgspec.Struct, kw_only=True):
    """A replica that disappeared from a tier whose policy keeps it."""

    run: str
    step: int
    generation: int
    tier: str

    @property
    def id(self) -> CheckpointId:
        return checkpoint_id(self.run, self.step, self.generation)


class QueueReport(msgspec.Struct, kw_only=True):
    """The checkpoints that a tier should have and lacks. Of a cold tier also: `copying`, the one in progress; and since
    the daemon's start, `copy_s`, how long a copy takes, the age of the last commit, and how many copies were given up,
    by reason: "replaced" by newer ones, "no_space" in hot; `given_up_age_s`: since the last one was; `due_every_s`: the
    interval between the checkpoints that the tier should get, None where no run goes on or shows its pace. Of hot,
    `oldest_age_s` begins with the first snapshot since the newest durable one, also if newer ones have replaced it."""

    tier: str
    checkpoints: int
    oldest_age_s: float = 0.0
    copying: str | None = None
    copy_s: float | None = None
    due_every_s: float | None = None
    last_copy_age_s: float | None = None
    given_up: dict[str, int] = {}
    given_up_age_s: dict[str, float] = {}


class FailureReport(msgspec.Struct, frozen=True, kw_only=True):
    """`at`: of the last time; `first_at`: of the first of `count` times in a row, as far as the daemon remembers."""

    at: str
    stage: str
    message: str
    run: str | None = None
    step: int | None = None
    kind: str = ""
    hint: str = ""
    first_at: str = ""
    count: int = 1


class CostReport(msgspec.Struct, frozen=True, kw_only=True):
    mean_s: float
    count: int


class CostsReport(msgspec.Struct, kw_only=True):
    """Measured since the daemon's start, over all runs. `stall`: of a rank's snapshot(); `persist`: from there to the
    commit in hot; `replicate`: of a copy to a cold tier, by tier; `restore`: from a rank's request to its verified
    bytes, by the tier that they came from. None, or no tier: not measured yet."""

    stall: CostReport | None = None
    persist: CostReport | None = None
    replicate: dict[str, CostReport] = {}
    restore: dict[str, CostReport] = {}


class Severity(StrEnum):
    """The severity of the alert. Critical: committed or sealed work is at risk, act now. Warning: act today."""

    WARNING = "warning"
    CRITICAL = "critical"


class Alarm(msgspec.Struct, frozen=True, kw_only=True):
    """`alert`: its name in grafana/alerts.yml. `runbook`: a section of docs/RUNBOOK.md. `command`: to type next."""

    alert: str
    severity: Severity
    message: str
    runbook: str
    command: str


class StatusReport(msgspec.Struct, kw_only=True):
    """`pid` None: no daemon answers, and the tiers were listed by the CLI; `holder`: a daemon runs all the same, and
    `silence`: it may run, and why it cannot be asked.
    `alarms`: what is wrong, and what to type next. `peer_address`: where other nodes read the
    parts of this one; empty: nowhere. `peer_fingerprint`: of its TLS certificate there; empty without TLS."""

    version: str
    node: str
    pid: int | None
    uptime_s: float | None
    is_ready: bool
    peer_address: str = ""
    peer_fingerprint: str = ""
    halted: list[str] = []
    foreign: list[str] = []
    lost: list[LostReplica] = []
    runs: list[RunReport] = []
    tiers: list[TierReport] = []
    queues: list[QueueReport] = []
    watches: list[WatchReport] = []
    sidecars: SidecarReport | None = None
    slots: dict[str, int] = {}
    costs: CostsReport = msgspec.field(default_factory=CostsReport)
    failures: list[FailureReport] = []
    holder: HolderReport | None = None
    silence: str = ""
    alarms: list[Alarm] = []

    def find_run(self, name: str) -> RunReport | None:
        return next((report for report in self.runs if report.run == name), None)


def foreign_sentences(catalog: Catalog, matches: Callable[[CheckpointId], bool] = lambda checkpoint: True) -> list[str]:
    """Why replicas and markers are not of their run's daemons: of the checkpoints that match, and of the claims of each
    run, FOREIGN_LISTED_MAX sentences, and how many more there are."""
    found = ((tier, key, why, parse_key(key)) for (tier, key), why in sorted(catalog.foreign().items()))
    shown = ((tier, key, why) for tier, key, why, checkpoint in found if checkpoint is None or matches(checkpoint))
    sentences = sum_up_foreign(shown)
    left_out = len(sentences) - FOREIGN_LISTED_MAX
    return [*sentences[:FOREIGN_LISTED_MAX], *([f"and {left_out} more"] if left_out > 0 else [])]


def tiers_text(tiers: Iterable[str], parts: Mapping[str, PartReport] | UnsetType) -> str:
    """The tiers of a checkpoint as a person reads them: a part is never taken for the whole."""
    parts = {} if parts is UNSET else parts
    near = [name for name in (MEMORY, HOT) if name in parts]
    far = [name for name in parts if name not in near]
    return ",".join([*(f"{name}({parts[name]})" for name in near), *tiers, *(f"{name}({parts[name]})" for name in far)])


def run_report(catalog: Catalog, run: Run, now: datetime) -> RunReport:
    """What the tiers say of a run."""
    newest = {tier: catalog.newest(run, tier) for tier in catalog.tiers}
    in_hot, part = newest.get(HOT), catalog.newest_part(run)
    nodes = None
    if part is not None and (in_hot is None or part.id.recency > in_hot.id.recency):
        parts, everywhere = {HOT: newest_part_report(part, now)}, everywhere_report(catalog, run, now)
        nodes = NodesReport(
            ranks=part.ranks,
            world_size=part.world_size,
            parts=parts,
            everywhere=everywhere,
            is_adopted=part.is_adopted or UNSET,
        )
    report = RunReport(
        run=run,
        generation=catalog.generation_max(run),
        tiers={
            tier: newest_report(manifest.id, manifest.created_at, now) if manifest else None
            for tier, manifest in newest.items()
        },
        nodes=nodes or UNSET,
    )
    set_unhealthy(report, catalog.unhealthy(run))
    return report


def set_unhealthy(report: RunReport, unhealthy: Iterable[CheckpointId]) -> None:
    oldest_first = sorted(unhealthy, key=lambda checkpoint: checkpoint.recency)
    report.unhealthy_steps = [checkpoint.step for checkpoint in oldest_first]
    report.unhealthy_generation = oldest_first[-1].generation if oldest_first else None


def sources_of(report: RunReport) -> dict[str, RestartPoint]:
    """What a restart of the run could begin with, by tier, nearest first."""
    newest: dict[str, NewestCheckpoint | NewestPart | None] = {}
    if report.nodes is not UNSET:
        newest = {"all nodes": report.nodes.everywhere, PEER: report.nodes.copied}
    newest |= report.tiers
    return {tier: RestartPoint(each.generation, each.step, each.age_s) for tier, each in newest.items() if each}


def tier_report(
    catalog: Catalog,
    name: str,
    url: str,
    free_bytes: int | None,
    *,
    listed_age_s: float | None = None,
    to_reap: int | None = None,
    is_on_hot_disk: bool = False,
    write_bytes_per_s: float | None = None,
    disk: DiskForecast | None = None,
) -> TierReport:
    knowledge, entries = catalog.tiers[name], catalog.in_tier(name)
    is_listed = bool(entries) or knowledge.is_known
    parts = sum(isinstance(entry.held(name), NodeFile) for entry in entries.values())
    return TierReport(
        name=name,
        url=url,
        is_known=knowledge.is_known,
        error=knowledge.error or None,
        checkpoints=len(entries) if is_listed else None,
        used_bytes=catalog.used_bytes(name) if is_listed else None,
        free_bytes=free_bytes,
        room_bytes=room_bytes(catalog) if name == HOT and is_listed else None,
        listed_age_s=listed_age_s,
        to_reap=to_reap,
        parts=parts or UNSET,
        is_on_hot_disk=is_on_hot_disk,
        write_bytes_per_s=None if write_bytes_per_s is None else round(write_bytes_per_s, 1),
        disk=disk,
    )


def costs_report(metrics: Metrics) -> CostsReport:
    def by_tier(means: Mapping[str, tuple[float, int]]) -> dict[str, CostReport]:
        return {tier: CostReport(mean_s=mean_s, count=count) for tier, (mean_s, count) in means.items()}

    return CostsReport(
        stall=by_tier(metrics.mean_s(metrics.snapshot_stall_seconds)).get(""),
        persist=by_tier(metrics.mean_s(metrics.persist_seconds)).get(""),
        replicate=by_tier(metrics.mean_s(metrics.replicate_seconds)),
        restore=by_tier(metrics.mean_s(metrics.restore_seconds)),
    )
