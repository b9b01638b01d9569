"""Opens the copy of another node's part for a restore: the node is gone, or has lost its disk.

What that node knew of the part may be lost with it. So a copy is examined before it is handed over, or sent to cold.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from tierd.context import DaemonContext
from tierd.descriptors import closed_on_error
from tierd.errors import Corrupt, NotFound, TierdError, text_of, unhealthy
from tierd.format.ids import HOT, Run, checkpoint_id
from tierd.format.node_file import NodeFile
from tierd.format.wire import Find
from tierd.health.examiner import examine_files
from tierd.transfer.verify import verify_files
from tierd.workers.restorer import OpenCheckpoint

log = logging.getLogger("tierd")


async def open_copy(context: DaemonContext, run: Run, find: Find) -> OpenCheckpoint:
    """Its `manifest` is the node file. Raises NotFound without a copy of that checkpoint; Unhealthy if it has NaN or
    Inf, unless `find` allows that. A copy without a verdict is examined first: the other node's verdict may be lost."""
    copies = context.part_copies
    part = copies.get(checkpoint_id(run, find.step or 0, find.generation or 0)) if copies is not None else None
    if copies is None or part is None:
        raise NotFound(f"open the copy of another node's part of step {find.step} of {run}: there is none")
    descriptors = await copies.open_files(part, [file.name for file in part.files])
    with closed_on_error(descriptors):
        if not find.allow_unhealthy and await examine_copy(context, part, descriptors) is False:
            raise unhealthy(part.id, f"the copy of {part.name}")
    return OpenCheckpoint(HOT, part, descriptors)


async def examine_copy(context: DaemonContext, part: NodeFile, descriptors: Sequence[int]) -> bool | None:
    """Whether the copy of this part is healthy. None also when it cannot be examined in time, or is damaged: then the
    disk has made the NaN, and who reads it compares the checksums."""
    health, copies = context.config.health, context.part_copies
    if part.is_healthy is not None or not health.examine or copies is None:
        return part.is_healthy
    files = [(descriptor, file.size_bytes) for descriptor, file in zip(descriptors, part.files, strict=True)]
    try:
        async with asyncio.timeout(health.restore_wait_s):
            is_healthy = (await examine_files(part.id, files)).healthy
            if not is_healthy and (damage := (await verify_files(copies.tier, part)).sentences):
                raise Corrupt(f"examine the copy of {part.name} of {part.id}: {damage[0]}")
            return is_healthy
    except (TierdError, TimeoutError) as error:
        log.warning("the copy of %s was not examined: %s", part.id, text_of(error))
        return None
