"""Messages of runs over several nodes: what the ranks of a node and its daemon tell each other about the other nodes.

They are part of the protocol in wire.py, which encodes and decodes them.
"""

from __future__ import annotations

import msgspec

from tierd.format.peers import PeerAddress

HELD_MAX = 32  # checkpoints in an inventory
COPIES_MAX = 8  # copies of other nodes' parts in one answer


class NodeRanks(msgspec.Struct, frozen=True, kw_only=True):
    """How the ranks of a run are divided into nodes. `ranks`: those of this node, ascending. `lowest`: the lowest rank
    of each node, ascending. `claim`: the random bits of the claim of the generation, empty until the daemon of rank 0
    has made it. `base`: the sequence of the last checkpoint before the generation, 0 until then."""

    ranks: list[int]
    lowest: list[int]
    claim: str = ""
    base: int = 0


class Inventory(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Asks which checkpoints of the run this daemon knows, or those with this step, generation and milestone. Answered
    by Held or Refused. `lists_cold`: after a new listing of the run in the cold tiers. `older_than`: only those older
    than this generation and step."""

    request: int
    step: int | None
    generation: int | None
    milestone: str | None
    lists_cold: bool
    older_than: tuple[int, int] | None = None


class FindElsewhere(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Requests files of the part of a checkpoint that another node has: the daemon reads them there. `node_file`: the
    name of that part's node file. `chunks`: for each of `files` those that are needed, as a bitmap of bitmap.py.
    Answered by Found, whose descriptors are the files in order."""

    request: int
    step: int
    generation: int
    peer: PeerAddress
    node_file: str
    files: list[str]
    chunks: list[bytes]


class Everywhere(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Sent by the lowest rank of a node: `step` is the newest snapshot that is safe on every node, see FORMAT.md."""

    step: int


class Partner(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Sent by the lowest rank of a node: the daemon must copy the parts of another node, until the next Partner of the
    run. `node_file`: the name of that node's node files. `lifecycle`: as of that node's Welcome. Answered by Copied
    after each copy."""

    peer: PeerAddress
    node_file: str
    lifecycle: str = ""


class Roster(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Sent by the lowest rank of a node: the list of all nodes. One descriptor: a sealed memfd with NodeAddress as
    JSON."""


class FindNodes(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Asks for the other nodes of the run. Answered by FoundReplica with one descriptor, as that of Roster."""

    request: int


class HeldCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """What one daemon has of a checkpoint. `whole_in`: the tiers that have all of it, nearest first. `part_in`: the
    tiers, memory and hot, that have the part of this node; `ranks` are those of the part. Parts with the same
    `head_digest` are of one checkpoint. `healthy` None: the daemon does not know it."""

    step: int
    generation: int
    world_size: int
    whole_in: list[str] = []
    part_in: list[str] = []
    ranks: list[int] = []
    head_digest: str = ""
    healthy: bool | None = None


class Held(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to Inventory. `checkpoints`: at most HELD_MAX, newest first. `unlisted`: tiers not listed, why.
    `peer`: how other nodes read the parts here; None if they cannot. `copies`: of other nodes, at most COPIES_MAX."""

    request: int
    checkpoints: list[HeldCheckpoint]
    unlisted: list[str] = []
    peer: PeerAddress | None = None
    copies: list[HeldCheckpoint] = []


class Copied(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The daemon has the copy of the part of this step that the node of the last Partner saved."""

    step: int
    generation: int
