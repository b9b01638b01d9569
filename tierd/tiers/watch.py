"""Notices when another program changes the hot directory, or a folder in which a framework writes checkpoints.

It only saves waiting for the next listing. Without inotify, changes are found by that listing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from watchdog.events import (
    DirCreatedEvent,
    DirDeletedEvent,
    DirMovedEvent,
    FileClosedEvent,
    FileCreatedEvent,
    FileDeletedEvent,
    FileMovedEvent,
    FileSystemEvent,
    FileSystemEventHandler,
)
from watchdog.observers import Observer

from tierd.format import layout

log = logging.getLogger("tierd")

# Only these: otherwise each manifest that a listing opens would be an event too, and overflow the kernel's queue.
_EVENTS: list[type[FileSystemEvent]] = [FileCreatedEvent, FileMovedEvent, FileDeletedEvent]
# And not each write of a save, of which there are millions.
_EVENTS_OF_A_SAVE = [*_EVENTS, FileClosedEvent, DirCreatedEvent, DirMovedEvent, DirDeletedEvent]


@asynccontextmanager
async def watch(root: Path, on_change: Callable[[], None]) -> AsyncGenerator[None]:
    """Within the block, calls `on_change` on the running event loop after a manifest or a milestone marker changes."""
    loop = asyncio.get_running_loop()
    observer = Observer()

    class OnChange(FileSystemEventHandler):
        def on_any_event(self, event: FileSystemEvent) -> None:  # on watchdog's thread
            name = str(event.dest_path or event.src_path).rpartition("/")[2]
            if name == layout.MANIFEST or layout.mark_of(name):
                loop.call_soon_threadsafe(on_change)

    def start() -> None:  # walks the directory
        observer.schedule(OnChange(), str(root), recursive=True, event_filter=_EVENTS)
        observer.start()

    def stop() -> None:
        observer.stop()
        observer.join()

    try:
        await asyncio.to_thread(start)
    except OSError as error:
        log.warning("watch %s: %s; changes made by hand are found by the next listing", root, error)
        yield
        return
    try:
        yield
    finally:
        await asyncio.to_thread(stop)


class FolderEvents:
    """Calls `on_change` on watchdog's thread after something in a folder was made, closed, moved or deleted. Making one
    blocks while it walks the folder. Raises OSError where inotify is not available."""

    def __init__(self, folder: Path, on_change: Callable[[], None]) -> None:
        self._observer = Observer()

        class OnChange(FileSystemEventHandler):
            def on_any_event(self, event: FileSystemEvent) -> None:
                on_change()

        try:
            self._observer.schedule(OnChange(), str(folder), recursive=True, event_filter=_EVENTS_OF_A_SAVE)
            self._observer.start()
        except BaseException:
            self._observer.unschedule_all()
            raise

    @property
    def is_alive(self) -> bool:
        """False when the folder was deleted."""
        return self._observer.is_alive() and any(emitter.is_alive() for emitter in self._observer.emitters)

    def stop(self) -> None:
        """Blocks until its threads have ended."""
        self._observer.stop()
        self._observer.join()
