"""A test restore of a replica: into scratch space, verified, and removed again.

It uses the same copy as a real restore. What a killed drill left is removed by the next one in the same place.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

from tierd.errors import Corrupt, TierdError
from tierd.format.manifest import Manifest
from tierd.tiers.checkpoint_copy import copy_checkpoint
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.store import Progress
from tierd.tiers.tier import Tier
from tierd.transfer.atomic_output import atomic_output
from tierd.transfer.verify import verify_files

T = TypeVar("T")
FOLDER_CHARS_MAX = 100  # a filesystem allows 255, and `.partial` is added


async def drill(
    tier: Tier, manifest: Manifest, scratch: Path, *, spare_bytes: int = 0, progress: Progress | None = None
) -> float:
    """Restores the replica of `tier` below `scratch`, and removes it. `spare_bytes`: free space to leave for others.

    Returns the seconds from the first byte until the last one is durable in scratch space, without reading it back.

    Raises Corrupt where a byte differs, NotFound, TierUnreachable, Full; LockHeld while another drill runs there.
    """
    size_bytes = manifest.size_bytes + spare_bytes
    async with _in_thread(atomic_output(scratch / _folder(tier.name), size_bytes=size_bytes)) as output:
        async with DirectoryStore(output.folder, url=f"file://{output.partial}") as store:
            restored = Tier("scratch", store)
            started_s = time.monotonic()
            await copy_checkpoint(manifest, tier, restored, progress=progress)
            seconds = time.monotonic() - started_s
            verification = await verify_files(restored, manifest)
            await restored.delete(manifest.id)
        if verification.problems:
            raise Corrupt(
                f"drill {manifest.id} from {tier.name}: {verification.sentences[0]}",
                hint="the copy was correct when written, and is read back differently: check that disk",
            )
        return seconds


@asynccontextmanager
async def _in_thread(blocking: AbstractContextManager[T]) -> AsyncGenerator[T]:
    """Enters and leaves a context manager that waits for a disk in threads, not on the event loop.

    A thread cannot be cancelled: at a cancellation meanwhile, it is left as soon as it has been entered.
    """
    entering = asyncio.ensure_future(asyncio.to_thread(blocking.__enter__))
    try:
        entered = await asyncio.shield(entering)
    except asyncio.CancelledError as error:
        with suppress(TierdError):  # then it was not entered
            await entering
            await asyncio.to_thread(blocking.__exit__, type(error), error, error.__traceback__)
        raise
    try:
        yield entered
    except BaseException as error:
        if not await asyncio.to_thread(blocking.__exit__, type(error), error, error.__traceback__):
            raise
    else:
        await asyncio.to_thread(blocking.__exit__, None, None, None)


def clear(tier: str, scratch: Path) -> None:
    """Removes what a killed drill left."""
    if (scratch / f"{_folder(tier)}.partial").exists():
        with atomic_output(scratch / _folder(tier), size_bytes=0):
            pass


def _folder(tier: str) -> str:
    """A tier may be named by a path or URL, which must not lead out of the scratch space."""
    return re.sub(r"[^\w-]+", "-", tier, flags=re.ASCII)[-FOLDER_CHARS_MAX:]
