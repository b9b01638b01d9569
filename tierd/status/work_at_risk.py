"""Computes how much work of a run is lost if its trainers, its node or its region are lost now, and the restore time.

Pure. After the loss of the trainers every tier is left. After the loss of the node the cold tiers are left that are not
on hot's disk, and the copy on another node. After the loss of the region these cold tiers are left without the newest
of them, because tierd does not know which of them is in the region.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import msgspec

from tierd.format.ids import HOT, MEMORY, PEER

MEMORY_AND_DISK = (MEMORY, HOT, "all nodes")  # lost with the node


class RestartPoint(NamedTuple):
    """The newest checkpoint in a tier, from which a restart would continue."""

    generation: int
    step: int
    age_s: float | None


class RiskReport(msgspec.Struct, kw_only=True):
    """`lost`: trainers, node or region. `tier`, `step`: from where a restart would continue; None: all work is lost.
    `seconds`: the training time that would be lost; `gpu_seconds`: times the ranks; `steps`: as far as they are known.
    `restore_s`: the mean time of restores from that tier; None if none was measured."""

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
    """Empty if there is no checkpoint. `sources`: by tier, nearest first; PEER is the copy on another node. `step_s`:
    the time of a step. `restore_s`: measured, by tier. `on_hot_disk`: the cold tiers on the disk of hot. `started_s`:
    the age of this start of the trainers if it has saved nothing yet: work before it is in the newest checkpoint or
    lost already. `silent_s`: how long the trainers have probably hung."""
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
        """In seconds. A pause of the run between two checkpoints counts as work, because its length is not known."""
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
