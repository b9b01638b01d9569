"""What this daemon has of a run's checkpoints: the answer to a trainer's Inventory, and to another node.

Over several nodes the ranks combine the answers of all daemons and choose what to restore
(client/tierd_client/restore/node_choice.py). Reads no checkpoint.
"""

from __future__ import annotations

from heapq import nlargest

from tierd.catalog.entry import Entry
from tierd.context import DaemonContext
from tierd.format import layout
from tierd.format.ids import HOT, MEMORY, CheckpointId, Run
from tierd.format.node_file import NodeFile
from tierd.format.node_messages import COPIES_MAX, HELD_MAX, Held, HeldCheckpoint, Inventory
from tierd.format.peers import HeldPart, NodeParts
from tierd.format.text import printable
from tierd.format.wire import DESCRIPTORS_MAX
from tierd.lifecycle.selection import CheckpointQuery
from tierd.memory.snapshot_set import SnapshotSet
from tierd.workers.restorer import Restorer

UNLISTED_MAX, UNLISTED_CHARS = 8, 1000  # bounds of the message


async def inventory(context: DaemonContext, restorer: Restorer, run: Run, asked: Inventory) -> Held:
    """The newest checkpoints that are asked for, at most HELD_MAX."""
    catalog = context.catalog
    unlisted = await restorer.list_run(run) if asked.lists_cold else catalog.unlisted()
    query = CheckpointQuery(run=run, step=asked.step, generation=asked.generation, milestone=asked.milestone)
    entries = {entry.id: entry for entry in catalog.entries(run)}
    in_memory = {snapshot_set.id: snapshot_set for snapshot_set in context.memory.complete(run)}
    known = [
        checkpoint
        for checkpoint in {*entries, *in_memory}
        if (asked.older_than is None or (checkpoint.generation, checkpoint.step) < asked.older_than)
        and query.matches(checkpoint, _milestones(entries.get(checkpoint), in_memory.get(checkpoint)))
    ]
    newest = nlargest(HELD_MAX, known, key=lambda checkpoint: checkpoint.recency)
    copies = context.part_copies.of_run(run) if context.part_copies is not None and asked.older_than is None else []
    copies = [
        part
        for part in copies
        if query.matches(part.id, frozenset({part.milestone} - {""})) and len(part.ranks) < DESCRIPTORS_MAX
    ]
    reasons = [f"{printable(name)}: {printable(why)}"[:UNLISTED_CHARS] for name, why in unlisted.items()]
    return Held(
        request=asked.request,
        checkpoints=[
            _held(checkpoint, entries.get(checkpoint), in_memory.get(checkpoint), list(catalog.tiers))
            for checkpoint in newest
        ],
        unlisted=reasons[:UNLISTED_MAX],
        peer=context.peer_key.of(run),
        copies=[_copy(part) for part in copies[:COPIES_MAX]],
    )


def durable_parts(context: DaemonContext, run: Run, *, copy_lag_s: float | None, count: int = HELD_MAX) -> NodeParts:
    """The durable parts and copies of the run in hot, at most `count` of each."""
    hot = context.catalog.in_tier(HOT)
    own = [(part, hot[part.id].examined) for part in context.catalog.parts(run)]
    copies = context.part_copies.of_run(run) if context.part_copies is not None else []
    return NodeParts(
        parts=[_part(part, healthy) for part, healthy in own[:count]],
        copies=[_part(part, part.is_healthy) for part in copies[:count]],
        copy_lag_s=copy_lag_s and round(copy_lag_s, 1),
    )


def _part(part: NodeFile, healthy: bool | None) -> HeldPart:
    return HeldPart(
        step=part.step,
        generation=part.generation,
        world_size=part.world_size,
        ranks=part.ranks,
        node_file=part.name,
        head_digest=part.head_digest,
        created_at=part.created_at,
        healthy=healthy,
    )


def _copy(part: NodeFile) -> HeldCheckpoint:
    return HeldCheckpoint(
        step=part.step,
        generation=part.generation,
        world_size=part.world_size,
        part_in=[HOT],
        ranks=part.ranks,
        head_digest=part.head_digest,
        healthy=part.is_healthy,
    )


def _held(
    checkpoint: CheckpointId, entry: Entry | None, in_memory: SnapshotSet | None, tiers: list[str]
) -> HeldCheckpoint:
    """`tiers`: nearest first."""
    part: NodeFile | None = entry.part if entry is not None else None
    part_in = [HOT] if part is not None else []
    whole_in = [tier for tier in tiers if entry is not None and entry.is_whole_in(tier)]
    world_size = entry.manifest.world_size if entry is not None else 0
    healthy = entry.healthy if entry is not None else None
    if in_memory is not None:
        world_size = in_memory.world_size
        if in_memory.node is None:
            whole_in.insert(0, MEMORY)
        else:
            part = in_memory.make_node_file()  # its head needs no checksums
            part_in.insert(0, MEMORY)
        if healthy is None:
            healthy = in_memory.is_healthy
    if part is not None and (len(part.ranks) >= DESCRIPTORS_MAX or part.is_adopted):
        part, part_in = None, []  # it could not be handed over, or no trainer reads it
    return HeldCheckpoint(
        step=checkpoint.step,
        generation=checkpoint.generation,
        world_size=world_size,
        whole_in=whole_in,
        part_in=part_in,
        ranks=part.ranks if part is not None else [],
        head_digest=part.head_digest if part is not None else "",
        healthy=healthy,
    )


def _milestones(entry: Entry | None, in_memory: SnapshotSet | None) -> frozenset[str]:
    marks = entry.all_marks if entry is not None else frozenset[str]()
    taken_as = in_memory.head.milestone if in_memory is not None else None
    return layout.counted(marks | {taken_as} if taken_as else marks)
