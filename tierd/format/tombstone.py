"""The content of `gone.json`: which save was deleted.

Spec: docs/FORMAT.md#markers.
"""

from __future__ import annotations

import msgspec

from tierd.errors import UNDECODABLE


class Tombstone(msgspec.Struct, frozen=True, kw_only=True):
    """`save`: the save digest of the checkpoint that was deleted; empty if it was not known, as in older versions.
    `deletion`: names the deletion, which alone deletes the other files; empty in older versions."""

    deleted: bool = True
    save: str = ""
    deletion: str = ""


def decode(raw: bytes) -> Tombstone | None:
    """None for what is no tombstone, whatever it is."""
    try:
        return msgspec.json.decode(raw, type=Tombstone)
    except UNDECODABLE:
        return None
