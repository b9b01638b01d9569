"""Deletion: only what the plan gives up, and nothing because of missing knowledge."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from tests.support.hung_directory import hung_directory
from tests.support.rooms import RUN, Rooms, rooms_at
from tierd.catalog.decisions import HaltReason, decisions, halted, pending, to_reap
from tierd.catalog.listing import refresh
from tierd.config.sections import ColdPolicy, LifecycleConfig, TierPolicy
from tierd.errors import Retained, TierUnreachable
from tierd.format.health import Diagnosis
from tierd.format.ids import CheckpointId, Generation, Rank, checkpoint_id
from tierd.lifecycle.policy import Action, deletions
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.store import StoredObject
from tierd.workers.reaper import Reaper
from tierd.workers.retentions import RETENTION_S_MAX, RETENTION_S_MIN, Retentions

STEPS = (100, 200, 300, 400, 500)


@pytest.fixture
async def rooms(tmp_path: Path) -> AsyncIterator[Rooms]:
    """Five checkpoints of a run in hot and in cold; each keeps the last three."""
    async with rooms_at(tmp_path) as rooms:
        for number, step in enumerate(STEPS):
            await rooms.commit("hot", "cold", step=step, sequence=number + 1)
        await rooms.look()
        yield rooms


def reaper(rooms: Rooms) -> Reaper:
    return Reaper(rooms.context)


async def test_what_no_policy_keeps_is_deleted_from_every_tier(rooms: Rooms) -> None:

    assert await reaper(rooms).run_once()
    assert rooms.steps("hot") == rooms.steps("cold") == [500, 400, 300]
    assert sorted(manifest.step for manifest in rooms.catalog.manifests_in("hot")) == [300, 400, 500]
    assert rooms.events.count(("space_freed",)) == 4


async def test_rules_that_a_reload_raises_stop_deletions_of_the_pass_that_runs(rooms: Rooms) -> None:
    async def reload_after_the_first_deletion() -> None:
        while len(rooms.catalog.manifests_in("hot")) + len(rooms.catalog.manifests_in("cold")) == 2 * len(STEPS):
            await asyncio.sleep(0)
        lifecycle = LifecycleConfig(hot=TierPolicy(keep_last=4), cold=ColdPolicy(keep_last=4))
        rooms.context.reload(msgspec.structs.replace(rooms.config, lifecycle=lifecycle))

    await asyncio.gather(reaper(rooms).run_once(), reload_after_the_first_deletion())
    assert rooms.steps("hot") == rooms.steps("cold") == [500, 400, 300, 200]


async def test_hot_replica_stays_until_its_selected_cold_copy_is_there(rooms: Rooms) -> None:
    await rooms.commit("hot", step=600, sequence=10)  # every tenth goes to cold
    for step in (700, 800, 900):
        await rooms.commit("hot", "cold", step=step, sequence=step)
    await rooms.look()
    await reaper(rooms).run_once()
    assert 600 in rooms.steps("hot")
    await rooms.commit("cold", step=600, sequence=10)
    await rooms.look()
    await reaper(rooms).run_once()
    assert 600 not in rooms.steps("hot")
    assert 600 in rooms.steps("cold")


async def test_unreadable_manifest_stops_deletion_for_its_run_only(rooms: Rooms) -> None:
    for number, step in enumerate(STEPS):
        await rooms.commit("hot", "cold", step=step, sequence=number + 1, run="other")
    (rooms.folder("hot", CheckpointId(RUN, 300, 1)) / "manifest.json").write_text("{")  # type: ignore[arg-type]
    await rooms.look()
    await reaper(rooms).run_once()
    assert rooms.steps("hot") == [*reversed(STEPS)], "nothing is deleted, not even the unreadable one"
    assert rooms.steps("cold") == [*reversed(STEPS)]
    assert rooms.steps("hot", "other") == rooms.steps("cold", "other") == [500, 400, 300]
    assert [halt.reason for halt in halted(rooms.catalog)] == [HaltReason.UNREADABLE_MANIFEST]


async def test_a_cold_tier_that_cannot_be_listed_stops_deletions_that_depend_on_it(rooms: Rooms) -> None:
    rooms.catalog.listing_failed("cold", "503")
    assert all(action.tier == "hot" for action in deletions(decisions(rooms.catalog, rooms.config)))
    await reaper(rooms).run_once()
    assert rooms.steps("cold") == [*reversed(STEPS)]
    assert rooms.steps("hot") == [500, 400, 300], "hot still deletes what no policy keeps"


async def test_nothing_is_deleted_while_hot_cannot_be_listed(rooms: Rooms) -> None:
    rooms.catalog.listing_failed("hot", "I/O error")
    assert deletions(decisions(rooms.catalog, rooms.config)) == []


async def test_a_tier_that_refuses_deletions_does_not_delay_others(rooms: Rooms) -> None:
    """A bucket that refuses deletions must not fill the local disk."""

    async def refuse(keys: Sequence[str]) -> None:
        raise TierUnreachable(f"delete {keys[0]}: access denied")

    rooms.cold["cold"].store.delete = refuse  # type: ignore[method-assign]
    assert not await reaper(rooms).run_once()
    assert rooms.steps("hot") == [500, 400, 300]
    assert [incident.stage for incident in rooms.incidents.recent()] == ["reap"], "once per pass"


async def test_nothing_is_deleted_in_a_tier_without_deletions_and_hot_goes_on(rooms: Rooms) -> None:
    cold = [msgspec.structs.replace(each, deletes=False) for each in rooms.config.cold]
    rooms.config = msgspec.structs.replace(rooms.config, cold=cold)
    worker = reaper(rooms)
    assert await worker.run_once()
    assert rooms.steps("hot") == [500, 400, 300]
    assert rooms.steps("cold") == [*reversed(STEPS)]
    assert rooms.incidents.recent() == []
    assert to_reap(rooms.catalog, rooms.config) == {"cold": 2}
    left = [
        decision for decision in decisions(rooms.catalog, rooms.config) if "left to `tierd reap`" in decision.reason
    ]
    assert sorted(decision.checkpoint.step for decision in left) == [100, 200]


async def test_what_only_hot_keeps_is_not_counted_as_left_to_reap(rooms: Rooms) -> None:
    """`tierd reap` does not see hot: it keeps in cold what the policy of hot selects."""
    own = ColdPolicy(keep_last=1, keep_every=0)
    cold = [msgspec.structs.replace(each, deletes=False, lifecycle=own) for each in rooms.config.cold]
    rooms.config = msgspec.structs.replace(rooms.config, cold=cold)
    assert await reaper(rooms).run_once()
    planned = [each for each in decisions(rooms.catalog, rooms.config) if each.tier == "cold"]
    assert len(deletions(planned)) == 4
    assert to_reap(rooms.catalog, rooms.config) == {"cold": 2}


@pytest.mark.parametrize("another", ["hot", "other"])
async def test_a_cold_directory_that_hangs_does_not_stop_deletions_in_other_tiers(tmp_path: Path, another: str) -> None:
    """A hard-mounted NFS whose server is gone blocks every call, and no thread in it can be ended."""
    async with rooms_at(tmp_path, cold=("nas", "other")) as rooms:
        for number, step in enumerate(STEPS):
            await rooms.commit("nas", another, step=step, sequence=number + 1)
        await rooms.look()
        nas = rooms.cold["nas"].store
        assert isinstance(nas, DirectoryStore)
        nas.pool.timeout_s = 0.05
        with hung_directory(nas.root) as hung:
            assert not await reaper(rooms).run_once()
            assert hung.blocked
            assert rooms.steps(another) == [500, 400, 300]
            reported = [rooms.catalog.tiers["nas"].error, *(incident.message for incident in rooms.incidents.recent())]
            assert any("no answer within" in message for message in reported)
            hung.answer()
            nas.pool.timeout_s = 60.0
            await rooms.look()
            while not await reaper(rooms).run_once():
                await asyncio.sleep(0.01)
        assert rooms.steps("nas") == [500, 400, 300]


async def test_a_change_during_a_pass_leads_to_a_new_plan(rooms: Rooms) -> None:
    """A milestone that is marked during the first deletion prevents the second."""
    real_delete = rooms.hot_store.delete
    saved = CheckpointId(RUN, 200, 1)  # type: ignore[arg-type]

    async def delete_and_mark(keys: Sequence[str]) -> None:
        await real_delete(keys)
        rooms.hot_store.delete = real_delete  # type: ignore[method-assign]
        await rooms.hot.mark_milestone(saved, "best", "now")
        await refresh(rooms.catalog, rooms.hot)

    rooms.hot_store.delete = delete_and_mark  # type: ignore[method-assign]
    await reaper(rooms).run_once()
    assert 100 not in rooms.steps("cold")
    assert 200 in rooms.steps("cold")


async def test_deletions_are_those_among_the_decisions(rooms: Rooms) -> None:
    await rooms.commit("hot", step=600, sequence=6)
    await rooms.look()
    decided = decisions(rooms.catalog, rooms.config)
    shown = {(each.tier, int(each.checkpoint.step)) for each in decided if each.action in (Action.EVICT, Action.EXPIRE)}
    assert {tier for tier, _ in shown} == {"hot", "cold"}
    assert {decision.checkpoint.step for decision in decided} == {*STEPS, 600}
    before = {(tier, step) for tier in ("hot", "cold") for step in rooms.steps(tier)}
    assert await reaper(rooms).run_once()
    assert before - {(tier, step) for tier in ("hot", "cold") for step in rooms.steps(tier)} == shown


async def test_slots_of_departed_trainers_are_freed_after_the_grace_time(tmp_path: Path) -> None:
    async with rooms_at(tmp_path) as rooms:
        rooms.memory.enter(RUN, Generation(1), Rank(0), 1)
        rooms.memory.leave(RUN, Rank(0), now_s=-1e9)
        await reaper(rooms).run_once()
        assert ("run_forgotten", RUN) in rooms.events
        assert rooms.memory.runs() == []


async def test_hot_replica_stays_when_the_cold_one_was_deleted_after_the_last_listing(rooms: Rooms) -> None:
    """The listing may be minutes old, so a deletion checks the other replica again."""
    await rooms.commit("hot", "cold", step=600, sequence=10)
    for step in (700, 800, 900):
        await rooms.commit("hot", "cold", step=step, sequence=step)
    await rooms.look()
    lost = CheckpointId(RUN, 600, 1)  # type: ignore[arg-type]
    await rooms.cold["cold"].delete(lost)
    assert await reaper(rooms).run_once()
    assert 600 in rooms.steps("hot")
    assert pending(rooms.catalog, rooms.config, "cold") == [lost], "it is copied again"


@pytest.mark.parametrize("loss", ["deleted", "unmounted"])
async def test_cold_replica_stays_when_another_cold_tier_has_lost_the_last_listed_one(
    tmp_path: Path, loss: str
) -> None:
    """The policy of `dr` keeps every second checkpoint, and that of `cold` only the last one. None is in hot."""
    async with rooms_at(tmp_path, cold=("cold", "dr")) as rooms:
        own = {"cold": ColdPolicy(keep_last=1, keep_every=0), "dr": ColdPolicy(keep_last=1, keep_every=2)}
        tiers = [msgspec.structs.replace(tier, lifecycle=own[tier.name]) for tier in rooms.config.cold]
        rooms.config = msgspec.structs.replace(rooms.config, cold=tiers)
        for number, step in enumerate((100, 200, 300)):
            await rooms.commit("cold", "dr", step=step, sequence=number + 1)
        await rooms.look()
        if loss == "deleted":
            await rooms.cold["dr"].delete(CheckpointId(RUN, 200, 1))  # type: ignore[arg-type]
        else:
            os.rename(tmp_path / "dr", tmp_path / "unmounted")
        assert await reaper(rooms).run_once() == (loss == "deleted")
        assert 200 in rooms.steps("cold")
        assert ("relist", "dr") in rooms.events


async def test_hot_replica_stays_when_cold_has_a_tombstone_since(rooms: Rooms) -> None:
    """Another daemon was deleting the checkpoint there when it ended: the manifest is still there."""
    for tier in rooms.tiers.values():
        await tier.mark_milestone(CheckpointId(RUN, 200, 1), "best", "now")  # type: ignore[arg-type]
    await rooms.look()
    await rooms.cold["cold"].bury(CheckpointId(RUN, 200, 1))  # type: ignore[arg-type]
    await reaper(rooms).run_once()
    assert 200 in rooms.steps("hot")


async def test_hot_replica_stays_when_the_marker_of_its_milestone_has_disappeared_from_cold(rooms: Rooms) -> None:
    """Without the marker, the cold tier would expire the checkpoint."""
    for tier in rooms.tiers.values():
        await tier.mark_milestone(CheckpointId(RUN, 200, 1), "best", "now")  # type: ignore[arg-type]
    await rooms.look()
    (rooms.folder("cold", CheckpointId(RUN, 200, 1)) / "milestone-best.json").unlink()  # type: ignore[arg-type]
    assert await reaper(rooms).run_once()
    assert rooms.steps("hot") == [500, 400, 300, 200]


@pytest.mark.parametrize("save", ["this one", "another one", "not known"])
async def test_a_tombstone_of_another_save_with_the_same_id_leaves_hot_alone(tmp_path: Path, save: str) -> None:
    """Two nodes had claimed one generation while cold did not answer, and the other one has deleted its own step 40
    there. This node's step 40, the third, is selected for cold and is not there."""
    config = LifecycleConfig(hot=TierPolicy(keep_last=1), cold=ColdPolicy(keep_last=1, keep_every=3))
    async with rooms_at(tmp_path, lifecycle=config) as rooms:
        mine = await rooms.commit("hot", step=40, sequence=3)
        for step in (50, 60):
            await rooms.commit("hot", "cold", step=step, sequence=step)
        deleted = {"this one": mine.save_digest, "another one": "0" * 64, "not known": ""}[save]
        await rooms.cold["cold"].bury(mine.id, deleted)
        await rooms.look()
        assert await reaper(rooms).run_once()
        assert (40 in rooms.steps("hot")) == (save == "another one")
        assert await rooms.replicator().run_once()
        assert 40 not in rooms.steps("cold")  # not before the tombstone is cleared


