"""A body is read piece by piece with its checksum, and its last piece is sent only when every byte is right."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os

import pytest

from tests.support.store_contract import BytesSource, FailingSource, content, entry_of
from tierd.errors import Corrupt
from tierd.s3.body import PIECE_BYTES, SEND_BYTES, Body
from tierd.tiers.store import Source

CHUNK_BYTES = PIECE_BYTES + 4096
SIZE_BYTES = 2 * CHUNK_BYTES + 5
DATA = content(SIZE_BYTES)
ENTRY = entry_of(DATA, chunk_bytes=CHUNK_BYTES)


def body(source: Source, offset: int = 0, length: int = SIZE_BYTES) -> Body:
    return Body(source, ENTRY, offset, length, buffer=memoryview(bytearray(PIECE_BYTES)), action="write x")


def read_all(found: Body) -> bytes:
    """Reads as boto3 does: in a thread, until the end."""
    sent: list[bytes] = []
    while piece := found.read(16384):
        assert len(piece) <= SEND_BYTES, "one send must end within the timeout of the socket"
        sent.append(bytes(piece))
    return b"".join(sent)


@pytest.mark.parametrize("is_local", [True, False], ids=["local", "remote"])
@pytest.mark.parametrize(
    ("offset", "length"), [(0, SIZE_BYTES), (0, CHUNK_BYTES), (CHUNK_BYTES, CHUNK_BYTES), (2 * CHUNK_BYTES, 5)]
)
async def test_body_returns_the_bytes_of_its_part_again_after_a_rewind(
    is_local: bool, offset: int, length: int
) -> None:
    def read_piece(offset: int, buffer: memoryview) -> None:
        buffer[:] = DATA[offset : offset + len(buffer)]

    source = BytesSource(DATA)
    source.fill_blocking = read_piece if is_local else None
    found = body(source, offset, length)
    assert (found.seek(0, os.SEEK_END), found.tell(), found.seek(0)) == (length, length, 0)
    for _ in range(2):
        assert await asyncio.to_thread(read_all, found) == DATA[offset : offset + length]
        found.seek(0)
    await asyncio.to_thread(found.read)  # an attempt that ended in the middle
    found.seek(0)
    assert await asyncio.to_thread(read_all, found) == DATA[offset : offset + length]


@pytest.mark.parametrize("flipped", [0, CHUNK_BYTES - 1, SIZE_BYTES - 1])
async def test_last_piece_is_not_sent_when_any_byte_is_wrong(flipped: int) -> None:
    damaged = bytearray(DATA)
    damaged[flipped] ^= 1
    found = body(BytesSource(bytes(damaged)))
    sent = 0

    def send() -> None:
        nonlocal sent
        while piece := found.read():
            sent += len(piece)

    with pytest.raises(Corrupt, match=f"write x: chunk {flipped // CHUNK_BYTES} of 3"):
        await asyncio.to_thread(send)
    assert sent < SIZE_BYTES
    assert isinstance(found.source_error, Corrupt)


async def test_error_of_the_source_is_kept_for_the_caller() -> None:
    """boto3 raises an error of its own instead."""
    found = body(FailingSource(DATA))
    with pytest.raises(Corrupt, match="ends early"):
        await asyncio.to_thread(read_all, found)
    assert "ends early" in str(found.source_error)


async def test_aborted_body_ends_after_its_source_stops_writing_to_the_buffer() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def wait(offset: int, buffer: memoryview) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    found = body(Source(wait))
    reading = asyncio.ensure_future(asyncio.to_thread(found.read))
    await begun.wait()
    found.abort()
    with pytest.raises((concurrent.futures.CancelledError, asyncio.CancelledError)):
        await reading
    assert ended.is_set()
    with pytest.raises((concurrent.futures.CancelledError, asyncio.CancelledError)):
        await asyncio.to_thread(found.read)
