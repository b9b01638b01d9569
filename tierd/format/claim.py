"""The marker of a generation: which start of a run has claimed it, so that no other start uses the same number.

Spec: docs/FORMAT.md#markers.
"""

from __future__ import annotations

import secrets

import msgspec

import tierd
from tierd.errors import UNDECODABLE


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """`node`: of the daemon that claimed; `claimed_by`: its version. `claim`: 128 random bits in hex, which tell one
    start from another. `hot`: a digest of the identity of the daemon's hot tier. `made_at_s`: when it claimed, in Unix
    time. Empty or 0 in the markers of older versions."""

    node: str = ""
    claimed_by: str = ""
    claim: str = ""
    hot: str = ""
    made_at_s: int = 0

    @classmethod
    def new(cls, node: str, hot: str = "", *, now_s: float = 0.0) -> Claim:
        claim = secrets.token_hex(16)
        return cls(node=node, claimed_by=tierd.__version__, claim=claim, hot=hot, made_at_s=int(now_s))

    def is_of_same_start(self, other: Claim) -> bool:
        return bool(self.claim) and self.claim == other.claim

    def is_of_same_hot(self, other: Claim) -> bool:
        """Whether both are of one hot tier. Also compares nodes: a copy of a disk has the identity of the original."""
        return bool(self.hot) and (self.node, self.hot) == (other.node, other.hot)

    def had_expired(self, other: Claim, grace_s: float) -> bool:
        """Whether this claim was made so long before `other` that the run had expired before `other` was made. So it
        was deleted, and somebody has put it back. `grace_s`: `limits.empty_run_grace_s`."""
        return 0 < grace_s < other.made_at_s - self.made_at_s and self.made_at_s > 0


def decode_claim(content: bytes) -> Claim | None:
    """None when these bytes are not the marker of a claim."""
    try:
        return msgspec.json.decode(content, type=Claim)
    except UNDECODABLE:
        return None
