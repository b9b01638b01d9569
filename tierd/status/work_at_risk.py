"""How much work of a run is lost if its trainers, its node or its region are lost now, and what the restart costs.

Pure. What survives: the loss of the trainers leaves every tier; the loss of the node leaves the cold tiers that are not
on hot's disk and, over several nodes, the copy on another node; the loss of the region leaves those cold tiers but the
one that is ahead, because nothing says which of them is in the region.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import msgspec

MEMORY_AND_DISK = ("memory", "hot", "all nodes")  # lost with the node
PEER = "peer"


class Source(NamedTuple):
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
    sources: Mapping[str, Source],
    *,
    world_size: int,
    is_running: bool,
    step_s: float | None = None,
    restore_s: Mapping[str, float] | None = None,
    on_hot_disk: Collection[str] = (),
) -> list[RiskReport]:
    """`sources`: of the tiers that have one, nearest first; PEER is the copy on another node. `step_s`: how long a step
    takes. `restore_s`: measured, by tier. `on_hot_disk`: the cold tiers there. Empty without a checkpoint."""
    if not sources:
        return []
    newest = max(sources.values(), key=lambda source: source[:2])
    off_node = [tier for tier in sources if tier not in (*MEMORY_AND_DISK, *on_hot_disk)]
    cold = [tier for tier in off_node if tier != PEER]
    ahead = _best(sources, cold)
    survivors = {"trainers": list(sources), "node": off_node, "region": [tier for tier in cold if tier != ahead]}

    def risk(lost: str, tiers: Collection[str]) -> RiskReport:
        best = _best(sources, tiers)
        if best is None:
            return RiskReport(lost=lost)
        source = sources[best]
        seconds = source.age_s
        if seconds is not None and not is_running:  # no work was done after the newest checkpoint
            seconds = None if newest.age_s is None else max(0.0, seconds - newest.age_s)
        steps = max(0, newest.step - source.step)
        if is_running and step_s and newest.age_s is not None:
            steps += int(newest.age_s / step_s)
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


def _best(sources: Mapping[str, Source], tiers: Collection[str]) -> str | None:
    """The tier with the newest checkpoint; the first of several."""
    return max(tiers, key=lambda tier: sources[tier][:2], default=None)
