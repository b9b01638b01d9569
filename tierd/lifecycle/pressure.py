"""Which hot replicas to evict when the hot disk is full: those that every cold tier holds and keeps, oldest first.

Pure. It goes beyond what the policy keeps in hot, and never deletes the last replica: a candidate has a replica in each
configured cold tier, each of these tiers is known, and the same plan keeps it there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

from tierd.format.ids import HOT, CheckpointId, Run
from tierd.lifecycle.policy import Action, Decision

# Hot needs space for so many beside those it keeps: one is written completely before an older one is deleted, and one
# more while copies are given up.
ROOM_CHECKPOINTS = 2


def room_for_next(sizes: Iterable[int]) -> int:
    """The free space that hot needs for the next checkpoints. `sizes`: of those that it has; each of the next may be as
    large as the largest. Deletion, alarms and forecasts all use it."""
    return ROOM_CHECKPOINTS * max(sizes, default=0)


def hot_deletions_for(
    need_bytes: int, decisions: Iterable[Decision], *, cold: Collection[str], sizes: Mapping[CheckpointId, int]
) -> list[Decision]:
    """The deletions in hot that free `need_bytes`, or as much as may be freed: first those that are planned anyway,
    then evictions beyond the policy.

    `decisions`: of runs whose contents of hot are known. `cold`: the names of all configured cold tiers. `sizes`: in
    bytes.
    """
    by_checkpoint: dict[CheckpointId, dict[str, Decision]] = defaultdict(dict)
    for decision in decisions:
        by_checkpoint[decision.checkpoint][decision.tier] = decision
    planned = [tiers[HOT] for tiers in by_checkpoint.values() if HOT in tiers and tiers[HOT].action is not Action.KEEP]
    deleted = sorted(planned, key=lambda decision: (decision.checkpoint.run, decision.checkpoint.recency))
    reason = f"evicted under disk pressure; still in {', '.join(cold)}"
    spare = [checkpoint for checkpoint, tiers in by_checkpoint.items() if _is_spare(tiers, cold)]
    deleted += [Decision(checkpoint, HOT, Action.EVICT, reason) for checkpoint in _oldest_first(spare)]
    chosen: list[Decision] = []
    for decision in deleted:
        if need_bytes <= 0:
            break
        chosen.append(decision)
        need_bytes -= sizes[decision.checkpoint]
    return chosen


def _is_spare(tiers: Mapping[str, Decision], cold: Collection[str]) -> bool:
    """Whether hot holds and keeps the checkpoint, and so does every cold tier. The plan says KEEP only of a replica in
    a tier that is known."""
    return bool(cold) and all(name in tiers and tiers[name].action is Action.KEEP for name in (HOT, *cold))


def _oldest_first(checkpoints: Iterable[CheckpointId]) -> list[CheckpointId]:
    """Checkpoints with the most newer ones of their run first: each run keeps its newest for as long as possible."""
    runs: dict[Run, list[CheckpointId]] = defaultdict(list)
    for checkpoint in checkpoints:
        runs[checkpoint.run].append(checkpoint)
    ranked: list[tuple[int, CheckpointId]] = []
    for of_run in runs.values():
        newest_first = sorted(of_run, key=lambda checkpoint: checkpoint.recency, reverse=True)
        ranked += enumerate(newest_first)
    ranked.sort(key=lambda pair: (-pair[0], pair[1].run))
    return [checkpoint for _, checkpoint in ranked]
