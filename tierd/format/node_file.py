"""Node files: where the ranks of a run span several nodes, each node lists its own part of a checkpoint.

A node uploads its shards, then its node file. When the node files of a checkpoint cover every rank, any node can
assemble the manifest: all of them make the same bytes, so it does not matter who commits.

Nodes that watch folders of other programs do the same: such a part has one rank, the number of the node, and its files
are those that the node has adopted.

Spec: docs/FORMAT.md#node-files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from tierd.errors import Corrupt
from tierd.format import layout
from tierd.format.adopted import tree_file
from tierd.format.ids import CheckpointId, Rank
from tierd.format.manifest import FileEntry, Head, Manifest, check_files, decode_file
from tierd.format.node_messages import HeldCheckpoint
from tierd.format.text import counted

CLAIM_DIGITS = 32  # hexadecimal: 128 bits
RANGES_SHOWN_MAX = 8
_HINT = "the checkpoint is not committed, nothing is overwritten; docs/RUNBOOK.md#unreadable-manifest"


class NodeFile(Manifest, frozen=True, kw_only=True):
    """The manifest of one node's part of a checkpoint. The fields of Head are the same on every node. `claim`: the
    random bits of the start that claimed the generation. `ranks`: of this node, ascending; `files`: their shards, in
    this order; if it is adopted, the tree of the node and what it has stored. `is_healthy`: None if they were not
    examined. `milestone`: empty if the snapshot is none."""

    claim: str
    ranks: list[int]
    is_healthy: bool | None = msgspec.field(name="healthy")
    milestone: str

    def encode(self) -> bytes:
        """As of a manifest: `files` and the signature, which is over the bytes before it, come last."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        last = {name: fields.pop(name) for name in ("files", "signature") if name in fields}
        return msgspec.json.format(msgspec.json.encode(fields | last), indent=1) + b"\n"

    @property
    def name(self) -> str:
        return layout.node_file_name(self.ranks[0], self.world_size)

    @property
    def extent(self) -> str:
        """Which ranks it has, as a person reads it."""
        if self.is_adopted:
            return f"only the part of node {self.ranks[0]} of {self.world_size} nodes"
        others = other_ranks_text(self.ranks, self.world_size)
        return f"only the part of one node: ranks {ranks_text(self.ranks)} of {self.world_size}, not {others}"

    @property
    def head(self) -> Head:
        return Head(**_head_fields(self))

    @property
    def head_digest(self) -> str:
        """A digest of the claim and the head, in hexadecimal: `assemble` takes only parts with the same digest."""
        return hashlib.sha256(msgspec.json.encode((self.claim, self.head))).hexdigest()

    @property
    def key(self) -> str:
        return layout.file_key(self.id, self.name)

    def contradiction(self, manifest: Manifest) -> str:
        """Why this is no part of the checkpoint with this manifest; empty if it is."""
        if (mine := _head_fields(self)) != (theirs := _head_fields(manifest)):
            return f"they differ in {', '.join(name for name in mine if mine[name] != theirs[name])}"
        files = {entry.name: entry for entry in manifest.files}
        return next((f"{entry.name} differs" for entry in self.files if files.get(entry.name) != entry), "")


def as_part(manifest: Manifest) -> NodeFile:
    """A checkpoint of a run on one node as the part, with all ranks, that the node has of it: so the nodes of a later
    start read it. There is no other part, so the claim plays no role."""
    if isinstance(manifest, NodeFile):
        return manifest
    ranks = list(range(manifest.world_size))
    return NodeFile(
        **_head_fields(manifest),
        files=manifest.files,
        claim="0" * CLAIM_DIGITS,
        ranks=ranks,
        is_healthy=None,
        milestone="",
    )


def decode_node_file(raw: bytes, *, name: str, where: str, expect: CheckpointId) -> NodeFile:
    """Decode and check the node file `name` in the folder of the checkpoint `expect`. `where`: its tier, for messages.

    Raises NewerFormat for a later version, Corrupt for any other violation of the format.
    """

    def check(node_file: NodeFile) -> None:
        _check(node_file)
        if node_file.name != name:
            raise ValueError(f"its name should be {node_file.name}")

    return decode_file(raw, NodeFile, check, action=f"decode {name} of {expect} in {where}", expect=expect)


def ranks_text(ranks: Sequence[int]) -> str:
    """Ascending ranks for a person: "0-3, 8", of many only the first ranges and the number."""
    ranges: list[tuple[int, int]] = []
    for rank in ranks:
        first = ranges.pop()[0] if ranges and rank == ranges[-1][1] + 1 else rank
        ranges.append((first, rank))
    return _ranges_text(ranges)


def other_ranks_text(ranks: Sequence[int], world_size: int) -> str:
    """As `ranks_text`, of the ranks that are not among these."""
    edges = [-1, *ranks, world_size]
    return _ranges_text([(one + 1, other - 1) for one, other in pairwise(edges) if other > one + 1])


