"""A part of a checkpoint comes from cold: only what is asked for, each chunk once, and never taken for a replica."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from tests.support.rooms import RUN, Rooms, rooms_at
from tests.support.state import commit, shard_of
from tierd.catalog import Entry
from tierd.errors import Corrupt, TierUnreachable
from tierd.format import wire
from tierd.workers.fetcher import Fetcher
from tierd.workers.restorer import Restorer, close_all

CHUNK_BYTES = 4096
ELEMENTS = 40 * CHUNK_BYTES // 4
NOTHING: list[list[int]] = []


class Asked:
    """A checkpoint of two shards in two cold tiers, and who fetches it."""

    def __init__(self, rooms: Rooms) -> None:
        self.rooms = rooms
        self.raws = [shard_of([("weight", torch.randn(ELEMENTS), (rank * ELEMENTS,))], rank=rank) for rank in (0, 1)]
        for store in rooms.cold.values():
            self.folder = commit(
                Path(store.store.url.removeprefix("file://")), self.raws, run=RUN, chunk_bytes=CHUNK_BYTES
            )
        self.header_chunks = (len(self.raws[0]) - 4 * ELEMENTS) // CHUNK_BYTES
        self.fetcher = Fetcher(
            rooms.catalog, rooms.hot, rooms.hot_store, metrics=rooms.metrics, incidents=rooms.incidents
        )

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
        """Whether what was handed over is a part; its chunks and headers are the right bytes, in files of full size."""
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
        """One bit of that chunk of the first shard."""
        path = self.rooms.folder(tier, self.entry.id) / self.entry.manifest.files[0].name
        _flip(path, index)


def _flip(path: Path, index: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[index * CHUNK_BYTES] ^= 1
    path.write_bytes(raw)


@pytest.fixture
async def asked(tmp_path: Path) -> AsyncIterator[Asked]:
    gc.collect()  # what earlier tests left is theirs
    before = len(os.listdir("/proc/self/fd"))
    async with rooms_at(tmp_path, cold=("cold", "dr")) as rooms:
        found = Asked(rooms)
        await rooms.look()
        yield found
    assert len(os.listdir("/proc/self/fd")) <= before, "descriptors leak"


async def test_headers_come_first_however_long_and_nothing_else(asked: Asked) -> None:
    assert asked.header_chunks > 1
    assert await asked.bring(NOTHING)
    assert asked.given_bytes() == asked.headers_bytes


async def test_only_the_chunks_that_are_asked_for_come_and_each_once_whoever_asks(asked: Asked) -> None:
    for chunks in ([[20, 21], []], [[21, 22], [40]], [[22], [40]]):
        assert await asked.bring(chunks)
    assert asked.given_bytes() == asked.headers_bytes + 4 * CHUNK_BYTES
    await asyncio.gather(*(asked.bring([[30], [30 + rank]]) for rank in range(4)))
    assert asked.given_bytes() == asked.headers_bytes + 9 * CHUNK_BYTES


async def test_part_is_listed_nowhere_and_takes_room_for_no_more(asked: Asked) -> None:
    await asked.bring([[20], []])
    await asked.rooms.look()
    assert asked.entry.tiers == {"cold", "dr"}
    assert await asked.rooms.hot_store.list() == []
    assert sum(path.stat().st_blocks * 512 for path in asked.arriving()) < asked.entry.manifest.size_bytes / 2


async def test_ranks_that_need_nearly_all_make_a_hot_replica_of_all(asked: Asked) -> None:
    everything = [list(range(len(one.chunks))) for one in asked.entry.manifest.files]
    assert await asked.bring([everything[0], []])
    assert not await asked.bring([[], everything[1][:-2]])
    assert asked.given_bytes() == asked.entry.manifest.size_bytes
    assert asked.entry.tiers == {"hot", "cold", "dr"}
    assert asked.arriving() == []
    assert not await asked.bring(NOTHING), "as handed over from hot"


async def test_who_asks_for_all_gets_all_and_what_was_there_is_not_fetched_again(asked: Asked) -> None:
    await asked.bring([[20], []])
    assert not await asked.bring(None)
    assert asked.given_bytes() == asked.entry.manifest.size_bytes
    assert asked.entry.tiers == {"hot", "cold", "dr"}


async def test_part_stays_while_it_is_in_use_and_goes_when_the_run_is_restored(asked: Asked) -> None:
    await asked.bring([[20], []])
    await asked.fetcher.sweep(RUN)
    assert len(asked.arriving()) == 2
    await asked.fetcher.restored(RUN)
    assert asked.arriving() == []
    await asked.fetcher.restored(RUN)


async def test_part_that_was_removed_meanwhile_is_fetched_again(asked: Asked) -> None:
    await asked.bring([[20], []])
    asked.arriving()[0].unlink()
    await asked.bring([[21], []])
    await asked.bring([[20], []])
    assert asked.given_bytes() == 1.5 * asked.headers_bytes + 3 * CHUNK_BYTES


async def test_next_daemon_goes_on_with_what_verifies(asked: Asked) -> None:
    await asked.bring([[20, 21], [30]])
    _flip(asked.arriving()[0], 20)
    asked.fetcher = Fetcher(
        asked.rooms.catalog,
        asked.rooms.hot,
        asked.rooms.hot_store,
        metrics=asked.rooms.metrics,
        incidents=asked.rooms.incidents,
    )
    await asked.bring(NOTHING)
    await asked.bring([[20, 21], [30]])
    assert asked.given_bytes() == asked.headers_bytes + 4 * CHUNK_BYTES


async def test_what_was_damaged_after_it_came_is_read_again_when_the_next_tier_is_asked(asked: Asked) -> None:
    await asked.bring([[20, 21], []])
    _flip(asked.arriving()[0], 20)
    await asked.bring([[20, 21], []], "dr")
    assert asked.given_bytes("dr") == CHUNK_BYTES


async def test_chunk_that_is_bad_in_one_tier_comes_from_the_next_which_gives_no_more(asked: Asked) -> None:
    asked.damage("cold", 21)
    assert await asked.bring([[20], []])
    with pytest.raises(Corrupt, match="chunk 21 of"):
        await asked.bring([[21, 22], [30]])
    assert await asked.bring([[20, 21, 22], [30]], "dr")
    assert asked.given_bytes("dr") == CHUNK_BYTES


async def test_tier_that_dies_in_the_middle_leaves_the_rest_to_the_next(
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


async def test_damaged_hot_replica_is_mended_as_a_whole_whatever_is_asked(asked: Asked) -> None:
    assert not await asked.bring(None)
    asked.damage("hot", 30)
    assert not await asked.bring([[20], []], is_hot_bad=True)
    assert asked.given_bytes() == asked.entry.manifest.size_bytes + CHUNK_BYTES


async def test_indexes_beyond_a_file_and_files_beyond_the_manifest_are_no_matter(asked: Asked) -> None:
    assert await asked.bring([[], [], [1]])
    descriptors, _ = await asked.fetcher.bring(
        asked.entry, asked.rooms.cold["cold"], [[10_000]], lambda done, total: None, is_hot_bad=False
    )
    close_all(descriptors)
    assert asked.given_bytes() == asked.headers_bytes


async def test_trainer_that_is_refused_a_chunk_finds_the_rest_when_it_asks_the_next_tier(asked: Asked) -> None:
    """To sweep what came, because one chunk of it is bad, would be to fetch it all again."""

    async def nobody_knows(checkpoint: object) -> bool | None:
        return None

    rooms = asked.rooms
    worker = Restorer(
        rooms.memory, rooms.catalog, rooms.hot, rooms.hot_store, rooms.cold, [],
        metrics=rooms.metrics, incidents=rooms.incidents, judge=nobody_knows,
    )  # fmt: skip

    async def find(tier: str, exclude: list[str], chunks: list[list[int]]) -> tuple[str, bool]:
        packed = [wire.pack_indexes(some) for some in chunks]
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
    assert rooms.count("tierd_verify_failures_total", tier="cold") == 1
    exclude = [f"{asked.entry.id.name}@cold"]
    assert await find("auto", exclude, NOTHING) == ("dr", True)
    assert await find("dr", exclude, [[20, 25], [30]]) == ("dr", True)
    assert asked.given_bytes("dr") == CHUNK_BYTES
    await worker.restored(RUN)
    assert asked.arriving() == []
