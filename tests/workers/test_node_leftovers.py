"""Parts of checkpoints over several nodes that never became whole, and what is left of deleted checkpoints."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from tests.support.rooms import rooms_at
from tests.workers.test_committer import WORLD_SIZE, Node, Nodes, id_of, nodes  # noqa: F401
from tierd.catalog.decisions import decisions, pending
from tierd.descriptors import close_all
from tierd.format import layout
from tierd.format.health import Diagnosis
from tierd.format.ids import HOT, Rank
from tierd.lifecycle.policy import Action
from tierd.tiers.tier import Tier
from tierd.workers.committer import HOME_S, LIST_MAX_S
from tierd.workers.fetcher import Fetcher
from tierd.workers.leftovers import GRACE_S
from tierd.workers.reaper import Reaper
from tierd.workers.replicator import Replicator

TENTH = 3  # the number of the snapshot whose sequence is 10: a policy keeps it for good


def names_in_cold(node: Node, step: int) -> set[str]:
    folder = node.rooms.folder("cold", id_of(step))
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def age(node: Node, step: int) -> None:
    """Everything in the folder is older than a day."""
    for path in node.rooms.folder("cold", id_of(step)).iterdir():
        at_s = path.stat().st_mtime - GRACE_S - 60.0
        os.utime(path, (at_s, at_s))


async def look(nodes: Nodes, node: Node, replicator: Replicator) -> None:  # noqa: F811
    """The tier is listed again, and the replicator passes."""
    nodes.now_s += node.rooms.config.limits.cold_list_interval_s + 1.0
    await node.rooms.list_tiers()
    await replicator.run_once()


def replicator_of(node: Node) -> Replicator:
    replicator = node.rooms.replicator()
    assert isinstance(replicator, Replicator)
    return replicator


async def commit_all(nodes: Nodes, step: int, number: int) -> None:  # noqa: F811
    for node in nodes.nodes:
        await node.send(step, number=number)
    await nodes.wait(HOME_S + 1, nodes.nodes[0])
    assert step in nodes.nodes[0].rooms.steps("cold")


async def test_the_tombstone_of_a_deleted_checkpoint_goes_after_a_day_also_if_nothing_else_happens(
    nodes: Nodes,  # noqa: F811
) -> None:
    home = nodes.nodes[0]
    for number, step in enumerate((10, 20), 1):
        await commit_all(nodes, step, number)
    await home.rooms.cold["cold"].delete(id_of(10))
    home.rooms.catalog.drop(id_of(10), "cold")
    replicator = replicator_of(home)
    home.rooms.catalog.part_gone("cold", id_of(10))
    await look(nodes, home, replicator)
    await look(nodes, home, replicator)
    assert names_in_cold(home, 10) == {layout.GONE}

    age(home, 10)
    await look(nodes, home, replicator)
    assert names_in_cold(home, 10) == set()


async def test_parts_that_never_became_whole_get_a_tombstone_after_a_day_and_go_after_another(
    nodes: Nodes,  # noqa: F811
) -> None:
    home, second, _ = nodes.nodes
    for node in (home, second):
        await node.send(10, number=1)
    replicator = replicator_of(home)
    await look(nodes, home, replicator)
    age(home, 10)
    await look(nodes, home, replicator)
    assert layout.GONE not in names_in_cold(home, 10)  # no newer one is committed: the third may come

    await commit_all(nodes, 20, 2)
    before = names_in_cold(home, 10)
    await look(nodes, home, replicator)
    assert names_in_cold(home, 10) == before | {layout.GONE}

    age(home, 10)
    await look(nodes, home, replicator)
    assert names_in_cold(home, 10) == set()


async def test_the_last_part_that_comes_while_the_others_are_cleared_makes_no_checkpoint_without_files(
    nodes: Nodes,  # noqa: F811
) -> None:
    home, second, third = nodes.nodes
    for node in (home, second):
        await node.send(30, number=1)
    await commit_all(nodes, 40, 2)
    replicator = replicator_of(home)
    age(home, 30)
    await look(nodes, home, replicator)
    await third.send(30, number=1, resent=True)
    await nodes.wait(LIST_MAX_S)
    assert 30 not in home.rooms.steps("cold")
    age(home, 30)
    await look(nodes, home, replicator)
    assert names_in_cold(home, 30) == set()


async def test_hot_lets_go_of_a_part_of_what_cold_has_deleted(nodes: Nodes) -> None:  # noqa: F811
    home, second, _ = nodes.nodes
    for node in (home, second):
        await node.send(10, number=TENTH)
    for number, step in enumerate((20, 30, 40, 50), TENTH + 1):
        await commit_all(nodes, step, number)
    await second.rooms.list_tiers()
    assert action_in_hot(second, 10) is Action.KEEP  # the others may come

    cold = home.rooms.cold["cold"]
    assert isinstance(cold, Tier)
    await cold.bury(id_of(10))
    await nodes.wait(2 * LIST_MAX_S, second)
    assert action_in_hot(second, 10) is Action.EXPIRE


async def test_hot_lets_go_of_a_healthy_part_when_the_whole_checkpoint_has_no_verdict(
    nodes: Nodes,  # noqa: F811
) -> None:
    """Another node was not examined in time, so cold has no verdict, and never gets one."""
    home, second, _ = nodes.nodes
    for node in nodes.nodes:
        await node.persist(10)
        if node is not home:
            await node.rooms.hot.mark_diagnosis(id_of(10), Diagnosis(healthy=True))
            node.rooms.catalog.diagnosed(id_of(10), HOT, is_healthy=True)
        await node.rooms.replicator().run_once()  # type: ignore[union-attr]
    await nodes.wait(HOME_S + 1, home)
    assert not names_in_cold(home, 10) & {layout.HEALTHY, layout.UNHEALTHY}

    for number, step in enumerate((20, 30, 40, 50), 2):
        await commit_all(nodes, step, number)
    await nodes.wait(LIST_MAX_S, second)
    await second.rooms.list_tiers()
    # What was found healthy stays until a newer one was.
    await second.rooms.hot.mark_diagnosis(id_of(50), Diagnosis(healthy=True))
    await Reaper(second.rooms.context).run_once()
    assert id_of(10) not in [manifest.id for manifest in second.rooms.catalog.manifests_in(HOT)]


async def test_a_fetch_that_ends_while_the_part_is_deleted_commits_no_checkpoint_without_files(
    nodes: Nodes,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    second = nodes.nodes[1]
    await commit_all(nodes, 10, 1)
    await nodes.wait(LIST_MAX_S, second)
    rooms, cold = second.rooms, second.rooms.cold["cold"]
    delete = rooms.hot_store.delete
    tasks: list[asyncio.Task[Any]] = []

    async def delete_slowly(keys: Collection[str]) -> None:
        """Between the node file and the shards, hot is listed, and a restore brings the whole checkpoint."""
        if not tasks and all(key.endswith(".safetensors") for key in keys):
            await rooms.list_tiers(HOT)
            entry = rooms.catalog.get(id_of(10))
            assert entry is not None
            bring = Fetcher(rooms.context).bring(entry, cold, None, lambda done, size: None, is_hot_bad=False)
            tasks.append(asyncio.create_task(bring))
            await asyncio.wait(tasks, timeout=0.5)
        await delete(keys)

    monkeypatch.setattr(type(rooms.hot_store), "delete", lambda store, keys: delete_slowly(keys))
    async with rooms.context.lock(id_of(10)):  # as the reaper holds it
        assert await rooms.hot.delete(id_of(10))
    (descriptors, _) = await tasks[0]
    close_all(descriptors)
    names = {path.name for path in rooms.folder(HOT, id_of(10)).iterdir()}
    assert layout.MANIFEST in names
    assert names >= {layout.shard_name(Rank(rank), WORLD_SIZE) for rank in range(WORLD_SIZE)}


def action_in_hot(node: Node, step: int) -> Action:
    decided = decisions(node.rooms.catalog, node.rooms.config)
    return next(each.action for each in decided if each.checkpoint == id_of(step) and each.tier == HOT)


async def test_a_start_on_one_node_buries_the_parts_of_an_earlier_one_before_it_deletes_them(
    nodes: Nodes,  # noqa: F811
    tmp_path: Path,
) -> None:
    """A node that slept may send the last part just now, and commit."""
    await nodes.nodes[1].send(10)
    clocks = {"monotonic_s": lambda: nodes.now_s}
    async with rooms_at(tmp_path / "alone", cold=nodes.nodes[0].rooms.config.cold, clocks=clocks) as rooms:
        alone = Node(rooms, 0)
        await rooms.list_tiers()
        rooms.seal(40, [b"all of it"], generation=2, number=4)
        assert await rooms.persister().run_once()
        replicator = replicator_of(alone)
        age(alone, 10)
        await look(nodes, alone, replicator)  # copies its own checkpoint
        await look(nodes, alone, replicator)
        assert layout.GONE in names_in_cold(alone, 10)


async def test_what_the_daemon_of_rank_0_has_deleted_is_no_loss_and_is_not_sent_again(
    nodes: Nodes,  # noqa: F811
    tmp_path: Path,
) -> None:
    home, second, _ = nodes.nodes
    await commit_all(nodes, 10, 1)
    await second.rooms.list_tiers()
    assert id_of(10) in [manifest.id for manifest in second.rooms.catalog.manifests_in("cold")]
    assert await home.rooms.cold["cold"].delete(id_of(10))
    await second.rooms.list_tiers()
    assert id_of(10) not in second.rooms.catalog.tiers["cold"].missing
    assert not pending(second.rooms.catalog, second.rooms.config, "cold")

    # A daemon that starts later has not seen the checkpoint in cold, only the tombstone.
    async with rooms_at(tmp_path / "1", cold=second.rooms.config.cold) as restarted:
        await restarted.list_tiers()
        assert [manifest.id for manifest in restarted.catalog.manifests_in(HOT)] == [id_of(10)]
        assert not pending(restarted.catalog, restarted.config, "cold")
