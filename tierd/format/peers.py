"""How a node reads the parts of checkpoints that another one has. The trainers carry it between them, see wire.py."""

from __future__ import annotations

import msgspec

TIER_HEADER = "Tierd-Tier"  # "hot": only what is durable there


class PeerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where other nodes read the parts of a run that a daemon has: host:port, and the token that opens them.
    `fingerprint`: the SHA-256 of its TLS certificate, in hex; empty: it answers in plain HTTP."""

    address: str
    token: str
    fingerprint: str = ""

    def __repr__(self) -> str:
        return f"PeerAddress({self.address!r})"  # without the token