@pytest.mark.parametrize("tier", ["hot", "cold"])
async def test_checkpoint_with_a_milestone_that_the_plan_did_not_know_stays(rooms: Rooms, tier: str) -> None:
    """Another machine may have set it after the last listing of the tier."""
    saved = CheckpointId(RUN, 200, 1)  # type: ignore[arg-type]
    await rooms.tiers[tier].mark_milestone(saved, "best", "now")
    assert await reaper(rooms).run_once()
    assert 200 in rooms.steps("cold")
    entry = rooms.catalog.get(saved)
    assert entry is not None
    assert entry.all_milestones == {"best"}
    assert 100 not in rooms.steps("cold")


async def test_a_verdict_that_the_plan_did_not_know_leads_to_a_new_plan(rooms: Rooms) -> None:
    """Another machine has examined it after the last listing. Hot has lost the checkpoint."""
    examined = checkpoint_id(RUN, 200, 1)
    await rooms.hot.delete(examined)
    await rooms.look()
    await rooms.cold["cold"].mark_diagnosis(examined, Diagnosis(healthy=True))
    assert await reaper(rooms).run_once()
    assert 200 in rooms.steps("cold"), "the newest that is known to be healthy"
    assert 100 not in rooms.steps("cold")


async def test_a_run_is_listed_again_before_its_first_deletion_where_no_worker_lists_it(rooms: Rooms) -> None:
    """Verdicts on newer checkpoints change which older ones are kept."""
    for step in (300, 400, 500):
        await rooms.cold["cold"].mark_diagnosis(checkpoint_id(RUN, step, 1), Diagnosis(healthy=False))
    await Reaper(rooms.context, lists_again=True).run_once()
    assert rooms.steps("cold")[-2:] == [200, 100], "those that may be healthy stay"


