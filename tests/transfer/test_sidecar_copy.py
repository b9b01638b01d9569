"""Where new segments begin and end, and what a copy does with a file that is written meanwhile."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.rooms import RUN, Rooms, rooms_at
from tierd.errors import BadRequest, NotFound
from tierd.format.ids import Run
from tierd.format.sidecar import SEGMENT_BYTES_MAX, Segment, chain, parse_segment, segment_prefix
from tierd.tiers.pool import ThreadPool
from tierd.transfer.sidecar_copy import FileChanged, FileState, SidecarCopy, new_spans, read_state

RUN_NAME = Run(RUN)


def path_of(*edges: int) -> list[Segment]:
    ends = pairwise(edges)
    return [Segment(RUN_NAME, "a", 1, begin, end, "a" * 16, "a" * 16) for begin, end in ends]


@pytest.mark.parametrize(
    ("edges", "size", "expected"),
    [
        ((), 10, [(0, 10)]),
        ((0, 10), 10, []),
        ((0, 10), 15, [(10, 15)]),  # the last segment is larger than what is new
        ((0, 12, 15), 20, [(12, 20)]),
        ((0, 10, 15), 20, [(0, 20)]),
        ((0, SEGMENT_BYTES_MAX), 2 * SEGMENT_BYTES_MAX + 5, None),
    ],
)
def test_small_segments_are_merged(edges: tuple[int, ...], size: int, expected: list[tuple[int, int]] | None) -> None:
    found = new_spans(path_of(*edges), edges[-1] if edges else 0, size)
    if expected is None:
        expected = [(SEGMENT_BYTES_MAX, 2 * SEGMENT_BYTES_MAX), (2 * SEGMENT_BYTES_MAX, size)]
    assert found == expected


def test_a_file_that_grows_by_one_byte_has_few_segments_and_is_not_written_too_often() -> None:
    path: list[Segment] = []
    written = 0
    for size in range(1, 3000):
        ((begin, end),) = new_spans(path, size - 1, size)
        path = [each for each in path if each.end <= begin] + path_of(begin, end)
        written += end - begin
        assert len(path) <= size.bit_length()
    assert written <= 3000 * 12


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="does not exist any more"):
        read_state(tmp_path / "absent", [])
    with pytest.raises(BadRequest, match="not a regular file"):
        read_state(tmp_path, [])
    os.symlink(tmp_path / "absent", tmp_path / "link")
    with pytest.raises(BadRequest, match="Too many levels of symbolic links"):
        read_state(tmp_path / "link", [])


@pytest.fixture
async def rooms(tmp_path: Path) -> AsyncIterator[Rooms]:
    async with rooms_at(tmp_path / "house") as rooms:
        yield rooms


@pytest.mark.parametrize("change", [b"step 1\nstep X\n", b"step 1\n", None])
async def test_a_file_that_changes_after_it_was_digested_is_not_copied(
    rooms: Rooms, tmp_path: Path, change: bytes | None
) -> None:
    file, pool = tmp_path / "a", ThreadPool(1, "test")
    file.write_bytes(b"step 1\nstep 2\n")
    state = await asyncio.to_thread(read_state, file, [])
    if change is None:
        file.unlink()
    else:
        file.write_bytes(change)
    with pytest.raises(FileChanged):
        await SidecarCopy(pool, rooms.context.hot, RUN_NAME, "a", 1, []).run(state)
    assert await rooms.context.hot.store.list(segment_prefix(RUN_NAME)) == []
    pool.close()


async def test_a_copy_that_ended_before_it_deleted_what_it_merged_is_completed(rooms: Rooms, tmp_path: Path) -> None:
    file, pool, hot = tmp_path / "a", ThreadPool(1, "test"), rooms.context.hot
    kept: dict[str, bytes] = {}
    for size in (10, 20, 30):
        file.write_bytes(bytes(size))
        await SidecarCopy(pool, hot, RUN_NAME, "a", 1, await listed(rooms)).run(await state_of(file))
        for stored in await hot.store.list(segment_prefix(RUN_NAME)):
            kept[stored.key] = await hot.store.get_bytes(stored.key, size_max=1 << 20)
    for key, raw in kept.items():  # none was deleted
        await hot.store.put_bytes(key, raw, if_absent=True)
    assert len(await listed(rooms)) > len(chain(await listed(rooms)))
    assert await SidecarCopy(pool, hot, RUN_NAME, "a", 1, await listed(rooms)).run(await state_of(file)) == 0
    assert await listed(rooms) == chain(await listed(rooms))
    pool.close()


async def state_of(file: Path) -> FileState:
    return await asyncio.to_thread(read_state, file, range(31))


async def listed(rooms: Rooms) -> list[Segment]:
    stored = await rooms.context.hot.store.list(segment_prefix(RUN_NAME))
    return sorted(segment for each in stored if (segment := parse_segment(each.key)) is not None)
