"""The lifecycle as one pure function: what should be copied, evicted or expired, given what is.

last_replica: nothing here deletes the last committed replica of what any policy keeps, nor the newest healthy
checkpoint, nor a hot replica whose selected cold copy is pending. halt, not guess: a tier whose contents are
unknown loses nothing, and nothing is deleted on the strength of what it might hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tierd.config import LifecycleConfig, TierPolicy
from tierd.format.ids import CheckpointId

HOT = "hot"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointView:
    """What the plan needs to know of one checkpoint. `tiers`: names of the tiers where it is committed."""

    id: CheckpointId
    sequence: int
    milestones: frozenset[str]
    healthy: bool | None
    tiers: frozenset[str]


@dataclass(frozen=True, slots=True)
class Replicate:
    """Copy a checkpoint from hot into `tier`."""

    checkpoint: CheckpointId
    tier: str
    reason: str


@dataclass(frozen=True, slots=True)
class Evict:
    """Drop the replica in `tier`; others remain."""

    checkpoint: CheckpointId
    tier: str
    reason: str


@dataclass(frozen=True, slots=True)
class Expire:
    """Drop the last replica, in `tier`: no policy keeps the checkpoint any more."""

    checkpoint: CheckpointId
    tier: str
    reason: str


Action = Replicate | Evict | Expire


def kept(checkpoints: Iterable[CheckpointView], policy: TierPolicy) -> dict[CheckpointId, str]:
    """What a tier with this policy keeps of one run, and why ("last 3", "every 10th", "milestone best")."""
    raise RuntimeError


def plan(
    checkpoints: Iterable[CheckpointView],
    policy: LifecycleConfig,
    *,
    cold: Mapping[str, bool],
    hot_known: bool,
) -> list[Action]:
    """What to do. `cold`: each cold tier's name, and whether its contents are known right now."""
    raise RuntimeError
