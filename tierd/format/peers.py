"""Addresses at which nodes read each other's parts, exchanged by the trainers (wire.py), and lists of the parts."""

from __future__ import annotations

import msgspec

TIER_HEADER = "Tierd-Tier"  # "hot": only what is durable there
ROSTER_BYTES_MAX = 4 << 20  # some hundred bytes for each node
PARTS_BYTES_MAX = 256 << 10  # of a NodeParts
NEWEST_BYTES_MAX = 16 << 10  # the same with one part and one copy; thousands of nodes may be asked at once


class PeerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The address where other nodes read a daemon's parts of a run, as host:port, and the token that opens them.
    `fingerprint`: the SHA-256 of its TLS certificate, in hex; empty: it answers in plain HTTP."""

    address: str
    token: str
    fingerprint: str = ""

    def __repr__(self) -> str:
        return f"PeerAddress({self.address!r})"  # without the token


class NodeAddress(msgspec.Struct, frozen=True, kw_only=True):
    """A node of a run: its ranks, ascending, and where other nodes read its parts; None if it serves none."""

    ranks: list[int]
    peer: PeerAddress | None = None


class HeldPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a checkpoint that is durable on a node. Parts with the same `head_digest` are of one checkpoint.
    `healthy` None: not examined."""

    step: int
    generation: int
    world_size: int
    ranks: list[int]
    node_file: str
    head_digest: str
    created_at: str
    healthy: bool | None = None


class NodeParts(msgspec.Struct, frozen=True, kw_only=True):
    """What a node has of a run, newest first: parts of its own, and copies of other nodes' parts. `copy_lag_s`: the age
    of the oldest checkpoint whose copy is missing here; None if it keeps no copies."""

    parts: list[HeldPart] = []
    copies: list[HeldPart] = []
    copy_lag_s: float | None = None
