"""Which place a tier is: its marker is made, remembered and compared, and nothing depends on a wrong place."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.config import make_config
from tests.support.rooms import RUN, Rooms, rooms_at
from tierd.catalog.identity import Identities
from tierd.catalog.listing import refresh
from tierd.config.sections import ColdConfig
from tierd.errors import BadConfig, Full, TierdError, TierUnreachable
from tierd.format import layout
from tierd.format.ids import checkpoint_id
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.tier import Tier
from tierd.workers.reaper import Reaper
from tierd.workers.restorer import Restorer


def root_of(rooms: Rooms, tier: str) -> Path:
    store = rooms.tiers[tier].store
    assert isinstance(store, DirectoryStore)
    return store.root


def markers(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob(f"{layout.TIER_MARKERS}*"))


async def use_once(root: Path, **sections: Any) -> None:
    """The life of a daemon in which every tier was listed, and cold got a checkpoint."""
    async with rooms_at(root, **sections) as rooms:
        await rooms.commit("cold", step=100)
        await rooms.list_tiers()


async def judge_nothing(checkpoint: object) -> bool | None:
    return None


# ── markers ──


async def test_first_listing_marks_each_tier_and_later_ones_change_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tierd")
    async with rooms_at(tmp_path) as rooms:
        await rooms.list_tiers()
        assert caplog.messages == [
            f"{name}: began a new tier at {tier.store.url}; if checkpoints should be there, its disk is not mounted"
            for name, tier in rooms.tiers.items()
        ]
        caplog.clear()
        made = {name: markers(root_of(rooms, name)) for name in rooms.tiers}
        assert [len(names) for names in made.values()] == [1, 1]
        assert made["hot"] != made["cold"]
    async with rooms_at(tmp_path) as rooms:
        await rooms.list_tiers()
        assert {name: markers(root_of(rooms, name)) for name in rooms.tiers} == made
        assert rooms.incidents.recent() == []
        assert caplog.messages == []


async def test_a_marker_is_no_checkpoint_and_no_leftover(tmp_path: Path) -> None:
    async with rooms_at(tmp_path) as rooms:
        await rooms.commit("hot", "cold", step=100)
        await rooms.list_tiers()
        for tier in rooms.tiers.values():
            listing = await tier.listing()
            assert [checkpoint.step for checkpoint in listing.committed] == [100]
            assert not listing.partial
            assert len(listing.identities) == 1
            assert await tier.identities() == listing.identities


async def test_a_listing_of_the_markers_does_not_read_the_folders_of_runs(tmp_path: Path) -> None:
    """Claims and restores list them, and a tier may hold 10,000 checkpoints."""
    async with rooms_at(tmp_path) as rooms:
        await rooms.commit("hot", step=100)
        await rooms.list_tiers("hot")
        walk = rooms.hot_store.tree.walk("", layout.TIER_MARKERS)
        visited = await asyncio.to_thread(lambda: [key for key, *_ in walk])
        assert not any("/" in key for key in visited)


async def test_two_daemons_that_mark_one_tier_at_the_same_time_agree(tmp_path: Path) -> None:
    """Also where the server ignores conditions: no marker replaces another."""
    shared = (ColdConfig(url=f"file://{tmp_path / 'shared'}"),)
    async with rooms_at(tmp_path / "a", cold=shared) as first, rooms_at(tmp_path / "b", cold=shared) as second:
        listings = [await rooms.cold["cold"].listing() for rooms in (first, second)]
        for rooms, listing in zip((first, second), listings, strict=True):
            await rooms.context.identities.check(rooms.cold["cold"], listing)
        assert len(markers(tmp_path / "shared")) == 2
        await first.list_tiers()
        await second.list_tiers()
    for node in ("a", "b"):
        async with rooms_at(tmp_path / node, cold=shared) as rooms:
            await rooms.list_tiers()
    assert len(markers(tmp_path / "shared")) == 2


async def refuse(*arguments: object, **options: object) -> bool:
    raise TierUnreachable("write: access denied")


async def test_a_tier_that_cannot_be_marked_is_used_as_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with rooms_at(tmp_path) as rooms:
        await rooms.commit("cold", step=100)
        rooms.cold["cold"].store.put_bytes = refuse  # type: ignore[method-assign]
        await rooms.list_tiers()
        await rooms.list_tiers()
        assert rooms.catalog.tiers["cold"].is_known
        assert [record.message.partition(",")[0] for record in caplog.records] == ["cold cannot be marked"], "once"
        assert rooms.incidents.recent() == []


async def test_an_empty_tier_that_cannot_be_marked_is_not_known(tmp_path: Path) -> None:
    """A mount point without its disk often belongs to root, so that nothing is written there."""
    async with rooms_at(tmp_path) as rooms:
        root_of(rooms, "cold").mkdir(parents=True)
        rooms.cold["cold"].store.put_bytes = refuse  # type: ignore[method-assign]
        with pytest.raises(TierUnreachable, match="access denied"):
            await rooms.list_tiers()
        assert not rooms.catalog.tiers["cold"].is_known


async def test_a_full_hot_disk_does_not_stop_the_listing_of_cold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nothing could be evicted."""
    async with rooms_at(tmp_path) as rooms:
        await rooms.commit("hot", "cold", step=100)
        put_bytes = DirectoryStore.put_bytes

        async def fill_up(store: DirectoryStore, key: str, content: bytes, *, if_absent: bool = False) -> bool:
            if store.root.is_relative_to(rooms.hot_store.root):
                raise Full("write: no space left on device")
            return await put_bytes(store, key, content, if_absent=if_absent)

        monkeypatch.setattr(DirectoryStore, "put_bytes", fill_up)
        await rooms.context.identities.begin(rooms.tiers)
        await rooms.list_tiers()
        assert all(knowledge.is_known for knowledge in rooms.catalog.tiers.values())
        path = rooms.hot_store.root / layout.KNOWN_TIERS / "cold.json"
        assert not path.exists()
        monkeypatch.undo()
        await rooms.list_tiers()
        assert path.exists(), "it is written as soon as there is space"


