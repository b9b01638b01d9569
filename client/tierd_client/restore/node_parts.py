"""The replicas of a run over several nodes: the parts of a checkpoint that the nodes have, or a whole one in a tier.

The lowest rank of each node asks its daemon what it has, and all ranks gather the answers. Rank 0 chooses
(node_choice.py). Each rank reads the shards that its own daemon has, and gets the headers of all others. If it needs
bytes that only other nodes have, its daemon reads them from the daemons there. If one rank cannot read what it needs,
all ranks try the next source.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from tierd.descriptors import close_all
from tierd.errors import Corrupt, DaemonUnreachable, NotFound, TierdError, TierUnreachable, Transient, unhealthy
from tierd.format import layout, wire
from tierd.format.ids import AUTO, HOT, PEER, CheckpointId, checkpoint_id
from tierd.format.node_file import NodeFile, assemble, decode_node_file
from tierd.format.node_messages import HELD_MAX, HeldCheckpoint
from tierd_client.log import log
from tierd_client.nodes import is_lowest_of_node
from tierd_client.ranks import Ranks
from tierd_client.restore.node_choice import (
    NodeInventory,
    PassedOver,
    choose_parts,
    is_unhealthy,
    newest_whole,
    used_copies,
    used_part,
    with_whole_as_parts,
)
from tierd_client.restore.part_replica import PartElsewhere, PartReplica
from tierd_client.restore.replica import Replica, RestoreRequest, find_replica, hand_over
from tierd_client.session import DaemonSession

HELD_OF_NODE_MAX = 16 * HELD_MAX  # checkpoints that a node reports


class Problem(enum.IntEnum):
    """Why the ranks have not read a replica, by severity."""

    NONE = 0
    NOT_READABLE = 1
    NO_PEER = 2
    UNHEALTHY = 3
    DAMAGED = 4


@dataclass(frozen=True, slots=True)
class Attempt:
    """A replica to read next. `open`: called on all ranks."""

    checkpoint: CheckpointId
    tier: str
    open: Callable[[], Replica]


class _Source(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 has chosen. `is_parts`: each rank reads what its own daemon has."""

    checkpoint: CheckpointId
    tier: str
    is_parts: bool


