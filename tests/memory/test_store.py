"""A snapshot set as a store for reading."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.rooms import Rooms, rooms_at
from tierd.errors import Corrupt, NotFound
from tierd.format import layout
from tierd.format.health import Diagnosis
from tierd.format.ids import MEMORY, Rank
from tierd.memory.snapshot_set import SnapshotSet
from tierd.memory.store import SnapshotStore
from tierd.tiers.readable_tier import ReadableTier


@pytest.fixture
async def rooms(tmp_path: Path) -> AsyncIterator[Rooms]:
    async with rooms_at(tmp_path) as rooms:
        yield rooms


async def store_of(rooms: Rooms, snapshot_set: SnapshotSet) -> SnapshotStore:
    await rooms.memory.compute_checksums(snapshot_set)
    return SnapshotStore(snapshot_set, snapshot_set.make_manifest(sequence=1))


async def test_files_and_manifest_are_those_of_the_set(rooms: Rooms) -> None:
    snapshot_set = rooms.seal(7, [b"one", b"three"])
    store = await store_of(rooms, snapshot_set)
    tier = ReadableTier(MEMORY, store)
    manifest = await tier.manifest(snapshot_set.id)
    assert [(file.name, file.size_bytes) for file in manifest.files] == [
        (layout.shard_name(Rank(0), 2), 3),
        (layout.shard_name(Rank(1), 2), 5),
    ]
    key = layout.file_key(snapshot_set.id, layout.shard_name(Rank(1), 2))
    buffer = bytearray(3)
    await store.read(key, 1, memoryview(buffer))
    assert bytes(buffer) == b"hre"
    source = store.source(key)
    assert source.fill_blocking is not None
    source.fill_blocking(0, memoryview(buffer))
    assert bytes(buffer) == b"thr"


async def test_a_missing_file_and_a_read_past_the_end_raise(rooms: Rooms) -> None:
    snapshot_set = rooms.seal(7, [b"one"])
    store = await store_of(rooms, snapshot_set)
    key = layout.file_key(snapshot_set.id, layout.shard_name(Rank(0), 1))
    with pytest.raises(Corrupt, match="ends 2 bytes early"):
        await store.read(key, 2, memoryview(bytearray(3)))
    with pytest.raises(NotFound):
        await store.read("run42/other", 0, memoryview(bytearray(1)))
    with pytest.raises(NotFound):
        await store.get_bytes("run42/other", size_max=100)


@pytest.mark.parametrize("is_healthy", [True, False])
async def test_the_diagnosis_is_a_marker(rooms: Rooms, is_healthy: bool) -> None:
    snapshot_set = rooms.seal(7, [b"one"])
    snapshot_set.diagnosis = Diagnosis(healthy=is_healthy, examined_at="now")
    tier = ReadableTier(MEMORY, await store_of(rooms, snapshot_set))
    assert await tier.diagnosis(snapshot_set.id, is_healthy=is_healthy) == snapshot_set.diagnosis