# ── a place that is not the one before ──


@pytest.mark.parametrize("is_mount_point", [True, False], ids=["an empty mount point", "no directory"])
async def test_cold_that_is_absent_at_start_is_not_an_empty_tier(tmp_path: Path, is_mount_point: bool) -> None:
    await use_once(tmp_path)
    cold = tmp_path / "cold"
    cold.rename(tmp_path / "unmounted")
    if is_mount_point:
        cold.mkdir()
    async with rooms_at(tmp_path) as rooms:
        unlisted = await Restorer(rooms.context, judge_nothing).list_run(RUN)
        assert "marker" in unlisted["cold"], "a trainer does not start anew"
        with pytest.raises(TierUnreachable, match="has no marker"):
            await rooms.list_tiers()
        assert not rooms.catalog.tiers["cold"].is_known
        await rooms.commit("hot", step=200)
        await rooms.list_tiers("hot")
        await rooms.replicator().run_once()
        assert list(cold.glob("*")) == [], "nothing is written where another disk will be mounted"
        if is_mount_point:
            cold.rmdir()
        (tmp_path / "unmounted").rename(cold)
        await rooms.list_tiers()
        assert [manifest.step for manifest in rooms.catalog.manifests_in("cold")] == [100]


async def test_another_disk_at_the_path_is_named_with_both_markers(tmp_path: Path) -> None:
    await use_once(tmp_path)
    (tmp_path / "cold").rename(tmp_path / "unmounted")
    await use_once(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "cold").rename(tmp_path / "cold")
    async with rooms_at(tmp_path) as rooms:
        with pytest.raises(TierUnreachable) as raised:
            await rooms.list_tiers()
        for root in (tmp_path / "unmounted", tmp_path / "cold"):
            assert markers(root)[0] in raised.value.message


async def test_mount_that_disappears_while_the_daemon_runs_is_no_empty_tier(tmp_path: Path) -> None:
    async with rooms_at(tmp_path) as rooms:
        manifest = await rooms.commit("hot", "cold", step=100)
        await rooms.list_tiers()
        (tmp_path / "cold").rename(tmp_path / "unmounted")
        (tmp_path / "cold").mkdir()
        with pytest.raises(TierUnreachable, match="has no marker"):
            await rooms.list_tiers()
        entry = rooms.catalog.get(checkpoint_id(RUN, 100, 1))
        assert entry is not None
        assert entry.tiers == {"hot", "cold"}, "what was known stays"
        rooms.catalog.add(manifest, "hot", ["best"])
        await rooms.replicator().run_once()
        assert list((tmp_path / "cold").glob("*")) == [], "no marker of a milestone is written to the wrong disk"
        assert rooms.count("tierd_lost_checkpoints_total", tier="cold") == 0.0


async def test_hot_that_disappears_while_the_daemon_runs_is_no_empty_tier(tmp_path: Path) -> None:
    async with rooms_at(tmp_path) as rooms:
        await rooms.commit("hot", step=100)
        await rooms.list_tiers()
        (tmp_path / "hot").rename(tmp_path / "unmounted")
        (tmp_path / "hot").mkdir()
        with pytest.raises(TierUnreachable, match="has no marker"):
            await rooms.list_tiers("hot")


@pytest.mark.parametrize("has_marker", [True, False])
async def test_the_command_in_the_hint_accepts_a_replacement(tmp_path: Path, has_marker: bool) -> None:
    await use_once(tmp_path)
    shutil.rmtree(tmp_path / "cold")
    (tmp_path / "cold").mkdir()
    if has_marker:
        await use_once(tmp_path / "elsewhere")
        shutil.copytree(tmp_path / "elsewhere" / "cold", tmp_path / "cold", dirs_exist_ok=True)
    async with rooms_at(tmp_path) as rooms:
        with pytest.raises(TierUnreachable) as raised:
            await rooms.list_tiers()
        command = re.search(r"touch [^;]*", str(raised.value))
        assert command is not None
        os.close(os.open(shlex.split(command[0])[1], os.O_CREAT))
        await rooms.list_tiers()
        assert rooms.catalog.tiers["cold"].is_known


