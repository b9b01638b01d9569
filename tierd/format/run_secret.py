"""The secret of a run: what the job sends to prove that it knows it, and what a daemon keeps to check that.

The job sends a proof that was derived from the secret, so the secret itself leaves no process. Deriving it is slow on
purpose: whoever reads what a daemon keeps needs that time for each guess.
"""

from __future__ import annotations

import hashlib
import hmac

from tierd.errors import BadConfig

VARIABLE = "TIERD_RUN_SECRET"
CHARS_MIN, CHARS_MAX = 16, 1024
PROOF_CHARS = 64
# 16 MiB and some 50 ms, once per process of the job: https://datatracker.ietf.org/doc/html/rfc7914
_SCRYPT_COST = 1 << 14


def proof_of(secret: str) -> str:
    """What a job sends instead of the secret, PROOF_CHARS hexadecimal digits; empty for an empty secret.

    It does not depend on the run: a job that may read several runs has one secret for all. Raises BadConfig for a
    secret that is too short or too long.
    """
    if not secret:
        return ""
    if not CHARS_MIN <= len(secret) <= CHARS_MAX:
        raise BadConfig(
            f"use the secret in {VARIABLE}: it has {len(secret)} characters, expected {CHARS_MIN} to {CHARS_MAX}",
            hint=f"make one for each job, for example with: export {VARIABLE}=$(openssl rand -hex 16)",
        )
    derived = hashlib.scrypt(secret.encode(), salt=b"tierd-run-secret-1", n=_SCRYPT_COST, r=8, p=1, dklen=32)
    return derived.hex()


def digest_of(run: str, proof: str, salt: bytes) -> bytes:
    """What a daemon keeps of a proof."""
    return hmac.digest(salt, f"{run}\0{proof}".encode(), hashlib.sha256)


def is_proof(run: str, proof: str, salt: bytes, digest: bytes) -> bool:
    """Whether the digest was made from this proof, in a time that does not depend on the proof."""
    return hmac.compare_digest(digest_of(run, proof, salt), digest)
