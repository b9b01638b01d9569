"""One row of docs/reference/exactness.md: something that a training holds, and whether a restore gives it back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

EXACT = "exact"
TOPOLOGIES = ((1, 1), (2, 2), (2, 1))
"""(ranks that save, ranks that restore)."""


@dataclass(frozen=True)
class Row:
    """`outcome`: EXACT, or a part of the message with which the first snapshot refuses it. `make`: what the room of the
    row builds its objects from. `refused_on_fewer`: a part of the Mismatch of a restore on one rank of what two saved.
    `fresh`: makes the value that is there before the restore, where that must be of the same class.
    """

    name: str
    outcome: str
    make: Callable[..., Any]
    refused_on_fewer: str = ""
    fresh: Callable[[], Any] | None = None