async def test_a_replica_that_another_process_has_deleted_is_not_reported_as_deleted_here(rooms: Rooms) -> None:
    await rooms.hot.delete(checkpoint_id(RUN, 100, 1))
    await rooms.look()
    await rooms.cold["cold"].delete(checkpoint_id(RUN, 100, 1))
    reported: list[tuple[str, int]] = []
    worker = Reaper(rooms.context, on_deletion=lambda each: reported.append((each.tier, each.checkpoint.step)))
    assert await worker.run_once()
    assert sorted(reported) == [("cold", 200), ("hot", 200)]
    assert checkpoint_id(RUN, 100, 1) not in [manifest.id for manifest in rooms.catalog.manifests_in("cold")]


@pytest.mark.parametrize("marked", ["hot", "cold"])
async def test_replica_with_the_only_verdict_stays_until_another_has_it(tmp_path: Path, marked: str) -> None:
    """Otherwise the unhealthy checkpoint would count as one that may be healthy, and a restart would get its NaN."""
    async with rooms_at(tmp_path, cold=("cold", "dr")) as rooms:
        cold, dr = rooms.config.cold
        keeps_unhealthy = msgspec.structs.replace(dr, lifecycle=ColdPolicy(keep_unhealthy=10))
        rooms.config = msgspec.structs.replace(rooms.config, cold=[cold, keeps_unhealthy])
        for step in (100, 200, 300):
            await rooms.commit(marked, "dr", step=step)
        for step in (100, 200):
            unhealthy = CheckpointId(RUN, step, 1)  # type: ignore[arg-type]
            await rooms.tiers[marked].mark_diagnosis(unhealthy, Diagnosis(healthy=False))
        await rooms.look()
        assert await reaper(rooms).run_once()
        assert rooms.steps(marked) == [300, 200, 100]
        await rooms.replicator("dr").run_once()
        assert len(list(rooms.folder("dr", unhealthy).parent.glob("*/unhealthy.json"))) == 2
        assert await reaper(rooms).run_once()
        assert 100 not in rooms.steps(marked)
        assert rooms.steps("dr") == [300, 200, 100]


