"""Asks the nodes of a run what they have of it: all at the same time, for at most ASK_S.

For a node that does not answer, the result is PeerUnreachable with a short reason.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

import msgspec

from tierd.errors import UNDECODABLE, NotFound, PeerUnreachable, TierdError
from tierd.format.ids import Run
from tierd.format.peers import NEWEST_BYTES_MAX, PARTS_BYTES_MAX, NodeAddress, NodeParts
from tierd.tiers.peer_store import PeerStore

ASK_S = 2.0  # for all nodes together
AT_ONCE_MAX = 256  # connections


async def ask_nodes(
    run: Run, nodes: Sequence[NodeAddress], *, needs_tls: bool, only_newest: bool = False
) -> list[NodeParts | PeerUnreachable]:
    """What each node answers, in order."""
    free = asyncio.Semaphore(AT_ONCE_MAX)
    tasks = [asyncio.create_task(_ask(run, node, free, needs_tls=needs_tls, only_newest=only_newest)) for node in nodes]
    try:
        if tasks:
            await asyncio.wait(tasks, timeout=ASK_S)
        return [task.result() if task.done() else PeerUnreachable(f"no answer within {ASK_S:.0f} s") for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _ask(
    run: Run, node: NodeAddress, free: asyncio.Semaphore, *, needs_tls: bool, only_newest: bool
) -> NodeParts | PeerUnreachable:
    if node.peer is None:
        return PeerUnreachable("it serves nothing to other nodes: its config has no peers.listen")
    try:
        async with free, PeerStore(node.peer, needs_tls=needs_tls, is_hot=True, attempts=1) as store:
            key, size_max = (f"{run}/newest", NEWEST_BYTES_MAX) if only_newest else (run, PARTS_BYTES_MAX)
            raw = await store.get_bytes(key, size_max=size_max)
            return msgspec.json.decode(raw, type=NodeParts)
    except NotFound:
        return PeerUnreachable("its daemon is of an earlier version of tierd")
    except UNDECODABLE as error:
        return PeerUnreachable(f"its answer cannot be read: {error}")
    except TierdError as error:
        return PeerUnreachable(_reason(error))


def _reason(error: TierdError) -> str:
    cause = getattr(error.__cause__, "os_error", error.__cause__)  # of aiohttp: what connect() has raised
    number = cause.errno if isinstance(cause, OSError) else None
    return os.strerror(number).lower() if number else error.message
