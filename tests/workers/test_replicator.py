"""From hot to one cold tier: what the lifecycle selects, byte by byte, and nothing that is damaged."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from tests.support.cli import assert_same_files, flip_a_bit
from tests.support.rooms import RUN, Rooms, rooms_at
from tierd.config import ColdPolicy, LifecycleConfig
from tierd.decisions import decisions, waiting
from tierd.errors import TierUnreachable
from tierd.format import wire
from tierd.format.ids import checkpoint_id
from tierd.lifecycle.policy import Action
from tierd.listing import refresh


@pytest.fixture
async def rooms(tmp_path: Path) -> AsyncIterator[Rooms]:
    async with rooms_at(tmp_path, cold=("cold", "dr")) as found:
        yield found


async def test_selected_checkpoints_are_copied_newest_first_and_milestones_before_all(rooms: Rooms) -> None:
    for step in (100, 200, 300, 400, 500):
        await rooms.commit("hot", step=step, milestones=("best",) if step == 100 else ())
    await rooms.look()
    assert await rooms.replicator().run_once()
    assert [message.step for message in rooms.told if isinstance(message, wire.Replicated)] == [100, 500, 400, 300]
    assert rooms.steps("cold") == [500, 400, 300, 100]
    assert rooms.steps("dr") == []
    one = max(rooms.catalog.held("cold"), key=lambda manifest: manifest.step).id
    assert_same_files(rooms.folder("hot", one), rooms.folder("cold", one))
    assert rooms.count("tierd_bytes_total", tier="cold", direction="write") == 4 * 40_000


async def test_each_cold_tier_is_sent_what_its_own_lifecycle_selects(rooms: Rooms) -> None:
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
    assert {one.action for one in decisions(rooms.catalog, rooms.config)} == {Action.KEEP}


async def test_pass_with_nothing_to_copy_changes_nothing(rooms: Rooms) -> None:
    await rooms.commit("hot", "cold")
    await rooms.look()
    moment = rooms.catalog.moment()
    assert await rooms.replicator().run_once()
    assert rooms.catalog.moment() == moment


async def test_damaged_hot_replica_is_never_copied_and_holds_up_no_other(rooms: Rooms) -> None:
    hurt = await rooms.commit("hot", step=300)
    await rooms.commit("hot", step=200)
    await rooms.look()
    flip_a_bit(rooms.folder("hot", hurt.id) / "rank-00001-of-00002.safetensors")
    assert not await rooms.replicator().run_once()
    assert rooms.steps("cold") == [200]
    assert [(one["stage"], one["kind"], one["step"]) for one in rooms.incidents.recent()] == [
        ("replicate", "corrupt", 300)
    ]
    assert rooms.count("tierd_verify_failures_total", tier="hot") == 1


async def test_checkpoint_deleted_by_hand_is_no_trouble(rooms: Rooms) -> None:
    gone = await rooms.commit("hot", step=300)
    await rooms.commit("hot", step=200)
    await rooms.look()
    await rooms.hot.delete(gone.id)
    assert await rooms.replicator().run_once()
    assert rooms.steps("cold") == [200]


async def test_milestone_marked_later_is_marked_in_cold_too(rooms: Rooms) -> None:
    one = await rooms.commit("hot", "cold")
    await rooms.look()
    await rooms.hot.mark_milestone(one.id, "best", "now")
    await refresh(rooms.catalog, rooms.hot)
    await rooms.replicator().run_once()
    assert (rooms.folder("cold", one.id) / "milestone-best.json").exists()
    entry = rooms.catalog.get(one.id)
    assert entry is not None
    assert entry.milestones["cold"] == {"best"}


async def test_milestone_that_arrives_with_a_deletion_does_not_bring_the_replica_back(tmp_path: Path) -> None:
    """Else hot would be evicted for a cold replica that is not there."""
    lifecycle = LifecycleConfig(cold=ColdPolicy(milestones=False))
    async with rooms_at(tmp_path, lifecycle=lifecycle) as rooms:
        one = await rooms.commit("hot", "cold", milestones=("best",))
        (rooms.folder("cold", one.id) / "milestone-best.json").unlink()
        await rooms.look()
        real_mark = rooms.cold["cold"].mark_milestone

        async def mark_then_lose(*arguments: object) -> None:
            await real_mark(*arguments)  # type: ignore[arg-type]
            await rooms.cold["cold"].delete(one.id)
            rooms.catalog.drop(one.id, "cold")

        rooms.cold["cold"].mark_milestone = mark_then_lose  # type: ignore[method-assign, assignment]
        worker = rooms.replicator()
        await worker._mark()
        entry = rooms.catalog.get(one.id)
        assert entry is not None
        assert entry.tiers == {"hot"}


async def test_tier_out_of_reach_is_told_as_waiting_not_as_empty(rooms: Rooms) -> None:
    one = await rooms.commit("hot")
    await rooms.look()
    rooms.catalog.lost_tier("cold", "503")
    worker = rooms.replicator()
    assert worker.pending() == []
    assert await worker.run_once()
    assert waiting(rooms.catalog, rooms.config) == {"cold": [one.id], "dr": [one.id]}
    assert await rooms.replicator("dr").run_once(), "the other region goes on"
    assert waiting(rooms.catalog, rooms.config) == {"cold": [one.id], "dr": []}


async def test_tier_that_fails_in_the_middle_is_tried_again_by_the_loop(rooms: Rooms) -> None:
    await rooms.commit("cold", step=50)
    await rooms.commit("hot", "dr")
    await rooms.look()
    root = rooms.folder("cold", rooms.catalog.held("hot")[0].id).parents[1]
    root.rename(root.with_name("unmounted"))
    with pytest.raises(TierUnreachable):
        await rooms.replicator().run_once()
    root.with_name("unmounted").rename(root)
    assert await rooms.replicator().run_once()
    assert rooms.steps("cold") == [100, 50]


async def test_checkpoint_that_a_disk_cannot_read_holds_up_no_other_for_long(rooms: Rooms) -> None:
    """One bad sector under the newest: it looks like the tier's fault, so the pass ends, and the next begins with
    another."""
    hurt = await rooms.commit("hot", step=300)
    await rooms.commit("hot", step=200)
    await rooms.look()
    worker = rooms.replicator()
    real_put = rooms.cold["cold"].store.put

    async def put(key: str, *arguments: object, **more: object) -> object:
        if hurt.id.name in key:
            raise TierUnreachable(f"read {key}: Input/output error")
        return await real_put(key, *arguments, **more)  # type: ignore[arg-type]

    rooms.cold["cold"].store.put = put  # type: ignore[method-assign, assignment]
    for _ in range(3):
        with pytest.raises(TierUnreachable):
            await worker.run_once()
    assert rooms.steps("cold") == [200]


async def test_leftovers_of_a_killed_copy_go_once_nobody_wants_the_checkpoint(rooms: Rooms) -> None:
    """Only of a run that lives here: a shared tier may hold what another node is copying right now."""
    await rooms.commit("hot", "cold", step=900)
    wanted = await rooms.commit("hot", "cold", step=800)
    for step, run in ((100, RUN), (100, "another-nodes-run")):
        await rooms.commit("cold", step=step, run=run)
        (rooms.folder("cold", checkpoint_id(run, step, 1)) / "manifest.json").unlink()
    (rooms.folder("cold", wanted.id) / "manifest.json").unlink()
    await rooms.look()
    assert await rooms.replicator().run_once()
    assert rooms.steps("cold") == [900, 800], "what is still wanted was copied whole"
    assert not rooms.folder("cold", checkpoint_id(RUN, 100, 1)).exists()
    assert rooms.folder("cold", checkpoint_id("another-nodes-run", 100, 1)).exists()


async def test_unreadable_manifest_in_cold_is_not_written_against_again_and_again(rooms: Rooms) -> None:
    found = await rooms.commit("hot", "cold")
    (rooms.folder("cold", found.id) / "manifest.json").write_text("{")
    await rooms.look()
    assert await rooms.replicator().run_once()
    assert rooms.incidents.recent() == []