async def test_an_unhealthy_verdict_stays_while_a_tier_that_may_have_the_checkpoint_is_not_known(rooms: Rooms) -> None:
    """A daemon that was killed after its copy, before it copied the marker: cold has not been listed yet."""
    for step, is_healthy in ((100, False), (200, False), (300, True)):
        checkpoint = CheckpointId(RUN, step, 1)  # type: ignore[arg-type]
        await rooms.tiers["hot"].mark_diagnosis(checkpoint, Diagnosis(healthy=is_healthy))
    await rooms.look()
    for step in (100, 300):
        rooms.catalog.drop(CheckpointId(RUN, step, 1), "cold")  # type: ignore[arg-type]
    rooms.catalog.listing_failed("cold", "not listed yet")
    await reaper(rooms).run_once()
    assert 100 in rooms.steps("hot")
    await rooms.look()
    assert await reaper(rooms).run_once()
    assert 100 not in rooms.steps("hot")
    assert 100 not in rooms.steps("cold"), "no policy keeps it"


async def test_an_unhealthy_verdict_stays_while_the_checkpoint_is_being_copied(rooms: Rooms) -> None:
    """The copy began before the verdict, so it has none, and it may be complete before the catalog has it."""
    for step in (100, 200):
        unhealthy = CheckpointId(RUN, step, 1)  # type: ignore[arg-type]
        await rooms.tiers["hot"].mark_diagnosis(unhealthy, Diagnosis(healthy=False))
    await rooms.look()
    copied = CheckpointId(RUN, 100, 1)  # type: ignore[arg-type]
    rooms.catalog.drop(copied, "cold")
    rooms.catalog.set_copying("cold", copied)
    await reaper(rooms).run_once()
    assert 100 in rooms.steps("hot")
    rooms.catalog.set_copying("cold", None)
    await rooms.look()
    assert await reaper(rooms).run_once()
    assert 100 not in rooms.steps("hot")


