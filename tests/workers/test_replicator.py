"""Copying from hot to one cold tier: what the lifecycle selects, and nothing that is damaged."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.cli import assert_same_files, flip_a_bit
from tests.support.rooms import RUN, Rooms, rooms_at
from tierd.catalog.decisions import decisions, deletions, pending, waiting
from tierd.catalog.listing import refresh
from tierd.config.sections import ColdPolicy, LifecycleConfig
from tierd.errors import TierUnreachable
from tierd.format import layout, wire
from tierd.format.health import Diagnosis
from tierd.format.ids import CheckpointId, Generation, Rank, checkpoint_id
from tierd.lifecycle.policy import Action
from tierd.tiers.store import StoredObject
from tierd.workers.leftovers import CLEARED_MAX, SEND_AGAIN_S

DAY_S = 86400.0


@pytest.fixture
async def rooms(tmp_path: Path) -> AsyncIterator[Rooms]:
    async with rooms_at(tmp_path, cold=("cold", "dr")) as rooms:
        yield rooms


async def test_milestones_are_copied_first_and_then_the_newest_selected_checkpoints(rooms: Rooms) -> None:
    for step in (100, 200, 300, 400, 500):
        await rooms.commit("hot", step=step, milestones=("best",) if step == 100 else ())
    await rooms.look()
    assert await rooms.replicator().run_once()
    assert [message.step for message in rooms.sent if isinstance(message, wire.Replicated)] == [100, 500, 400, 300]
    assert rooms.steps("cold") == [500, 400, 300, 100]
    assert rooms.steps("dr") == []
    newest = max(rooms.catalog.manifests_in("cold"), key=lambda manifest: manifest.step).id
    assert_same_files(rooms.folder("hot", newest), rooms.folder("cold", newest))
    assert rooms.count("tierd_bytes_total", tier="cold", direction="write") == 4 * 40_000


async def test_each_cold_tier_gets_what_its_own_lifecycle_selects(rooms: Rooms) -> None:
    cold, dr = rooms.config.cold
    dr = msgspec.structs.replace(dr, lifecycle=ColdPolicy(keep_last=1))
    rooms.config = msgspec.structs.replace(rooms.config, cold=[cold, dr])
    for step in (100, 200, 300):
        await rooms.commit("hot", step=step)
    await rooms.look()
    for name in ("cold", "dr"):
        assert await rooms.replicator(name).run_once()
    assert (rooms.steps("cold"), rooms.steps("dr")) == ([300, 200, 100], [300])
    assert waiting(rooms.catalog, rooms.config) == {"cold": [], "dr": []}
    assert {decision.action for decision in decisions(rooms.catalog, rooms.config)} == {Action.KEEP}


async def test_a_pass_with_nothing_to_copy_changes_nothing(rooms: Rooms) -> None:
    await rooms.commit("hot", "cold")
    await rooms.look()
    moment = rooms.catalog.changes
    assert await rooms.replicator().run_once()
    assert rooms.catalog.changes == moment


async def test_a_damaged_hot_replica_is_never_copied_and_does_not_delay_others(rooms: Rooms) -> None:
    damaged = await rooms.commit("hot", step=300)
    await rooms.commit("hot", step=200)
    await rooms.look()
    flip_a_bit(rooms.folder("hot", damaged.id) / "rank-00001-of-00002.safetensors")
    assert not await rooms.replicator().run_once()
    assert rooms.steps("cold") == [200]
    assert [(incident.stage, incident.kind, incident.step) for incident in rooms.incidents.recent()] == [
        ("replicate", "corrupt", 300)
    ]
    assert rooms.count("tierd_verify_failures_total", tier="hot") == 1


async def test_a_checkpoint_that_was_deleted_by_hand_is_not_an_error(rooms: Rooms) -> None:
    deleted = await rooms.commit("hot", step=300)
    await rooms.commit("hot", step=200)
    await rooms.look()
    await rooms.hot.delete(deleted.id)
    assert await rooms.replicator().run_once()
    assert rooms.steps("cold") == [200]


async def test_a_later_milestone_is_copied_to_cold(rooms: Rooms) -> None:
    manifest = await rooms.commit("hot", "cold")
    await rooms.look()
    await rooms.hot.mark_milestone(manifest.id, "best", "now")
    await refresh(rooms.catalog, rooms.hot)
    await rooms.replicator().run_once()
    assert (rooms.folder("cold", manifest.id) / "milestone-best.json").exists()
    entry = rooms.catalog.get(manifest.id)
    assert entry is not None
    assert entry.milestones["cold"] == {"best"}


async def test_a_removal_is_copied_to_cold_and_the_mark_is_not(rooms: Rooms) -> None:
    manifest = await rooms.commit("hot", "cold", milestones=("best",))
    (rooms.folder("cold", manifest.id) / "milestone-best.json").unlink()
    await rooms.hot.unmark_milestone(manifest.id, "best", "now")
    await rooms.look()
    await rooms.replicator().run_once()
    names = {path.name for path in rooms.folder("cold", manifest.id).iterdir()}
    assert "removed-milestone-best.json" in names
    assert "milestone-best.json" not in names
    entry = rooms.catalog.get(manifest.id)
    assert entry is not None
    assert entry.all_milestones == frozenset()


async def test_a_copy_of_a_former_milestone_gets_the_removal_only(rooms: Rooms) -> None:
    manifest = await rooms.commit("hot", milestones=("best",))
    await rooms.hot.unmark_milestone(manifest.id, "best", "now")
    await rooms.look()
    worker = rooms.replicator()
    for _ in range(3):
        await worker.run_once()
    names = {path.name for path in rooms.folder("cold", manifest.id).iterdir()}
    assert "removed-milestone-best.json" in names
    assert "milestone-best.json" not in names


async def test_marking_a_replica_that_is_deleted_meanwhile_does_not_add_it_to_the_catalog(tmp_path: Path) -> None:
    """Otherwise hot would be evicted because of a cold replica that does not exist."""
    lifecycle = LifecycleConfig(cold=ColdPolicy(milestones=False))
    async with rooms_at(tmp_path, lifecycle=lifecycle) as rooms:
        manifest = await rooms.commit("hot", "cold", milestones=("best",))
        (rooms.folder("cold", manifest.id) / "milestone-best.json").unlink()
        await rooms.look()
        cold = rooms.cold["cold"]
        real_put_bytes = cold.store.put_bytes

        async def mark_then_delete(key: str, content: bytes, *, if_absent: bool = False) -> bool:
            is_new = await real_put_bytes(key, content, if_absent=if_absent)
            cold.store.put_bytes = real_put_bytes  # type: ignore[method-assign]
            await cold.delete(manifest.id)
            rooms.catalog.drop(manifest.id, "cold")
            return is_new

        cold.store.put_bytes = mark_then_delete  # type: ignore[method-assign]
        worker = rooms.replicator()
        await worker._mark()
        entry = rooms.catalog.get(manifest.id)
        assert entry is not None
        assert entry.tiers == {"hot"}


async def test_no_marker_is_written_to_a_replica_after_its_deletion(rooms: Rooms) -> None:
    """The folder would stay without a manifest."""
    manifest = await rooms.commit("hot", "cold", milestones=("best",))
    folder = rooms.folder("cold", manifest.id)
    (folder / "milestone-best.json").unlink()
    await rooms.look()
    store = rooms.cold["cold"].store
    async with rooms.context.lock(manifest.id):  # as the reaper does, which lists the files and then deletes them
        keys = sorted(stored.key for stored in await store.list(layout.checkpoint_prefix(manifest.id)))
        marking = asyncio.ensure_future(rooms.replicator()._mark())
        await asyncio.wait({marking}, timeout=0.2)  # a replicator that does not wait for the deletion ends first
        await store.delete(keys)
        rooms.catalog.drop(manifest.id, "cold")
    await marking
    assert not folder.exists()
    assert rooms.catalog.get(manifest.id).tiers == {"hot"}  # type: ignore[union-attr]


async def test_an_unreachable_tier_is_reported_as_waiting_and_not_as_empty(rooms: Rooms) -> None:
    manifest = await rooms.commit("hot")
    await rooms.look()
    rooms.catalog.listing_failed("cold", "503")
    worker = rooms.replicator()
    assert pending(rooms.catalog, rooms.config, "cold") == []
    assert await worker.run_once()
    assert waiting(rooms.catalog, rooms.config) == {"cold": [manifest.id], "dr": [manifest.id]}
    assert await rooms.replicator("dr").run_once(), "the other region is not affected"
    assert waiting(rooms.catalog, rooms.config) == {"cold": [manifest.id], "dr": []}


async def test_a_copy_to_a_tier_that_failed_is_done_by_the_next_pass(rooms: Rooms) -> None:
    await rooms.commit("cold", step=50)
    await rooms.commit("hot", "dr")
    await rooms.look()
    root = rooms.folder("cold", rooms.catalog.manifests_in("hot")[0].id).parents[1]
    root.rename(root.with_name("unmounted"))
    with pytest.raises(TierUnreachable):
        await rooms.replicator().run_once()
    root.with_name("unmounted").rename(root)
    assert await rooms.replicator().run_once()
    assert rooms.steps("cold") == [100, 50]


async def test_a_checkpoint_that_cannot_be_read_does_not_block_others(rooms: Rooms) -> None:
    """A bad sector under the newest checkpoint looks like an error of the tier: it ends the pass, and the next pass
    starts with another checkpoint."""
    damaged = await rooms.commit("hot", step=300)
    await rooms.commit("hot", step=200)
    await rooms.look()
    worker = rooms.replicator()
    real_put = rooms.cold["cold"].store.put

    async def put(key: str, *arguments: object, **more: object) -> object:
        if damaged.id.name in key:
            raise TierUnreachable(f"read {key}: Input/output error")
        return await real_put(key, *arguments, **more)  # type: ignore[arg-type]

    rooms.cold["cold"].store.put = put  # type: ignore[method-assign, assignment]
    for _ in range(3):
        with pytest.raises(TierUnreachable):
            await worker.run_once()
    assert rooms.steps("cold") == [200]


def leave_uncommitted(rooms: Rooms, checkpoint: CheckpointId, *, age_s: float) -> Path:
    """Make the replica in cold one that a copy has not committed, and whose newest file is `age_s` old."""
    folder = rooms.folder("cold", checkpoint)
    (folder / "manifest.json").unlink()
    at_s = rooms.context.now().timestamp() - age_s
    for file, more_s in zip(sorted(folder.iterdir()), (1e6, 0.0), strict=True):
        os.utime(file, (at_s - more_s, at_s - more_s))
    return folder


async def test_files_of_a_killed_copy_are_deleted_when_the_checkpoint_is_not_selected(rooms: Rooms) -> None:
    """Only those of local runs: another node may be copying to a shared tier at this moment."""
    await rooms.commit("hot", "cold", step=900, generation=2)
    selected = await rooms.commit("hot", "cold", step=800, generation=2)
    for run in (RUN, "another-nodes-run"):
        leave_uncommitted(rooms, (await rooms.commit("cold", step=100, run=run)).id, age_s=2 * DAY_S)
    (rooms.folder("cold", selected.id) / "manifest.json").unlink()
    await rooms.look()
    assert await rooms.replicator().run_once()
    assert rooms.steps("cold") == [900, 800], "the selected checkpoint was copied completely"
    assert not rooms.folder("cold", checkpoint_id(RUN, 100, 1)).exists()
    assert rooms.folder("cold", checkpoint_id("another-nodes-run", 100, 1)).exists()


@pytest.mark.parametrize(
    ("generation", "age_s", "here", "is_deleted"),
    [
        (1, 2 * DAY_S, None, True),
        (1, DAY_S / 2, None, False),
        (2, 2 * DAY_S, None, False),
        (2, 2 * DAY_S, 2, True),
        (2, DAY_S / 2, 2, False),
        (3, 2 * DAY_S, 2, False),
    ],
)
async def test_files_that_another_node_may_be_copying_are_not_deleted(
    rooms: Rooms, generation: int, age_s: float, here: int | None, is_deleted: bool
) -> None:
    """A job moved to another node, which copies into the shared tier while this node still has the run in hot.
    `here`: the generation whose trainer is connected to this daemon."""
    await rooms.commit("hot", "cold", step=900, generation=2)
    copied = await rooms.commit("cold", step=1000, generation=generation)
    folder = leave_uncommitted(rooms, copied.id, age_s=age_s)
    if here is not None:
        rooms.memory.enter(RUN, Generation(here), Rank(0), 1)
    await rooms.look()
    assert await rooms.replicator().run_once()
    assert folder.exists() != is_deleted


async def test_files_of_a_copy_whose_source_was_deleted_stay_for_a_day(rooms: Rooms) -> None:
    """Another node may be copying the same checkpoint."""
    manifest = await rooms.commit("hot", step=300)
    await rooms.look()
    real_put, is_first_there = rooms.cold["cold"].store.put, asyncio.Event()

    async def put(key: str, *arguments: object, **more: object) -> object:
        if "rank-00001" in key:
            await is_first_there.wait()
            await rooms.hot.delete(manifest.id)
        entry = await real_put(key, *arguments, **more)  # type: ignore[arg-type]
        is_first_there.set()
        return entry

    rooms.cold["cold"].store.put = put  # type: ignore[method-assign, assignment]
    assert await rooms.replicator().run_once()
    assert [path.name for path in rooms.folder("cold", manifest.id).iterdir()] == ["rank-00000-of-00002.safetensors"]


def age_tombstone(rooms: Rooms, checkpoint: CheckpointId, *, age_s: float) -> Path:
    tombstone = rooms.folder("cold", checkpoint) / layout.GONE
    at_s = rooms.context.now().timestamp() - age_s
    os.utime(tombstone, (at_s, at_s))
    return tombstone


@pytest.mark.parametrize(("age_s", "is_deleted"), [(2 * DAY_S, True), (DAY_S / 2, False)])
async def test_a_tombstone_goes_after_a_day_and_costs_no_request_until_then(
    rooms: Rooms, age_s: float, is_deleted: bool
) -> None:
    """Also that of the run's newest generation, and when the run has ended."""
    await rooms.commit("hot", "cold", step=900)
    deleted = await rooms.commit("cold", step=100)
    cold = rooms.cold["cold"]
    await cold.delete(deleted.id)
    tombstone = age_tombstone(rooms, deleted.id, age_s=age_s)
    await rooms.look()
    listings, list_store = [], cold.store.list

    async def count(prefix: str = "", **options: str) -> list[StoredObject]:
        listings.append(prefix)
        return await list_store(prefix, **options)

    cold.store.list = count  # type: ignore[method-assign]
    assert await rooms.replicator().run_once()
    assert tombstone.exists() != is_deleted
    assert bool(listings) == is_deleted


