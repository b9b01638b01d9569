"""A deletion of a checkpoint that has begun and not ended, with what is needed to put the manifest back."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field

from tierd.errors import TierdError
from tierd.format import layout
from tierd.format.ids import CheckpointId
from tierd.format.manifest import decode


@dataclass(frozen=True, slots=True)
class Deletion:
    """`key`: of the manifest, which is deleted first; in hot of a node file where there is none. `raw`: its bytes; None
    if they could not be read: it is deleted, but cannot be put back. `names`: of the files when the deletion began.
    `token`: names this deletion in the tombstone. Only the deletion that the tombstone names deletes the other
    files."""

    checkpoint: CheckpointId
    key: str
    raw: bytes | None
    names: frozenset[str]
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def save(self) -> str:
        """The save digest; empty if there is none, or the manifest cannot be decoded."""
        with suppress(TierdError):
            return "" if self.raw is None else decode(self.raw, where="a tier", expect=self.checkpoint).save_digest
        return ""

    def milestones_set_since(self, names: Collection[str]) -> frozenset[str]:
        """Since the deletion began. Empty if the checkpoint cannot be kept: its manifest was not read, or another file
        is gone. `names`: of the files now."""
        needed = {name for name in self.names if not layout.is_marker(name)} - {self.key.rpartition("/")[2]}
        if self.raw is None or not needed <= set(names):
            return frozenset()
        return layout.milestones_of(names) - layout.milestones_of(self.names)
