"""Inotify in a watched folder: it wakes the worker, and where it does not report a change, the folder is polled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tierd.tiers.pool import ThreadPool
from tierd.workers.folder_events import UNREPORTED_S, EventSource


class Events:
    def __init__(self, path: Path) -> None:
        self.now_s = 0.0
        self.woken = asyncio.Event()
        self.pool = ThreadPool(2, "events", timeout_s=30)
        self.source = EventSource(path, self.pool, self.woken.set, lambda: self.now_s)

    async def see(self, names: int) -> str:
        """A pass that finds these names."""
        await self.source.begin_pass()
        self.source.follow(names)
        return self.source.polled_because


@pytest.fixture
async def events(tmp_path: Path) -> AsyncIterator[Events]:
    found = Events(tmp_path)
    yield found
    await found.source.stop()
    found.pool.close()


async def test_a_change_wakes_once_and_its_report_ends_the_doubt(events: Events, tmp_path: Path) -> None:
    assert await events.see(1) == ""
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "checkpoint-5/state").touch()
    async with asyncio.timeout(60):
        await events.woken.wait()
    assert await events.see(2) == ""
    assert not events.source.is_in_doubt


async def test_changes_that_are_not_reported_for_a_while_lead_to_polling(events: Events) -> None:
    """As of another machine on NFS: the names differ, and inotify is silent."""
    assert await events.see(1) == ""
    assert await events.see(2) == ""
    assert events.source.is_in_doubt
    events.now_s = UNREPORTED_S + 1
    assert "inotify does not report every change" in await events.see(2)
    assert "inotify does not report every change" in await events.see(3)


async def test_without_inotify_the_folder_is_polled(tmp_path: Path) -> None:
    events = Events(tmp_path / ("name" * 100))  # the call fails, as without inotify
    assert "inotify is not available: File name too long" in await events.see(1)
    await events.source.stop()
    events.pool.close()


async def test_inotify_begins_when_the_folder_appears(tmp_path: Path) -> None:
    events = Events(tmp_path / "out")
    assert await events.see(1) == "the folder does not exist"
    (tmp_path / "out").mkdir()
    assert await events.see(1) == ""
    await events.source.stop()
    events.pool.close()
