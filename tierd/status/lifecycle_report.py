"""The report of `tierd lifecycle`: what the policy would do with each checkpoint now, and a forecast."""

from __future__ import annotations

import msgspec

from tierd.catalog.catalog import Catalog
from tierd.catalog.decisions import decisions, forecasts
from tierd.config.sections import Config
from tierd.format.ids import CheckpointId, Run, checkpoint_id
from tierd.lifecycle.forecast import Forecast
from tierd.lifecycle.policy import Action


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


def lifecycle_report(
    catalog: Catalog, config: Config, run: Run | None = None, *, is_explained: bool = False
) -> LifecycleReport:
    """The planned actions and the forecast."""
    return LifecycleReport(
        planned=planned_actions(catalog, config, run, is_explained=is_explained),
        forecast=[forecast for forecast in forecasts(catalog, config) if run in (None, forecast.run)],
    )


def planned_actions(
    catalog: Catalog, config: Config, run: Run | None = None, *, is_explained: bool
) -> list[PlannedAction]:
    """What the lifecycle would do now. `is_explained`: also what it keeps, and why."""
    return [
        PlannedAction(
            **msgspec.to_builtins(decision.checkpoint),
            tier=decision.tier,
            action=decision.action.value,
            reason=decision.reason,
        )
        for decision in decisions(catalog, config)
        if run in (None, decision.checkpoint.run) and (is_explained or decision.action is not Action.KEEP)
    ]
