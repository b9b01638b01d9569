"""A copy of another node's part is handed over as that node would: not with NaN in it, unless asked for."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from tests.support.cli import make_part
from tests.support.rooms import Rooms, rooms_at
from tests.support.state import entry_of, shard_of
from tierd.config.sections import HealthConfig
from tierd.descriptors import close_all
from tierd.errors import NotFound, Unhealthy
from tierd.format import layout
from tierd.format.ids import CheckpointId, checkpoint_id
from tierd.format.wire import Find
from tierd.tiers.part_copies import PartCopies
from tierd.workers.open_copy import open_copy

ID = checkpoint_id("run42", 100, 1)


def find(checkpoint: CheckpointId = ID, *, allow_unhealthy: bool = False) -> Find:
    return Find(
        request=1,
        step=checkpoint.step,
        generation=checkpoint.generation,
        milestone=None,
        tier="hot",
        exclude=[],
        allow_unhealthy=allow_unhealthy,
        is_node_part=True,
        is_copy=True,
    )


@pytest.fixture
async def rooms(tmp_path: Path) -> AsyncIterator[Rooms]:
    async with rooms_at(tmp_path, health=HealthConfig(examine=True)) as rooms:
        copies = PartCopies(rooms.config)
        rooms.context = replace(rooms.context, part_copies=copies)
        yield rooms
        await copies.store.close()


async def keep(rooms: Rooms, value: float, *, is_healthy: bool | None = None) -> None:
    copies = rooms.context.part_copies
    assert copies is not None
    root = rooms.config.hot_path / layout.PEERS
    part = await asyncio.to_thread(make_part, root, [1], world_size=2)
    shard = shard_of([("model.weight", torch.full((3,), value), (0,))], rank=1)
    entry = entry_of(shard, part.files[0].name)
    (root / layout.file_key(ID, entry.name)).unlink()
    (root / part.key).unlink()
    await copies.store.put_bytes(layout.file_key(ID, entry.name), shard)
    part = msgspec.structs.replace(part, files=[entry], is_healthy=is_healthy)
    await copies.commit(part, part.encode(), peer=None)


async def test_healthy_copy_is_opened(rooms: Rooms) -> None:
    await keep(rooms, 1.0)
    opened = await open_copy(rooms.context, ID.run, find())
    assert (opened.tier, len(opened.descriptors), opened.manifest.step) == ("hot", 1, 100)
    close_all(opened.descriptors)


@pytest.mark.parametrize(("value", "is_healthy"), [(float("nan"), None), (1.0, False)])
async def test_unhealthy_copy_is_refused_unless_it_is_allowed(
    rooms: Rooms, value: float, is_healthy: bool | None
) -> None:
    await keep(rooms, value, is_healthy=is_healthy)
    with pytest.raises(Unhealthy, match=r"or its loss was bad.*--allow-unhealthy.*#unhealthy-checkpoint"):
        await open_copy(rooms.context, ID.run, find())
    opened = await open_copy(rooms.context, ID.run, find(allow_unhealthy=True))
    close_all(opened.descriptors)


async def test_copy_in_which_the_disk_made_a_nan_is_damaged_and_not_unhealthy(rooms: Rooms) -> None:
    """Else all nodes would go on from an older checkpoint, though another source has this one."""
    await keep(rooms, 1.0)
    copies = rooms.context.part_copies
    assert copies is not None
    part = copies.get(ID)
    assert part is not None
    path = copies.store.root / layout.file_key(ID, part.files[0].name)
    content = path.read_bytes()
    at = content.rindex(struct.pack("<3f", 1.0, 1.0, 1.0))
    path.chmod(0o600)
    path.write_bytes(content[:at] + b"\xff" * 12 + content[at + 12 :])
    opened = await open_copy(rooms.context, ID.run, find())  # the trainer compares the checksums
    close_all(opened.descriptors)


async def test_missing_copy_is_not_found(rooms: Rooms) -> None:
    with pytest.raises(NotFound, match="there is none"):
        await open_copy(rooms.context, ID.run, find())
