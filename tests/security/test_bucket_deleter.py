"""Someone who can delete objects in one cold tier, and nothing else: what that does to the other tiers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from tests.support.rooms import RUN, Rooms, rooms_at
from tierd.catalog.selectable import selectable_replicas
from tierd.config.sections import ColdPolicy, LifecycleConfig, TierPolicy
from tierd.format.health import Diagnosis
from tierd.format.ids import CheckpointId
from tierd.format.signature import parse_keys
from tierd.lifecycle.selection import CheckpointQuery, select
from tierd.workers.reaper import Reaper

KEYRING = parse_keys("hmac-sha256:" + "01" * 32, where="test")


@pytest.fixture(params=[("cold", "dr")])
async def rooms(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Rooms]:
    """Hot keeps one checkpoint, each of the cold tiers two."""
    async with rooms_at(tmp_path, keyring=KEYRING, cold=request.param) as rooms:
        lifecycle = LifecycleConfig(hot=TierPolicy(keep_last=1, milestones=False), cold=ColdPolicy(keep_last=2))
        rooms.config = msgspec.structs.replace(rooms.config, lifecycle=lifecycle)
        yield rooms


async def persist(rooms: Rooms, step: int, *, milestone: str | None = None) -> CheckpointId:
    snapshot_set = rooms.seal(step, [b"weights" * 1000], milestone=milestone)
    assert await rooms.persister().run_once()
    for name in rooms.cold:
        await rooms.list_tiers(name)
        await rooms.replicator(name).run_once()
    return snapshot_set.id


async def list_and_reap(rooms: Rooms) -> None:
    await rooms.list_tiers()
    await Reaper(rooms.context).run_once()
    await rooms.list_tiers()


@pytest.mark.parametrize("rooms", [("cold",)], indirect=True, ids=["one tier"])
@pytest.mark.parametrize("are_deleted", [True, False])
async def test_shards_that_are_deleted_below_their_manifest_let_hot_evict_nothing(
    rooms: Rooms, are_deleted: bool
) -> None:
    """The listing still shows the manifest."""
    first = await persist(rooms, 100)
    await persist(rooms, 200)
    for shard in rooms.folder("cold", first).glob("rank-*") if are_deleted else ():
        shard.unlink()
    await Reaper(rooms.context).run_once()  # with the listings from before
    await list_and_reap(rooms)
    assert rooms.steps("hot") == ([200, 100] if are_deleted else [200])


async def test_a_deleted_milestone_marker_unmarks_its_checkpoint_in_no_other_tier(rooms: Rooms) -> None:
    milestone = await persist(rooms, 100, milestone="best")
    (rooms.folder("cold", milestone) / "milestone-best.json").unlink()
    for step in (200, 300, 400):
        await persist(rooms, step)
    await list_and_reap(rooms)
    assert 100 in rooms.steps("dr")


async def test_a_deleted_verdict_makes_a_checkpoint_the_newest_only_where_no_other_replica_has_one(
    rooms: Rooms,
) -> None:
    await persist(rooms, 100)
    unhealthy = await persist(rooms, 200)
    for tier in rooms.tiers.values():
        await tier.mark_diagnosis(unhealthy, Diagnosis(healthy=False))
    for name, newest in (("cold", 100), ("dr", 100), ("hot", 200)):
        (rooms.folder(name, unhealthy) / "unhealthy.json").unlink()
        await rooms.list_tiers()
        assert select(CheckpointQuery(run=RUN), selectable_replicas(rooms.catalog)).candidate.id.step == newest, name
