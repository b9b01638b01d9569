"""Which checkpoint a training over several nodes restores from the nodes themselves.

Pure: it takes what the daemons of all nodes have, and what has failed since. A checkpoint is covered when the parts of
the nodes together have every rank that saved it. Where nodes cannot read from each other, a covered checkpoint is
chosen only if the shard of every rank is on the node where that rank is now.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from tierd.errors import UNHEALTHY
from tierd.format.ids import AUTO, HOT, MEMORY, PEER, CheckpointId, checkpoint_id
from tierd.format.node_file import missing_ranks, ranks_text
from tierd.format.node_messages import HeldCheckpoint
from tierd.format.peers import PeerAddress
from tierd.format.wire import DESCRIPTORS_MAX

_NO_PEERS = "and the nodes do not read from each other"  # the end of a sentence


class NodeInventory(msgspec.Struct, frozen=True, kw_only=True):
    """What the daemon of one node has. `ranks`: those that are on this node now. `peer`: how other nodes read it; None
    if they cannot. `copies`: of parts of other nodes."""

    ranks: list[int]
    checkpoints: list[HeldCheckpoint]
    peer: PeerAddress | None = None
    copies: list[HeldCheckpoint] = []


@dataclass(frozen=True, slots=True)
class PartsSource:
    """The parts of a checkpoint on all nodes. `tier`: hot; or memory (a node that has its part only in hot reads it
    from hot); or peer (a part that another node has copied is read from the copy)."""

    checkpoint: CheckpointId
    tier: str


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A checkpoint of which a node has a part and which is not restored from the nodes. `reason`: a sentence.
    `is_covered`: the nodes together have all of it."""

    checkpoint: CheckpointId
    reason: str
    is_covered: bool
    is_unhealthy: bool = False


def choose_parts(
    nodes: Sequence[NodeInventory],
    run: str,
    *,
    tier: str = AUTO,
    allow_unhealthy: bool = False,
    failed: Collection[tuple[CheckpointId, str]] = (),
    unhealthy: Collection[CheckpointId] = (),
) -> tuple[PartsSource | None, list[PassedOver]]:
    """The newest covered checkpoint, from memory if it can be, and why newer ones were passed over.

    `tier`: auto, or the only one to take; hot includes peer. `failed`: sources that a rank could not read, as
    (checkpoint, tier). `unhealthy`: checkpoints that were found unhealthy after the daemons had answered.
    """
    passed_over: list[PassedOver] = []
    for checkpoint in sorted(_with_parts(nodes, run), key=lambda each: each.recency, reverse=True):
        gap = _gap(nodes, checkpoint)
        if not allow_unhealthy and (checkpoint in unhealthy or is_unhealthy(nodes, checkpoint)):
            reason = f"{checkpoint}: the part of a node {UNHEALTHY}"
            passed_over.append(PassedOver(checkpoint, reason, is_covered=not gap, is_unhealthy=True))
            continue
        if problem := gap or _distance(nodes, checkpoint):
            passed_over.append(PassedOver(checkpoint, f"{checkpoint}: {problem}", is_covered=not gap))
            continue
        tiers = [each for each in _tiers(nodes, checkpoint) if tier in (AUTO, each) or (tier, each) == (HOT, PEER)]
        for each in tiers:
            if (checkpoint, each) not in failed:
                return PartsSource(checkpoint, each), passed_over
        if tiers:
            reason = f"{checkpoint}: its parts on the nodes could not be restored"
            passed_over.append(PassedOver(checkpoint, reason, is_covered=True))
    return None, passed_over


