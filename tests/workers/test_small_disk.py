"""A hot tier on a real ext4 of 64 MiB that becomes full or read-only: the trainer is told, and all of it recovers."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.support.cli import content
from tests.support.ext4 import make_image, mounted, run
from tests.support.rooms import RUN, Rooms, rooms_at
from tierd.config.sections import ColdPolicy, LifecycleConfig, TierPolicy
from tierd.descriptors import close_all
from tierd.format import wire
from tierd.format.ids import CheckpointId, checkpoint_id
from tierd.transfer.verify import verify_replica
from tierd.workers.reaper import Reaper
from tierd.workers.restorer import Restorer

MIB = 1 << 20
SHARD_BYTES = 6 * MIB
CYCLES = 3
CYCLES_LONG = 50


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    make_image(tmp_path / "image")
    with mounted(tmp_path / "image", tmp_path / "disk") as disk:
        yield disk


@pytest.fixture
async def rooms(disk: Path) -> AsyncIterator[Rooms]:
    """No cold tier, and hot keeps two checkpoints of two shards."""
    lifecycle = LifecycleConfig(hot=TierPolicy(keep_last=2), cold=ColdPolicy(keep_last=2, keep_every=0))
    async with rooms_at(disk / "tierd", cold=(), lifecycle=lifecycle) as rooms:
        await rooms.look()
        yield rooms


async def persisted(rooms: Rooms, step: int) -> wire.ToClient:
    """Takes a snapshot of other bytes for each step. Returns what the trainer is told."""
    before = len(rooms.sent)
    rooms.seal(step, [os.urandom(SHARD_BYTES), os.urandom(SHARD_BYTES)])
    await rooms.persister().run_once()
    await Reaper(rooms.context).run_once()
    (message,) = [each for each in rooms.sent[before:] if getattr(each, "step", None) == step]
    return message


async def assert_whole(rooms: Rooms, steps: list[int]) -> None:
    """Hot has these checkpoints, whole, and no other file of a checkpoint."""
    assert rooms.steps("hot") == steps
    for step in steps:
        verification = await verify_replica(rooms.hot, checkpoint_id(RUN, step, 1))
        assert verification is not None
        assert verification.sentences == []
    assert list(rooms.hot_store.root.rglob("*.partial")) == []


async def run_cycles(rooms: Rooms, disk: Path, cycles: int) -> None:
    for first in range(0, 100 * cycles, 100):
        assert isinstance(await persisted(rooms, first + 10), wire.Persisted)
        assert isinstance(await persisted(rooms, first + 20), wire.Persisted)
        filler = disk / "filler"
        filler.write_bytes(bytes(max(0, (await rooms.hot_store.free_bytes() or 0) - SHARD_BYTES // 2)))
        for step in (first + 30, first + 40):
            message = await persisted(rooms, step)
            assert isinstance(message, wire.Failed)
            assert (message.kind, message.is_final) == ("full", False)
            await assert_whole(rooms, [first + 20, first + 10])
        filler.unlink()
        assert await rooms.persister().run_once(), "the newest snapshot is written once there is space"
        await Reaper(rooms.context).run_once()
        await assert_whole(rooms, [first + 40, first + 20])


async def test_a_full_disk_keeps_its_checkpoints_and_takes_new_ones_when_there_is_space(
    rooms: Rooms, disk: Path
) -> None:
    await run_cycles(rooms, disk, CYCLES)


async def test_a_start_on_a_full_disk_continues_from_the_newest_checkpoint_which_only_cold_has(disk: Path) -> None:
    """Fetched into memory. The older one in hot would undo the steps between them."""
    async with rooms_at(disk / "tierd") as rooms:
        await rooms.commit("hot", step=10)
        newest = await rooms.commit("cold", step=20, size_bytes=SHARD_BYTES)
        await rooms.look()
        (disk / "filler").write_bytes(bytes(max(0, (await rooms.hot_store.free_bytes() or 0) - SHARD_BYTES // 2)))
        newest_one = wire.Find(request=1, step=None, generation=None, milestone=None, tier="auto", exclude=[])
        found = await Restorer(rooms.context, not_examined).find(RUN, newest_one, lambda done, total: None)
        shards = [os.pread(descriptor, SHARD_BYTES, 0) for descriptor in found.descriptors]
        close_all(found.descriptors)
        assert (found.manifest, found.tier, found.passed_over) == (newest, "cold", [])
        assert shards == [content(newest.id, rank, SHARD_BYTES) for rank in (0, 1)]
        assert rooms.steps("hot") == [10]
        assert list(rooms.hot_store.root.rglob("*.partial")) == []


async def not_examined(checkpoint: CheckpointId) -> bool | None:
    return None


@pytest.mark.long
async def test_a_disk_is_full_many_times(rooms: Rooms, disk: Path) -> None:
    await run_cycles(rooms, disk, CYCLES_LONG)


async def test_a_read_only_disk_keeps_its_checkpoints_and_takes_new_ones_when_it_can_be_written(
    rooms: Rooms, disk: Path
) -> None:
    assert isinstance(await persisted(rooms, 10), wire.Persisted)
    run("mount", "-o", "remount,ro", str(disk))
    message = await persisted(rooms, 20)
    assert isinstance(message, wire.Failed)
    assert (message.kind, message.is_final) == ("tier_unreachable", False)
    assert "Read-only file system" in message.message
    await assert_whole(rooms, [10])
    run("mount", "-o", "remount,rw", str(disk))
    assert await rooms.persister().run_once()
    await assert_whole(rooms, [20, 10])
