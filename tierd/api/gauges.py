"""Sets the gauges of /metrics from the status, so that both say the same."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence, Set

from msgspec import UNSET

from tierd.catalog.decisions import halted
from tierd.context import DaemonContext
from tierd.format.ids import MEMORY, Run
from tierd.format.run_state import ENDED_BADLY
from tierd.memory.outcomes import ENDED_RECENT_S
from tierd.metrics import HALT_REASONS, OTHER_RUNS, RUNS_MAX
from tierd.status.node_reports import age_s
from tierd.status.report import RunReport, StatusReport


def refresh_gauges(context: DaemonContext, status: StatusReport, peer_lag_s: Callable[[Run], float | None]) -> None:
    """Set every gauge. Not a coroutine: two concurrent scrapes must not see each other's cleared gauges."""
    metrics, catalog, now = context.metrics, context.catalog, context.now()
    for gauge in (
        metrics.last_committed_step,
        metrics.last_committed_timestamp_seconds,
        metrics.checkpoints,
        metrics.everywhere_age_seconds,
        metrics.peer_lag_seconds,
        metrics.commit_missing_ranks,
        metrics.unhealthy_checkpoints,
        metrics.tier_free_bytes,
        metrics.tier_room_bytes,
        metrics.tier_used_bytes,
        metrics.run_state,
        metrics.run_pause_seconds,
        metrics.run_pause_limit_seconds,
    ):
        gauge.clear()
    shown = _runs_with_series(status.runs, set(context.memory.runs()))
    metrics.keep_runs(shown)
    for run in status.runs:
        if run.run not in shown:
            continue
        metrics.begin_run(run.run)
        metrics.unhealthy_checkpoints.labels(run.run).set(len(run.unhealthy_steps))
        if run.state is not None and (run.ended_age_s or 0.0) < ENDED_RECENT_S:
            metrics.run_state.labels(run.run, run.state).set(1)
        if run.pause is not None:
            metrics.run_pause_seconds.labels(run.run).set(run.pause.seconds)
            metrics.run_pause_limit_seconds.labels(run.run).set(run.pause.limit_s)
        everywhere = run.nodes.everywhere if run.nodes is not UNSET else None
        if everywhere is not None and everywhere.age_s is not None:
            metrics.everywhere_age_seconds.labels(run.run).set(everywhere.age_s)
        if run.nodes is not UNSET:
            for name in context.cold:
                awaited = run.nodes.awaited.get(name)
                metrics.commit_missing_ranks.labels(run.run, name).set(len(awaited.ranks) if awaited else 0)
        if (lag_s := peer_lag_s(Run(run.run))) is not None:
            metrics.peer_lag_seconds.labels(run.run).set(lag_s)
        for tier, newest in run.tiers.items():
            if newest is None or tier == MEMORY:
                continue
            metrics.last_committed_step.labels(run.run, tier).set(newest.step)
            age = age_s(newest.created_at, now)
            if age is not None:
                metrics.last_committed_timestamp_seconds.labels(run.run, tier).set(now.timestamp() - age)
    for tier in status.tiers:
        if tier.used_bytes is not None:
            metrics.tier_used_bytes.labels(tier.name).set(tier.used_bytes)
        if tier.free_bytes is not None:
            metrics.tier_free_bytes.labels(tier.name).set(tier.free_bytes)
        if tier.room_bytes is not None:
            metrics.tier_room_bytes.labels(tier.name).set(tier.room_bytes)
        metrics.damaged_checkpoints.labels(tier.name).set(len(catalog.tiers[tier.name].damaged))
        runs = (checkpoint.run for checkpoint in catalog.in_tier(tier.name))
        counts = Counter(run if run in shown else OTHER_RUNS for run in runs)
        for run in {*shown, *counts} if tier.checkpoints is not None else ():  # else 0 would say that it has none
            metrics.checkpoints.labels(run, tier.name).set(counts[run])
    for queue in status.queues:
        metrics.queue_checkpoints.labels(queue.tier).set(queue.checkpoints)
        metrics.queue_oldest_age_seconds.labels(queue.tier).set(queue.oldest_age_s)
        if (committed_at_s := context.copies[queue.tier].committed_at_s) is not None:
            metrics.last_copy_timestamp_seconds.labels(queue.tier).set(committed_at_s)
    metrics.event_loop_tasks.set(len(asyncio.all_tasks()))
    for state, count in status.slots.items():
        metrics.slots.labels(state).set(count)
    foreign = Counter(tier for tier, _ in catalog.foreign())
    for tier in catalog.tiers:
        metrics.foreign_checkpoints.labels(tier).set(foreign[tier])
    metrics.newer_generations.set(len(context.newer_generations()))
    reasons = {halt.reason for halt in halted(catalog)}
    for reason in HALT_REASONS:
        metrics.halted.labels(reason).set(reason in reasons)


def _runs_with_series(reports: Sequence[RunReport], in_memory: Set[str]) -> set[str]:
    """The runs with trainers, slots or a bad end, then those with the newest checkpoint; at most RUNS_MAX."""

    def age(report: RunReport) -> tuple[bool, float]:
        parts = report.nodes.parts if report.nodes is not UNSET else {}
        ages_s = [newest.age_s for newest in (*report.tiers.values(), *parts.values()) if newest is not None]
        return report.run not in in_memory, min((each for each in ages_s if each is not None), default=math.inf)

    def is_live(report: RunReport) -> bool:
        has_checkpoints = report.nodes is not UNSET or any(report.tiers.values())
        return report.run in in_memory or report.state in ENDED_BADLY or has_checkpoints

    return {report.run for report in sorted(filter(is_live, reports), key=age)[:RUNS_MAX]}
