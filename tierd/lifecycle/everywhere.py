"""Which parts of a run over several nodes stay in hot, because a restart may need them, and which do not any more.

One node may be slower than the others. If a fast node deleted an older part by its own policy, no step might be left
that all nodes have. So the trainers report the step that is durable on every node, and parts of it or newer ones stay.
A run may also go on elsewhere for good. Then no newer part comes here and pushes out the last ones, so these go after
some time. Pure.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from datetime import datetime, timedelta

from tierd.format.ids import HOT, CheckpointId
from tierd.lifecycle.policy import CheckpointView


def needed_parts(
    parts: Iterable[CheckpointId],
    *,
    everywhere: CheckpointId | None,
    newest_in_cold: CheckpointId | None,
    is_cold_enough: bool = False,
) -> set[CheckpointId]:
    """Of the parts in hot of one run, those that are not deleted: at or above `everywhere`, the newest checkpoint that
    is known to be durable on every node; while none is known, at or above the newest that a cold tier has whole. If
    `everywhere` is of an earlier generation than that, it says nothing about the nodes of the later one and is ignored.

    `is_cold_enough`: hot needs room, or the run has left this node. Then a part may go if a cold tier has that
    checkpoint or a newer one.
    """
    is_former = everywhere and newest_in_cold and everywhere.generation < newest_in_cold.generation
    floor = newest_in_cold if everywhere is None or is_former else everywhere
    needed = {part for part in parts if floor is None or part.recency >= floor.recency}
    if is_cold_enough and newest_in_cold is not None:
        needed = {part for part in needed if part.recency > newest_in_cold.recency}
    return needed


def left_since(
    newest_file: datetime | None, *, now: datetime, absent_s: float, was_seen: bool, restart_s: float, grace_s: float
) -> datetime | None:
    """Since when a run has left this node: since its newest file here was written. None if it has not, or may not have.

    Each start of a run writes a claim here, and each part is a file, so the files tell it also after a restart of the
    daemon. `absent_s`: how long this daemon has seen no trainer of the run, by the monotonic clock. `was_seen`: whether
    it has seen one at all; if not, it waits for `restart_s`, in which trainers attach again. `grace_s`: 0: never.
    """
    if not grace_s or newest_file is None or absent_s < (grace_s if was_seen else restart_s):
        return None
    return newest_file if now - newest_file >= timedelta(seconds=grace_s) else None


def spare_parts(
    parts: Iterable[CheckpointView],
    *,
    newest_in_cold: CheckpointId | None,
    known: Container[str],
    waiting: Container[CheckpointId],
) -> set[CheckpointId]:
    """Of the parts in hot of a run that has left this node, those that go, whatever hot's policy keeps: a cold tier has
    that checkpoint or a newer one. A milestone goes only if cold has the milestone itself. As long as any part of a
    generation stays, so does its newest: without it, what cold has of the generation would seem to be of another node
    (catalog/claims.py). `known`: the cold tiers whose contents are known. `waiting`: the checkpoints that a cold tier
    should get from here."""
    views = list(parts)
    spare = {
        view.id
        for view in views
        if newest_in_cold is not None
        and view.id.recency <= newest_in_cold.recency
        and not view.foreign
        and view.id not in waiting
        and (not view.milestones or any(tier in known for tier in view.tiers - {HOT}))
    }
    newest = {view.id.generation: view.id for view in sorted(views, key=lambda view: view.id.recency)}
    return spare - {newest[view.id.generation] for view in views if view.id not in spare}
