"""A file that is fetched into memory: as large as its entry says, with memory only for what was written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.rooms import Rooms, rooms_at
from tierd.errors import BadRequest, Full
from tierd.format.manifest import Manifest
from tierd.transfer.fetch import Fetch
from tierd.transfer.memory_file import MemoryFile

SIZE_BYTES = 1 << 20


async def make(rooms: Rooms) -> tuple[Manifest, MemoryFile]:
    manifest = await rooms.commit("cold", size_bytes=SIZE_BYTES)
    return manifest, MemoryFile(rooms.hot_store, "run42/x/shard", manifest.files[0])


async def test_holes_read_as_zeros_and_take_no_memory(tmp_path: Path) -> None:
    async with rooms_at(tmp_path) as rooms:
        _, file = await make(rooms)
        assert not file.exists()
        assert not file.begin(True)
        assert file.begin(True), "it is there already"
        file.write(8192, memoryview(b"abcdXX"), 4)
        fd = file.open_fd()
        try:
            assert os.pread(fd, 6, 8191) == b"\0abcd\0"
            assert os.fstat(fd).st_size == SIZE_BYTES
            assert os.fstat(fd).st_blocks * 512 <= 8192
            del file
            assert os.pread(fd, 4, 8192) == b"abcd", "a reader still has it"
        finally:
            os.close(fd)


async def test_refused_memory_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with rooms_at(tmp_path) as rooms:
        _, file = await make(rooms)
        file.begin(True)

        def refuse(*_: object) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "pwrite", refuse)
        with pytest.raises(Full, match="into memory: No space left"):
            file.write(0, memoryview(b"abcd"), 4)


async def test_fetch_into_memory_cannot_be_committed(tmp_path: Path) -> None:
    async with rooms_at(tmp_path) as rooms:
        manifest, _ = await make(rooms)
        fetch = Fetch(manifest, rooms.hot_store, in_memory=True)
        await fetch.begin()
        assert await fetch.take(rooms.cold["cold"]) is None
        assert fetch.is_whole
        with pytest.raises(BadRequest, match="it is in memory"):
            await fetch.finish()