async def test_what_is_whole_under_a_tombstone_is_not_deleted_with_it(rooms: Rooms) -> None:
    """A daemon was killed after it had written the tombstone, and another one had put a manifest there meanwhile,
    because a newer checkpoint is unhealthy: now this is the last healthy one. What a policy does not keep, is deleted
    by the policy."""
    kept = await rooms.commit("cold", step=100)
    cold = rooms.cold["cold"]
    await rooms.commit("hot", "cold", step=200, sequence=2)
    await cold.mark_diagnosis(checkpoint_id(RUN, 200, 1), Diagnosis(healthy=False))
    await cold.bury(kept.id, kept.save_digest)
    age_tombstone(rooms, kept.id, age_s=2 * DAY_S)
    for file in rooms.folder("cold", kept.id).iterdir():
        os.utime(file, (0, rooms.context.now().timestamp() - 2 * DAY_S))
    await rooms.look()
    assert await rooms.replicator().run_once()
    await rooms.look()
    assert kept.id in (await cold.listing()).committed


async def test_many_old_tombstones_do_not_delay_copies(rooms: Rooms) -> None:
    """A run that comes back to this node, or a policy that was changed a day ago: thousands are due at once."""
    await rooms.commit("hot", "cold", step=1)
    cold = rooms.cold["cold"]
    for step in range(1000, 1000 + 3 * CLEARED_MAX):
        await cold.bury(checkpoint_id(RUN, step, 1))
        age_tombstone(rooms, checkpoint_id(RUN, step, 1), age_s=2 * DAY_S)
    await rooms.commit("hot", step=900_000, sequence=2)
    await rooms.look()
    deleted_before: list[int] = []
    put, delete, deleted = cold.store.put, cold.store.delete, set[str]()

    async def count(keys: Sequence[str]) -> None:
        deleted.update(key for key in keys if key.endswith(layout.GONE))
        await delete(keys)

    async def note(*arguments: Any, **options: Any) -> Any:
        deleted_before.append(len(deleted))
        return await put(*arguments, **options)

    cold.store.put, cold.store.delete = note, count  # type: ignore[method-assign]
    worker = rooms.replicator()
    assert await worker.run_once()
    assert deleted_before
    assert deleted_before[0] <= CLEARED_MAX
    for _ in range(3):
        await worker.run_once()
    assert len(deleted) == 3 * CLEARED_MAX, "without another listing of the tier"


