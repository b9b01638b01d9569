"""A writer to a bucket puts back objects that were deleted: each has a right signature."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from tests.support.rooms import RUN, Rooms, rooms_at
from tierd.catalog.selectable import selectable_replicas
from tierd.config.sections import ColdPolicy, LifecycleConfig, TierPolicy
from tierd.format import layout, wire
from tierd.format.claim import Claim
from tierd.format.health import Diagnosis
from tierd.format.ids import CheckpointId, Generation
from tierd.format.signature import parse_keys
from tierd.lifecycle.selection import CheckpointQuery, select
from tierd.workers.reaper import Reaper

DAY_S = 86400.0


@pytest.fixture
async def rooms(tmp_path: Path) -> AsyncIterator[Rooms]:
    keyring = parse_keys("hmac-sha256:" + "01" * 32, where="test")
    async with rooms_at(tmp_path, keyring=keyring) as rooms:
        hot, cold = TierPolicy(keep_last=2, milestones=True), ColdPolicy(keep_last=2, milestones=True)
        rooms.config = msgspec.structs.replace(rooms.config, lifecycle=LifecycleConfig(hot=hot, cold=cold))
        yield rooms


async def persist(rooms: Rooms, step: int, generation: int) -> CheckpointId:
    snapshot_set = rooms.seal(step, [b"weights" * 1000], generation=generation)
    assert await rooms.persister().run_once()
    await rooms.list_tiers()
    await rooms.replicator().run_once()
    return snapshot_set.id


async def delete_and_keep_a_copy(rooms: Rooms, checkpoint: CheckpointId, copies: Path) -> None:
    shutil.copytree(rooms.folder("cold", checkpoint), copies / checkpoint.name)
    for name, tier in rooms.tiers.items():
        assert await tier.delete(checkpoint)
        rooms.catalog.drop(checkpoint, name)


def put_back(rooms: Rooms, checkpoint: CheckpointId, copies: Path) -> None:
    """Whoever can write to the bucket can also delete the tombstone."""
    folder = rooms.folder("cold", checkpoint)
    (folder / layout.GONE).unlink()
    shutil.copytree(copies / checkpoint.name, folder, dirs_exist_ok=True)


async def test_replayed_checkpoints_of_an_older_generation_are_not_newest_and_push_out_nothing(
    rooms: Rooms, tmp_path: Path
) -> None:
    old = [await persist(rooms, step, 1) for step in (900, 910, 920)]
    for checkpoint in old:
        await delete_and_keep_a_copy(rooms, checkpoint, tmp_path / "copies")
    new = [await persist(rooms, step, 2) for step in (100, 200)]
    for checkpoint in old:
        put_back(rooms, checkpoint, tmp_path / "copies")
    await rooms.list_tiers()
    await Reaper(rooms.context).run_once()
    await rooms.list_tiers()
    assert all(rooms.folder(tier, checkpoint).exists() for tier in rooms.tiers for checkpoint in new)
    shutil.rmtree(tmp_path / "hot" / RUN)  # a restore can only come from the bucket
    await rooms.list_tiers()
    assert select(CheckpointQuery(run=RUN), selectable_replicas(rooms.catalog)).candidate.id == new[-1]


async def test_replayed_checkpoint_of_the_same_generation_is_deleted_again(rooms: Rooms, tmp_path: Path) -> None:
    old = await persist(rooms, 100, 1)
    await delete_and_keep_a_copy(rooms, old, tmp_path / "copies")
    new = [await persist(rooms, step, 1) for step in (200, 300)]
    put_back(rooms, old, tmp_path / "copies")
    await rooms.list_tiers()
    await Reaper(rooms.context).run_once()
    assert {tier: rooms.steps(tier) for tier in rooms.tiers} == {"hot": [300, 200], "cold": [300, 200]}
    assert all(rooms.catalog.get(checkpoint) for checkpoint in new)


async def test_replayed_milestone_keeps_its_checkpoint_and_deletes_nothing(rooms: Rooms, tmp_path: Path) -> None:
    old = await persist(rooms, 100, 1)
    await rooms.cold["cold"].mark_milestone(old, "best", "now")
    await delete_and_keep_a_copy(rooms, old, tmp_path / "copies")
    for step in (200, 300):
        await persist(rooms, step, 1)
    put_back(rooms, old, tmp_path / "copies")
    await rooms.list_tiers()
    await Reaper(rooms.context).run_once()
    assert {tier: rooms.steps(tier) for tier in rooms.tiers} == {"hot": [300, 200], "cold": [300, 200, 100]}


async def test_replayed_claim_does_not_lower_the_generation(rooms: Rooms) -> None:
    cold = rooms.cold["cold"]
    for generation in (1, 2):
        assert await cold.claim_generation(RUN, Generation(generation), {})
    checkpoint = await persist(rooms, 100, 2)
    claim = rooms.folder("cold", checkpoint).parents[1] / layout.generation_key(RUN, Generation(1))
    content = claim.read_bytes()
    claim.unlink()
    await rooms.list_tiers()
    claim.write_bytes(content)
    await rooms.list_tiers()
    assert rooms.catalog.generation_max(RUN) == 2


async def test_marker_of_another_checkpoint_or_of_another_name_does_not_count(rooms: Rooms) -> None:
    """Each is signed, for its own place."""
    first, second = [await persist(rooms, step, 1) for step in (100, 200)]
    cold = rooms.cold["cold"]
    await cold.mark_milestone(first, "best", "now")
    await cold.mark_diagnosis(first, Diagnosis(healthy=False))
    there = rooms.folder("cold", first)
    moved = {
        "milestone-best.json": [rooms.folder("cold", second) / "milestone-best.json", there / "milestone-other.json"],
        "unhealthy.json": [rooms.folder("cold", second) / "unhealthy.json", there / "healthy.json"],
    }
    for name, places in moved.items():
        for place in places:
            place.write_bytes((there / name).read_bytes())
    await rooms.list_tiers()
    entries = {each: rooms.catalog.get(each) for each in (first, second)}
    found = {each: entry and (entry.all_milestones, entry.healthy) for each, entry in entries.items()}
    assert found == {first: ({"best"}, False), second: (frozenset(), None)}
    assert len(rooms.catalog.foreign()) == 4


async def test_replayed_verdict_makes_its_checkpoint_unhealthy_again(rooms: Rooms) -> None:
    checkpoint = await persist(rooms, 100, 1)
    await rooms.cold["cold"].mark_diagnosis(checkpoint, Diagnosis(healthy=False))
    verdict = rooms.folder("cold", checkpoint) / "unhealthy.json"
    content = verdict.read_bytes()
    verdict.unlink()
    await rooms.list_tiers()
    assert getattr(rooms.catalog.get(checkpoint), "healthy", ...) is None
    verdict.write_bytes(content)
    await rooms.list_tiers()
    assert getattr(rooms.catalog.get(checkpoint), "healthy", ...) is False


async def test_checkpoints_of_another_bucket_or_of_a_former_run_of_that_name_are_newest(
    rooms: Rooms, tmp_path: Path
) -> None:
    """A signature holds for a run name, with whatever else is signed by the same key: what a bucket writer can do."""
    await persist(rooms, 100, 1)
    old = await persist(rooms, 900, 5)
    await delete_and_keep_a_copy(rooms, old, tmp_path / "copies")
    await rooms.list_tiers()
    put_back(rooms, old, tmp_path / "copies")
    shutil.rmtree(tmp_path / "hot" / RUN)
    await rooms.list_tiers()
    assert select(CheckpointQuery(run=RUN), selectable_replicas(rooms.catalog)).candidate.id == old


@pytest.mark.parametrize(("age_s", "is_fenced"), [(30 * DAY_S, False), (DAY_S, True), (-30 * DAY_S, True)])
async def test_replayed_claim_of_a_run_that_had_expired_fences_nobody(
    rooms: Rooms, age_s: float, is_fenced: bool
) -> None:
    """A run that expired leaves no claim, so its next start has generation 1 again. A claim of a week ago, or of after
    this start, is that of a start on another node: both would write generation 1."""
    cold, now_s = rooms.cold["cold"], rooms.context.now().timestamp()
    assert await cold.claim_generation(RUN, Generation(1), Claim.new("here", now_s=now_s - age_s))
    assert await rooms.hot.claim_generation(RUN, Generation(1), Claim.new("here", now_s=now_s))
    rooms.seal(100, [b"weights" * 1000])
    assert await rooms.persister().run_once()
    await rooms.list_tiers()
    await rooms.replicator().run_once()
    assert bool([message for message in rooms.sent if isinstance(message, wire.Fenced)]) is is_fenced
    assert rooms.steps("cold") == ([] if is_fenced else [100])


async def test_without_a_key_the_time_in_a_claim_proves_nothing(tmp_path: Path) -> None:
    async with rooms_at(tmp_path) as rooms:
        cold, now_s = rooms.cold["cold"], rooms.context.now().timestamp()
        assert await cold.claim_generation(RUN, Generation(1), Claim.new("elsewhere", now_s=1.0))
        assert await rooms.hot.claim_generation(RUN, Generation(1), Claim.new("here", now_s=now_s))
        rooms.seal(100, [b"weights" * 1000])
        assert await rooms.persister().run_once()
        await rooms.list_tiers()
        await rooms.replicator().run_once()
        assert [message for message in rooms.sent if isinstance(message, wire.Fenced)]


async def test_replayed_checkpoint_without_its_verdict_does_not_push_out_the_newest_healthy_one(
    rooms: Rooms, tmp_path: Path
) -> None:
    """The unhealthy checkpoints were newer. Their verdicts are not put back."""
    healthy = await persist(rooms, 100, 1)
    for tier in rooms.tiers.values():
        await tier.mark_diagnosis(healthy, Diagnosis(healthy=True))
    unhealthy = [await persist(rooms, step, 1) for step in (200, 300, 400)]
    for checkpoint in unhealthy:
        await delete_and_keep_a_copy(rooms, checkpoint, tmp_path / "copies")
    for checkpoint in unhealthy:
        put_back(rooms, checkpoint, tmp_path / "copies")
    await rooms.list_tiers()
    await Reaper(rooms.context).run_once()
    assert 100 in rooms.steps("hot")
    assert 100 in rooms.steps("cold")
