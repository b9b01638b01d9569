"""Checks what trainers over several nodes tell their daemon: its ranks, the nodes, the claim of their generation.

fenced: a node joins a generation only if it finds the same claim in a cold tier. So all nodes write to the same bucket,
and parts of two starts of a run never become one checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from itertools import pairwise

import msgspec

from tierd.api.session import TrainerSession
from tierd.context import DaemonContext, PartnerNode, RunRoster
from tierd.descriptors import read_sealed
from tierd.errors import (
    UNDECODABLE,
    BadConfig,
    BadRequest,
    Corrupt,
    Foreign,
    Full,
    NotFound,
    Stale,
    TierdError,
    TierUnreachable,
    text_of,
)
from tierd.format import layout, wire
from tierd.format.ids import Generation, Run
from tierd.format.node_file import CLAIM_DIGITS
from tierd.format.node_messages import NodeRanks
from tierd.format.peers import ROSTER_BYTES_MAX, NodeAddress
from tierd.format.signature import without_signature
from tierd.tiers.tier import Tier
from tierd.workers.peer_fetcher import check_address

log = logging.getLogger("tierd")

_HINT_KEY = "name the same security.key_file in the config of all nodes: docs/RUNBOOK.md#foreign-checkpoints"
COLD_TIMEOUT_S = 20.0  # a tier that takes longer counts as one that cannot be reached


def check_node_ranks(node: NodeRanks, rank: int, world_size: int, action: str) -> None:
    """Raises BadRequest unless these are the ranks of one of several nodes of a run, and `rank` is among them."""
    for name, ranks in (("ranks", node.ranks), ("lowest", node.lowest)):
        if not ranks or ranks[0] < 0 or ranks[-1] >= world_size or any(b <= a for a, b in pairwise(ranks)):
            raise BadRequest(f"{action}: `{name}` are not ascending ranks below {world_size}")
    if rank not in node.ranks or node.ranks[0] not in node.lowest or node.lowest[0] != 0 or len(node.lowest) < 2:
        raise BadRequest(f"{action}: rank {rank} is not on one of several nodes")
    digits = set("0123456789abcdef")
    if (node.claim and (len(node.claim) != CLAIM_DIGITS or not set(node.claim) <= digits)) or node.base < 0:
        raise BadRequest(f"{action}: claim {node.claim[:40]!r}, base {node.base}")


def decode_roster(raw: bytes, run: Run, world_size: int) -> list[NodeAddress]:
    """The nodes of a run, from the memory of a Roster. Raises BadRequest."""
    action = f"take the nodes of {run}"
    try:
        nodes = msgspec.json.decode(raw, type=list[NodeAddress])
    except UNDECODABLE as error:
        raise BadRequest(f"{action}: {error}") from error
    ranks = {rank for node in nodes for rank in node.ranks}
    if not ranks <= set(range(world_size)) or len(ranks) < sum(len(node.ranks) for node in nodes):
        raise BadRequest(f"{action}: they have others than its {world_size} ranks, or one twice")
    for node in nodes:
        if not node.ranks or node.ranks != sorted(node.ranks):
            raise BadRequest(f"{action}: the ranks of a node are not ascending")
        if node.peer is not None:
            check_address(node.peer)
    return nodes


def take_roster(context: DaemonContext, run: Run, generation: Generation, descriptor: int) -> None:
    """Note the nodes of a run, and forget those of runs that are gone. `descriptor`: that of the Roster. Raises
    BadRequest."""
    nodes = decode_roster(read_sealed(descriptor, size_max=ROSTER_BYTES_MAX), run, context.memory.world_size(run))
    for gone in context.rosters.keys() - {*context.memory.runs(), *context.catalog.runs()}:
        del context.rosters[gone]
    if (node := context.memory.node(run)) is not None:
        context.rosters[run] = RunRoster(generation, nodes, node.ranks)


def copy_from_partner(context: DaemonContext, session: TrainerSession, message: wire.Partner) -> None:
    """Copy the parts of the partner's node from now on. Answer with those that are here already. Raises BadRequest."""
    copies = context.part_copies
    if copies is None or context.memory.node(session.run) is None:
        return
    check_address(message.peer)
    if layout.parse_node_file(message.node_file) is None:
        raise BadRequest(f"copy the parts {message.node_file[:80]!r}: not the name of a node file")
    partner = PartnerNode(session.generation, message.peer, message.node_file, message.lifecycle)
    context.partners[session.run] = partner
    for part in copies.of_run(session.run):
        if part.generation == session.generation and part.name == message.node_file:
            session.post(wire.Copied(step=part.step, generation=part.generation))