async def test_a_milestone_of_a_checkpoint_that_cold_has_deleted_is_sent_again_after_an_hour(rooms: Rooms) -> None:
    """Until then the daemon that has deleted it may still delete its files. Hot keeps it as long."""
    for step in (100, 200, 300, 400):
        await rooms.commit("hot", "cold", step=step)
    first = checkpoint_id(RUN, 100, 1)
    await rooms.cold["cold"].delete(first)
    await rooms.hot.mark_milestone(first, "best", "now")
    await rooms.look()
    worker = rooms.replicator()
    assert await worker.run_once()
    assert rooms.steps("cold") == [400, 300, 200]
    deleted = {decision.checkpoint for decision in deletions(decisions(rooms.catalog, rooms.config), rooms.config)}
    assert first not in deleted
    age_tombstone(rooms, first, age_s=SEND_AGAIN_S + 1)
    await rooms.look()
    assert await rooms.replicator().run_once()
    await rooms.look()
    assert await rooms.replicator().run_once()
    assert rooms.steps("cold") == [400, 300, 200, 100]


async def test_a_copy_ends_when_another_daemon_deletes_the_checkpoint_meanwhile(rooms: Rooms) -> None:
    manifest = await rooms.commit("hot", "cold", step=300)
    await rooms.commit("hot", "cold", step=400, sequence=2)
    cold = rooms.cold["cold"]
    await cold.store.delete([layout.manifest_key(manifest.id)])
    await rooms.look()
    real_put = cold.store.put

    async def put(key: str, *arguments: object, **more: object) -> object:
        await cold.bury(manifest.id)
        return await real_put(key, *arguments, **more)  # type: ignore[arg-type]

    cold.store.put = put  # type: ignore[method-assign, assignment]
    worker = rooms.replicator()
    assert await worker.run_once()
    assert rooms.steps("cold") == [400]
    assert [message for message in rooms.sent if isinstance(message, wire.Replicated)] == []
    assert rooms.incidents.recent() == []
    assert waiting(rooms.catalog, rooms.config)["cold"] == []


