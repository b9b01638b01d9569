"""Attacks by a server in place of another node: a trainer names its address, and its node files claim what it likes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from tests.support.lying_node import LyingNode, claimed_entry, entry_of, lying_node, node_file, shard_name
from tests.support.rooms import RUN, Rooms, rooms_at
from tierd.descriptors import close_all
from tierd.errors import Corrupt, Foreign, TierdError, Transient
from tierd.format import wire
from tierd.format.ids import CheckpointId, checkpoint_id
from tierd.format.node_file import NodeFile
from tierd.format.signature import Keyring
from tierd.key_file import new_key
from tierd.tiers import peer_store
from tierd.workers.hot_space import MARGIN_BYTES
from tierd.workers.reaper import Reaper
from tierd.workers.restorer import Restorer

OTHER_RUN = "other"
ID = checkpoint_id(RUN, 5, 1)
NODE_FILE, SHARD = "node-00001-of-00002.json", shard_name(1, 2)
CHUNK = 4096
STEPS = [4, 3, 2, 1]


async def judge_nothing(_: CheckpointId) -> bool | None:
    return None


class Victim:
    """A node with a full hot disk, and checkpoints of another run there and in cold. `more_bytes` are free."""

    def __init__(self, rooms: Rooms) -> None:
        self.rooms = rooms
        self.more_bytes = 0
        self._size_bytes = self._used_bytes() + MARGIN_BYTES
        self.restorer = Restorer(rooms.context, judge_nothing, Reaper(rooms.context).make_room)

    async def bring(self, node: LyingNode, chunks: int | Sequence[int], **fields: Any) -> int:
        """A trainer asks for these chunks of the shard. Returns its size."""
        wanted = list(range(chunks)) if isinstance(chunks, int) else list(chunks)
        asked = wire.FindElsewhere(
            request=1,
            step=5,
            generation=1,
            peer=node.peer,
            node_file=NODE_FILE,
            files=[SHARD],
            chunks=[wire.pack_indexes(wanted)],
        )
        asked = msgspec.structs.replace(asked, **fields)
        descriptors = await self.restorer.peer_fetcher.bring(RUN, asked, lambda done, total: None)
        try:
            return os.fstat(descriptors[0]).st_size
        finally:
            close_all(descriptors)

    def _used_bytes(self) -> int:
        return sum(path.stat().st_blocks * 512 for path in self.rooms.hot_store.root.rglob("*"))

    @property
    def free_bytes(self) -> int:
        return self._size_bytes + self.more_bytes - self._used_bytes()

    @property
    def steps(self) -> list[int]:
        """Of the other run's checkpoints in hot."""
        return self.rooms.steps("hot", OTHER_RUN)

    def taken_bytes(self) -> int:
        """On the disk of hot, by what is fetched."""
        return sum(path.stat().st_blocks * 512 for path in self.rooms.hot_store.root.rglob("*.partial"))


@pytest.fixture
async def victim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> AsyncIterator[Victim]:
    monkeypatch.setattr(peer_store, "RETRY_MIN_S", 0.001)
    monkeypatch.setattr(peer_store, "RETRY_MAX_S", 0.002)
    keyring = Keyring([new_key()]) if getattr(request, "param", False) else None
    async with rooms_at(tmp_path, keyring=keyring) as rooms:
        for step in STEPS:
            await rooms.commit("hot", "cold", run=OTHER_RUN, step=step, sequence=step)
        await rooms.list_tiers()
        victim = Victim(rooms)

        async def free_bytes(_: object) -> int:
            return victim.free_bytes

        monkeypatch.setattr("tierd.workers.hot_space.free_bytes", free_bytes)
        yield victim


def part(size_bytes: int, *, chunk_bytes: int = CHUNK, sums: int = 1) -> NodeFile:
    return node_file(ID, {1: claimed_entry(SHARD, size_bytes, chunk_bytes, sums)}, 2)


async def nothing_right(request: web.Request) -> web.StreamResponse:
    begin, end = request.http_range.start, request.http_range.stop
    return web.Response(status=206, body=b"\1" * (end - begin))


# ── sizes that are only claimed ──


@pytest.mark.parametrize("size_bytes", [400_000, 1 << 40])
async def test_size_that_a_node_file_claims_makes_no_room(victim: Victim, size_bytes: int) -> None:
    chunk_bytes = CHUNK if size_bytes < 1 << 30 else 64 << 20
    lie = part(size_bytes, chunk_bytes=chunk_bytes)
    async with lying_node({NODE_FILE: lie.encode(), SHARD: nothing_right}) as node:
        with pytest.raises(Corrupt):
            await victim.bring(node, len(lie.files[0].chunks))
    assert victim.steps == STEPS
    assert victim.taken_bytes() <= chunk_bytes + (1 << 16)


