"""Opens the copy of another node's part for a restore: the node is gone, or has lost its disk."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from tierd.context import DaemonContext
from tierd.descriptors import close_all
from tierd.errors import NotFound, TierdError, Unhealthy
from tierd.format.ids import Run, checkpoint_id
from tierd.format.node_file import NodeFile
from tierd.format.wire import Find
from tierd.health.examiner import examine_files
from tierd.lifecycle.policy import HOT
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
    try:
        if not find.allow_unhealthy and await _is_unhealthy(context, part, descriptors):
            raise Unhealthy(f"restore {part.id}: the copy of {part.name} holds numbers that are not finite")
    except BaseException:
        close_all(descriptors)
        raise
    return OpenCheckpoint(HOT, part, descriptors)


async def _is_unhealthy(context: DaemonContext, part: NodeFile, descriptors: Sequence[int]) -> bool:
    """False also when it cannot be examined in time."""
    health = context.config.health
    if part.is_healthy is not None or not health.examine:
        return part.is_healthy is False
    files = [(descriptor, file.size_bytes) for descriptor, file in zip(descriptors, part.files, strict=True)]
    try:
        async with asyncio.timeout(health.restore_wait_s):
            return not (await examine_files(part.id, files)).healthy
    except (TierdError, TimeoutError) as error:
        log.warning("restore the copy of %s unexamined: %s", part.id, error or "no diagnosis in time")
        return False
