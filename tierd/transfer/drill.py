"""A test restore of a replica: into scratch space, verified, and removed again.

It uses the same copy as a real restore. What a killed drill left is removed by the next one in the same place.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

from tierd.errors import Corrupt
from tierd.format.manifest import Manifest
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.store import Progress
from tierd.tiers.tier import Tier, copy_checkpoint
from tierd.transfer.atomic_output import atomic_output
from tierd.transfer.verify import verify_files

FOLDER_CHARS_MAX = 100  # a filesystem allows 255, and `.partial` is added


async def drill(
    tier: Tier, manifest: Manifest, scratch: Path, *, spare_bytes: int = 0, progress: Progress | None = None
) -> float:
    """Restores the replica of `tier` below `scratch`, and removes it. `spare_bytes`: free space to leave for others.

    Returns the seconds from the first byte until the last one is durable in scratch space, without reading it back.

    Raises Corrupt where a byte differs, NotFound, TierUnreachable, Full; LockHeld while another drill runs there.
    """
    with atomic_output(scratch / _folder(tier.name), size_bytes=manifest.size_bytes + spare_bytes) as output:
        async with DirectoryStore(output.partial) as store:
            restored = Tier("scratch", store)
            began_s = time.monotonic()
            await copy_checkpoint(manifest, tier, restored, progress=progress)
            seconds = time.monotonic() - began_s
            verification = await verify_files(restored, manifest)
            await restored.delete(manifest.id)  # in the store's threads; `atomic_output` would block the event loop
        if verification.problems:
            raise Corrupt(
                f"drill {manifest.id} from {tier.name}: {verification.sentences[0]}",
                hint="the copy was correct when written, and is read back differently: check that disk",
            )
        return seconds


def clear(tier: str, scratch: Path) -> None:
    """Removes what a killed drill left."""
    if (scratch / f"{_folder(tier)}.partial").exists():
        with atomic_output(scratch / _folder(tier), size_bytes=0):
            pass


def _folder(tier: str) -> str:
    """A tier may be named by a path or URL, which must not lead out of the scratch space."""
    return re.sub(r"[^\w-]+", "-", tier, flags=re.ASCII)[-FOLDER_CHARS_MAX:]
