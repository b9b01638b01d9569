"""What the lifecycle decides about parts of checkpoints over several nodes in hot.

Some stay although hot's policy does not keep them. Others go although it does, because their run has left this node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace

from tierd.catalog.catalog import Catalog
from tierd.catalog.entry import Entry
from tierd.format.ids import HOT, CheckpointId, Run
from tierd.lifecycle.everywhere import needed_parts, spare_parts
from tierd.lifecycle.policy import Action, Decision


def with_parts(
    catalog: Catalog, decided: Iterable[Decision], *, is_hot_full: bool, only: CheckpointId | None
) -> list[Decision]:
    """The decisions, with those about parts in hot. `only`: as of `decisions`."""
    needed = parts_needed(catalog, is_hot_full=is_hot_full)
    kept = [_needed(decision) if decision.checkpoint in needed else decision for decision in decided]
    spare = {checkpoint: why for checkpoint, why in _spare(catalog, kept).items() if only in (None, checkpoint)}
    if not spare:
        return kept
    others = [decision for decision in kept if decision.tier != HOT or decision.checkpoint not in spare]
    return others + [_deletion(catalog, checkpoint, why) for checkpoint, why in spare.items()]


def parts_needed(catalog: Catalog, *, is_hot_full: bool) -> set[CheckpointId]:
    """The parts in hot that a restart over several nodes may need."""
    return {
        checkpoint
        for run, of_run in _parts(catalog, _is_restorable).items()
        for checkpoint in needed_parts(
            (entry.id for entry in of_run),
            everywhere=catalog.everywhere.get(run),
            newest_in_cold=catalog.newest_in_cold(run),
            is_cold_enough=is_hot_full or run in catalog.left,
        )
    }


def rests_on_cold(catalog: Catalog, checkpoint: CheckpointId) -> bool:
    """Whether the part of this checkpoint in hot may go only because a cold tier has that one or a newer one."""
    run, entry = checkpoint.run, catalog.get(checkpoint)
    if entry is None or entry.part is None:
        return False
    everywhere = catalog.everywhere.get(run)
    is_needed = bool(needed_parts([checkpoint], everywhere=everywhere, newest_in_cold=None))
    return run in catalog.left or (is_needed and _is_restorable(entry))


def _is_restorable(entry: Entry) -> bool:
    """Nothing is restored from adopted parts before their commit."""
    return entry.part is not None and not entry.part.is_adopted


def _parts(catalog: Catalog, is_wanted: Callable[[Entry], bool]) -> dict[Run, list[Entry]]:
    """The entries in hot that are wanted, by run."""
    parts: dict[Run, list[Entry]] = defaultdict(list)
    for checkpoint, entry in catalog.in_tier(HOT).items():
        if is_wanted(entry):
            parts[checkpoint.run].append(entry)
    return parts


def _needed(decision: Decision) -> Decision:
    if decision.tier != HOT or decision.action not in (Action.EVICT, Action.EXPIRE):
        return decision
    return replace(decision, action=Action.KEEP, reason="no newer one is known to be durable on every node")


def _spare(catalog: Catalog, decided: list[Decision]) -> dict[CheckpointId, str]:
    """The parts in hot that are deleted because their run has left this node, and why; newest first."""
    if not catalog.left or not catalog.tiers[HOT].is_known:
        return {}
    waiting = {each.checkpoint for each in decided if each.action in (Action.REPLICATE, Action.WAIT)}
    halted = {checkpoint.run for checkpoint in catalog.tiers[HOT].unreadable}
    parts = _parts(catalog, lambda entry: entry.part is not None and entry.id.run in catalog.left.keys() - halted)
    reasons: dict[CheckpointId, str] = {}
    for run, of_run in sorted(parts.items()):
        newest, known = catalog.newest_in_cold(run), catalog.known_cold(run)
        views = [entry.view for entry in of_run]
        spare = spare_parts(views, newest_in_cold=newest, known=known, waiting=waiting)
        if newest is not None and (entry := catalog.get(newest)) is not None:
            where, since = ", ".join(sorted(known & entry.tiers)), catalog.left[run]
            why = f"its run has left this node, no new file since {since:%Y-%m-%d}; {where} has {newest.name}"
            reasons |= dict.fromkeys(sorted(spare, key=lambda each: each.recency, reverse=True), why)
    return reasons


def _deletion(catalog: Catalog, checkpoint: CheckpointId, why: str) -> Decision:
    entry = catalog.get(checkpoint)
    is_elsewhere = entry is not None and not entry.tiers.isdisjoint(catalog.known_cold(checkpoint.run))
    return Decision(checkpoint, HOT, Action.EVICT if is_elsewhere else Action.EXPIRE, why)