async def test_replica_with_the_only_verdict_is_deleted_after_the_others(rooms: Rooms) -> None:
    """No policy keeps the unhealthy step 100. Its cold replica is deleted before it gets the verdict."""
    for step in (100, 200):
        unhealthy = CheckpointId(RUN, step, 1)  # type: ignore[arg-type]
        await rooms.tiers["hot"].mark_diagnosis(unhealthy, Diagnosis(healthy=False))
    await rooms.look()
    assert await reaper(rooms).run_once()
    assert rooms.steps("hot") == [500, 400, 300, 200], "the newest unhealthy one stays in hot, as evidence"
    assert rooms.steps("cold") == [500, 400, 300]


@pytest.mark.parametrize("damage", [Path.unlink, lambda shard: shard.write_bytes(b"short")])
async def test_hot_replica_stays_when_the_cold_one_is_not_whole(rooms: Rooms, damage: Callable[[Path], object]) -> None:
    """Another daemon may have deleted a shard between its upload and the commit."""
    await rooms.commit("hot", "cold", step=600, sequence=10)
    for step in (700, 800, 900):
        await rooms.commit("hot", "cold", step=step, sequence=step)
    await rooms.look()
    damage(rooms.folder("cold", CheckpointId(RUN, 600, 1)) / "rank-00001-of-00002.safetensors")  # type: ignore[arg-type]
    await reaper(rooms).run_once()
    assert 600 in rooms.steps("hot")
    assert ("relist", "cold") in rooms.events, "the listing reports it, and the scrub repairs it from hot"
    assert rooms.incidents.recent()[0].kind == "corrupt"


