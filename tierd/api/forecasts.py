"""Forecasts for the status when the disk of each tier will be full, and how often a checkpoint is due in a cold tier.

Only runs that go on count: those with trainers here, and those whose next checkpoint is not overdue and whose trainers
have not ended here, such as runs of other nodes in a shared tier, which other daemons copy. A forecast simulates the
policy, so it runs in a thread, once in FORECAST_S.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial

from tierd.catalog.decisions import held
from tierd.context import DaemonContext
from tierd.format.ids import HOT, Run
from tierd.lifecycle.forecast import RunInTier, full_in_s, goes_on, pace_of
from tierd.lifecycle.pressure import ROOM_CHECKPOINTS
from tierd.status.report import DiskForecast

FORECAST_S = 60.0
WAIT_S = 1.0  # a status that waits longer for a new forecast shows the last one


@dataclass(frozen=True, slots=True)
class TierForecasts:
    """`full_at`: by tier that has a disk of its own; None: never full; "unknown": a run has no pace yet. `due_every_s`:
    by cold tier; a tier is missing if no run goes on or a run has no pace yet."""

    full_at: Mapping[str, datetime | str | None] = field(default_factory=dict[str, "datetime | str | None"])
    due_every_s: Mapping[str, float] = field(default_factory=dict[str, float])

    def disk(self, tier: str, now: datetime) -> DiskForecast | None:
        """None if no run goes on or the tier has no disk of its own."""
        if tier not in self.full_at:
            return None
        at = self.full_at[tier]
        if not isinstance(at, datetime):
            return DiskForecast(verdict="fits" if at is None else "unknown")
        return DiskForecast(
            verdict="full",
            full_at=at.isoformat(timespec="seconds"),
            full_in_s=round(max(0.0, (at - now).total_seconds()), 1),
        )


class Forecasts:
    def __init__(self, context: DaemonContext) -> None:
        self._context = context
        self._read_s = -math.inf
        self._found = TierForecasts()
        self._reading: asyncio.Future[TierForecasts] | None = None

    async def read(self, free: Mapping[str, int | None], on_hot_disk: Collection[str]) -> TierForecasts:
        """`free`: the free bytes of each tier, None without a disk. `on_hot_disk`: the cold tiers on hot's disk."""
        context, now_s = self._context, self._context.monotonic_s()
        if self._reading is None and now_s - self._read_s >= FORECAST_S:
            attached = {run for run in context.memory.runs() if context.memory.present(run)}
            outcomes = context.memory.outcomes.all_ranks()
            ended = {run: generation for run, generation, _ in outcomes if run not in attached}
            # A run that ended here and has a newer generation goes on, on another node.
            runs = [
                run
                for run in held(context.catalog, context.config)
                if run.run not in ended or run.views[-1].id.generation > ended[run.run]
            ]
            read = partial(_forecasts, runs, attached, free, on_hot_disk, context.now())
            self._reading, self._read_s = asyncio.get_running_loop().run_in_executor(None, read), now_s
        if (reading := self._reading) is not None:
            await asyncio.wait({reading}, timeout=WAIT_S)
            if reading.done():
                self._reading = None
                self._found = reading.result()
        return self._found


def _forecasts(
    runs: Sequence[RunInTier],
    attached: Set[Run],
    free: Mapping[str, int | None],
    on_hot_disk: Collection[str],
    now: datetime,
) -> TierForecasts:
    has_new = bool(attached - {run.run for run in runs})  # some run has no checkpoint yet
    runs = [run for run in runs if run.run in attached or goes_on(run.views, now)]
    full_at: dict[str, datetime | str | None] = {}
    due_every_s: dict[str, float] = {}
    for tier, free_bytes in free.items() if runs or has_new else ():
        of_tier = [run for run in runs if run.tier == tier]
        paces = {run.run: pace.interval_s for run in of_tier if (pace := pace_of(run.views)) is not None}
        is_known = len(paces) == len(of_tier) and not has_new
        copied = [run.run for run in of_tier if run.run in attached or HOT in run.views[-1].tiers]
        if tier != HOT and is_known and copied:
            due_every_s[tier] = round(1 / sum(1 / paces[run] for run in copied), 3)
        if free_bytes is not None and tier not in on_hot_disk:
            on_disk = [run for run in runs if run.tier == tier or (tier == HOT and run.tier in on_hot_disk)]
            full_at[tier] = _full_at(on_disk, free_bytes, now) if is_known else "unknown"
    return TierForecasts(full_at, due_every_s)


def _full_at(runs: Sequence[RunInTier], free_bytes: int, now: datetime) -> datetime | str | None:
    """As in `TierForecasts`. Hot keeps room for the next checkpoints."""
    largest_bytes = max((run.checkpoint_bytes for run in runs if run.tier == HOT), default=0)
    try:
        seconds = full_in_s(runs, free_bytes - ROOM_CHECKPOINTS * largest_bytes)
    except OverflowError:  # a manifest from near the year 9999
        seconds = None
    if seconds is None:
        return "unknown"
    return None if seconds == math.inf else now + timedelta(seconds=seconds)
