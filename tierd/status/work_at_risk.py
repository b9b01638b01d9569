"""How much work of a run is lost if its trainers, its node or its region are lost now, and what the restart costs.

Pure. What survives: the loss of the trainers leaves every tier; the loss of the node leaves the cold tiers that are not
on hot's disk and, over several nodes, the copy on another node; the loss of the region leaves those cold tiers but the
one that is ahead, because nothing says which of them is in the region.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import msgspec

from tierd.format.ids import HOT, MEMORY, PEER

MEMORY_AND_DISK = (MEMORY, HOT, "all nodes")  # lost with the node


class RestartPoint(NamedTuple):
    """The newest checkpoint that a tier has: what a restart would begin with."""

    generation: int
    step: int
    age_s: float | None


class RiskReport(msgspec.Struct, kw_only=True):
    """`lost`: trainers, node or region. `tier`, `step`: where a restart would begin; None: nowhere, all work is lost.
    `seconds`: of training that would be lost, `gpu_seconds` times the ranks, `steps` as far as they are known.
    `restore_s`: what a restore from that tier took so far, by the mean; None: none was measured."""

    lost: str
    tier: str | None = None
    step: int | None = None
    seconds: float | None = None
    gpu_seconds: float | None = None
    steps: int | None = None
    restore_s: float | None = None


def work_at_risk(
    sources: Mapping[str, RestartPoint],
    *,
    world_size: int,
    is_running: bool,
    step_s: float | None = None,
    restore_s: Mapping[str, float] | None = None,
    on_hot_disk: Collection[str] = (),
    started_s: float | None = None,
    silent_s: float = 0.0,
) -> list[RiskReport]:
    """`sources`: of the tiers that have one, nearest first; PEER is the copy on another node. `step_s`: how long a step
    takes. `restore_s`: measured, by tier. `on_hot_disk`: the cold tiers there. `started_s`: how long ago this start of
    the trainers began, where it has saved nothing yet: before it, no work was done after the newest checkpoint.
    `silent_s`: for how long the trainers have hung, probably. Empty without a checkpoint."""
    if not sources:
        return []
    newest = max(sources.values(), key=lambda source: source[:2])
    off_node = [tier for tier in sources if tier not in (*MEMORY_AND_DISK, *on_hot_disk)]
    cold = [tier for tier in off_node if tier != PEER]
    ahead = _best(sources, cold)
    ages_s = [age_s for age_s in (newest.age_s, started_s) if age_s is not None] if is_running else [0.0]
    # The time of work after the newest checkpoint.
    since_newest_s = max(0.0, min(ages_s) - silent_s) if ages_s else None
    survivors = {"trainers": list(sources), "node": off_node, "region": [tier for tier in cold if tier != ahead]}

    def work_after(source: RestartPoint) -> float | None:
        """In seconds. What the run has rested between two checkpoints counts as work: nothing says how long it was."""
        if source[:2] == newest[:2]:
            return since_newest_s
        if source.age_s is None or newest.age_s is None or since_newest_s is None:
            return source.age_s if is_running else None
        return max(0.0, source.age_s - newest.age_s) + since_newest_s

    def risk(lost: str, tiers: Collection[str]) -> RiskReport:
        best = _best(sources, tiers)
        if best is None:
            return RiskReport(lost=lost)
        source = sources[best]
        seconds = work_after(source)
        steps = max(0, newest.step - source.step)
        if step_s and since_newest_s is not None:
            steps += int(since_newest_s / step_s)
        return RiskReport(
            lost=lost,
            tier=best,
            step=source.step,
            seconds=None if seconds is None else round(seconds, 1),
            gpu_seconds=None if seconds is None else round(seconds * world_size, 1),
            steps=steps,
            restore_s=(restore_s or {}).get(best),
        )

    return [risk(lost, tiers) for lost, tiers in survivors.items()]


def _best(sources: Mapping[str, RestartPoint], tiers: Collection[str]) -> str | None:
    """The tier with the newest checkpoint; the first of several."""
    return max(tiers, key=lambda tier: sources[tier][:2], default=None)