class _SharedPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part as the lowest rank of a node sends it to all. `headers`: of the files in `node_file`, in order. `is_copy`:
    of the part of another node."""

    node_file: bytes
    headers: list[bytes]
    is_copy: bool = False


def is_over_nodes(session: DaemonSession, ranks: Ranks) -> bool:
    """All ranks. Whether they are on several nodes, or the daemon of rank 0 has parts of an earlier start on several
    nodes."""
    if session.hello.node is not None:
        return True

    def has_parts() -> bool:
        if session.hello.rank != 0 or session.welcome.seen is None:  # None: of a daemon that knows of one node only
            return False
        held = session.inventory(
            wire.Inventory(request=0, step=None, generation=None, milestone=None, lists_cold=False)
        )
        return bool(held.copies) or any(checkpoint.part_in for checkpoint in held.checkpoints)

    return ranks.maximum([int(ranks.run_on_all(has_parts))])[0] > 0


class NodeReplicas:
    """All ranks, in every method."""

    def __init__(self, session: DaemonSession, ranks: Ranks, request: RestoreRequest) -> None:
        self._session = session
        self._ranks = ranks
        self._request = request
        self._failed: list[tuple[CheckpointId, str]] = []
        self._unhealthy: set[CheckpointId] = set()
        self._is_damaged = False
        self._logged: set[CheckpointId] = set()
        raws = ranks.gather(ranks.run_on_all(self._ask))
        nodes = [msgspec.msgpack.decode(raw, type=NodeInventory) for raw in raws if raw]
        self._nodes = with_whole_as_parts(nodes, session.hello.run)

    def _ask(self) -> bytes:
        """The inventory of this node, on its lowest rank; else nothing. Rank 0's daemon looks at the cold tiers now."""
        node, is_first = self._session.hello.node, self._ranks.rank == 0
        if not is_lowest_of_node(self._session.hello):
            return b""
        request = self._request
        question = wire.Inventory(
            request=0,
            step=request.step,
            generation=request.generation,
            milestone=request.milestone,
            lists_cold=is_first,
        )
        held = self._session.inventory(question)
        for reason in held.unlisted if is_first else ():
            log.error("tierd: a tier could not be listed, a newer checkpoint may be there: %s", reason)
        checkpoints, copies = list(held.checkpoints), held.copies
        # A node may be far ahead of another one: what both have is then far down its list.
        while len(held.checkpoints) == HELD_MAX and any(checkpoint.part_in for checkpoint in held.checkpoints):
            if len(checkpoints) >= HELD_OF_NODE_MAX:
                break
            oldest = held.checkpoints[-1]
            older_than = oldest.generation, oldest.step
            held = self._session.inventory(msgspec.structs.replace(question, lists_cold=False, older_than=older_than))
            checkpoints += held.checkpoints
        here = node.ranks if node is not None else list(range(self._ranks.world_size))
        inventory = NodeInventory(ranks=here, checkpoints=checkpoints, peer=held.peer, copies=copies)
        return msgspec.msgpack.encode(inventory)

    def next(self) -> Attempt:
        """Raises on all ranks when there is nothing left to try."""
        source, replica = self._ranks.run_on_all(self._choose)
        choice = b"" if source is None else msgspec.json.encode(source)
        source = msgspec.json.decode(self._ranks.broadcast(choice), type=_Source)
        checkpoint, tier = source.checkpoint, source.tier
        if source.is_parts:
            return Attempt(checkpoint, tier, lambda: self._open_parts(checkpoint, tier))
        exactly = RestoreRequest.exactly(checkpoint, tier)
        return Attempt(checkpoint, tier, lambda: replica or find_replica(self._session, exactly, self._excluded))

    def failed(self, attempt: Attempt, problem: Problem) -> None:
        """A rank could not read it: the next attempt is another one."""
        self._failed.append((attempt.checkpoint, attempt.tier))
        self._is_damaged |= problem is Problem.DAMAGED
        if problem is Problem.NO_PEER:
            # Do not read from other nodes again: where a firewall drops packets, each attempt takes half a minute.
            self._nodes = [msgspec.structs.replace(node, peer=None) for node in self._nodes]
        if problem is Problem.UNHEALTHY:
            self._unhealthy.add(attempt.checkpoint)

    @property
    def _excluded(self) -> list[str]:
        """What a daemon must not hand over, in the form of wire.Find."""
        excluded = {f"{checkpoint.name}@{tier}" for checkpoint, tier in self._failed}
        if not self._request.allow_unhealthy:
            for held in self._nodes[0].checkpoints:
                checkpoint = checkpoint_id(self._session.hello.run, held.step, held.generation)
                if checkpoint in self._unhealthy or is_unhealthy(self._nodes, checkpoint):
                    excluded |= {f"{checkpoint.name}@{tier}" for tier in held.whole_in}
        return sorted(excluded)

    # ── rank 0 ──

    def _choose(self) -> tuple[_Source | None, Replica | None]:
        """On rank 0: (what all ranks read next, the open replica if it is a whole one). On other ranks: (None, None).

        The source is the newest checkpoint that the nodes have together, or the newest that the daemon of rank 0 has
        whole if that is newer."""
        if self._ranks.rank != 0:
            return None, None
        request, run = self._request, self._session.hello.run
        narrowed: dict[str, Any] = {
            "tier": request.tier,
            "allow_unhealthy": request.allow_unhealthy,
            "failed": self._failed,
            "unhealthy": self._unhealthy,
        }
        parts, passed_over = choose_parts(self._nodes, run, **narrowed)
        whole = newest_whole(self._nodes, run, **narrowed)
        replica: Replica | None = None
        if parts is None or (whole is not None and whole.recency > parts.checkpoint.recency):
            try:
                replica = find_replica(self._session, request, self._excluded)
            except TierdError as error:
                if parts is None:
                    raise self._refusal(error, passed_over) from error
                log.error("tierd: the newer checkpoint %s is passed over: %s", whole, error.message)
        if replica is not None and parts is not None and parts.checkpoint.recency >= replica.manifest.id.recency:
            with replica:  # close it: it is not newer than the parts
                replica = None
        if replica is not None:
            source = _Source(checkpoint=replica.manifest.id, tier=replica.tier, is_parts=False)
        else:
            assert parts is not None
            source = _Source(checkpoint=parts.checkpoint, tier=parts.tier, is_parts=True)
        self._log(passed_over, source.checkpoint)
        return source, replica

    def _log(self, passed_over: list[PassedOver], chosen: CheckpointId) -> None:
        """Which newer checkpoints were passed over, each once: their steps are lost."""
        for passed in passed_over:
            if passed.checkpoint.recency > chosen.recency and passed.checkpoint not in self._logged:
                self._logged.add(passed.checkpoint)
                log.error("tierd: a newer checkpoint is passed over: %s", passed.reason)

    def _refusal(self, error: TierdError, passed_over: list[PassedOver]) -> TierdError:
        """Why nothing is restored. `error`: why the daemon of rank 0 has nothing whole. While the nodes together have a
        checkpoint, the training must not start from scratch."""
        if self._is_damaged or not passed_over or not isinstance(error, NotFound | Corrupt | TierUnreachable):
            return error
        run, newest = self._session.hello.run, passed_over[0]
        if all(passed.is_unhealthy for passed in passed_over):
            return unhealthy(newest.checkpoint, "the part of a node")
        if isinstance(error, NotFound) and not any(passed.is_covered for passed in passed_over):
            for passed in passed_over:
                log.error("tierd: %s", passed.reason)
            return error
        return TierUnreachable(
            f"restore {run}: none of its checkpoints can be restored now. {newest.reason}. The daemon of rank 0 found "
            f"no whole one: {error.message}",
            hint="bring back the nodes that have the missing parts, or a tier that has a whole checkpoint; "
            + (error.hint or 'restore(state, resume="scratch", force=True) begins anew'),
        )

    # ── all ranks ──

    def _open_parts(self, checkpoint: CheckpointId, tier: str) -> PartReplica:
        """Raises on all ranks when one cannot open what its daemon has."""
        opened: list[PartReplica] = []
        copies = used_copies(self._nodes, checkpoint, tier)
        try:
            shared = self._ranks.run_on_all(lambda: self._share_parts(checkpoint, tier, opened))
            node_files: list[NodeFile] = []
            elsewhere: list[PartElsewhere] = []
            for rank, raw in enumerate(self._ranks.gather(shared)):
                for part in msgspec.msgpack.decode(raw, type=list[_SharedPart]) if raw else ():
                    held = copies.get(rank) if part.is_copy else self._part(rank, checkpoint, tier)
                    node_file = self._decode(part.node_file, held, checkpoint, where="the daemon of another node")
                    node_files.append(node_file)
                    # A copy on this node, too, is read through its daemon.
                    if part.is_copy or rank not in self._own.ranks:
                        names = (entry.name for entry in node_file.files)
                        headers = dict(zip(names, part.headers, strict=True))
                        elsewhere.append(PartElsewhere(rank, node_file.name, headers, self._node_of(rank).peer))
            manifest = assemble(node_files)
            if not opened:
                opened.append(PartReplica(PEER, manifest, []))
            # Each node begins with the part of the next one: else all would read from the first one at once.
            elsewhere.sort(key=lambda part: part.lowest_rank < self._ranks.rank)
            (replica,) = opened
            replica.manifest, replica.elsewhere, replica.daemon = manifest, elsewhere, self._session
        except BaseException:
            for each in opened:
                close_all(each.descriptors)
            raise
        return replica

    @property
    def _own(self) -> NodeInventory:
        return self._node_of(self._ranks.rank)

    def _node_of(self, rank: int) -> NodeInventory:
        return next(node for node in self._nodes if rank in node.ranks)

    def _share_parts(self, checkpoint: CheckpointId, tier: str, opened: list[PartReplica]) -> bytes:
        """Adds to `opened` what this rank's daemon has, if it has a part. Returns what the lowest rank of the node
        sends to all: its part, and the copy of another one, as far as they are used."""
        held = self._part(self._ranks.rank, checkpoint, tier)
        copy = used_copies(self._nodes, checkpoint, tier).get(self._ranks.rank)
        shared: list[_SharedPart] = []
        if held is not None:
            replica = self._open(checkpoint, HOT if tier == HOT else AUTO, held)
            opened.append(replica)
            if is_lowest_of_node(self._session.hello):
                shared.append(self._shared(replica))
        if copy is not None:
            other = self._open(checkpoint, HOT, copy, is_copy=True)
            with other:
                shared.append(self._shared(other, is_copy=True))
        return msgspec.msgpack.encode(shared) if shared else b""

    def _part(self, rank: int, checkpoint: CheckpointId, tier: str) -> HeldCheckpoint | None:
        return used_part(self._node_of(rank), self._nodes, checkpoint, tier)

    def _open(self, checkpoint: CheckpointId, tier: str, held: HeldCheckpoint, *, is_copy: bool = False) -> PartReplica:
        """A part that this rank's daemon has. `held`: what the daemon has reported about it."""
        message = wire.Find(
            request=0,
            step=checkpoint.step,
            generation=checkpoint.generation,
            milestone=None,
            tier=tier,
            exclude=[],
            allow_unhealthy=self._request.allow_unhealthy,
            is_node_part=True,
            is_copy=is_copy,
        )
        try:
            answer, node_file, descriptors = hand_over(
                self._session, message, partial(self._decode, held=held, checkpoint=checkpoint)
            )
        except DaemonUnreachable:
            raise
        except Transient as error:  # for example, a newer snapshot has replaced it in memory
            raise TierUnreachable(error.message, hint=error.hint) from error
        return PartReplica(answer.tier, node_file, descriptors)

    def _shared(self, replica: PartReplica, *, is_copy: bool = False) -> _SharedPart:
        node_file = replica.manifest
        assert isinstance(node_file, NodeFile)
        try:
            headers = [bytes(file.header()) for file in replica.files()]
        except Corrupt as error:
            log.error("tierd: %s; trying the next replica", error.message)
            self._session.report("corrupt", node_file.step, tier=replica.tier, detail=error.message)
            raise
        return _SharedPart(node_file=node_file.encode(), headers=headers, is_copy=is_copy)

    def _decode(self, raw: bytes, held: HeldCheckpoint | None, checkpoint: CheckpointId, *, where: str) -> NodeFile:
        """The node file of the part `held`."""
        if held is None:
            raise NotFound(f"restore {checkpoint}: {where} has no part of it")
        name = layout.node_file_name(held.ranks[0], held.world_size)
        return decode_node_file(raw, name=name, where=where, expect=checkpoint)
