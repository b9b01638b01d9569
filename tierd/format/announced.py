"""`head.json`: what node 0 says about a checkpoint that several nodes adopt from their own folders, before any part.

The other nodes take the head of their part from it, so that all parts are in one generation and have one sequence.

Spec: docs/FORMAT.md#adopted-over-nodes.
"""

from __future__ import annotations

from tierd.format.ids import CheckpointId
from tierd.format.manifest import Head, decode_file
from tierd.format.node_file import check_claim


class Announced(Head, frozen=True, kw_only=True):
    """`claim`: the random bits of the claim of the generation. `created_at`: when the newest file of node 0's part was
    written. `world_size`: the number of nodes."""

    claim: str


def decode_announced(raw: bytes, *, where: str, expect: CheckpointId) -> Announced:
    """Raises NewerFormat for a later version, Corrupt for any other violation of the format."""
    return decode_file(raw, Announced, _check, action=f"decode the head of {expect} in {where}", expect=expect)


def _check(announced: Announced) -> None:
    """Raises ValueError for the first violation."""
    check_claim(announced.claim)
    if not announced.is_adopted:
        raise ValueError(f"kind {announced.kind[:40]!r}")
    if announced.created is None:
        raise ValueError(f"created at {announced.created_at[:40]!r}")
