"""Which of the checkpoints that wait in hot for a cold copy to give up, when hot has no room for new ones.

Pure. Those that another tier holds go first. Then, of the run whose waiting checkpoints are the largest together, the
one whose neighbours are closest: what stays is spread evenly over the run. Milestones are never among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tierd.format.ids import HOT, CheckpointId
from tierd.lifecycle.policy import Action, CheckpointView, Decision, by_run


def give_up(waiting: Iterable[CheckpointView], sizes: Mapping[CheckpointId, int], to_free_bytes: int) -> list[Decision]:
    """The replicas to delete from hot, in order, until `to_free_bytes` are free. `waiting`: the checkpoints that are in
    hot only until cold tiers have them."""
    left = [view for view in waiting if not view.milestones]
    given_up: list[Decision] = []
    while left and to_free_bytes > 0:
        view = _most_dispensable(left, sizes)
        left.remove(view)
        to_free_bytes -= sizes[view.id]
        elsewhere = ", ".join(sorted(view.tiers - {HOT}))
        action, where = (Action.EVICT, f"{elsewhere} has it") if elsewhere else (Action.EXPIRE, "no other tier has it")
        given_up.append(Decision(view.id, HOT, action, f"given up, as hot has no room for new checkpoints; {where}"))
    return given_up


def _most_dispensable(waiting: list[CheckpointView], sizes: Mapping[CheckpointId, int]) -> CheckpointView:
    if elsewhere := [view for view in waiting if view.tiers - {HOT}]:
        return min(elsewhere, key=lambda view: view.id.recency)
    _, views = max(by_run(waiting), key=lambda run: sum(sizes[view.id] for view in run[1]))
    views.sort(key=lambda view: view.id.recency)
    # The oldest and the newest have one neighbour. They stay until there is nothing between them.
    inner = range(1, len(views) - 1)
    return views[min(inner, key=lambda place: views[place + 1].sequence - views[place - 1].sequence, default=0)]
