"""The marker of a generation: which start of a run has claimed it, so that no other start uses the same number.

Spec: docs/FORMAT.md#markers.
"""

from __future__ import annotations

import secrets

import msgspec

import tierd


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """`node`: of the daemon that claimed; `claimed_by`: its version. `claim`: 128 random bits in hex, which tell one
    start from another. `hot`: the identity of the daemon's hot tier. Empty in the markers of older versions."""

    node: str = ""
    claimed_by: str = ""
    claim: str = ""
    hot: str = ""

    @classmethod
    def new(cls, node: str, hot: str = "") -> Claim:
        return cls(node=node, claimed_by=tierd.__version__, claim=secrets.token_hex(16), hot=hot)

    def is_of_same_start(self, other: Claim) -> bool:
        return bool(self.claim) and self.claim == other.claim

    def is_of_same_hot(self, other: Claim) -> bool:
        """Also compares the nodes: a copy of a disk has the identity of the original."""
        return bool(self.hot) and (self.node, self.hot) == (other.node, other.hot)


def decode_claim(content: bytes) -> Claim | None:
    """None when these bytes are not the marker of a claim."""
    try:
        return msgspec.json.decode(content, type=Claim)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
