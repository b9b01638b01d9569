"""Answers a peer that asks for a checkpoint: with descriptors, or with why not; meanwhile it hears that we are at it.

A question is no part of its conversation: a fetch that was begun is finished, so that a trainer that was killed in
the middle of it finds the checkpoint in the hot tier.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any

from tierd.api.session import TrainerSession
from tierd.errors import NotFound, TierdError, Transient
from tierd.format import wire
from tierd.incidents import Incidents
from tierd.workers.restorer import Restorer, close_all

FINDS_MAX = 256  # questions under way at once, of all peers together
PROGRESS_INTERVAL_S = 1.0  # a peer that hears nothing for a minute gives up; behind another's fetch it may wait longer


class Finder:
    def __init__(
        self, restorer: Restorer, incidents: Incidents, spawn: Callable[[Coroutine[Any, Any, None]], object]
    ) -> None:
        self._restorer = restorer
        self._incidents = incidents
        self._spawn = spawn
        self._count = 0

    def ask(self, session: TrainerSession, find: wire.Find) -> None:
        """The answer is posted to the session."""
        if self._count >= FINDS_MAX:
            session.post(refused(find.request, Transient(f"find a checkpoint: {FINDS_MAX} are being looked for")))
            return
        self._count += 1
        self._spawn(self._answer(session, find))

    async def _answer(self, session: TrainerSession, find: wire.Find) -> None:
        loop = asyncio.get_running_loop()
        done_bytes = total_bytes = 0

        def on_progress(done: int, total: int) -> None:
            nonlocal done_bytes, total_bytes
            done_bytes, total_bytes = done, total

        def tell_progress() -> None:
            nonlocal timer
            session.post(wire.Progress(request=find.request, done_bytes=done_bytes, total_bytes=total_bytes))
            timer = loop.call_later(PROGRESS_INTERVAL_S, tell_progress)

        timer = loop.call_later(PROGRESS_INTERVAL_S, tell_progress)
        try:
            session.post(*await self._open(session, find, on_progress))
        except Exception as error:  # whatever it is, the peer hears of it, and the daemon lives
            if not isinstance(error, NotFound):
                self._incidents.record("restore", error)
            doing = f"find a checkpoint of {session.run}"
            told = error if isinstance(error, TierdError) else TierdError(f"{doing}: {error!r}")
            session.post(refused(find.request, told))
        finally:
            self._count -= 1
            timer.cancel()

    async def _open(
        self, session: TrainerSession, find: wire.Find, on_progress: Callable[[int, int], None]
    ) -> tuple[wire.FoundReplica, list[int]]:
        found = await self._restorer.find(session.run, find, on_progress)
        try:
            manifest = _as_memfd(found.manifest.encode())
        except BaseException:
            close_all(found.descriptors)
            raise
        told = wire.FoundReplica(
            request=find.request, tier=found.tier, passed_over=found.passed_over, is_part=found.is_part
        )
        return told, [manifest, *found.descriptors]


def refused(request: int, error: TierdError) -> wire.Refused:
    return wire.Refused(request=request, kind=error.kind, message=error.message[:8192], hint=error.hint)


def _as_memfd(content: bytes) -> int:
    descriptor = os.memfd_create("tierd-manifest", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, content)
        os.lseek(descriptor, 0, os.SEEK_SET)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
