"""A sidecar file of a tier is written whole to a folder, or not at all, and replaces nothing."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.rooms import RUN, Rooms, rooms_at
from tierd.access import PRIVATE
from tierd.errors import Corrupt, NotFound, TargetNotEmpty
from tierd.format.ids import Run
from tierd.format.sidecar import Segment, encode_segment, short
from tierd.tiers.tier import Tier
from tierd.transfer.sidecar_output import write_sidecar

CONTENT = b"step 1\nstep 2\nstep 3\n"


@pytest.fixture
async def rooms(tmp_path: Path) -> AsyncIterator[Rooms]:
    async with rooms_at(tmp_path / "house") as rooms:
        yield rooms


async def stored(tier: Tier, *edges: int) -> list[Segment]:
    segments: list[Segment] = []
    for begin, end in pairwise(edges):
        before, after = (hashlib.sha256(CONTENT[:at]).hexdigest() for at in (begin, end))
        segment = Segment(Run(RUN), "a.jsonl", 1, begin, end, short(before), short(after))
        raw = encode_segment(segment, CONTENT[begin:end], before=before, after=after, keyring=None)
        await tier.store.put_bytes(segment.key, raw)
        segments.append(segment)
    return segments


async def names(folder: Path) -> set[str]:
    return set(await asyncio.to_thread(os.listdir, folder))


async def test_segments_become_one_file(rooms: Rooms, tmp_path: Path) -> None:
    path = await stored(rooms.context.hot, 0, 7, 14, 21)
    target = tmp_path / "new" / "a.jsonl"
    assert await write_sidecar(rooms.context.hot, path, target, PRIVATE)
    assert target.read_bytes() == CONTENT
    assert not await write_sidecar(rooms.context.hot, path, target, PRIVATE), "it is there already"
    assert await names(target.parent) == {"a.jsonl"}


async def test_another_file_is_not_replaced(rooms: Rooms, tmp_path: Path) -> None:
    path = await stored(rooms.context.hot, 0, 21)
    target = tmp_path / "a.jsonl"
    target.write_bytes(CONTENT[:7])
    with pytest.raises(TargetNotEmpty, match="it exists with other bytes"):
        await write_sidecar(rooms.context.hot, path, target, PRIVATE)
    assert target.read_bytes() == CONTENT[:7]
    assert await names(tmp_path) == {"a.jsonl", "house"}


async def test_a_filesystem_without_hard_links_takes_the_file(
    rooms: Rooms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As exFAT and some FUSE filesystems."""
    path = await stored(rooms.context.hot, 0, 7, 21)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    target = tmp_path / "a.jsonl"
    assert await write_sidecar(rooms.context.hot, path, target, PRIVATE)
    assert target.read_bytes() == CONTENT
    assert not await write_sidecar(rooms.context.hot, path, target, PRIVATE)
    target.write_bytes(CONTENT[:7])
    with pytest.raises(TargetNotEmpty, match="it exists with other bytes"):
        await write_sidecar(rooms.context.hot, path, target, PRIVATE)
    assert await names(tmp_path) == {"a.jsonl", "house"}


async def test_a_segment_that_is_gone_or_swapped_leaves_nothing(rooms: Rooms, tmp_path: Path) -> None:
    hot = rooms.context.hot
    path = await stored(hot, 0, 7, 14)
    with pytest.raises(Corrupt, match="the digest of its bytes is not the one in its header"):
        await write_sidecar(hot, path[1:], tmp_path / "a.jsonl", PRIVATE)
    await hot.store.delete([path[1].key])
    with pytest.raises(NotFound):
        await write_sidecar(hot, path, tmp_path / "a.jsonl", PRIVATE)
    with pytest.raises(NotFound):  # listed again, none is left
        await write_sidecar(hot, [], tmp_path / "a.jsonl", PRIVATE)
    assert await names(tmp_path) == {"house"}
