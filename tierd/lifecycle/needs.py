"""What a policy will need in each tier, before there is any checkpoint: from its size and how often one is saved."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from tierd.config.sections import LifecycleConfig, TierPolicy
from tierd.format.ids import CheckpointId, checkpoint_id
from tierd.lifecycle.forecast import Forecast, forecast
from tierd.lifecycle.policy import CheckpointView

_ANY_TIME = datetime(2025, 1, 1, tzinfo=UTC)


def needs(
    policy: LifecycleConfig,
    *,
    cold: Mapping[str, float],
    own: Mapping[str, TierPolicy],
    checkpoint_bytes: int,
    interval_s: float,
    steps: int,
) -> list[Forecast]:
    """The forecast of each tier for a run that saves `checkpoint_bytes` every `interval_s`, which is every `steps`
    steps. Without milestones, best and unhealthy checkpoints: their number is not known before. `cold`, `own`: as of
    `forecast`."""
    # Two, because `forecast` computes the interval and the steps from one checkpoint to the next.
    views = [_saved(number, number * interval_s, number * steps) for number in (1, 2)]
    sizes: dict[CheckpointId, int] = {view.id: checkpoint_bytes for view in views}
    return forecast(views, sizes, policy, cold=cold, own=own)


def _saved(number: int, at_s: float, step: int) -> CheckpointView:
    return CheckpointView(
        id=checkpoint_id("forecast", step, 1),
        sequence=number,
        milestones=frozenset(),
        healthy=None,
        tiers=frozenset(),
        created_at=_ANY_TIME + timedelta(seconds=at_s),
    )
