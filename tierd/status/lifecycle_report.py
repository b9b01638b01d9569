"""The report of `tierd lifecycle`: what the policy would do with each checkpoint now, and a forecast."""

from __future__ import annotations

import msgspec

from tierd.catalog.catalog import Catalog
from tierd.catalog.decisions import decisions, forecasting
from tierd.config.sections import Config
from tierd.format.ids import CheckpointId, Run, checkpoint_id
from tierd.lifecycle.forecast import Forecast
from tierd.lifecycle.policy import Decision


class PlannedAction(msgspec.Struct, kw_only=True):
    """The decision on one checkpoint in one tier. `action`: keep, replicate, wait, evict or expire."""

    run: str
    step: int
    generation: int
    tier: str
    action: str
    reason: str

    @property
    def id(self) -> CheckpointId:
        return checkpoint_id(self.run, self.step, self.generation)


class LifecycleReport(msgspec.Struct, kw_only=True):
    planned: list[PlannedAction]
    forecast: list[Forecast]


def planned_action(decision: Decision) -> PlannedAction:
    return PlannedAction(
        **msgspec.to_builtins(decision.checkpoint),
        tier=decision.tier,
        action=decision.action.value,
        reason=decision.reason,
    )


def lifecycle_report(
    catalog: Catalog, config: Config, run: Run | None = None, *, is_explained: bool = False
) -> LifecycleReport:
    """What the lifecycle would do now; `is_explained`: also what it keeps, and why."""
    decided = decisions(catalog, config, with_kept=is_explained)
    return LifecycleReport(
        planned=[planned_action(each) for each in decided if run in (None, each.checkpoint.run)],
        forecast=[each for each in forecasting(catalog, config)() if run in (None, each.run)],
    )
