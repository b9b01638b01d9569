"""Copies of other nodes' parts on the disk: what is found after a restart, and what is deleted."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.support.cli import make_part
from tests.support.config import make_config
from tierd.config.sections import Config
from tierd.format import layout
from tierd.format.node_file import NodeFile
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.part_copies import PartCopies


async def keep(config: Config, *steps: int) -> list[NodeFile]:
    """Copies of these steps, which an earlier daemon made."""
    root = config.hot_path / layout.PEERS
    return [await asyncio.to_thread(make_part, root, [2, 3], step=step) for step in steps]


async def recovered(config: Config) -> PartCopies:
    copies = PartCopies(config)
    await copies.recover()
    return copies


async def test_copies_are_found_after_a_restart_newest_first(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    five, seven, six = await keep(config, 5, 7, 6)
    copies = await recovered(config)
    assert copies.of_run(five.id.run) == [seven, six, five]
    assert copies.get(six.id) == six
    assert set(copies.runs()) == {five.id.run}


async def test_incomplete_copies_are_deleted_at_the_start(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    (whole,) = await keep(config, 5)
    folder = config.hot_path / layout.PEERS / whole.run / "000000000006-g0001"
    folder.mkdir()
    (folder / whole.files[0].name).write_bytes(b"shard")
    (folder / f".{whole.files[0].name}.0123456789abcdef.partial").write_bytes(b"half")
    copies = await recovered(config)
    assert copies.of_run(whole.id.run) == [whole]
    assert not folder.exists()


async def test_deleted_copy_leaves_no_file(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    (part,) = await keep(config, 5)
    copies = await recovered(config)
    (config.hot_path / layout.PEERS / part.run / part.id.name / ".x.0123456789abcdef.partial").write_bytes(b"half")
    await copies.delete(part.id)
    assert not [path for path in (config.hot_path / layout.PEERS).rglob("*") if path.is_file()]
    assert copies.get(part.id) is None


async def test_unreadable_copy_is_left_out_and_stays(tmp_path: Path) -> None:
    """A person may want to look at it. It goes as other copies do: when no restart needs its checkpoint."""
    config = make_config(tmp_path)
    (part,) = await keep(config, 5)
    path = config.hot_path / layout.PEERS / part.key
    path.write_bytes(path.read_bytes()[:-20])
    copies = await recovered(config)
    assert (copies.get(part.id), path.exists()) == (None, True)


async def test_copies_are_in_no_listing_of_hot(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    await keep(config, 5)
    async with DirectoryStore(config.hot_path) as hot:
        assert await hot.list() == []