@pytest.mark.parametrize("listed", ["cold", "hot"])
async def test_hot_replica_stays_when_the_plan_changes_during_the_last_listing(rooms: Rooms, listed: str) -> None:
    """A listing may take minutes. Meanwhile the cold tier can turn out to have lost its replica."""
    await rooms.commit("hot", "cold", step=600, sequence=10)
    for step in (700, 800, 900):
        await rooms.commit("hot", "cold", step=step, sequence=step)
    await rooms.look()
    lost = CheckpointId(RUN, 600, 1)  # type: ignore[arg-type]
    store = rooms.tiers[listed].store
    real_list = store.list

    async def list_slowly(prefix: str = "", **options: str) -> list[StoredObject]:
        objects = await real_list(prefix)
        if lost.name in prefix:
            rooms.catalog.drop(lost, "cold")
        return objects

    store.list = list_slowly  # type: ignore[method-assign]
    assert await reaper(rooms).run_once()
    assert 600 in rooms.steps("hot")


async def test_changes_that_leave_a_deletion_in_the_plan_do_not_delay_it(rooms: Rooms) -> None:
    """With many runs, something changes during every listing."""
    real_list = rooms.hot_store.list

    async def list_and_commit(prefix: str = "", **options: str) -> list[StoredObject]:
        objects = await real_list(prefix)
        rooms.catalog.changes += 1
        return objects

    rooms.hot_store.list = list_and_commit  # type: ignore[method-assign]
    async with asyncio.timeout(30):
        assert await reaper(rooms).run_once()
    assert rooms.steps("hot") == [500, 400, 300]


async def test_hot_replica_stays_while_the_cold_tier_does_not_answer(rooms: Rooms) -> None:
    await rooms.commit("hot", "cold", step=600, sequence=10)
    for step in (700, 800, 900):
        await rooms.commit("hot", "cold", step=step, sequence=step)
    await rooms.look()
    root = rooms.config.cold[0].url.removeprefix("file://")
    os.rename(root, root + "-unmounted")
    assert not await reaper(rooms).run_once()
    assert 600 in rooms.steps("hot")
    assert not rooms.catalog.tiers["cold"].is_known
    assert ("relist", "cold") in rooms.events, "or it would get no copy for ten minutes"


ONE, OTHER = checkpoint_id("run", 1, 1), checkpoint_id("run", 2, 1)


@pytest.mark.parametrize(
    ("remaining_s", "waits_s"),
    [(3600, 3600), (1, RETENTION_S_MIN), (10**7, RETENTION_S_MAX), (math.inf, RETENTION_S_MAX)],
)
def test_deletion_is_tried_again_after_the_retention_within_limits(remaining_s: float, waits_s: float) -> None:
    retentions = Retentions()
    retentions.add("cold", ONE, Retained("x", remaining_s=remaining_s), now_s=100.0)
    assert retentions.holds("cold", ONE, now_s=100 + waits_s - 1)
    assert not retentions.holds("cold", ONE, now_s=100 + waits_s)
    assert not retentions.holds("dr", ONE, now_s=100)
    assert not retentions.holds("cold", OTHER, now_s=100)


def test_first_retention_that_ends_is_due() -> None:
    retentions = Retentions()
    assert retentions.due_s == math.inf
    retentions.add("cold", ONE, Retained("x", remaining_s=100), now_s=0.0)
    retentions.add("cold", OTHER, Retained("x", remaining_s=200), now_s=0.0)
    assert retentions.due_s == 100
    retentions.forget_due(now_s=150.0)
    assert retentions.due_s == 200
    retentions.forget_due(now_s=200.0)
    assert retentions.due_s == math.inf


# ── when hot is full ──


