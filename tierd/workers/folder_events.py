"""Starts a pass over a watched folder when inotify reports a change, and detects that inotify misses changes.

The watcher polls the folder where inotify is not available, and where a listing shows a change that inotify did not
report: another machine wrote there over NFS, or inotify's queue was full.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tierd.tiers.pool import ThreadPool
from tierd.tiers.watch import FolderEvents

log = logging.getLogger("tierd")

UNREPORTED_S = 5.0  # an event that comes later than this after its change counts as missed
GAP_S = 0.5  # from an event to the pass, because a save causes many events


class EventSource:
    """`polled_because`: empty while inotify works. `on_change`: called on the event loop."""

    def __init__(self, path: Path, pool: ThreadPool, on_change: Callable[[], None], now_s: Callable[[], float]) -> None:
        self._path, self._pool, self._on_change, self._now_s = path, pool, on_change, now_s
        self.polled_because = "the folder does not exist"
        self._source: FolderEvents | None = None
        self._is_tried = False
        self._names: int | None = None
        self._has_event = self._had_event = False
        self._unreported_s: float | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_in_doubt(self) -> bool:
        """Whether a listing has shown a change that inotify has not reported so far."""
        return self._unreported_s is not None and not self.polled_because

    async def begin_pass(self) -> None:
        """Call this before the folder is listed: inotify reports only later changes, and an event that arrives after
        this call may be of a change that the listing lacks. Raises TierUnreachable when the folder does not answer."""
        self._loop = asyncio.get_running_loop()
        self._had_event, self._has_event = self._has_event, False
        if self._source is not None and not self._source.is_alive:
            await self.stop()  # the folder was deleted and made again
        if self._is_tried:
            return
        try:
            self._source = await self._pool.run(FolderEvents, self._path, self._notice)
            self.polled_because = ""
        except FileNotFoundError:
            return
        except OSError as error:
            self._poll(f"inotify is not available: {error.strerror or error}")
        self._is_tried = True

    def follow(self, names: int) -> None:
        """Call this after the folder is listed. `names`: a number that changes when the names in the folder change."""
        if self._had_event:
            self._unreported_s = None
        elif self._unreported_s is None and self._names not in (None, names):
            self._unreported_s = self._now_s()
        if self.is_in_doubt and self._now_s() - (self._unreported_s or 0.0) > UNREPORTED_S:
            self._poll("inotify does not report every change: another machine writes there, or its queue was full")
        self._names = names

    async def stop(self) -> None:
        source, self._source = self._source, None
        self._names, self._unreported_s = None, None
        self._is_tried, self.polled_because = False, "the folder does not exist"
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if source is not None:
            await asyncio.to_thread(source.stop)

    def _poll(self, why: str) -> None:
        self.polled_because = why
        log.warning("watch %s: the folder is polled: %s", self._path, why)

    def _notice(self) -> None:  # on watchdog's thread
        self._has_event = True
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._start_timer)

    def _start_timer(self) -> None:
        if self._timer is None and self._loop is not None:
            self._timer = self._loop.call_later(GAP_S, self._fire)

    def _fire(self) -> None:
        self._timer = None
        self._on_change()
