"""Answers what a peer asks before a restore: Find, FindElsewhere, Inventory and FindNodes.

The answers are descriptors of a checkpoint's files, what is here, and the nodes of the run.

Until the answer, the peer receives Progress every second. A fetch is finished even if its peer disconnects, so a
trainer that was killed during a fetch finds the checkpoint in the hot tier after its restart.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from tierd.api.session import TrainerSession, refused
from tierd.context import DaemonContext
from tierd.descriptors import closed_on_error, sealed_memory
from tierd.errors import NotFound, TierdError, Transient
from tierd.format import wire
from tierd.format.ids import PEER, Run
from tierd.workers.inventory import inventory
from tierd.workers.open_copy import open_copy
from tierd.workers.restorer import Restorer

FINDS_MAX = 256  # pending at once, of all peers together
FINDS_OF_RUN_MAX = 128  # of one run, whose trainers may name a node that does not answer; each rank has one at a time
Asked = wire.Find | wire.FindElsewhere | wire.Inventory | wire.FindNodes
PROGRESS_INTERVAL_S = 1.0  # a peer without any message for a minute gives up, and a fetch may take longer


class RestoreRequests:
    """`spawn` starts a task that does not end with the peer's connection."""

    def __init__(
        self, restorer: Restorer, context: DaemonContext, spawn: Callable[[Coroutine[Any, Any, None]], object]
    ) -> None:
        self._restorer = restorer
        self._context = context
        self._incidents = context.incidents
        self._spawn = spawn
        self._pending = Counter[Run]()

    def answer(self, session: TrainerSession, asked: Asked) -> None:
        """Start to look for the checkpoint. The answer is posted to the session."""
        for pending, limit in ((self._pending.total(), FINDS_MAX), (self._pending[session.run], FINDS_OF_RUN_MAX)):
            if pending >= limit:
                session.post(refused(asked.request, Transient(f"find a checkpoint: {limit} requests are pending")))
                return
        self._pending[session.run] += 1
        self._spawn(self._answer(session, asked))

    async def _answer(self, session: TrainerSession, asked: Asked) -> None:
        loop = asyncio.get_running_loop()
        progress = wire.Progress(request=asked.request, done_bytes=0, total_bytes=0)

        def on_progress(done: int, total: int) -> None:
            nonlocal progress
            progress = wire.Progress(request=asked.request, done_bytes=done, total_bytes=total)

        def post_progress() -> None:
            nonlocal timer
            session.post(progress)
            timer = loop.call_later(PROGRESS_INTERVAL_S, post_progress)

        timer = loop.call_later(PROGRESS_INTERVAL_S, post_progress)
        try:
            if isinstance(asked, wire.Inventory):
                session.post(await inventory(self._context, self._restorer, session.run, asked))
            elif isinstance(asked, wire.FindNodes):
                raw = msgspec.json.encode(self._context.other_nodes(session.run))
                session.post(wire.FoundReplica(request=asked.request, tier=PEER), [sealed_memory("tierd-nodes", raw)])
            elif isinstance(asked, wire.FindElsewhere):
                descriptors = await self._restorer.peer_fetcher.bring(session.run, asked, on_progress)
                session.post(wire.FoundReplica(request=asked.request, tier=PEER, is_part=True), descriptors)
            else:
                session.post(*await self._open(session, asked, on_progress))
        except Exception as error:  # a bug too is answered: the peer waits, and the daemon must go on
            if not isinstance(error, NotFound):
                self._incidents.record("restore", error)
            if not isinstance(error, TierdError):
                error = TierdError(f"find a checkpoint of {session.run}: {error!r}")
            session.post(refused(asked.request, error))
        finally:
            self._pending[session.run] -= 1
            self._pending += Counter()  # forgets the runs that have none
            timer.cancel()

    async def _open(
        self, session: TrainerSession, find: wire.Find, on_progress: Callable[[int, int], None]
    ) -> tuple[wire.FoundReplica, list[int]]:
        """The answer and its descriptors: of the manifest, then of the files."""
        if find.is_copy:
            opened = await open_copy(self._context, session.run, find)
        elif find.is_node_part:
            opened = await self._restorer.find_part(session.run, find)
        else:
            opened = await self._restorer.find(session.run, find, on_progress)
        descriptors = opened.descriptors
        with closed_on_error(descriptors):
            descriptors.insert(0, sealed_memory("tierd-manifest", opened.manifest.encode()))
        answer = wire.FoundReplica(
            request=find.request, tier=opened.tier, passed_over=opened.passed_over, is_part=opened.is_part
        )
        return answer, descriptors