def needs_cold_tier(run: Run) -> BadConfig:
    return BadConfig(
        f"join run {run}: its ranks span several nodes, and this daemon has no cold tier",
        hint="the nodes share checkpoints through a cold tier: add the same [[cold]] to the config of every node",
    )


async def confirm_node_claim(context: DaemonContext, run: Run, generation: Generation, bits: str) -> None:
    """Returns when hot or a cold tier has the claim with these random bits, or none can be reached. Notes it in hot, so
    that copies to a tier without it begin with the same claim, and ranks that come back wait for no cold tier. A claim
    that is found counts as seen: this node may have missed any number of starts before.

    Raises BadConfig when the tiers that can be reached have no claim of the generation, or one by another key, Stale
    when they have that of another start.
    """
    if not context.cold:
        raise needs_cold_tier(run)
    action = f"join run {run} generation {generation}, whose ranks span several nodes"
    limit = context.catalog.claims.generation_limit(run, context.now().timestamp())
    if not 1 <= generation <= limit:
        raise BadRequest(f"{action}: not between 1 and {limit}")
    with suppress(TierdError):  # then it is asked below, and answers by name
        noted = await context.hot.claim(run, generation)
        if noted is not None and noted.claim == bits:
            context.catalog.saw_generation(run, generation)
            return
    reached: list[str] = []
    others: list[str] = []
    for tier in context.cold.values():
        try:
            async with asyncio.timeout(COLD_TIMEOUT_S):
                if why := await _other_key(tier, run, generation):
                    raise BadConfig(f"{action}: {why}", hint=_HINT_KEY)
                claim = await tier.claim(run, generation)
        except BadConfig:
            raise
        except (TierdError, TimeoutError) as error:
            log.warning("%s: look for its claim in %s: %s", action, tier.name, text_of(error))
            continue
        if claim is not None and claim.claim == bits:
            context.catalog.saw_generation(run, generation)
            break
        (others if claim is not None else reached).append(tier.name)
    else:
        if others:
            raise Stale(f"{action}: another start has claimed it in {', '.join(others)}")
        if reached:
            raise BadConfig(
                f"{action}: {', '.join(reached)} of this node has no claim of it",
                hint="is it another bucket or folder than that of the other nodes? A file:// tier must be shared",
            )
    own = msgspec.structs.replace(context.new_claim(), claim=bits)
    try:
        if not await context.claim(context.hot, run, generation, own):
            raise Stale(f"{action}: another start has claimed it in hot")
    except (Full, TierUnreachable) as error:
        log.warning("%s: note its claim in hot: %s", action, error)


async def _other_key(tier: Tier, run: Run, generation: Generation) -> str:
    """Why the claim shows that the node of rank 0 has another key than this one, or that only one of them has a key:
    then neither reads what the other writes. Empty if it does not, or there is no claim."""
    try:
        raw = await tier.marker_bytes(layout.generation_key(run, generation))
    except Foreign as error:
        return error.message
    except (NotFound, Corrupt):
        return ""
    is_signed = without_signature(raw) != raw
    return f"its claim in {tier.name} is signed, and this node has no key" if is_signed and not tier.keyring else ""
