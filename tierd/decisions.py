"""What the lifecycle decides about the catalog: what to copy and delete, what waits, and where deletion is halted.

Queries for the workers, the HTTP API and the CLI. A run is judged only by the tiers that are known for certain: one
unreadable manifest makes the run's part of that tier unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tierd.catalog import Catalog
from tierd.config import Config
from tierd.format.ids import CheckpointId, Run
from tierd.lifecycle import policy
from tierd.lifecycle.forecast import Forecast, forecast
from tierd.lifecycle.policy import HOT, Action, Decision


class HaltReason(StrEnum):
    UNREADABLE_MANIFEST = "unreadable_manifest"
    DAMAGED_REPLICA = "damaged_replica"
    TIER_UNREACHABLE = "tier_unreachable"


@dataclass(frozen=True, slots=True)
class Halt:
    """Why nothing is deleted of `run` in `tier`. `run` None: of any run."""

    reason: HaltReason
    tier: str
    run: Run | None
    message: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


def halted(catalog: Catalog) -> list[Halt]:
    """Where deletion is halted; empty when it is not."""
    halts: list[Halt] = []
    for (tier, checkpoint), why in catalog.unreadable().items():
        is_damaged = checkpoint in catalog.tiers[tier].damaged
        reason = HaltReason.DAMAGED_REPLICA if is_damaged else HaltReason.UNREADABLE_MANIFEST
        halts.append(Halt(reason, tier, checkpoint.run, why))
    return halts + [Halt(HaltReason.TIER_UNREACHABLE, tier, None, why) for tier, why in catalog.unlisted().items()]


def decisions(catalog: Catalog, config: Config) -> list[Decision]:
    """What becomes of every checkpoint in every tier, and why, given which tiers are known for its run."""
    unreadable = {(tier, checkpoint.run) for tier, checkpoint in catalog.unreadable()}
    decided: list[Decision] = []
    for run, views in policy.by_run(catalog.views()):
        is_known = {name: known.is_known and (name, run) not in unreadable for name, known in catalog.tiers.items()}
        cold = {cold.name: is_known[cold.name] for cold in config.cold}
        decided += policy.explain(views, config.lifecycle, cold=cold, hot_known=is_known[HOT], own=config.own_policies)
    return decided


def deletions(catalog: Catalog, config: Config) -> list[Decision]:
    """The replicas to delete now, by run, the oldest first."""
    return policy.deletions(decisions(catalog, config))


def pending(catalog: Catalog, config: Config, tier: str) -> list[CheckpointId]:
    """The checkpoints that `tier` should have and lacks, and that can be copied now, in the order of the plan."""
    milestones = {entry.id for entry in catalog.entries() if entry.all_milestones}
    # A person must clear an unreadable replica: to copy it again would end in the same conflict.
    unreadable = catalog.tiers[tier].unreadable
    copies = [copy.checkpoint for copy in policy.copies(_copying(catalog, config), milestones) if copy.tier == tier]
    return [checkpoint for checkpoint in copies if checkpoint not in unreadable]


def waiting(catalog: Catalog, config: Config) -> dict[str, list[CheckpointId]]:
    """By cold tier: the checkpoints that it should have and lacks, also while the tier cannot be reached."""
    missing: dict[str, list[CheckpointId]] = {cold.name: [] for cold in config.cold}
    for one in _copying(catalog, config):
        if one.action in (Action.REPLICATE, Action.WAIT):
            missing[one.tier].append(one.checkpoint)
    return missing


def lost(catalog: Catalog, config: Config, tier: str) -> list[CheckpointId]:
    """The replicas that have disappeared from `tier` although its policy keeps them, newest first.

    The others may have been deleted by another daemon's lifecycle: what its policy kept of the tier before, it keeps of
    what is there now and what is missing.
    """
    missing = catalog.tiers[tier].missing
    if not missing:
        return []
    runs = {checkpoint.run for checkpoint in missing}
    views = {view.id: view for view in catalog.views() if view.id.run in runs}
    there = [view for view in views.values() if tier in view.tiers]
    there += [views.get(checkpoint, view) for checkpoint, view in missing.items()]
    rules = config.lifecycle.hot if tier == HOT else config.own_policies.get(tier, config.lifecycle.cold)
    kept = [checkpoint for _, of_run in policy.by_run(there) for checkpoint in policy.kept(of_run, rules)]
    return sorted((c for c in kept if c in missing), key=lambda checkpoint: checkpoint.recency, reverse=True)


def forecasts(catalog: Catalog, config: Config) -> list[Forecast]:
    """What each run will hold in each tier, and what that will cost."""
    sizes = {entry.id: entry.manifest.size_bytes for entry in catalog.entries()}
    prices = {cold.name: cold.price_per_gib_month for cold in config.cold}
    return forecast(catalog.views(), sizes, config.lifecycle, cold=prices, own=config.own_policies)


def _copying(catalog: Catalog, config: Config) -> list[Decision]:
    """The decisions about copies. An unreadable manifest of a run stops its deletions, but no copy."""
    cold = {cold.name: catalog.tiers[cold.name].is_known for cold in config.cold}
    return policy.explain(catalog.views(), config.lifecycle, cold=cold, hot_known=True, own=config.own_policies)