async def test_room_is_made_for_no_more_than_what_has_come(victim: Victim) -> None:
    """The server sends three true chunks. One checkpoint of the other run has 40,000 bytes."""
    true = os.urandom(3 * CHUNK)
    claimed = entry_of(SHARD, true + bytes(400_000), CHUNK)

    lie = node_file(ID, {1: claimed}, 2)
    async with lying_node({NODE_FILE: lie.encode(), SHARD: true + b"\1" * 400_000}) as node:
        with pytest.raises(Corrupt):
            await victim.bring(node, len(claimed.chunks))
    assert victim.steps == STEPS[:-1]


async def test_zeros_that_nobody_sent_make_no_room(victim: Victim) -> None:
    """A hole in the file reads as zeros, which fit to the checksums of zeros."""
    first = os.urandom(CHUNK)
    claimed = entry_of(SHARD, first + bytes(400_000), CHUNK)
    lie = node_file(ID, {1: claimed}, 2)
    async with lying_node({NODE_FILE: lie.encode(), SHARD: first + bytes(CHUNK)}) as node:
        with suppress(TierdError):
            await victim.bring(node, len(claimed.chunks))
    assert len(victim.steps) >= len(STEPS) - 1


async def test_true_part_gets_room_on_a_full_disk(victim: Victim) -> None:
    content = os.urandom(25 * CHUNK)
    honest = node_file(ID, {1: entry_of(SHARD, content, CHUNK)}, 2)
    async with lying_node({NODE_FILE: honest.encode(), SHARD: content}) as node:
        assert await victim.bring(node, 25) == len(content)
        assert await victim.bring(node, 25) == len(content)
        assert node.requested.count(SHARD) < 10
    assert len(victim.steps) < len(STEPS)


async def test_larger_chunks_than_a_daemon_writes_are_refused(victim: Victim) -> None:
    """A chunk is the least for which there must be space before anything is verified."""
    lie = part(10 << 30, chunk_bytes=5 << 30)
    async with lying_node({NODE_FILE: lie.encode(), SHARD: nothing_right}) as node:
        with pytest.raises(Corrupt, match="chunks"):
            await victim.bring(node, 2)
        assert node.requested == [NODE_FILE]
    assert (victim.steps, victim.taken_bytes()) == (STEPS, 0)


@pytest.mark.parametrize("victim", [True], indirect=True, ids=["signed"])
async def test_with_a_key_an_unsigned_node_file_is_not_used(victim: Victim) -> None:
    content = os.urandom(3 * CHUNK)
    honest = node_file(ID, {1: entry_of(SHARD, content, CHUNK)}, 2)
    other_key = Keyring([new_key()]).sign_manifest(honest)
    for lie in (honest, other_key):
        async with lying_node({NODE_FILE: lie.encode(), SHARD: content}) as node:
            with pytest.raises(Foreign):
                await victim.bring(node, 3)
            assert node.requested == [NODE_FILE]
    keyring = victim.rooms.context.keyring
    assert keyring is not None
    async with lying_node({NODE_FILE: keyring.sign_manifest(honest).encode(), SHARD: content}) as node:
        assert await victim.bring(node, 3) == len(content)


# ── many requests, and many checkpoints ──


async def test_checkpoints_that_are_given_up_leave_nothing(victim: Victim) -> None:
    """A restore tries one checkpoint after the other; a hostile trainer as many as it likes."""
    content = os.urandom(25 * CHUNK)
    victim.more_bytes = 1 << 40
    for step in range(5, 9):
        checkpoint = checkpoint_id(RUN, step, 1)
        honest = node_file(checkpoint, {1: entry_of(SHARD, content, CHUNK)}, 2)
        async with lying_node({NODE_FILE: honest.encode(), SHARD: content}) as node:
            assert await victim.bring(node, 25, step=step) == len(content)
    assert victim.taken_bytes() <= 110_000


async def test_node_files_in_memory_are_bounded_together(victim: Victim, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each server sends a large one, and then nothing more."""
    silent = asyncio.Event()

    async def wait(_: web.Request) -> web.StreamResponse:
        await silent.wait()
        return web.Response(status=503)

    lie = part(64 << 20).encode()
    count = (8 << 20) // len(lie)
    limits = victim.rooms.config.limits
    config = msgspec.structs.replace(victim.rooms.config, limits=msgspec.structs.replace(limits, manifests_mib_max=1))
    victim.rooms.config = config
    victim.restorer = Restorer(victim.rooms.context, judge_nothing)
    async with lying_node({NODE_FILE: lie, SHARD: wait}) as node:
        tasks = [asyncio.create_task(victim.bring(node, 1)) for _ in range(count)]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=30.0)
        assert done
        assert all(isinstance(task.exception(), Transient) for task in done)
        assert victim.restorer.peer_fetcher._node_files_bytes <= 1 << 20
        silent.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert victim.restorer.peer_fetcher._node_files_bytes == 0
