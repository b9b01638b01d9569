"""Fetches a part of a checkpoint from cold: only requested chunks, each once; a part never counts as a replica."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import torch

from tests.support.rooms import RUN, Rooms, rooms_at
from tests.support.state import commit, shard_of
from tests.support.waiting import wait_until
from tierd.catalog.entry import Entry
from tierd.descriptors import close_all
from tierd.errors import Corrupt, Full, TierUnreachable
from tierd.format import wire
from tierd.format.bitmap import pack_indexes
from tierd.tiers import direct_io
from tierd.transfer.partial_file import PartialFile
from tierd.workers import fetcher
from tierd.workers.fetcher import Fetcher
from tierd.workers.restorer import Restorer

CHUNK_BYTES = 4096
ELEMENTS = 40 * CHUNK_BYTES // 4
NOTHING: list[list[int]] = []


class Asked:
    """A checkpoint of two shards in two cold tiers, and its fetcher."""

    def __init__(self, rooms: Rooms) -> None:
        self.rooms = rooms
        self.raws = [shard_of([("weight", torch.randn(ELEMENTS), (rank * ELEMENTS,))], rank=rank) for rank in (0, 1)]
        for store in rooms.cold.values():
            self.folder = commit(
                Path(store.store.url.removeprefix("file://")), self.raws, run=RUN, chunk_bytes=CHUNK_BYTES
            )
        self.header_chunks = (len(self.raws[0]) - 4 * ELEMENTS) // CHUNK_BYTES
        self.fetcher = Fetcher(rooms.context)

    @property
    def entry(self) -> Entry:
        (found,) = self.rooms.catalog.entries(RUN)
        return found

    @property
    def headers_bytes(self) -> int:
        return 2 * self.header_chunks * CHUNK_BYTES

    def given_bytes(self, tier: str = "cold") -> float:
        return self.rooms.count("tierd_bytes_total", tier=tier, direction="read") or 0

    def arriving(self) -> list[Path]:
        return sorted(self.rooms.hot_store.root.rglob("*.partial"))

    async def bring(self, chunks: list[list[int]] | None, tier: str = "cold", *, is_hot_bad: bool = False) -> bool:
        """Returns whether the checkpoint was opened as a part. Checks its chunks and headers, in files of full size."""
        descriptors, is_part = await self.fetcher.bring(
            self.entry, self.rooms.cold[tier], chunks, lambda done, total: None, is_hot_bad=is_hot_bad
        )
        for descriptor, raw, some in zip(descriptors, self.raws, chunks or [[], []], strict=False):
            assert os.fstat(descriptor).st_size >= len(raw)
            for index in [*range(self.header_chunks), *some]:
                begin = index * CHUNK_BYTES
                assert os.pread(descriptor, CHUNK_BYTES, begin) == raw[begin : begin + CHUNK_BYTES], index
        close_all(descriptors)
        return is_part

    def damage(self, tier: str, index: int) -> None:
        """Flip one bit of that chunk of the first shard."""
        path = self.rooms.folder(tier, self.entry.id) / self.entry.manifest.files[0].name
        _flip(path, index)


def _flip(path: Path, index: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[index * CHUNK_BYTES] ^= 1
    path.write_bytes(raw)


@pytest.fixture
async def asked(tmp_path: Path, frozen_heap: None) -> AsyncIterator[Asked]:
    gc.collect()  # close descriptors that earlier tests left
    before = len(os.listdir("/proc/self/fd"))
    async with rooms_at(tmp_path, cold=("cold", "dr")) as rooms:
        found = Asked(rooms)
        await rooms.look()
        yield found
        await found.fetcher.restored(RUN)
        # A thread that has just read the memory may still refer to it.
        await asyncio.to_thread(wait_until, lambda: in_memory() == 0)
    assert len(os.listdir("/proc/self/fd")) <= before, "descriptors leak"


async def test_fetch_without_chunks_fetches_only_the_headers_of_any_length(asked: Asked) -> None:
    assert asked.header_chunks > 1
    assert await asked.bring(NOTHING)
    assert asked.given_bytes() == asked.headers_bytes


async def test_only_requested_chunks_are_fetched_and_each_once(asked: Asked) -> None:
    for chunks in ([[20, 21], []], [[21, 22], [40]], [[22], [40]]):
        assert await asked.bring(chunks)
    assert asked.given_bytes() == asked.headers_bytes + 4 * CHUNK_BYTES
    await asyncio.gather(*(asked.bring([[30], [30 + rank]]) for rank in range(4)))
    assert asked.given_bytes() == asked.headers_bytes + 9 * CHUNK_BYTES


async def test_part_is_not_listed_and_takes_only_its_own_space(asked: Asked) -> None:
    await asked.bring([[20], []])
    await asked.rooms.look()
    assert asked.entry.tiers == {"cold", "dr"}
    assert await asked.rooms.hot_store.list() == []
    assert sum(path.stat().st_blocks * 512 for path in asked.arriving()) < asked.entry.manifest.size_bytes / 2


async def test_ranks_that_need_nearly_all_chunks_make_a_hot_replica(asked: Asked) -> None:
    everything = [list(range(len(one.chunks))) for one in asked.entry.manifest.files]
    assert await asked.bring([everything[0], []])
    assert not await asked.bring([[], everything[1][:-2]])
    assert asked.given_bytes() == asked.entry.manifest.size_bytes
    assert asked.entry.tiers == {"hot", "cold", "dr"}
    assert asked.arriving() == []
    assert not await asked.bring(NOTHING), "it is handed over from hot"


async def test_request_for_all_chunks_fetches_only_the_missing_ones(asked: Asked) -> None:
    await asked.bring([[20], []])
    assert not await asked.bring(None)
    assert asked.given_bytes() == asked.entry.manifest.size_bytes
    assert asked.entry.tiers == {"hot", "cold", "dr"}


async def test_part_is_kept_while_in_use_and_deleted_when_the_run_is_restored(asked: Asked) -> None:
    await asked.bring([[20], []])
    await asked.fetcher.sweep(RUN)
    assert len(asked.arriving()) == 2
    await asked.fetcher.restored(RUN)
    assert asked.arriving() == []
    await asked.fetcher.restored(RUN)


async def test_part_deleted_meanwhile_is_fetched_again(asked: Asked) -> None:
    await asked.bring([[20], []])
    asked.arriving()[0].unlink()
    await asked.bring([[21], []])
    await asked.bring([[20], []])
    assert asked.given_bytes() == 1.5 * asked.headers_bytes + 3 * CHUNK_BYTES


async def test_next_daemon_continues_with_the_chunks_that_verify(asked: Asked) -> None:
    await asked.bring([[20, 21], [30]])
    _flip(asked.arriving()[0], 20)
    asked.fetcher = Fetcher(asked.rooms.context)
    await asked.bring(NOTHING)
    await asked.bring([[20, 21], [30]])
    assert asked.given_bytes() == asked.headers_bytes + 4 * CHUNK_BYTES


async def test_chunk_damaged_after_it_was_fetched_is_fetched_again_from_the_next_tier(asked: Asked) -> None:
    await asked.bring([[20, 21], []])
    _flip(asked.arriving()[0], 20)
    await asked.bring([[20, 21], []], "dr")
    assert asked.given_bytes("dr") == CHUNK_BYTES


async def test_only_the_damaged_chunk_is_fetched_from_the_next_tier(asked: Asked) -> None:
    asked.damage("cold", 21)
    assert await asked.bring([[20], []])
    with pytest.raises(Corrupt, match="chunk 21 of"):
        await asked.bring([[21, 22], [30]])
    assert await asked.bring([[20, 21, 22], [30]], "dr")
    assert asked.given_bytes("dr") == CHUNK_BYTES


async def test_rest_is_fetched_from_the_next_tier_when_one_goes_away(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    await asked.bring(NOTHING)
    last = asked.entry.manifest.files[1].name
    read = asked.rooms.cold["cold"].store.read

    async def goes_away(key: str, offset: int, buffer: memoryview) -> None:
        if key.endswith(last):
            raise TierUnreachable("gone")
        await read(key, offset, buffer)

    asked.rooms.hot_store.pieces_in_flight = 1
    monkeypatch.setattr(asked.rooms.cold["cold"].store, "read", goes_away)
    with pytest.raises(TierUnreachable, match="gone"):
        await asked.bring([[20], [30]])
    assert await asked.bring([[20], [30]], "dr")
    assert asked.given_bytes("dr") == CHUNK_BYTES


async def test_damaged_hot_replica_is_replaced_whole_whatever_chunks_are_requested(asked: Asked) -> None:
    assert not await asked.bring(None)
    asked.damage("hot", 30)
    assert not await asked.bring([[20], []], is_hot_bad=True)
    assert asked.given_bytes() == asked.entry.manifest.size_bytes + CHUNK_BYTES


async def test_chunk_indexes_and_files_out_of_range_are_ignored(asked: Asked) -> None:
    assert await asked.bring([[], [], [1]])
    descriptors, _ = await asked.fetcher.bring(
        asked.entry, asked.rooms.cold["cold"], [[10_000]], lambda done, total: None, is_hot_bad=False
    )
    close_all(descriptors)
    assert asked.given_bytes() == asked.headers_bytes


async def test_trainer_that_is_refused_a_chunk_gets_the_rest_from_the_next_tier(asked: Asked) -> None:
    """If one damaged chunk deleted the rest, all of it would be fetched again."""

    async def nobody_knows(checkpoint: object) -> bool | None:
        return None

    worker = Restorer(asked.rooms.context, nobody_knows)

    async def find(tier: str, exclude: list[str], chunks: list[list[int]]) -> tuple[str, bool]:
        packed = [pack_indexes(some) for some in chunks]
        plain = wire.Find(
            request=1, step=None, generation=None, milestone=None, tier=tier, exclude=exclude, chunks=packed
        )
        found = await worker.find(RUN, plain, lambda done, total: None)
        close_all(found.descriptors)
        return found.tier, found.is_part

    asked.damage("cold", 25)
    assert await find("auto", [], NOTHING) == ("cold", True)
    with pytest.raises(Corrupt):
        await find("cold", [], [[20, 25], [30]])
    assert asked.rooms.count("tierd_verify_failures_total", tier="cold") == 1
    exclude = [f"{asked.entry.id.name}@cold"]
    assert await find("auto", exclude, NOTHING) == ("dr", True)
    assert await find("dr", exclude, [[20, 25], [30]]) == ("dr", True)
    assert asked.given_bytes("dr") == CHUNK_BYTES
    await worker.fetcher.restored(RUN)
    assert asked.arriving() == []


# ── where hot does not take the files ──


def in_memory() -> int:
    """How many files this process has fetched into memory and still holds."""
    return len([fd for fd in os.listdir("/proc/self/fd") if "memfd:tierd-fetch" in _link(fd)])


def _link(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:  # the descriptor with which the folder was listed
        return ""


@pytest.fixture
def full_hot(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise Full("write in hot: no space left on device")

    def reserve(fd: int, size_bytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(PartialFile, "write", refuse)
    monkeypatch.setattr(direct_io, "fallocate", reserve)


@pytest.mark.usefixtures("full_hot")
@pytest.mark.parametrize("is_asked_for_chunks", [False, True])
async def test_checkpoint_is_fetched_into_memory_when_hot_is_full(asked: Asked, *, is_asked_for_chunks: bool) -> None:
    chunks = [list(range(len(one.chunks))) for one in asked.entry.manifest.files] if is_asked_for_chunks else None
    assert not await asked.bring(chunks)
    assert asked.given_bytes() == asked.entry.manifest.size_bytes
    assert asked.entry.tiers == {"cold", "dr"}, "what is in memory is no replica"
    assert asked.arriving() == []
    gc.disable()  # the memory is released at once, not when Python looks for cycles
    try:
        assert in_memory() == 2
        await asked.fetcher.restored(RUN)
        await asyncio.to_thread(wait_until, lambda: in_memory() == 0)
    finally:
        gc.enable()


@pytest.mark.parametrize("is_asked_for_chunks", [False, True])
async def test_checkpoint_is_fetched_into_memory_when_hot_cannot_be_read(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, *, is_asked_for_chunks: bool
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise TierUnreachable("read in hot: input/output error")

    for name in ("get_bytes", "get_many", "list", "open_files"):
        monkeypatch.setattr(asked.rooms.hot_store, name, fail)
    chunks = [[20, 21], [30]] if is_asked_for_chunks else None
    assert await asked.bring(chunks) == is_asked_for_chunks
    assert in_memory() == 2


@pytest.mark.parametrize("failing", ["sync", "manifest"])
async def test_checkpoint_is_fetched_into_memory_when_hot_fails_at_the_end(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """All chunks have arrived, and then the disk is full or fails: the trainer would get an older checkpoint."""

    async def refuse(*_: object, **__: object) -> bool:
        raise Full("write in hot: no space left on device")

    def fail(file: object) -> None:
        raise TierUnreachable("fsync in hot: input/output error")

    if failing == "manifest":
        monkeypatch.setattr(asked.rooms.hot_store, "put_bytes", refuse)
    else:
        monkeypatch.setattr(PartialFile, "make_durable", fail)
    assert not await asked.bring(None)
    assert in_memory() == 2
    assert asked.arriving() == []
    assert list(asked.rooms.hot_store.root.glob("*/*/rank-*")) == [], "nobody would delete them before the next start"


@pytest.mark.usefixtures("full_hot")
async def test_chunks_in_memory_are_fetched_once_too(asked: Asked) -> None:
    for chunks in ([[20, 21], []], [[21, 22], [40]], [[22], [40]]):
        assert await asked.bring(chunks)
    assert asked.given_bytes() == asked.headers_bytes + 4 * CHUNK_BYTES
    assert asked.arriving() == []


async def test_what_hot_has_already_is_fetched_again_when_hot_becomes_full(
    asked: Asked, request: pytest.FixtureRequest
) -> None:
    await asked.bring([[20], []])
    request.getfixturevalue("full_hot")
    assert await asked.bring([[20, 21], [30]])
    assert asked.arriving() == []
    assert await asked.bring([[21, 22], [30]])


@pytest.mark.usefixtures("full_hot")
async def test_rest_in_memory_comes_from_the_next_tier(asked: Asked) -> None:
    asked.damage("cold", 30)
    assert await asked.bring([[20], []])
    with pytest.raises(Corrupt, match="in cold"):
        await asked.bring([[30], []])
    assert await asked.bring([[20, 30], []], "dr")


@pytest.mark.usefixtures("full_hot")
async def test_hot_is_full_and_memory_too(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher, "available_bytes", lambda: 2 * asked.entry.manifest.size_bytes - 1)
    with pytest.raises(Full):
        await asked.bring(None)
    assert in_memory() == 0


@pytest.mark.usefixtures("full_hot")
async def test_chunks_that_are_asked_for_later_must_fit_into_memory_too(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer asks for the headers first, which are small."""
    monkeypatch.setattr(fetcher, "available_bytes", lambda: 4 * asked.headers_bytes)
    assert await asked.bring(NOTHING)
    with pytest.raises(Full, match="half of the available memory"):
        await asked.bring(None)
    assert asked.given_bytes() == asked.headers_bytes


@pytest.mark.usefixtures("full_hot")
async def test_fetches_into_memory_at_once_must_fit_together(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    other = msgspec.structs.replace(asked.entry.manifest, step=6)
    begun = fetcher.Fetch(other, asked.rooms.hot_store, in_memory=True)  # nothing of it has arrived
    asked.fetcher.in_memory.add(begun)
    monkeypatch.setattr(fetcher, "available_bytes", lambda: 3 * other.size_bytes)
    with pytest.raises(Full):
        await asked.bring(None)
    del begun
    assert not await asked.bring(None)


@pytest.mark.usefixtures("full_hot")
async def test_memory_is_released_when_nobody_asks_again(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher, "IN_MEMORY_KEPT_S", 0.0)
    assert await asked.bring([[20], []])
    await asyncio.to_thread(wait_until, lambda: in_memory() == 0)
    assert await asked.bring([[20], []])


@pytest.mark.usefixtures("full_hot")
async def test_reader_cannot_write_into_what_is_in_memory(asked: Asked) -> None:
    descriptors, _ = await asked.fetcher.bring(
        asked.entry, asked.rooms.cold["cold"], None, lambda done, total: None, is_hot_bad=False
    )
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(descriptors[0], b"x", 0)
    close_all(descriptors)