async def test_a_checkpoint_with_an_unreadable_manifest_in_cold_is_not_copied_again(rooms: Rooms) -> None:
    manifest = await rooms.commit("hot", "cold")
    (rooms.folder("cold", manifest.id) / "manifest.json").write_text("{")
    await rooms.look()
    assert await rooms.replicator().run_once()
    assert rooms.incidents.recent() == []


async def test_first_pass_sweeps_what_killed_writers_left_in_a_cold_directory(rooms: Rooms) -> None:
    await rooms.commit("cold")
    await rooms.look()
    left = rooms.folder("cold", checkpoint_id(RUN, 100, 1)) / "shard.0badcafe.partial"
    left.write_bytes(b"half")
    assert await rooms.replicator().run_once()
    assert not left.exists()


@pytest.mark.parametrize("refused", ["delete", "remove_unfinished"])
async def test_leftovers_that_cannot_be_deleted_delay_no_copy(rooms: Rooms, refused: str) -> None:
    """The credential may not delete, or a folder is another user's. The others are still cleared."""
    await rooms.commit("hot", "cold", step=900, generation=2)
    for step in (100, 200, 300):
        leave_uncommitted(rooms, (await rooms.commit("cold", step=step)).id, age_s=2 * DAY_S)
    await rooms.commit("hot", step=1000, generation=2, sequence=2)
    await rooms.look()
    store = rooms.cold["cold"].store
    delete = store.delete

    async def refuse(keys: Sequence[str]) -> None:
        if "000200" in keys[0]:
            raise TierUnreachable(f"delete {keys[0]}: access denied")
        await delete(keys)

    async def refuse_all(*_: object, **options: object) -> int:
        raise TierUnreachable("look for abandoned uploads: access denied")

    if refused == "delete":
        store.delete = refuse  # type: ignore[method-assign]
    else:
        store.remove_unfinished = refuse_all  # type: ignore[method-assign]
    worker = rooms.replicator()
    for _ in range(4):
        assert await worker.run_once()
    assert rooms.steps("cold") == [1000, 900]
    left = [step for step in (100, 200, 300) if rooms.folder("cold", checkpoint_id(RUN, step, 1)).exists()]
    assert left == ([200] if refused == "delete" else [])
    assert [incident.count for incident in rooms.incidents.recent()] == [1], "once in a sweep"


async def test_a_marker_that_cannot_be_written_delays_neither_copies_nor_other_markers(rooms: Rooms) -> None:
    for step in (100, 200, 300):
        await rooms.commit("hot", "cold", step=step, sequence=step)
        await rooms.hot.mark_milestone(checkpoint_id(RUN, step, 1), "best", "now")
    await rooms.commit("hot", step=1000, sequence=1000)
    await rooms.look()
    cold = rooms.cold["cold"]
    put_bytes = cold.store.put_bytes
    is_refused = True

    async def refuse(key: str, content: bytes, *, if_absent: bool = False) -> bool:
        if is_refused and "000200" in key:
            raise TierUnreachable(f"write {key}: permission denied")
        return await put_bytes(key, content, if_absent=if_absent)

    cold.store.put_bytes = refuse  # type: ignore[method-assign]
    worker = rooms.replicator()
    for _ in range(2):
        assert not await worker.run_once()
    assert rooms.steps("cold") == [1000, 300, 200, 100]
    is_refused = False
    assert await worker.run_once()
    listing = await cold.listing()
    assert [listing.milestones(checkpoint_id(RUN, step, 1)) for step in (100, 200, 300)] == 3 * [{"best"}]
