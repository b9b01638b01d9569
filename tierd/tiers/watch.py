"""Says when a person or another program changes the hot directory: a marker set, a checkpoint put there by hand.

Only a hint that saves waiting for the next look: where inotify is not to be had, nothing else is lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from watchdog.events import (
    FileCreatedEvent,
    FileDeletedEvent,
    FileMovedEvent,
    FileSystemEvent,
    FileSystemEventHandler,
)
from watchdog.observers import Observer

from tierd.format import layout

log = logging.getLogger("tierd")

# Asked of the kernel: else every manifest that a listing opens and reads would be an event too, and overflow its queue.
_EVENTS: list[type[FileSystemEvent]] = [FileCreatedEvent, FileMovedEvent, FileDeletedEvent]


class _OnChange(FileSystemEventHandler):
    """Called on watchdog's thread: hands over to the event loop what may have changed a listing."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    def on_created(self, event: FileSystemEvent) -> None:
        self._look(str(event.src_path))

    def on_moved(self, event: FileSystemEvent) -> None:
        self._look(str(event.dest_path))

    def on_deleted(self, event: FileSystemEvent) -> None:
        self._look(str(event.src_path))

    def _look(self, path: str) -> None:
        name = path.rpartition("/")[2]
        if name == layout.MANIFEST or layout.milestone_of(name):
            self._tell()


@contextmanager
def watch(root: Path, on_change: Callable[[], None]) -> Generator[None]:
    """Within the block, `on_change` is called on the running event loop after manifests or markers change."""
    loop = asyncio.get_running_loop()
    observer = Observer()

    def tell() -> None:
        loop.call_soon_threadsafe(on_change)

    try:
        observer.schedule(_OnChange(tell), str(root), recursive=True, event_filter=_EVENTS)
        observer.start()
    except OSError as error:
        log.warning("watch %s: %s; changes by hand are seen at the next look instead", root, error)
        yield
        return
    try:
        yield
    finally:
        observer.stop()
        observer.join()
