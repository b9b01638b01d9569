"""Listings on request, and replicas that disappear: what is reported as lost, what is not, and what is sent again."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.rooms import RUN, Rooms, rooms_at
from tierd.catalog.decisions import lost, pending
from tierd.catalog.listing import refresh, refresh_run
from tierd.errors import TierUnreachable
from tierd.format import layout
from tierd.format.ids import CheckpointId, checkpoint_id
from tierd.tiers.store import StoredObject
from tierd.tiers.tier import Tier
from tierd.workers.lister import DELETION_S, Lister
from tierd.workers.reaper import Reaper
from tierd.workers.recovery import clear_uncommitted

STEPS = (100, 200, 300)


@pytest.fixture
async def rooms(tmp_path: Path) -> AsyncIterator[Rooms]:
    """Three checkpoints in hot and in cold, which keep the last three; cold has a tenth too, and all were listed."""
    async with rooms_at(tmp_path) as rooms:
        await rooms.commit("cold", step=10, sequence=10)
        for number, step in enumerate(STEPS):
            await rooms.commit("hot", "cold", step=step, sequence=11 + number)
        await rooms.list_tiers()
        yield rooms


def id_of(step: int) -> CheckpointId:
    return checkpoint_id(RUN, step, 1)


def remove(rooms: Rooms, tier: str, *steps: int) -> None:
    """As a person or another program does."""
    for step in steps:
        shutil.rmtree(rooms.folder(tier, id_of(step)))


def lost_steps(rooms: Rooms, tier: str = "cold") -> list[int]:
    return [checkpoint.step for checkpoint in lost(rooms.catalog, rooms.config, tier)]


async def test_emptied_tier_is_reported_once_and_hot_sends_again_what_it_has(rooms: Rooms) -> None:
    remove(rooms, "cold", 10, *STEPS)
    for _ in range(2):
        await rooms.list_tiers()
    assert lost_steps(rooms) == [300, 200, 100, 10]
    (incident,) = rooms.incidents.recent()
    assert (incident.stage, incident.kind, incident.run, incident.step) == ("list", "lost", RUN, 300)
    assert "run42/000000000010-g0001 disappeared" in incident.message
    assert [checkpoint.step for checkpoint in rooms.listers["cold"].lost] == [300, 200, 100, 10]
    assert rooms.count("tierd_lost_checkpoints_total", tier="cold") == 4.0
    await rooms.replicator().run_once()
    assert rooms.steps("cold") == [300, 200, 100]
    await rooms.list_tiers()
    assert lost_steps(rooms) == [10], "only what no tier has"
    assert rooms.listers["cold"].lost == [id_of(10)]
    assert rooms.count("tierd_lost_checkpoints_total", tier="cold") == 4.0


async def test_replica_that_comes_back_and_disappears_again_is_reported_again(rooms: Rooms) -> None:
    for _ in range(2):
        remove(rooms, "cold", 300)
        await rooms.list_tiers()
        await rooms.replicator().run_once()
        assert rooms.listers["cold"].lost == []
    assert rooms.count("tierd_lost_checkpoints_total", tier="cold") == 2.0


async def test_replica_without_its_manifest_is_lost(rooms: Rooms) -> None:
    (rooms.folder("cold", id_of(300)) / layout.MANIFEST).unlink()
    await rooms.list_tiers()
    assert lost_steps(rooms) == [300]


async def test_replica_without_its_manifest_may_be_in_the_middle_of_a_deletion(tmp_path: Path) -> None:
    """Another daemon deletes the manifest, finds a new milestone, and puts the manifest back."""
    now_s = 1000.0
    async with rooms_at(tmp_path, clocks={"monotonic_s": lambda: now_s}) as rooms:
        await rooms.commit("cold", step=100)
        await rooms.list_tiers()
        manifest = rooms.folder("cold", id_of(100)) / layout.MANIFEST
        away = manifest.rename(tmp_path / "manifest")
        await rooms.list_tiers()
        now_s += DELETION_S - 1
        await rooms.list_tiers()
        assert rooms.listers["cold"].lost == []
        assert rooms.incidents.recent() == []

        away.rename(manifest)
        await rooms.list_tiers()
        manifest.rename(away)
        now_s += 2
        await rooms.list_tiers()
        assert rooms.listers["cold"].lost == [], "it was there in between"

        now_s += DELETION_S
        await rooms.list_tiers()
        assert rooms.listers["cold"].lost == [id_of(100)]
        (incident,) = rooms.incidents.recent()
        assert incident.kind == "lost"


async def test_replica_that_disappears_from_hot_is_lost(rooms: Rooms) -> None:
    remove(rooms, "hot", 200)
    await rooms.list_tiers()
    assert lost_steps(rooms, "hot") == [200]
    assert rooms.count("tierd_lost_checkpoints_total", tier="hot") == 1.0


async def test_what_the_lifecycle_of_another_daemon_expires_is_not_lost(rooms: Rooms) -> None:
    """It knows newer checkpoints of the shared tier, of which this daemon learns in the same listing."""
    await rooms.commit("cold", step=400, sequence=14)
    remove(rooms, "cold", 100)
    await rooms.list_tiers()
    assert lost_steps(rooms) == []
    assert rooms.incidents.recent() == []
    assert rooms.catalog.tiers["cold"].missing == {}


async def test_nothing_of_a_run_is_reported_as_lost_while_one_of_its_manifests_cannot_be_read(rooms: Rooms) -> None:
    """Another daemon may have expired 100 because of 400, which is there and unreadable."""
    await rooms.commit("cold", step=400, sequence=14)
    manifest = rooms.folder("cold", id_of(400)) / layout.MANIFEST
    content = manifest.read_bytes()
    manifest.write_bytes(b"{")
    remove(rooms, "cold", 100)
    await rooms.list_tiers()
    assert lost_steps(rooms) == []
    manifest.write_bytes(content)
    await rooms.list_tiers()
    assert lost_steps(rooms) == []
    remove(rooms, "cold", 300)
    await rooms.list_tiers()
    assert lost_steps(rooms) == [300]


async def test_what_another_daemon_expires_during_a_listing_is_not_lost(rooms: Rooms) -> None:
    """The listing was begun before the newer checkpoint, and reads the folder of the expired one after its deletion."""
    store = rooms.cold["cold"].store
    real_list = store.list

    async def list_over_a_long_time(prefix: str = "", **options: str) -> list[StoredObject]:
        store.list = real_list  # type: ignore[method-assign]
        stored = await real_list(prefix)
        await rooms.commit("cold", step=400, sequence=14)
        remove(rooms, "cold", 100)
        return [each for each in stored if id_of(100).name not in each.key]

    store.list = list_over_a_long_time  # type: ignore[method-assign]
    await rooms.list_tiers()
    assert rooms.incidents.recent() == []
    assert lost_steps(rooms) == rooms.listers["cold"].lost == []


@pytest.mark.parametrize("step", [100, 400], ids=["given up by the policy", "kept by it"])
async def test_what_this_daemon_deletes_during_a_listing_is_not_lost(rooms: Rooms, step: int) -> None:
    """The listing lacks the checkpoint, and the catalog still has it, while a long deletion goes on. On a full disk hot
    also deletes what its policy keeps."""
    await rooms.commit("hot", "cold", step=400, sequence=14)
    await rooms.list_tiers()
    cold = rooms.cold["cold"]
    real_delete = cold.store.delete

    async def delete_slowly(keys: Sequence[str]) -> None:
        await real_delete(keys)
        await rooms.list_tiers("cold")

    cold.store.delete = delete_slowly  # type: ignore[method-assign]
    await cold.delete(id_of(step))
    rooms.catalog.drop(id_of(step), "cold")
    await rooms.list_tiers()
    assert rooms.incidents.recent() == []
    assert lost_steps(rooms) == []
    assert rooms.count("tierd_lost_checkpoints_total", tier="cold") == 0.0


async def test_what_a_failed_deletion_took_is_not_lost_until_it_is_there_again(rooms: Rooms) -> None:
    cold = rooms.cold["cold"]
    real_delete = cold.store.delete

    async def delete_in_part(keys: Sequence[str]) -> None:
        await real_delete(keys[:1])
        raise TierUnreachable("delete: 503")

    cold.store.delete = delete_in_part  # type: ignore[method-assign]
    with pytest.raises(TierUnreachable):
        await cold.delete(id_of(300))
    await rooms.list_tiers()
    assert rooms.incidents.recent() == []
    cold.store.delete = real_delete  # type: ignore[method-assign]
    await clear_uncommitted(cold, id_of(300))
    await rooms.list_tiers()
    await rooms.replicator().run_once()
    await rooms.list_tiers()
    remove(rooms, "cold", 300)
    await rooms.list_tiers()
    assert [incident.step for incident in rooms.incidents.recent()] == [300]


async def test_listing_that_lacks_what_is_there_changes_nothing(rooms: Rooms) -> None:
    """Some servers list a new object late, or answer a listing from a cache."""
    store = rooms.cold["cold"].store
    real_list = store.list

    async def list_late(prefix: str = "", **options: str) -> list[StoredObject]:
        return [stored for stored in await real_list(prefix) if prefix or id_of(300).name not in stored.key]

    store.list = list_late  # type: ignore[method-assign]
    with pytest.raises(TierUnreachable, match=r"000000000300-g0001 is there"):
        await rooms.list_tiers()
    entry = rooms.catalog.get(id_of(300))
    assert entry is not None
    assert "cold" in entry.tiers
    assert lost_steps(rooms) == []
    store.list = real_list  # type: ignore[method-assign]
    await rooms.list_tiers()
    assert rooms.catalog.tiers["cold"].is_known


async def test_disk_that_is_unmounted_during_a_listing_loses_nothing(rooms: Rooms) -> None:
    """The listing has read the marker, and then finds no folder of a run."""
    store = rooms.cold["cold"].store
    real_list = store.list
    root = rooms.folder("cold", id_of(300)).parents[1]

    async def unmount_in_between(prefix: str = "", **options: str) -> list[StoredObject]:
        stored = await real_list(prefix)
        if prefix:
            return stored
        root.rename(root.with_name("unmounted"))
        root.mkdir()
        return [each for each in stored if layout.parse_tier_marker(each.key)]

    store.list = unmount_in_between  # type: ignore[method-assign]
    with pytest.raises(TierUnreachable, match="has no marker"):
        await rooms.list_tiers("cold")
    assert lost_steps(rooms) == []
    assert len(rooms.catalog.manifests_in("cold")) == 4


async def test_loss_that_the_reaper_meets_is_reported(rooms: Rooms) -> None:
    """Before it evicts from hot, it looks into cold."""
    for step in (400, 500, 600):
        await rooms.commit("hot", "cold", step=step, sequence=step)
    await rooms.commit("hot", "cold", step=20, sequence=20)
    await rooms.list_tiers()
    remove(rooms, "cold", 20)
    await Reaper(rooms.context).run_once()
    assert 20 in rooms.steps("hot")
    assert ("relist", "cold") in rooms.events
    assert pending(rooms.catalog, rooms.config, "cold") == [id_of(20)], "it is copied again"
    await rooms.list_tiers()
    assert [incident.step for incident in rooms.incidents.recent()] == [20]


async def test_a_command_that_lists_twice_reports_no_loss(rooms: Rooms) -> None:
    remove(rooms, "cold", 300)
    await refresh(rooms.catalog, rooms.cold["cold"])
    assert rooms.incidents.recent() == []


async def test_look_waits_for_a_listing_that_began_after_it(rooms: Rooms) -> None:
    """One that had begun before may have read what has just been deleted."""
    lister = rooms.listers["cold"]
    store = rooms.cold["cold"].store
    real_list, has_read, may_end = store.list, asyncio.Event(), asyncio.Event()

    async def list_slowly(prefix: str = "", **options: str) -> list[StoredObject]:
        stored = await real_list(prefix)
        has_read.set()
        await may_end.wait()
        return stored

    store.list = list_slowly  # type: ignore[method-assign]
    async with asyncio.TaskGroup() as group:
        listing = group.create_task(lister.run_once())
        await has_read.wait()
        remove(rooms, "cold", 10)
        look = group.create_task(lister.look())
        while ("relist", "cold") not in rooms.events:
            await asyncio.sleep(0)
        may_end.set()
        await listing
        await asyncio.sleep(0)
        assert lost_steps(rooms) == []
        assert not look.done()
        await lister.run_once()
        await look
    assert lost_steps(rooms) == [10]


async def test_look_ends_when_the_tier_cannot_be_listed(rooms: Rooms) -> None:
    lister = Lister(rooms.context, rooms.cold["cold"], 10.0)

    async def fail(prefix: str = "", **options: str) -> list[StoredObject]:
        raise TierUnreachable("list: 503")

    rooms.cold["cold"].store.list = fail  # type: ignore[method-assign]
    async with asyncio.TaskGroup() as group:
        look = group.create_task(lister.look())
        await asyncio.sleep(0)
        with pytest.raises(TierUnreachable):
            await lister.run_once()
        await look
    assert lister.listed_s is None


async def test_listings_of_a_run_read_each_manifest_once_and_again_when_it_is_another(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[CheckpointId] = []
    manifests = Tier.manifests

    async def counted(tier: Tier, checkpoints: Sequence[CheckpointId], **options: Any) -> Any:
        read.extend(checkpoints)
        return await manifests(tier, checkpoints, **options)

    monkeypatch.setattr(Tier, "manifests", counted)
    for step in (400, 500):
        await rooms.commit("hot", step=step, sequence=step)
        for _ in range(2):
            await refresh_run(rooms.catalog, rooms.hot, RUN, rooms.context.identities)
    assert [checkpoint.step for checkpoint in read] == [400, 500]
    shutil.rmtree(rooms.folder("hot", id_of(500)))
    await rooms.commit("hot", step=500, sequence=7)
    await refresh_run(rooms.catalog, rooms.hot, RUN, rooms.context.identities)
    assert [checkpoint.step for checkpoint in read] == [400, 500, 500]