async def test_a_full_hot_disk_evicts_what_cold_holds_beyond_the_policy(rooms: Rooms) -> None:
    assert await reaper(rooms).run_once()
    assert rooms.steps("hot") == [500, 400, 300]
    assert await reaper(rooms).make_room(50_000) == 80_000, "two checkpoints of 40,000 bytes"
    assert rooms.steps("hot") == [500]
    assert rooms.steps("cold") == [500, 400, 300]
    assert rooms.count("tierd_pressure_evictions_total") == 2
    assert await reaper(rooms).run_once()
    assert rooms.steps("cold") == [500, 400, 300], "cold keeps what hot's policy selects and hot no longer has"


async def test_room_is_made_first_of_what_no_policy_keeps(rooms: Rooms) -> None:
    assert await reaper(rooms).make_room(1) == 40_000
    assert rooms.steps("hot") == [500, 400, 300, 200]


@pytest.mark.parametrize("damage", ["manifest.json", "rank-00000-of-00002.safetensors"])
async def test_no_room_is_made_of_a_checkpoint_that_cold_has_lost_meanwhile(rooms: Rooms, damage: str) -> None:
    await reaper(rooms).run_once()
    (rooms.folder("cold", checkpoint_id(RUN, 300, 1)) / damage).unlink()
    assert await reaper(rooms).make_room(1) == 40_000
    assert rooms.steps("hot") == [500, 300], "the next one instead"


async def test_no_room_is_made_while_cold_does_not_answer(rooms: Rooms) -> None:
    await reaper(rooms).run_once()

    async def fails(prefix: str = "", **options: str) -> list[StoredObject]:
        raise TierUnreachable("list: no answer")

    rooms.cold["cold"].store.list = fails  # type: ignore[method-assign]
    assert await reaper(rooms).make_room(10**9) == 0
    assert rooms.steps("hot") == [500, 400, 300]
    assert "cold" in rooms.catalog.unlisted()


async def test_no_room_is_made_of_a_run_whose_manifest_in_hot_is_unreadable(rooms: Rooms) -> None:
    await reaper(rooms).run_once()
    (rooms.folder("hot", checkpoint_id(RUN, 400, 1)) / "manifest.json").write_text("{")
    await rooms.look()
    assert await reaper(rooms).make_room(10**9) == 0


async def test_making_room_does_not_wait_for_a_deletion_in_cold(rooms: Rooms) -> None:
    """Nor may it delete the replica that the deletion in cold counts on."""
    await reaper(rooms).run_once()
    async with rooms.context.lock(checkpoint_id(RUN, 300, 1)):
        assert await reaper(rooms).make_room(10**9) == 80_000
    assert rooms.steps("hot") == [300]


@pytest.mark.parametrize("is_listed", [False, True])
async def test_a_milestone_that_was_set_during_a_failed_deletion_is_put_back(rooms: Rooms, *, is_listed: bool) -> None:
    """By another machine, whose command has still seen the manifest. A listing may come before the next attempt, which
    is then not planned any more."""
    cold, expired = rooms.cold["cold"], CheckpointId(RUN, 100, 1)  # type: ignore[arg-type]
    real_delete = cold.store.delete

    async def delete_without_an_answer(keys: Sequence[str]) -> None:
        cold.store.delete = real_delete  # type: ignore[method-assign]
        await cold.mark_milestone(expired, "best", "now")
        await real_delete(keys)
        raise TierUnreachable("delete: no answer")

    cold.store.delete = delete_without_an_answer  # type: ignore[method-assign]
    worker = reaper(rooms)
    assert not await worker.run_once()
    assert expired in cold.deleting
    assert expired not in (await cold.listing()).committed
    if is_listed:
        await rooms.list_tiers()
    await worker.run_once()
    await rooms.list_tiers()
    await worker.run_once()
    listing = await cold.listing()
    assert expired in listing.committed
    assert listing.milestones(expired) == {"best"}
    assert not cold.deleting


