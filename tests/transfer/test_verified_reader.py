"""Bytes of a checkpoint from its replicas: verified, each chunk from the first tier that has it whole."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tests.support.cli import flip_a_bit
from tests.support.state import commit, shard_of
from tierd.errors import BadRequest, Corrupt, TierdError
from tierd.format.ids import checkpoint_id
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.tier import ReadableTier
from tierd.transfer.verified_reader import CHUNKS_KEPT, VerifiedReader

CHUNK_BYTES = 8192
NAME = "rank-00000-of-00001.safetensors"
CHUNKS = 3 * CHUNKS_KEPT
RAW = shard_of([("model.w", torch.arange(CHUNKS * CHUNK_BYTES // 4), (0,))])


class Replicas:
    """Tiers in sequence; `used` is the name of each one that was handed out."""

    def __init__(self, *roots: Path) -> None:
        self.tiers = [ReadableTier(root.name, DirectoryStore(root)) for root in roots]
        self.used: list[str] = []

    async def next(self, failed: Mapping[str, TierdError]) -> ReadableTier:
        for tier in self.tiers:
            if tier.name not in failed:
                self.used.append(tier.name)
                return tier
        raise next(iter(failed.values()))

    async def reader(self) -> VerifiedReader:
        return VerifiedReader(await self.tiers[0].manifest(checkpoint_id("run", 5, 1)), self.next)


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    roots = [tmp_path / "hot", tmp_path / "cold"]
    for root in roots:
        root.mkdir(mode=0o700)
        commit(root, [RAW], chunk_bytes=CHUNK_BYTES)
    return roots


async def read(reader: VerifiedReader, offset: int, size_bytes: int) -> bytes:
    buffer = bytearray(size_bytes)
    await reader.fill(NAME, offset, memoryview(buffer))
    return bytes(buffer)


async def test_any_bytes_are_read_and_each_chunk_once_in_sequence(roots: list[Path]) -> None:
    replicas, done = Replicas(*roots), list[int]()
    reader = await replicas.reader()
    reader.progress = done.append
    assert b"".join([await read(reader, at, min(1000, len(RAW) - at)) for at in range(0, len(RAW), 1000)]) == RAW
    assert sum(done) == len(RAW)
    assert await read(reader, 0, len(RAW)) == RAW
    assert await read(reader, len(RAW), 0) == b""
    assert (await reader.shard(NAME)).tensors["model.w"].shape == (CHUNKS * CHUNK_BYTES // 4,)
    assert set(replicas.used) == {"hot"}


async def test_a_damaged_chunk_comes_from_the_next_replica(roots: list[Path]) -> None:
    flip_a_bit(roots[0] / "run" / "000000000005-g0001" / NAME)
    replicas = Replicas(*roots)
    assert await read(await replicas.reader(), 0, len(RAW)) == RAW
    assert replicas.used.count("cold") == 1


async def test_a_chunk_that_no_replica_has_whole_is_refused(roots: list[Path]) -> None:
    for root in roots:
        flip_a_bit(root / "run" / "000000000005-g0001" / NAME)
    with pytest.raises(Corrupt, match=NAME):
        await read(await Replicas(*roots).reader(), 0, len(RAW))


async def test_bytes_beyond_the_end_are_refused(roots: list[Path]) -> None:
    reader = await Replicas(*roots).reader()
    for offset, size_bytes in ((len(RAW), 1), (len(RAW) - 1, 2), (-1, 1)):
        with pytest.raises(BadRequest):
            await read(reader, offset, size_bytes)