def with_whole_as_parts(nodes: Sequence[NodeInventory], run: str) -> list[NodeInventory]:
    """The inventories, with some whole checkpoints as parts. A start on one node leaves whole checkpoints in memory and
    hot of that node alone. If the parts on the nodes do not cover such a checkpoint, it counts as a part with all ranks
    on the first node that has it, so that the others can read it there. Unchanged unless all nodes read from each
    other."""
    if any(node.peer is None for node in nodes):
        return list(nodes)
    holders: dict[CheckpointId, list[int]] = {}
    for index, node in enumerate(nodes):
        for held in node.checkpoints:
            if _whole_here(held) and held.world_size < DESCRIPTORS_MAX:
                holders.setdefault(_id(run, held), []).append(index)
    owners = {
        checkpoint: found[0]
        for checkpoint, found in holders.items()
        if len(found) < len(nodes) and (not _parts(nodes, checkpoint, AUTO) or _gap(nodes, checkpoint))
    }

    def changed(index: int, held: HeldCheckpoint) -> HeldCheckpoint:
        owner = owners.get(_id(run, held))
        if owner is None:
            return held
        is_owner = owner == index
        return msgspec.structs.replace(
            held,
            part_in=_whole_here(held) if is_owner else [],
            ranks=list(range(held.world_size)) if is_owner else [],
            head_digest="",
        )

    return [
        msgspec.structs.replace(
            node,
            checkpoints=[changed(index, held) for held in node.checkpoints],
            copies=[copy for copy in node.copies if _id(run, copy) not in owners],
        )
        for index, node in enumerate(nodes)
    ]


def _whole_here(held: HeldCheckpoint) -> list[str]:
    return [tier for tier in (MEMORY, HOT) if tier in held.whole_in]


def newest_whole(
    nodes: Sequence[NodeInventory],
    run: str,
    *,
    tier: str = AUTO,
    allow_unhealthy: bool = False,
    failed: Collection[tuple[CheckpointId, str]] = (),
    unhealthy: Collection[CheckpointId] = (),
) -> CheckpointId | None:
    """The newest checkpoint of which a tier of rank 0's daemon, the first node's, has all. Arguments: as of
    `choose_parts`."""
    found: list[CheckpointId] = []
    for held in nodes[0].checkpoints:
        checkpoint = _id(run, held)
        tiers = [each for each in held.whole_in if tier in (AUTO, each) and (checkpoint, each) not in failed]
        is_bad = checkpoint in unhealthy or is_unhealthy(nodes, checkpoint)
        if tiers and (allow_unhealthy or not is_bad):
            found.append(checkpoint)
    return max(found, key=lambda each: each.recency, default=None)


def part_of(node: NodeInventory, checkpoint: CheckpointId) -> HeldCheckpoint | None:
    """What a node has of a checkpoint; None if it has no part."""
    return next((held for held in _held([node], checkpoint) if held.part_in), None)


def used_copies(nodes: Sequence[NodeInventory], checkpoint: CheckpointId, tier: str) -> dict[int, HeldCheckpoint]:
    """The copies that are read in place of parts, by the lowest rank of the node that keeps the copy: if `tier` is
    peer, those of all parts that have one, else only those of parts that no node has itself. Empty unless all nodes
    read from each other."""
    if any(node.peer is None for node in nodes):
        return {}
    own = [] if tier == PEER else _own_parts(nodes, checkpoint)
    saved = {rank for held in own for rank in held.ranks}
    used: dict[int, HeldCheckpoint] = {}
    for node in nodes:
        for copy in _copies([node], checkpoint):
            if saved.isdisjoint(copy.ranks):
                used[node.ranks[0]] = copy
                saved.update(copy.ranks)
    return used


def used_part(
    node: NodeInventory, nodes: Sequence[NodeInventory], checkpoint: CheckpointId, tier: str
) -> HeldCheckpoint | None:
    """The part of a checkpoint that this node has itself, unless a copy is read in its place; None if it has none."""
    part = part_of(node, checkpoint)
    copied = {rank for copy in used_copies(nodes, checkpoint, tier).values() for rank in copy.ranks}
    return part if part is not None and copied.isdisjoint(part.ranks) else None


def is_unhealthy(nodes: Sequence[NodeInventory], checkpoint: CheckpointId) -> bool:
    """Whether it holds NaN or Inf: found on one node, that counts for the whole checkpoint."""
    return any(each.healthy is False for each in [*_held(nodes, checkpoint), *_copies(nodes, checkpoint)])


