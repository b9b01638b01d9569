"""Nodes that adopt together while something differs between them: the tiers they reach, their clocks, their number."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.framework_saves import Writer, save_dcp_on, save_deepspeed_on, save_hf
from tests.support.rooms import rooms_at
from tests.workers.test_announcements import RUN, SPREAD_S, Node, made, shift
from tierd.config.sections import ColdPolicy, DaemonConfig, DrillConfig, LifecycleConfig, TierPolicy
from tierd.errors import TierUnreachable
from tierd.format.ids import checkpoint_id
from tierd.tiers.directory import DirectoryStore
from tierd.tiers.store import StoredObject
from tierd.tiers.tier import Tier
from tierd.workers.adopter import Adopter
from tierd.workers.announcements import AWAITED_MAX, RETRY_MAX_S
from tierd.workers.drain import drain
from tierd.workers.driller import Driller
from tierd.workers.reaper import Reaper
from tierd.workers.restorer import PART_AWAITED_S
from tierd.workers.worker import Wake


async def test_a_node_takes_the_newest_head_of_all_cold_tiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with made(tmp_path, 2, preset="deepspeed", cold=("cold", "dr")) as nodes:
        home, other = nodes.nodes
        save_deepspeed_on(nodes.outs, 10)
        await nodes.look(home)
        shift(save_deepspeed_on(nodes.outs, 10), SPREAD_S + 30)  # the training has gone back
        nodes.ahead_s += SPREAD_S + 30
        listing = Tier.listing

        async def fails(tier: Tier, *arguments: Any, **keys: Any) -> object:
            if tier.name == "cold":
                raise TierUnreachable("list cold: no answer")
            return await listing(tier, *arguments, **keys)

        with monkeypatch.context() as broken:
            broken.setattr(Tier, "listing", fails)
            await nodes.look(home)
        assert home.parts[10][:2] == (2, 2)
        await nodes.look(other)
        assert other.parts == home.parts, "the head in the first tier is of the save before"


async def test_a_node_whose_clock_is_behind_adopts_what_was_saved_while_its_daemon_was_down(tmp_path: Path) -> None:
    async with made(tmp_path, 2, preset="deepspeed") as nodes:
        home, other = nodes.nodes
        save_deepspeed_on(nodes.outs, 10)
        shift([other.out / "global_step10"], -30)
        await nodes.look()
        nodes.now_s, nodes.ahead_s = nodes.now_s + SPREAD_S, nodes.ahead_s + SPREAD_S
        await nodes.look(other)
        await other.watcher.close()
        shift(save_deepspeed_on(nodes.outs, 20), 20)
        shift([other.out / "global_step20"], -30)  # before step 10 by the clock of node 0
        nodes.ahead_s += SPREAD_S
        other.restart()
        await nodes.look(home)
        await nodes.look(other)
        assert {step: part[:2] for step, part in other.parts.items()} == {10: (1, 1), 20: (1, 2)}


async def test_of_dcp_a_save_that_was_killed_neither_delays_the_end_of_a_daemon_nor_counts_as_behind(
    tmp_path: Path,
) -> None:
    async with made(tmp_path, 2, preset="dcp") as nodes:
        other = nodes.nodes[1]
        folders = save_dcp_on(nodes.outs, 5)
        (folders[0] / ".metadata").unlink()
        await nodes.look()
        assert other.watcher.unfinished(0.0) == ["step-5"], "node 0 may announce it in a moment"
        shift(save_dcp_on(nodes.outs, 10), SPREAD_S + 30)
        nodes.ahead_s += SPREAD_S + 30
        await nodes.look()
        await nodes.look()
        assert list(other.parts) == [10]
        assert "step-5: node 0 has not announced step 5 yet" in other.waiting
        assert other.watcher.unfinished(0.0) == []
        assert other.watcher.report().pending == 0


async def test_what_more_nodes_have_saved_is_not_announced_as_whole_by_fewer(tmp_path: Path) -> None:
    async with made(tmp_path, 3, preset="deepspeed") as nodes:
        home, other, _ = nodes.nodes
        save_deepspeed_on(nodes.outs, 10)
        await nodes.look()
        await nodes.send()
        save_deepspeed_on(nodes.outs, 20)  # the job is killed before a daemon has seen it
        nodes.ahead_s += 60
        for node in (home, other):
            await node.watcher.close()
            node.restart(nodes=2)
        await nodes.look(home, other)
        await nodes.send(home, other)
        assert "before this daemon was started for 2 nodes, and ds/000000000010-g0001 is of 3 nodes" in home.problems
        assert "node 0 has not announced step 20 yet" in other.waiting
        assert home.watcher.unfinished(0.0) == [], "an end of the daemon does not wait for it"
        shift(save_deepspeed_on(nodes.outs[:2], 30), nodes.ahead_s + 5)
        nodes.ahead_s += 10
        await nodes.look(home, other)
        await nodes.look(home, other)
        await nodes.send(home, other)
        assert [step for step, _, _ in await nodes.committed()] == [10, 30]
        await home.watcher.close()
        home.restart(nodes=2)
        await nodes.look(home)
        assert list(home.parts) == [10, 30]
        assert other.watcher.unfinished(0.0) == []


async def test_a_head_of_another_number_of_nodes_holds_up_no_end_of_a_daemon(tmp_path: Path) -> None:
    async with made(tmp_path, 2, preset="deepspeed") as nodes:
        other = nodes.nodes[1]
        other.restart(nodes=4)
        save_deepspeed_on(nodes.outs, 10)
        await nodes.look()
        assert "watch.nodes is 4 here" in other.problems
        assert other.watcher.unfinished(0.0) == []


async def test_a_drill_restores_the_whole_from_cold_and_no_part_from_hot(tmp_path: Path) -> None:
    async with made(tmp_path, 2, preset="deepspeed") as nodes:
        save_deepspeed_on(nodes.outs, 10)
        await nodes.look()
        await nodes.send()
        rooms = nodes.nodes[0].rooms
        await rooms.list_tiers()
        rooms.config = msgspec.structs.replace(rooms.config, drill=DrillConfig(interval_s=100.0))
        driller = Driller(rooms.context)
        for _ in range(2):
            nodes.now_s += 1000
            await driller.run_once()
        proven = rooms.metrics.drill_newest_step_proven
        assert proven.labels(run=RUN, tier="cold")._value.get() == 10  # pyright: ignore[reportPrivateUsage]
        assert rooms.incidents.recent() == []


async def test_the_end_of_node_0_does_not_wait_for_a_part_that_another_node_has_lost(tmp_path: Path) -> None:
    async with made(tmp_path, 2, preset="deepspeed") as nodes:
        home, other = nodes.nodes
        for step in (10, 20):
            save_deepspeed_on(nodes.outs, step)
            await nodes.look(home)
            if step == 10:
                shutil.rmtree(other.out)
                other.out.mkdir()
                await nodes.send()
                assert await lacks(home), "node 1 may have it and send it"
                save_deepspeed_on(nodes.outs[1:], 20)
        await nodes.look(other)
        await nodes.send()
        assert [step for step, _, _ in await nodes.committed()] == [20]
        assert await lacks(home), "node 1 may still send it"
        nodes.ahead_s += PART_AWAITED_S
        assert not await lacks(home)


@pytest.mark.parametrize(("seconds", "waits_s"), [(30, 60), (5, 30)])
async def test_a_late_node_does_not_take_a_second_save_for_the_first(
    tmp_path: Path, seconds: float, waits_s: float
) -> None:
    async with made(tmp_path, 2, preset="deepspeed") as nodes:
        home, late = nodes.nodes
        save_deepspeed_on(nodes.outs, 10)
        await nodes.look(home)
        shift(save_deepspeed_on(nodes.outs, 10), seconds)  # the training has gone back, and was fast
        nodes.ahead_s += seconds
        await nodes.look(late)
        assert late.parts == {}
        limit = f"within {waits_s} s of the later write"
        assert f"it is adopted if node 0 announces no other save of step 10 {limit}" in late.waiting
        await nodes.look(home)
        nodes.now_s += RETRY_MAX_S
        await nodes.look(late)
        await nodes.send()
        assert await nodes.committed() == [(10, 2, 2)]


async def test_of_dcp_a_late_node_does_not_take_a_second_save_for_the_first(tmp_path: Path) -> None:
    async with made(tmp_path, 2, preset="dcp") as nodes:
        home, late = nodes.nodes
        save_dcp_on(nodes.outs, 10)
        await nodes.look(home)
        shift(save_dcp_on(nodes.outs, 10), 5)
        nodes.ahead_s += 5
        await nodes.look(late)
        assert late.parts == {}
        assert "5 s later than on node 0: it is adopted if node 0 announces no other save" in late.waiting
        await nodes.look(home)
        nodes.now_s += RETRY_MAX_S
        await nodes.look(late)
        await nodes.send()
        assert await nodes.committed() == [(10, 2, 2)]


@pytest.mark.parametrize("is_sent", [False, True])
async def test_node_0_on_a_new_host_completes_what_the_former_one_has_announced(tmp_path: Path, is_sent: bool) -> None:
    """The folder is on a shared disk, or was copied with its times; hot is empty. The other node has its part, and
    would adopt no second one of the same save."""
    async with made(tmp_path, 2, preset="deepspeed") as nodes:
        home, other = nodes.nodes
        save_deepspeed_on(nodes.outs, 10)
        await nodes.look()
        if is_sent:
            await nodes.send(home)
        config = msgspec.structs.replace(home.rooms.config, daemon=DaemonConfig(node="new-host"))
        clocks = {"monotonic_s": lambda: nodes.now_s, "now": nodes.now}
        opened = rooms_at(tmp_path / "new", clocks=clocks, cold=config.cold, daemon=config.daemon)
        async with opened as rooms:
            await rooms.list_tiers()
            nodes.nodes[0] = new = Node(rooms, home.watch)
            await home.watcher.close()
            await nodes.look()
            assert new.parts == other.parts
            await nodes.send()
            assert await nodes.committed() == [(10, 1, 1)]
            shift(save_deepspeed_on(nodes.outs, 20), 1)
            await nodes.look()
            await nodes.send()
            assert await nodes.committed() == [(10, 1, 1), (20, 2, 2)]
            await new.watcher.close()


@pytest.mark.parametrize("seconds", [-30, 30])
async def test_a_slow_node_has_its_part_adopted_after_a_while(tmp_path: Path, seconds: float) -> None:
    async with made(tmp_path, 2, preset="deepspeed") as nodes:
        shift(save_deepspeed_on(nodes.outs, 10)[1:], seconds)
        nodes.ahead_s += max(seconds, 0)
        await nodes.look()
        assert nodes.nodes[1].parts == {}
        nodes.ahead_s += SPREAD_S
        nodes.now_s += SPREAD_S
        await nodes.look()
        await nodes.send()
        assert await nodes.committed() == [(10, 1, 1)]


async def test_a_step_is_saved_again_after_cold_has_deleted_the_first(tmp_path: Path) -> None:
    async with made(tmp_path, 2, preset="deepspeed") as nodes:
        save_deepspeed_on(nodes.outs, 10)
        await nodes.look()
        await nodes.send()
        await nodes.cold.bury(checkpoint_id(RUN, 10, 1))
        for node in nodes.nodes:
            await node.rooms.list_tiers()
            assert list(node.parts) == [10], "hot keeps its part"
        shift(save_deepspeed_on(nodes.outs, 10), SPREAD_S + 30)
        nodes.ahead_s += SPREAD_S + 30
        await nodes.look()
        nodes.now_s += RETRY_MAX_S
        await nodes.look()
        await nodes.send()
        assert await nodes.committed() == [(10, 2, 2)]


async def test_no_source_is_removed_while_only_parts_of_newer_ones_exist(tmp_path: Path) -> None:
    policy = LifecycleConfig(hot=TierPolicy(keep_last=1), cold=ColdPolicy(keep_last=1, keep_every=0))
    async with made(tmp_path, 2, preset="hf-trainer", lifecycle=policy) as nodes:
        home, late = nodes.nodes
        home.restart(source="remove")
        for step in (10, 20, 30):
            folders = [save_hf(out, step, Writer()) for out in nodes.outs]
            shift(folders, step / 10)
            nodes.ahead_s += step / 10
            await nodes.look(home)
            await nodes.send(home)
            await Reaper(home.rooms.context).run_once()
        await nodes.look(home)
        assert list(home.parts) == [30]
        assert len(list(home.out.iterdir())) == 3, "node 1 has sent nothing, so nothing is whole"
        await nodes.look(late)
        await nodes.send()
        await home.rooms.list_tiers()
        await nodes.look(home)
        assert await nodes.committed() == [(30, 1, 3)]
        assert [path.name for path in home.out.iterdir()] == ["checkpoint-30"]


async def test_an_empty_folder_delays_no_end_of_a_daemon(tmp_path: Path) -> None:
    async with made(tmp_path, 2, preset="dcp") as nodes:
        for node in nodes.nodes:
            (node.out / "step-10").mkdir()
            await node.watcher.run_once()
            assert node.watcher.unfinished(0.0) == ["step-10"], "it may have just been made"
            await nodes.look(node)
            assert "there is no file in it yet" in node.waiting
            assert node.watcher.unfinished(0.0) == []


async def test_leftovers_of_higher_steps_keep_no_new_step_from_being_looked_for(tmp_path: Path) -> None:
    async with made(tmp_path, 2, preset="dcp") as nodes:
        other = nodes.nodes[1]
        (tmp_path / "lost").mkdir()
        for step in range(1000, 1000 + AWAITED_MAX):  # of a former job, and node 0 is another machine now
            save_dcp_on([tmp_path / "lost", *nodes.outs[1:]], step)
        save_dcp_on(nodes.outs, 10)
        shift([other.out / f"step-{step}" for step in range(1000, 1000 + AWAITED_MAX)], -1000)
        await nodes.look()
        await nodes.look()
        assert list(other.parts) == [10]


async def test_a_head_that_the_listing_did_not_show_is_not_contradicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with made(tmp_path, 2, preset="deepspeed") as nodes:
        home, other = nodes.nodes
        save_deepspeed_on(nodes.outs, 10)
        with monkeypatch.context() as killed:
            killed.setattr(Adopter, "adopt", fails)
            await nodes.look(home)
        home.restart()
        shift(save_deepspeed_on(nodes.outs, 10), SPREAD_S + 30)
        nodes.ahead_s += SPREAD_S + 30
        list_real = DirectoryStore.list

        async def stale(store: DirectoryStore, prefix: str = "", **keys: Any) -> list[StoredObject]:
            return [each for each in await list_real(store, prefix, **keys) if not each.key.endswith("head.json")]

        with monkeypatch.context() as late:
            late.setattr(DirectoryStore, "list", stale)
            await nodes.look(home)
        assert home.parts[10][0] == 2
        await nodes.look(other)
        assert other.parts == home.parts


async def fails(*_: object) -> None:
    raise TierUnreachable("killed")


async def lacks(node: Node) -> bool:
    """Whether the end of the daemon waits for anything in cold."""
    daemon = msgspec.structs.replace(node.rooms.config.daemon, drain_cold_s=60.0)
    node.rooms.config = msgspec.structs.replace(node.rooms.config, daemon=daemon)
    try:
        async with asyncio.timeout(0.2):
            await drain(node.rooms.context, lambda: None, Wake())
    except TimeoutError:
        return True
    return False
