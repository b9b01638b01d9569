"""How other nodes read from this daemon: its address, its certificate, and a token for each run.

The certificate and the tokens are new after each start of the daemon, so nothing is stored. The daemon tells a token
only to the trainers of its run.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field

from tierd.format.ids import Run
from tierd.format.peers import PeerAddress


@dataclass(slots=True, kw_only=True)
class PeerKey:
    """`address`: host:port; empty while this daemon serves nothing to other nodes. `fingerprint`: of its certificate;
    empty without TLS."""

    address: str = ""
    fingerprint: str = ""
    _secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    def token(self, run: Run) -> str:
        """What a request for the parts of this run must have."""
        return hmac.digest(self._secret, run.encode(), "sha256").hex()

    def of(self, run: Run) -> PeerAddress | None:
        """For the trainers of the run; None if other nodes cannot read here."""
        if not self.address:
            return None
        return PeerAddress(address=self.address, token=self.token(run), fingerprint=self.fingerprint)