def _gap(nodes: Sequence[NodeInventory], checkpoint: CheckpointId, tier: str = AUTO) -> str:
    """Why the parts do not cover the checkpoint, as the end of a sentence; empty if they do."""
    parts = _parts(nodes, checkpoint, tier)
    if len({(held.head_digest, held.world_size) for held in parts}) > 1:
        return "the nodes have parts of different starts of the run"
    world_size = parts[0].world_size
    if missing := missing_ranks(parts):
        return f"no node has the part with {_ranks(missing)} of {world_size}"
    return "two nodes have the part of one rank" if sum(len(held.ranks) for held in parts) != world_size else ""


def _distance(nodes: Sequence[NodeInventory], checkpoint: CheckpointId) -> str:
    """Why a rank cannot read what the nodes have of a covered checkpoint, as the end of a sentence; empty if each rank
    is on the node that has its shard, or all nodes read from each other."""
    if all(node.peer is not None for node in nodes):
        return ""
    world_size = next(held.world_size for held in _held(nodes, checkpoint) if held.part_in)
    ranks = sum(len(node.ranks) for node in nodes)
    if ranks != world_size:
        return f"{world_size} ranks saved it on several nodes, now there are {ranks}, {_NO_PEERS}"
    saved_here = {node.ranks[0]: part_of(node, checkpoint) for node in nodes}
    moved = [
        rank
        for node in nodes
        for rank in node.ranks
        if (part := saved_here[node.ranks[0]]) is None or rank not in part.ranks
    ]
    return f"another node has the part with {_ranks(sorted(moved))}, {_NO_PEERS}" if moved else ""


def _tiers(nodes: Sequence[NodeInventory], checkpoint: CheckpointId) -> list[str]:
    """The sources of a covered checkpoint, nearest first. Peer is last: the copy of a damaged part may be intact."""
    places = [held.part_in for held in _parts(nodes, checkpoint, AUTO)]
    tiers = [MEMORY] if any(MEMORY in place for place in places) else []
    tiers += [HOT] if all(HOT in place for place in places) else []
    has_other_copies = used_copies(nodes, checkpoint, PEER) != used_copies(nodes, checkpoint, AUTO)
    return tiers + ([PEER] if has_other_copies and not _gap(nodes, checkpoint, PEER) else [])


def _with_parts(nodes: Sequence[NodeInventory], run: str) -> set[CheckpointId]:
    found = {_id(run, held) for node in nodes for held in node.checkpoints if held.part_in}
    if all(node.peer is not None for node in nodes):
        found |= {_id(run, held) for node in nodes for held in node.copies}
    return found


def _parts(nodes: Sequence[NodeInventory], checkpoint: CheckpointId, tier: str) -> list[HeldCheckpoint]:
    """What is read of a checkpoint from a source: parts, and copies in place of others."""
    copies = list(used_copies(nodes, checkpoint, tier).values())
    copied = {rank for copy in copies for rank in copy.ranks}
    return [held for held in _own_parts(nodes, checkpoint) if copied.isdisjoint(held.ranks)] + copies


def _own_parts(nodes: Sequence[NodeInventory], checkpoint: CheckpointId) -> list[HeldCheckpoint]:
    return [held for held in _held(nodes, checkpoint) if held.part_in]


def _held(nodes: Iterable[NodeInventory], checkpoint: CheckpointId) -> list[HeldCheckpoint]:
    return _of(checkpoint, (held for node in nodes for held in node.checkpoints))


def _copies(nodes: Iterable[NodeInventory], checkpoint: CheckpointId) -> list[HeldCheckpoint]:
    return _of(checkpoint, (copy for node in nodes for copy in node.copies))


def _of(checkpoint: CheckpointId, found: Iterable[HeldCheckpoint]) -> list[HeldCheckpoint]:
    return [each for each in found if (each.step, each.generation) == (checkpoint.step, checkpoint.generation)]


def _id(run: str, held: HeldCheckpoint) -> CheckpointId:
    return checkpoint_id(run, held.step, held.generation)


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranks_text(ranks)}"