async def test_a_new_url_in_the_config_is_another_place_on_purpose(tmp_path: Path) -> None:
    await use_once(tmp_path)
    other = (ColdConfig(url=f"file://{tmp_path / 'new'}"),)
    async with rooms_at(tmp_path, cold=other) as rooms:
        await rooms.list_tiers()
        assert len(markers(tmp_path / "new")) == 1


async def test_a_damaged_memory_is_reported_and_not_replaced(tmp_path: Path) -> None:
    await use_once(tmp_path)
    path = tmp_path / "hot" / layout.KNOWN_TIERS / "cold.json"
    path.write_text("{")
    async with rooms_at(tmp_path) as rooms:
        with pytest.raises(TierUnreachable, match=re.escape(str(path))):
            await rooms.list_tiers()
    assert path.read_text() == "{"


# ── one place under two names ──


async def test_cold_that_is_hot_under_another_name_evicts_nothing_from_hot(tmp_path: Path) -> None:
    async with rooms_at(tmp_path) as rooms:
        root_of(rooms, "cold").symlink_to(root_of(rooms, "hot"))
        await rooms.commit("hot", step=100, sequence=10)  # every tenth goes to cold
        for step in (200, 300, 400, 500):
            await rooms.commit("hot", step=step, sequence=step)
        await rooms.list_tiers("hot")
        with pytest.raises(TierUnreachable, match="is the same place as hot"):
            await rooms.list_tiers("cold")
        await Reaper(rooms.context).run_once()
        assert rooms.steps("hot") == [500, 400, 300, 200, 100]
        unlisted = await Restorer(rooms.context, judge_nothing).list_run(RUN)
        assert "same place" in unlisted["cold"]


async def test_a_start_with_cold_that_is_hot_is_refused_by_name(tmp_path: Path) -> None:
    async with rooms_at(tmp_path) as rooms:
        root_of(rooms, "hot").mkdir(parents=True)
        root_of(rooms, "cold").symlink_to(root_of(rooms, "hot"))
        with pytest.raises(BadConfig, match=r"cold: .* is the same place as hot"):
            await rooms.context.identities.begin(rooms.tiers)


async def test_a_first_start_with_two_names_of_one_place_is_refused(tmp_path: Path) -> None:
    async with rooms_at(tmp_path, cold=("one", "two")) as rooms:
        root_of(rooms, "one").mkdir(parents=True)
        root_of(rooms, "two").symlink_to(root_of(rooms, "one"))
        with pytest.raises(BadConfig, match=r"two: .* is the same place as one"):
            await rooms.context.identities.begin(rooms.tiers)


async def test_a_tier_that_does_not_answer_does_not_delay_the_start(tmp_path: Path) -> None:
    async with rooms_at(tmp_path, cold=("one", "two")) as rooms:

        async def fail(prefix: str = "") -> list[Any]:
            raise TierUnreachable("list: no answer")

        rooms.cold["one"].store.list = fail  # type: ignore[method-assign]
        await rooms.context.identities.begin(rooms.tiers)
        assert len(markers(root_of(rooms, "two"))) == 1


# ── commands ──


async def test_a_command_compares_and_writes_nothing(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    tiers = [Tier("hot", DirectoryStore(config.hot_path)), Tier("cold", DirectoryStore(tmp_path / "cold"))]
    async with rooms_at(tmp_path) as rooms:
        await rooms.commit("hot", "cold", step=100)
        identities = Identities(config)
        for tier in tiers:
            await refresh(rooms.catalog, tier, identities)
        assert all(knowledge.is_known for knowledge in rooms.catalog.tiers.values())
        assert [markers(root_of(rooms, name)) for name in rooms.tiers] == [[], []]
        assert not (config.hot_path / layout.KNOWN_TIERS).exists()
        await rooms.list_tiers()
    (tmp_path / "cold").rename(tmp_path / "unmounted")
    (tmp_path / "cold").mkdir()
    with pytest.raises(TierdError, match="has no marker"):
        await Identities(config).check(tiers[1])
    for tier in tiers:
        await tier.store.close()


def test_only_the_exact_name_of_a_marker_is_a_key_with_a_dot() -> None:
    from tierd.tiers.store import is_key

    marker = layout.tier_marker_key("0e2fd2a5-6f0b-4f1c-9f3e-0b8f4f6c7a11")
    assert is_key(marker)
    refused: Sequence[str] = (f"run/{marker}", f"{marker}/x", marker.upper(), marker[:-1], f"{marker}.partial", ".x")
    assert not any(map(is_key, refused))
