"""Checkpoints as the input of the lifecycle policy."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from tierd.config.sections import LifecycleConfig, TierPolicy
from tierd.format.ids import CheckpointId, checkpoint_id
from tierd.lifecycle.policy import Action, CheckpointView, Decision, by_run, copies, deletions, explain_run


def view(
    sequence: int,
    *tiers: str,
    generation: int = 1,
    step: int | None = None,
    milestones: Iterable[str] = (),
    healthy: bool | None = None,
    run: str = "gpt",
    at: str | None = None,
    metrics: Mapping[str, float | str] | None = None,
    gone: Iterable[str] = (),
    is_part: bool = False,
) -> CheckpointView:
    return CheckpointView(
        id=checkpoint_id(run, sequence * 10 if step is None else step, generation),
        sequence=sequence,
        milestones=frozenset(milestones),
        healthy=healthy,
        tiers=frozenset(tiers),
        created_at=None if at is None else datetime.fromisoformat(at).replace(tzinfo=UTC),
        metrics=metrics or {},
        gone=frozenset(gone),
        is_part=is_part,
    )


def explain(
    checkpoints: Iterable[CheckpointView],
    rules: LifecycleConfig,
    *,
    cold: Mapping[str, bool],
    hot_known: bool,
    own: Mapping[str, TierPolicy] = MappingProxyType({}),
    copying: Mapping[str, Container[CheckpointId]] = MappingProxyType({}),
) -> list[Decision]:
    """As `explain_run`, of all runs, by name."""
    runs = [views for _, views in by_run(checkpoints)]
    more = {"cold": cold, "hot_known": hot_known, "own": own, "copying": copying}
    return [decision for views in runs for decision in explain_run(views, rules, **more)]


def plan(checkpoints: Iterable[CheckpointView], rules: LifecycleConfig, **arguments: Any) -> list[Decision]:
    """What is carried out: the copies in their order, then the deletions in theirs. `arguments`: as of `explain`."""
    views = list(checkpoints)
    decisions = explain(views, rules, **arguments)
    return copies(decisions, {one.id for one in views if one.milestones}) + deletions(decisions)


def brief(decisions: Iterable[Decision]) -> list[tuple[str, int, str]]:
    """Of each: the action, the number of the checkpoint, the tier."""
    return [(one.action.value, one.checkpoint.step // 10, one.tier) for one in decisions]


def by_replica(found: Iterable[Decision]) -> dict[tuple[int, str], tuple[Action, str]]:
    """By number of the checkpoint and tier: the action and its reason."""
    return {(one.checkpoint.step // 10, one.tier): (one.action, one.reason) for one in found}


def sequences(views: Iterable[CheckpointView], found: Iterable[CheckpointId]) -> list[int]:
    by_id = {one.id: one.sequence for one in views}
    return sorted(by_id[one] for one in found)
