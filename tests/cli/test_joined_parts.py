"""Shards of one checkpoint from several holders: who gives none any more is not asked again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.cli import make_part
from tierd.cli.joined_parts import Holder, JoinedParts
from tierd.errors import NotFound
from tierd.format import layout
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.tier import Tier


def test_next_holder_is_read_in_place_of_one_that_is_lost(tmp_path: Path) -> None:
    part = make_part(tmp_path / "there", [0, 1])
    keys = [layout.file_key(part.id, file.name) for file in part.files]

    async def read() -> None:
        stores = [DirectoryStore(tmp_path / name) for name in ("empty", "there")]
        (tmp_path / "empty").mkdir()
        lost, able = (Holder(Tier("hot", store), part.ranks, None) for store in stores)
        joined = JoinedParts(b"raw", part, {keys[0]: [lost, able], keys[1]: [lost]}, stores[1])
        buffer = bytearray(100)
        await joined.read(keys[0], 0, memoryview(buffer))
        assert buffer == (tmp_path / "there" / keys[0]).read_bytes()[:100]
        assert lost.lost is not None
        assert able.lost is None
        with pytest.raises(NotFound, match="on the nodes"):
            await joined.read(keys[1], 0, memoryview(buffer))
        for store in stores:
            await store.close()

    asyncio.run(read())