def _ranges_text(ranges: Sequence[tuple[int, int]]) -> str:
    shown = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges[:RANGES_SHOWN_MAX])
    count = sum(last - first + 1 for first, last in ranges)
    return shown if len(ranges) <= RANGES_SHOWN_MAX else f"{shown}, … ({count} ranks)"


def missing_ranks(parts: Collection[NodeFile | HeldCheckpoint]) -> list[int]:
    """The ranks of the checkpoint that none of its parts has, ascending. At least one part."""
    world_size = next(iter(parts)).world_size
    found = {rank for part in parts for rank in part.ranks}
    return [rank for rank in range(world_size) if rank not in found]


def assemble(node_files: Collection[NodeFile]) -> Manifest:
    """The manifest, unsigned, of a checkpoint whose node files cover every rank. It depends on them alone, in any
    order.

    Raises Corrupt when they are not parts of one checkpoint, when a rank has two, or when one has none.
    """
    parts = sorted(node_files, key=lambda node_file: node_file.ranks)
    action = f"assemble the manifest of {parts[0].id}"
    for part, following in pairwise(parts):
        if part.claim != following.claim:
            reason = "two starts of the run hold this generation"
            raise Corrupt(f"{action}: {part.name} and {following.name} have different claims: {reason}", hint=_HINT)
        if part.head != following.head:
            differing = [name for name in Head.__struct_fields__ if getattr(part, name) != getattr(following, name)]
            raise Corrupt(f"{action}: {part.name} and {following.name} differ in {', '.join(differing)}", hint=_HINT)
    files: dict[int, list[FileEntry]] = {}
    for part in parts:
        of_ranks = [part.files] if part.is_adopted else [[entry] for entry in part.files]
        for rank, entries in zip(part.ranks, of_ranks, strict=True):
            if rank in files:
                raise Corrupt(f"{action}: rank {rank} is in {part.name} and in another node file", hint=_HINT)
            files[rank] = entries
    if missing := missing_ranks(parts):
        raise Corrupt(
            f"{action}: {counted(len(missing), 'rank has', 'ranks have')} no node file: {ranks_text(missing)}",
            hint=_HINT,
        )
    return Manifest(**_head_fields(parts[0]), files=[entry for rank in sorted(files) for entry in files[rank]])


def verdict(node_files: Collection[NodeFile]) -> bool | None:
    """Whether the whole checkpoint is healthy: False as soon as one part is unhealthy, True when all are healthy."""
    verdicts = {node_file.is_healthy for node_file in node_files}
    return False if False in verdicts else None if None in verdicts else True


def milestones(node_files: Collection[NodeFile]) -> list[str]:
    return sorted({node_file.milestone for node_file in node_files} - {""})


def _head_fields(manifest: Manifest) -> dict[str, Any]:
    return {name: getattr(manifest, name) for name in Head.__struct_fields__}


def _check(node_file: NodeFile) -> None:
    """Raises ValueError for the first violation."""
    ranks, world_size = node_file.ranks, node_file.world_size
    if not ranks or any(later <= earlier for earlier, later in pairwise(ranks)):
        raise ValueError("its ranks are not ascending")
    if ranks[0] < 0 or ranks[-1] >= world_size:
        raise ValueError(f"ranks {ranks[0]} to {ranks[-1]} of world size {world_size}")
    check_claim(node_file.claim)
    if node_file.milestone and layout.milestone_of(f"milestone-{node_file.milestone}.json") is None:
        raise ValueError(f"milestone {node_file.milestone[:80]!r}")
    if node_file.is_adopted:
        _check_adopted(ranks, node_file.files)
    else:
        _check_names(ranks, world_size, node_file.files)
    check_files(node_file.files)


def check_claim(claim: str) -> None:
    """Raises ValueError."""
    if len(claim) != CLAIM_DIGITS or not set(claim) <= set("0123456789abcdef"):
        raise ValueError(f"claim {claim[:40]!r}")


def _check_adopted(ranks: Sequence[int], files: Sequence[FileEntry]) -> None:
    if len(ranks) != 1:
        raise ValueError(f"{len(ranks)} ranks of what one node has adopted")
    names = [entry.name for entry in files]
    prefix = layout.part_prefix(ranks[0])
    if tree_file(ranks[0]) not in names or not all(name.startswith(prefix) for name in names):
        raise ValueError("its files are not those that its node has adopted")


def _check_names(ranks: Sequence[int], world_size: int, files: Sequence[FileEntry]) -> None:
    expected = [layout.shard_name(Rank(rank), world_size) for rank in ranks]
    if [entry.name for entry in files] != expected:
        raise ValueError("its files are not the shards of its ranks")
