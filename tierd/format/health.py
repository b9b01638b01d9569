"""What an examination of a checkpoint found: whether its numbers are finite, and a digest of what is trained.

The name of the marker tells the diagnosis, so that a listing is enough; its content tells what was found.
Spec: docs/FORMAT.md#markers.
"""

from __future__ import annotations

import msgspec

from tierd.errors import Corrupt
from tierd.format.manifest import encode_marker

TENSORS_LISTED_MAX = 20
MARKER_BYTES_MAX = 64 << 10


class NotFinite(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor (or the parts of it that one shard holds) with numbers that are none."""

    tensor: str
    nan: int
    inf: int


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """`tensors` counts those that are not finite, `not_finite` lists the first of them.

    `digest`: of all trained tensors, or empty when that is not known, or when nothing is meant to change (every
    learning rate is 0). Two steps of one generation with one digest are the same weights.
    """

    healthy: bool
    examined_at: str = ""
    tensors: int = 0
    not_finite: list[NotFinite] = []
    digest: str = ""

    def __str__(self) -> str:
        if self.healthy:
            return "every number is finite"
        shown = ", ".join(f"{one.tensor} ({one.nan} NaN, {one.inf} Inf)" for one in self.not_finite[:3])
        more = f" and {self.tensors - 3} more" if self.tensors > 3 else ""
        return f"{self.tensors} tensors are not finite: {shown}{more}" if shown else "not finite"


class Examined(msgspec.Struct, frozen=True, kw_only=True):
    """What one look found. `trouble` says why it found nothing."""

    tensors: int = 0
    not_finite: list[NotFinite] = []
    digest: str = ""
    trouble: str = ""


def encode(diagnosis: Diagnosis) -> bytes:
    return encode_marker(msgspec.to_builtins(diagnosis))


def decode(raw: bytes, *, where: str) -> Diagnosis:
    """Raises Corrupt."""
    try:
        return msgspec.json.decode(raw, type=Diagnosis)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Corrupt(f"read the diagnosis {where}: {error}") from error
