"""A restore that nobody asked for, to know that it would go well: into scratch space, verified, and gone again.

The same copy as a real one. What a killed drill left is cleared by the next one there.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

from tierd.errors import Corrupt
from tierd.format.manifest import Manifest
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.store import Progress
from tierd.tiers.tier import Tier, copy_checkpoint
from tierd.transfer.atomic_output import atomic_output
from tierd.transfer.verify import verify_files

FOLDER_LENGTH_MAX = 100  # a filesystem allows 255, and `.partial` is added


@dataclass(frozen=True, slots=True)
class Drilled:
    """`seconds`: from the first byte to the last one durable in scratch, checked on the way. It was then read back."""

    manifest: Manifest
    seconds: float


async def drill(
    tier: Tier, manifest: Manifest, scratch: Path, *, spare_bytes: int = 0, progress: Progress | None = None
) -> Drilled:
    """Restores the replica of `tier` below `scratch`, and removes it. `spare_bytes`: room that others there may need.

    Raises Corrupt where a byte is not what it was, NotFound, TierUnreachable, Full; LockHeld while another is at it.
    """
    with atomic_output(scratch / _folder(tier.name), size_bytes=manifest.size_bytes + spare_bytes) as land:
        store = DirectoryStore(land.partial)
        restored = Tier("scratch", store)
        try:
            began_s = time.monotonic()
            await copy_checkpoint(manifest, tier, restored, progress=progress)
            seconds = time.monotonic() - began_s
            found = await verify_files(restored, manifest)
            await restored.delete(manifest.id)  # here, in the store's threads: the event loop has other things to do
        finally:
            await store.close()
        if found.problems:
            raise Corrupt(
                f"drill {manifest.id} from {tier.name}: {found.sentences[0]}",
                hint="it came whole, and is not read back so: look at that disk",
            )
        return Drilled(manifest, seconds)


def clear(tier: str, scratch: Path) -> None:
    """What a drill left that was killed."""
    if (scratch / f"{_folder(tier)}.partial").exists():
        with atomic_output(scratch / _folder(tier), size_bytes=0):
            pass


def _folder(tier: str) -> str:
    """A tier that is a place is called by its path or URL, which must not lead out of the scratch space."""
    return re.sub(r"[^\w-]+", "-", tier, flags=re.ASCII)[-FOLDER_LENGTH_MAX:]
