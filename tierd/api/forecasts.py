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

import msgspec

from tierd.catalog.decisions import held, room_bytes
from tierd.catalog.entry import NOT_LISTED_YET
from tierd.config.sections import TierPolicy
from tierd.context import DaemonContext
from tierd.format.ids import HOT, Run
from tierd.lifecycle.forecast import Late, RunInTier, full_in_s, goes_on, lasting_per_s, pace_of
from tierd.status.report import DiskForecast

FORECAST_S = 60.0
WAIT_S = 1.0  # a status that waits longer for a new forecast shows the last one


@dataclass(frozen=True, slots=True)
class TierForecasts:
    """`full_at`: by tier that has a disk of its own; None: never full; "unknown": a run has no pace yet. `due_every_s`:
    by cold tier; a tier is missing if no run goes on or a run has no pace yet. `late`: the cold tiers that do not get
    all copies in time: hot keeps more because of them."""

    full_at: Mapping[str, datetime | str | None] = field(default_factory=dict[str, "datetime | str | None"])
    due_every_s: Mapping[str, float] = field(default_factory=dict[str, float])
    late: Sequence[str] = ()

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
            waits_for=list(self.late) if tier == HOT else [],
        )


@dataclass(frozen=True, slots=True)
class CopiedTier:
    """A cold tier. `copy_s`: how long a copy takes, infinite where it cannot be reached now; None: not known yet."""

    copy_s: float | None
    rule: TierPolicy


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
            if (free_in_hot := free.get(HOT)) is not None:  # it keeps room for the next checkpoints
                free = {**free, HOT: free_in_hot - room_bytes(context.catalog)}
            read = partial(_forecasts, runs, attached, free, on_hot_disk, self._cold_tiers(), context.now())
            self._reading, self._read_s = asyncio.get_running_loop().run_in_executor(None, read), now_s
        if (reading := self._reading) is not None:
            await asyncio.wait({reading}, timeout=WAIT_S)
            if reading.done():
                self._reading = None
                self._found = reading.result()
        return self._found

    def _cold_tiers(self) -> dict[str, CopiedTier]:
        config, found = self._context.config, dict[str, CopiedTier]()
        for name in self._context.cold:
            known = self._context.catalog.tiers[name]
            is_down = not known.is_known and known.error != NOT_LISTED_YET
            copy_s = math.inf if is_down else self._context.copies[name].copy_s
            found[name] = CopiedTier(copy_s, config.own_policies.get(name, config.lifecycle.cold))
        return found


def _forecasts(
    runs: Sequence[RunInTier],
    attached: Set[Run],
    free: Mapping[str, int | None],
    on_hot_disk: Collection[str],
    cold: Mapping[str, CopiedTier],
    now: datetime,
) -> TierForecasts:
    has_new = bool(attached - {run.run for run in runs})  # some run has no checkpoint yet
    runs = [run for run in runs if run.run in attached or goes_on(run.views, now)]
    # Those of other nodes never come to hot.
    here = {run.run for run in runs if run.run in attached or HOT in run.views[-1].tiers}
    full_at: dict[str, datetime | str | None] = {}
    due_every_s: dict[str, float] = {}
    late: list[Late] = []
    # Hot last: what it keeps for a cold tier depends on how often a checkpoint is due there.
    tiers = sorted(free, key=lambda tier: tier == HOT)
    for tier, free_bytes in ((tier, free[tier]) for tier in tiers) if runs or has_new else ():
        of_tier = [run for run in runs if run.tier == tier and (tier != HOT or run.run in here)]
        paces = {run.run: pace.interval_s for run in of_tier if (pace := pace_of(run.views)) is not None}
        is_known = len(paces) == len(of_tier) and not has_new
        copied = [run for run in of_tier if run.run in here]
        if tier != HOT and is_known and copied:
            due_every_s[tier] = round(1 / sum(1 / paces[run.run] for run in copied), 3)
            late += _late(tier, copied, cold[tier], due_every_s=due_every_s[tier])
        if free_bytes is not None and tier not in on_hot_disk:
            on_disk = [*of_tier, *(run for run in runs if tier == HOT and run.tier in on_hot_disk)]
            on_disk = [msgspec.structs.replace(run, late=late) if run.tier == HOT else run for run in on_disk]
            if on_disk or has_new:
                full_at[tier] = _full_at(on_disk, free_bytes, now) if is_known else "unknown"
    return TierForecasts(full_at, due_every_s, [each.tier for each in late])


def _late(tier: str, runs: Sequence[RunInTier], copied: CopiedTier, *, due_every_s: float) -> list[Late]:
    """`tier`, if hot has to keep more for it than its own policy says."""
    if copied.copy_s is None or copied.copy_s <= due_every_s:
        return []
    is_down = copied.copy_s == math.inf
    lasting = sum(lasting_per_s(msgspec.structs.replace(run, rules=[copied.rule])) for run in runs)
    share = 1.0 if is_down else max(0.0, 1 - 1 / (copied.copy_s * lasting)) if lasting else 0.0
    return [Late(tier=tier, rule=copied.rule, share=share)]


def _full_at(runs: Sequence[RunInTier], free_bytes: int, now: datetime) -> datetime | str | None:
    """As in `TierForecasts`."""
    try:
        seconds = full_in_s(runs, free_bytes)
    except OverflowError:  # a manifest from near the year 9999
        seconds = None
    if seconds is None:
        return "unknown"
    return None if seconds == math.inf else now + timedelta(seconds=seconds)
