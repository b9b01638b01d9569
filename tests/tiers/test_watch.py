"""The watch on the hot directory reports changes of manifests and markers, and nothing else."""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path

import pytest

from tierd.tiers.watch import watch


class Changes:
    """Counts the notifications."""

    def __init__(self) -> None:
        self.count = 0
        self._told = asyncio.Event()

    def __call__(self) -> None:
        self.count += 1
        self._told.set()

    async def wait(self) -> None:
        async with asyncio.timeout(10):
            await self._told.wait()
        self._told.clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "hot" / "run42" / "000000000100-g0001"
    found.mkdir(parents=True)
    return found


async def test_watch_reports_markers_and_manifests_that_are_created_moved_or_deleted(
    folder: Path, tmp_path: Path
) -> None:
    changes = Changes()
    async with watch(tmp_path / "hot", changes):
        (folder / "milestone-best.json").write_text("{}")
        await changes.wait()
        (folder / "manifest.json.0a1b.partial").write_text("{}")
        (folder / "manifest.json.0a1b.partial").rename(folder / "manifest.json")
        await changes.wait()
        (folder / "manifest.json").unlink()
        await changes.wait()


async def test_watch_reports_a_checkpoint_that_is_moved_in_whole(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "manifest.json").write_text("{}")
    changes = Changes()
    async with watch(tmp_path / "hot", changes):
        shutil.copytree(tmp_path / "elsewhere", tmp_path / "hot" / "new" / "000000000200-g0001")
        await changes.wait()


async def test_watch_ignores_reads_and_shards_and_does_not_overflow(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A listing opens thousands of manifests: as events they would fill the kernel's queue of 16,384."""
    (folder / "manifest.json").write_text("{}")
    changes = Changes()
    with caplog.at_level(logging.WARNING):
        async with watch(tmp_path / "hot", changes):
            for number in range(20_000):
                (folder / "manifest.json").read_bytes()
                if number % 1000 == 0:
                    (folder / "rank-00000-of-00001.safetensors").write_bytes(b"x")
            (folder / "milestone-best.json").write_text("{}")
            await changes.wait()
    assert changes.count <= 2  # two: a file that is made is an event, and so may its folder's listing be
    assert "overflow" not in caplog.text


async def test_directory_that_cannot_be_watched_logs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with watch(tmp_path / "absent", Changes()):
        pass
    assert "found by the next listing" in caplog.text


async def test_watch_stops_its_threads_at_the_end(folder: Path, tmp_path: Path) -> None:
    changes = Changes()
    async with watch(tmp_path / "hot", changes):
        pass
    (folder / "manifest.json").write_text("{}")
    await asyncio.sleep(0)
    assert changes.count == 0
