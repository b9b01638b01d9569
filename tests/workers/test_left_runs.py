"""Parts of a run over several nodes whose trainers are on other nodes now: they go after a week, if cold has as new."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from tests.support.rooms import RUN, Rooms, rooms_at
from tests.support.store_contract import BytesSource
from tierd.catalog.decisions import decisions
from tierd.config.sections import ColdPolicy, LifecycleConfig, TierPolicy
from tierd.errors import TierUnreachable
from tierd.format import layout, wire
from tierd.format.checksum import CHUNK_BYTES
from tierd.format.claim import Claim
from tierd.format.health import Diagnosis
from tierd.format.ids import HOT, Generation, Rank, checkpoint_id
from tierd.format.manifest import FileEntry
from tierd.format.node_file import assemble
from tierd.lifecycle.policy import Action
from tierd.workers.left_runs import RESTART_S
from tierd.workers.reaper import Reaper

NODE = wire.NodeRanks(ranks=[1], lowest=[0, 1], claim="ab" * 16, base=0)
DAY_S = 86400.0


class Clock:
    """Both clocks; the wall clock may jump."""

    def __init__(self) -> None:
        self.elapsed_s = 0.0
        self.jumped_s = 0.0

    def now(self) -> datetime:
        return datetime.now(UTC) + timedelta(seconds=self.elapsed_s + self.jumped_s)

    def monotonic_s(self) -> float:
        return self.elapsed_s


class OneNode:
    """The node of rank 1. `reaper`: of the daemon that runs now."""

    def __init__(self, rooms: Rooms, clock: Clock) -> None:
        self.rooms, self.clock = rooms, clock
        self.reaper = Reaper(rooms.context)

    async def persist(self, *steps: int, **fields: object) -> None:
        """Its parts of these steps, of trainers that leave afterwards."""
        for step in steps:
            content = [f"rank 1 step {step}".encode()]
            self.rooms.seal(step, content, node=NODE, world_size=2, **{"number": step, **fields})
            await self.rooms.persister().run_once()
        await self.reaper.run_once()
        self.leave()

    def leave(self) -> None:
        for rank in self.rooms.memory.present(RUN):
            self.rooms.memory.leave(RUN, rank, now_s=self.clock.elapsed_s)
        self.rooms.memory.forget_departed(now_s=1e12, grace_s=0.0)

    async def in_cold(self, step: int, tier: str = "cold", **more: object) -> None:
        """Another node has committed it."""
        await self.rooms.commit(tier, step=step, generation=2, **more)  # type: ignore[arg-type]
        await self.list_tier(tier)

    async def commit_whole(self, step: int) -> None:
        """The checkpoint of this part, with that of rank 0."""
        (part,) = [each for each in self.rooms.catalog.parts(RUN) if each.step == step]
        cold, entries = self.rooms.cold["cold"], list[FileEntry]()
        for rank in (0, 1):
            shard, key = f"rank {rank} step {step}".encode(), layout.file_key(part.id, layout.shard_name(Rank(rank), 2))
            entries.append(
                await cold.store.put(key, BytesSource(shard), size_bytes=len(shard), chunk_bytes=CHUNK_BYTES)
            )
        await cold.commit(assemble([msgspec.structs.replace(part, ranks=[0], files=entries[:1]), part]))

    async def list_tier(self, tier: str = "cold") -> None:
        """As once a day: until then this node only looks at what it holds."""
        self.rooms.listers[tier].must_list = True
        await self.rooms.list_tiers(tier)

    async def after(self, days: float, *, restarts: bool = False) -> list[int]:
        """The steps of the parts in hot after so many days."""
        if restarts:
            self.clock.elapsed_s += days * DAY_S
            self.restart()
            return await self.reap()
        await self.reaper.run_once()
        self.clock.elapsed_s += days * DAY_S
        return await self.reap()

    def restart(self) -> None:
        self.rooms.catalog.left = {}
        self.rooms.catalog.everywhere.clear()
        self.reaper = Reaper(self.rooms.context)

    async def reap(self) -> list[int]:
        assert await self.reaper.run_once()
        return self.steps

    @property
    def steps(self) -> list[int]:
        folder = self.rooms.folder("hot", checkpoint_id(RUN, 1, 1)).parent
        return sorted(int(each.parent.name[:12]) for each in folder.glob("*/node-*.json"))


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[OneNode]:
    """Cold keeps three and milestones, as hot does. It has step 5 of a later start, and its part of no step."""
    clock = Clock()
    rules = LifecycleConfig(hot=TierPolicy(keep_last=3), cold=ColdPolicy(keep_last=1, keep_every=0))
    clocks = {"now": clock.now, "monotonic_s": clock.monotonic_s}
    async with rooms_at(tmp_path, clocks=clocks, lifecycle=rules) as rooms:
        await rooms.list_tiers()
        rooms.catalog.set_copying("cold", None)
        yield OneNode(rooms, clock)


def reasons(node: OneNode) -> list[str]:
    return [each.reason for each in decisions(node.rooms.catalog, node.rooms.config) if each.tier == HOT]


async def test_parts_of_a_run_that_goes_on_elsewhere_are_deleted_after_a_week(node: OneNode) -> None:
    await node.persist(1, 2, 3)
    await node.in_cold(5)
    assert await node.after(6.9) == [1, 2, 3]
    assert reasons(node) == ["last 3"] * 3
    assert await node.after(0.2) == []
    assert node.rooms.catalog.in_tier(HOT) == {}
    assert node.rooms.steps("cold") == [5]


async def test_the_reason_says_since_when_and_what_cold_has(node: OneNode) -> None:
    await node.persist(1)
    await node.in_cold(5)
    await node.after(0)
    node.clock.elapsed_s += 8 * DAY_S
    await node.reaper._left_runs.look()
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    (decision,) = [each for each in decisions(node.rooms.catalog, node.rooms.config) if each.tier == HOT]
    assert decision.action is Action.EXPIRE
    assert decision.reason == f"its run has left this node, no new file since {today}; cold has 000000000005-g0002"
    (shown,) = decisions(node.rooms.catalog, node.rooms.config, only=checkpoint_id(RUN, 1, 1))
    assert shown == decision


async def test_a_part_that_cold_has_whole_is_evicted(node: OneNode) -> None:
    await node.persist(1)
    await node.rooms.commit("cold", step=9, generation=1)
    await node.list_tier()
    assert await node.after(8) == []


async def test_parts_newer_than_cold_stay_for_ever(node: OneNode) -> None:
    await node.persist(1, 2)
    assert await node.after(30) == [1, 2]
    await node.rooms.commit("cold", step=1, generation=1)
    node.rooms.config = msgspec.structs.replace(node.rooms.config)
    assert 2 in await node.after(30)


async def test_nothing_goes_while_cold_is_not_known(node: OneNode) -> None:
    await node.persist(1)
    await node.in_cold(5)
    await node.after(0)
    node.rooms.catalog.listing_failed("cold", "503")
    assert await node.after(8) == [1]


async def test_trainers_that_come_back_stop_it_also_in_the_middle_of_a_deletion(node: OneNode) -> None:
    await node.persist(1, 2)
    await node.in_cold(5)
    await node.after(0)
    node.clock.elapsed_s += 8 * DAY_S
    listing = node.rooms.cold["cold"].store.list

    async def list_and_join(prefix: str = "", **options: object) -> object:
        """The trainers join while the reaper looks at cold."""
        if RUN not in node.rooms.memory.runs():
            node.rooms.memory.enter(RUN, Generation(3), Rank(1), 2, NODE)
        return await listing(prefix, **options)  # type: ignore[arg-type]

    node.rooms.cold["cold"].store.list = list_and_join  # type: ignore[method-assign, assignment]
    assert await node.reap() == [1, 2]
    assert node.rooms.catalog.left == {}


async def test_cold_is_looked_at_again_before_a_part_goes(node: OneNode) -> None:
    await node.persist(1)
    await node.in_cold(5)
    await node.after(0)
    await node.rooms.cold["cold"].delete(checkpoint_id(RUN, 5, 2))
    assert await node.after(8) == [1]
    assert ("relist", "cold") in node.rooms.events


async def test_a_newer_one_in_cold_that_has_lost_a_file_replaces_nothing(node: OneNode) -> None:
    await node.persist(1)
    await node.in_cold(5)
    await node.after(0)
    (node.rooms.folder("cold", checkpoint_id(RUN, 5, 2)) / layout.shard_name(Rank(1), 2)).unlink()
    assert await node.after(8) == [1]


async def test_an_unhealthy_or_unreadable_newer_one_replaces_nothing(node: OneNode) -> None:
    await node.persist(1)
    await node.in_cold(5)
    await node.rooms.cold["cold"].mark_diagnosis(checkpoint_id(RUN, 5, 2), Diagnosis(healthy=False))
    await node.rooms.list_tiers("cold")
    assert await node.after(8) == [1]
    await node.in_cold(6)
    (node.rooms.folder("cold", checkpoint_id(RUN, 6, 2)) / layout.MANIFEST).write_bytes(b"{")
    await node.rooms.list_tiers("cold")
    assert await node.after(8) == [1]


async def test_a_newer_one_that_no_claim_of_the_run_covers_replaces_nothing(node: OneNode) -> None:
    own = Claim(claim="ab" * 16)
    assert await node.rooms.context.claim(node.rooms.hot, RUN, Generation(1), own)
    assert await node.rooms.context.claim(node.rooms.cold["cold"], RUN, Generation(1), own)
    await node.persist(1)
    await node.in_cold(5)
    await node.rooms.list_tiers()
    assert await node.after(8) == [1]
    assert await node.rooms.context.claim(node.rooms.cold["cold"], RUN, Generation(2), Claim.new("other"))
    await node.in_cold(6)
    assert await node.after(0) == []


async def test_a_milestone_stays_until_cold_has_it_itself(node: OneNode) -> None:
    await node.persist(1)
    await node.persist(2, milestone="best")
    await node.in_cold(5)
    rules = LifecycleConfig(hot=TierPolicy(milestones=True), cold=ColdPolicy(keep_last=1, milestones=False))
    node.rooms.context.reload(msgspec.structs.replace(node.rooms.config, lifecycle=rules))
    assert await node.after(8) == [2]


async def test_what_stays_makes_no_checkpoint_in_cold_seem_to_be_of_another_node(tmp_path: Path) -> None:
    """The run ended here, and the daemon has restarted since: it knows what it has written by what is in hot."""
    clock = Clock()
    options = {"now": clock.now, "monotonic_s": clock.monotonic_s}
    rules = LifecycleConfig(hot=TierPolicy(keep_last=3), cold=ColdPolicy(keep_last=1, milestones=False, keep_every=0))
    async with rooms_at(tmp_path, clocks=options, lifecycle=rules) as rooms:
        before = OneNode(rooms, clock)
        for tier in rooms.tiers.values():
            assert await rooms.context.claim(tier, RUN, Generation(1), Claim(claim=NODE.claim))
        await before.persist(1, milestone="best")
        await before.persist(2, 3)
        await before.commit_whole(3)
    async with rooms_at(tmp_path, clocks=options, lifecycle=rules) as rooms:
        await rooms.list_tiers()
        rooms.catalog.set_copying("cold", None)
        node = OneNode(rooms, clock)
        assert await node.after(8) == [1, 3]
        await node.list_tier()
        assert rooms.catalog.doubts() == {}
        assert rooms.incidents.recent() == []


async def test_what_a_cold_tier_should_get_from_here_stays(node: OneNode) -> None:
    await node.persist(10)
    await node.in_cold(5)
    rules = LifecycleConfig(cold=ColdPolicy(keep_last=1, keep_every=10))
    node.rooms.context.reload(msgspec.structs.replace(node.rooms.config, lifecycle=rules))
    assert await node.after(8) == [10]
    node.rooms.catalog.part_gone("cold", checkpoint_id(RUN, 10, 1))  # it can never be whole there
    assert await node.after(0) == []


async def test_after_a_restart_the_files_say_how_long_it_is_and_trainers_have_an_hour_to_attach(node: OneNode) -> None:
    await node.persist(1)
    await node.in_cold(5)
    assert await node.after(8, restarts=True) == [1]
    assert await node.after((RESTART_S - 60) / DAY_S) == [1]
    assert await node.after(60 / DAY_S) == []


async def test_a_start_that_has_saved_nothing_counts_after_a_restart(node: OneNode) -> None:
    """It has restored from these parts, on this node."""
    await node.persist(1)
    await node.in_cold(5)
    for path in node.rooms.config.hot_path.rglob("*"):
        if path.is_file():
            age(path, days=8)
    assert await node.rooms.context.claim(node.rooms.hot, RUN, Generation(3), Claim.new("here"))
    node.restart()
    assert await node.after(1) == [1]
    assert await node.after(7) == []


async def test_a_clock_that_jumps_forward_deletes_nothing_and_one_that_jumps_back_delays_it(node: OneNode) -> None:
    await node.persist(1)
    await node.in_cold(5)
    node.restart()
    node.clock.jumped_s = 30 * DAY_S
    assert await node.after(1) == [1]
    node.clock.jumped_s = -30 * DAY_S
    assert await node.after(8) == [1]
    node.clock.jumped_s = 0
    assert await node.after(0) == []


async def test_nothing_goes_while_hot_cannot_be_listed(node: OneNode, monkeypatch: pytest.MonkeyPatch) -> None:
    await node.persist(1)
    await node.in_cold(5)
    await node.after(0)

    async def hangs(prefix: str = "", **_: object) -> object:
        raise TierUnreachable("no answer in time")

    with monkeypatch.context() as broken:
        broken.setattr(node.rooms.hot_store, "list", hangs)
        assert await node.after(8) == [1]
    assert await node.after(0) == []


async def test_a_limit_of_0_keeps_the_parts(node: OneNode) -> None:
    await node.persist(1)
    await node.in_cold(5)
    limits = msgspec.structs.replace(node.rooms.config.limits, left_run_grace_s=0.0)
    node.rooms.context.reload(msgspec.structs.replace(node.rooms.config, limits=limits))
    assert await node.after(100) == [1]


async def test_a_longer_time_in_a_reloaded_config_counts_for_runs_that_have_left_already(node: OneNode) -> None:
    """An operator sees that the parts will go, and wants them to stay."""
    await node.persist(1)
    assert await node.after(8) == [1]
    assert node.rooms.catalog.left
    limits = msgspec.structs.replace(node.rooms.config.limits, left_run_grace_s=30 * DAY_S)
    node.rooms.context.reload(msgspec.structs.replace(node.rooms.config, limits=limits))
    await node.in_cold(5)
    assert await node.after(1) == [1]
    assert await node.after(22) == []


async def test_runs_on_one_node_and_runs_that_are_watched_here_never_leave(node: OneNode) -> None:
    await node.rooms.commit("hot", step=1, generation=1, run="alone")
    await node.rooms.commit("cold", step=5, generation=2, run="alone")
    await node.persist(1)
    await node.in_cold(5)
    await node.rooms.list_tiers()
    node.rooms.context.watched_nodes[RUN] = 1
    assert await node.after(100) == [1]
    assert node.rooms.steps("hot", "alone") == [1]
    del node.rooms.context.watched_nodes[RUN]  # no [[watch]] of it any more
    assert await node.after(8) == []
    assert node.rooms.steps("hot", "alone") == [1]


def age(path: Path, *, days: float) -> None:
    written_s = path.stat().st_mtime - days * DAY_S
    os.utime(path, (written_s, written_s))
