"""Which parts of a run over several nodes stay in hot, because a restart may need them.

One node may be slower than the others. If a fast node deleted an older part by its own policy, no step might be left
that all nodes have. So the trainers report the step that is durable on every node, and parts of it or newer ones stay.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from tierd.format.ids import CheckpointId


def needed_parts(
    parts: Iterable[CheckpointId],
    *,
    everywhere: CheckpointId | None,
    newest_in_cold: CheckpointId | None,
    is_full: bool = False,
) -> set[CheckpointId]:
    """Of the parts in hot of one run, those that are not deleted: at or above `everywhere`, the newest checkpoint that
    is known to be durable on every node; while none is known, at or above the newest that a cold tier has whole. If
    `everywhere` is of an earlier generation than that, it says nothing about the nodes of the later one and is ignored.

    `is_full`: hot needs room. Then a part may go if a cold tier has that checkpoint or a newer one.
    """
    is_former = everywhere and newest_in_cold and everywhere.generation < newest_in_cold.generation
    floor = newest_in_cold if everywhere is None or is_former else everywhere
    needed = {part for part in parts if floor is None or part.recency >= floor.recency}
    if is_full and newest_in_cold is not None:
        needed = {part for part in needed if part.recency > newest_in_cold.recency}
    return needed