async def test_a_loss_is_reported_after_a_deletion_that_failed_and_is_not_planned_any_more(rooms: Rooms) -> None:
    cold, kept = rooms.cold["cold"], CheckpointId(RUN, 100, 1)  # type: ignore[arg-type]
    real_delete = cold.store.delete

    async def refuse(keys: Sequence[str]) -> None:
        raise TierUnreachable("delete: no answer")

    cold.store.delete = refuse  # type: ignore[method-assign]
    worker = reaper(rooms)
    assert not await worker.run_once()
    cold.store.delete = real_delete  # type: ignore[method-assign]
    await cold.mark_milestone(kept, "best", "now")
    await rooms.list_tiers()
    assert await worker.run_once()
    assert kept in (await cold.listing()).committed
    shutil.rmtree(rooms.folder("cold", kept))
    await rooms.list_tiers("cold")
    assert rooms.count("tierd_lost_checkpoints_total", tier="cold") == 1.0


async def test_a_failed_eviction_for_room_that_has_deleted_the_manifest_is_no_loss(rooms: Rooms) -> None:
    """The policy keeps the checkpoint, so it is not planned any more. A listing may come at any time afterwards."""
    worker = reaper(rooms)
    await worker.run_once()
    hot, evicted = rooms.context.hot, CheckpointId(RUN, 300, 1)  # type: ignore[arg-type]
    real_delete = hot.store.delete

    async def delete_the_manifest_only(keys: Sequence[str]) -> None:
        if not keys[0].endswith("manifest.json"):
            raise TierUnreachable("delete: Input/output error")
        await real_delete(keys)

    hot.store.delete = delete_the_manifest_only  # type: ignore[method-assign]
    assert await worker.make_room(1) == 0
    hot.store.delete = real_delete  # type: ignore[method-assign]
    assert evicted in hot.deleting
    assert await worker.run_once()
    assert not hot.deleting
    await rooms.list_tiers()
    assert rooms.count("tierd_lost_checkpoints_total", tier="hot") == 0.0
    assert rooms.steps("hot") == [500, 400]
    assert not rooms.folder("hot", evicted).exists(), "its shards would fill the disk until the next start"
    assert rooms.steps("cold") == [500, 400, 300]


async def test_what_a_failed_deletion_has_left_in_hot_is_deleted_when_the_disk_works_again(rooms: Rooms) -> None:
    """Also of one that the policy had planned, where a listing comes before the next attempt. Until it has ended,
    nothing is reported as lost."""
    hot, expired = rooms.context.hot, CheckpointId(RUN, 100, 1)  # type: ignore[arg-type]
    real_delete = hot.store.delete
    is_broken = True

    async def delete_manifests_only(keys: Sequence[str]) -> None:
        await real_delete(keys[:1])
        if is_broken and len(keys) > 1:
            raise TierUnreachable("delete: Input/output error")

    hot.store.delete = delete_manifests_only  # type: ignore[method-assign]
    worker = reaper(rooms)
    for _ in range(3):
        assert not await worker.run_once()
        await rooms.list_tiers()
    assert rooms.folder("hot", expired).exists()
    is_broken = False
    hot.store.delete = real_delete  # type: ignore[method-assign]
    while not await worker.run_once():
        pass
    assert not rooms.folder("hot", expired).exists()
    assert not hot.deleting
    await rooms.list_tiers()
    assert rooms.count("tierd_lost_checkpoints_total", tier="hot") == 0.0
    assert rooms.steps("hot") == [500, 400, 300]


async def test_what_a_failed_deletion_has_left_in_cold_is_a_leftover_also_of_the_newest_generation(
    rooms: Rooms,
) -> None:
    """Without a tombstone it could be a copy that another node is making, and would stay as long as no newer generation
    begins."""
    cold, expired = rooms.cold["cold"], CheckpointId(RUN, 100, 1)  # type: ignore[arg-type]
    real_delete = cold.store.delete

    async def delete_without_an_answer(keys: Sequence[str]) -> None:
        await real_delete(keys)
        raise TierUnreachable("delete: no answer")

    cold.store.delete = delete_without_an_answer  # type: ignore[method-assign]
    worker = reaper(rooms)
    assert not await worker.run_once()
    cold.store.delete = real_delete  # type: ignore[method-assign]
    await rooms.list_tiers()
    assert await worker.run_once()
    await rooms.list_tiers()
    assert expired in (await cold.listing()).gone
    assert rooms.catalog.tiers["cold"].gone.keys() >= {expired}
    assert rooms.count("tierd_lost_checkpoints_total", tier="cold") == 0.0
