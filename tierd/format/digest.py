"""Cryptographic digests of chunks, which a signed manifest holds beside their CRCs.

The digest of a chunk is the hash of the concatenated hashes of its leaves of 1 MiB. So the pieces of a chunk can be
hashed in any order and by several threads. Spec: docs/FORMAT.md#digests.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
from collections.abc import Iterable

from tierd.errors import Unsupported

LEAF_BYTES = 1 << 20
DIGEST_BYTES = 32
ALGORITHMS = ("blake3", "sha256")


def preferred() -> str:
    """The algorithm for new checkpoints: BLAKE3 where its package is installed; SHA-256 takes four times as long."""
    return "blake3" if importlib.util.find_spec("blake3") else "sha256"


def _hash(algorithm: str, content: bytes | memoryview) -> bytes:
    """Both release the GIL. Raises Unsupported where the package is missing."""
    if algorithm == "sha256":
        return hashlib.sha256(content).digest()
    try:
        from blake3 import blake3  # imported here: it is optional
    except ImportError:
        raise Unsupported(
            "verify a signed checkpoint: its digests are BLAKE3, and the package blake3 is not installed",
            hint="pip install 'tierd[signing]'",
        ) from None
    return blake3(content).digest()


def leaves(algorithm: str, piece: memoryview) -> bytes:
    """The concatenated hashes of the leaves of a piece, which begins at a leaf and ends at one or with its chunk."""
    return b"".join(_hash(algorithm, piece[at : at + LEAF_BYTES]) for at in range(0, len(piece), LEAF_BYTES))


def of_chunk(algorithm: str, hashes: Iterable[bytes]) -> str:
    """The digest of a chunk in base64, from the results of `leaves` in order."""
    return base64.b64encode(_hash(algorithm, b"".join(hashes))).decode("ascii")


def is_digest(text: str) -> bool:
    try:
        return len(base64.b64decode(text, validate=True)) == DIGEST_BYTES
    except ValueError:
        return False
