"""What a daemon answers to an Inventory, and how it hands over the part of its node."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.rooms import RUN, Rooms, rooms_at
from tierd.descriptors import close_all
from tierd.errors import NotFound, Unhealthy
from tierd.format import wire
from tierd.format.health import Diagnosis
from tierd.format.ids import CheckpointId, Run, checkpoint_id
from tierd.format.manifest import REPORTED_UNHEALTHY
from tierd.format.node_file import NodeFile
from tierd.format.node_messages import HELD_MAX, HeldCheckpoint
from tierd.tiers.directory import DirectoryStore
from tierd.workers.inventory import inventory
from tierd.workers.reaper import Reaper
from tierd.workers.restorer import Restorer

NODE = wire.NodeRanks(ranks=[1, 2], lowest=[0, 1], claim="ab" * 16, base=4)


@pytest.fixture
async def rooms(tmp_path: Path) -> AsyncIterator[Rooms]:
    async with rooms_at(tmp_path) as rooms:
        await rooms.list_tiers()
        yield rooms


def at(step: int) -> CheckpointId:
    return checkpoint_id(RUN, step, 1)


def restorer(rooms: Rooms, *, healthy: bool | None = None) -> Restorer:
    async def judge(checkpoint: CheckpointId) -> bool | None:
        return healthy

    return Restorer(rooms.context, judge)


def seal(rooms: Rooms, step: int, **fields: Any) -> None:
    shards = [f"rank {rank} step {step}".encode() for rank in NODE.ranks]
    rooms.seal(step, shards, node=NODE, world_size=3, number=step, **fields)


async def persist(rooms: Rooms, step: int, **fields: Any) -> None:
    seal(rooms, step, **fields)
    assert await rooms.persister().run_once()


async def test_a_snapshot_whose_loss_was_bad_is_unhealthy_before_it_is_examined(rooms: Rooms) -> None:
    seal(rooms, 5)
    seal(rooms, 6, metrics={REPORTED_UNHEALTHY: 1.0})
    assert [(each.step, each.healthy) for each in await held(rooms)] == [(6, False), (5, None)]


async def held(rooms: Rooms, run: str = RUN, **fields: Any) -> list[HeldCheckpoint]:
    asked = {"request": 3, "step": None, "generation": None, "milestone": None, "lists_cold": False}
    answer = await inventory(rooms.context, restorer(rooms), Run(run), wire.Inventory(**asked | fields))
    assert answer.request == 3
    assert wire.decode_to_client(wire.encode(answer)) == answer
    return answer.checkpoints


async def test_a_node_that_is_far_ahead_tells_of_all_its_parts_page_by_page(rooms: Rooms) -> None:
    count = HELD_MAX + 3
    for step in range(1, count + 1):
        await persist(rooms, step)
    first = await held(rooms)
    assert [each.step for each in first] == list(range(count, 3, -1))
    assert [each.step for each in await held(rooms, older_than=(1, first[-1].step))] == [3, 2, 1]


async def test_parts_in_memory_and_in_hot_are_named_newest_first(rooms: Rooms) -> None:
    await persist(rooms, 1)
    await persist(rooms, 2)
    seal(rooms, 3)
    newest, middle, oldest = await held(rooms)
    assert [(each.step, each.part_in, each.whole_in) for each in (newest, middle, oldest)] == [
        (3, ["memory"], []),
        (2, ["memory", "hot"], []),
        (1, ["hot"], []),
    ]
    assert all((each.ranks, each.world_size) == ([1, 2], 3) for each in (newest, middle, oldest))
    assert len({each.head_digest for each in (newest, middle, oldest)}) == 3


async def test_part_has_the_same_digest_in_memory_and_in_hot(rooms: Rooms) -> None:
    seal(rooms, 1)
    (in_memory,) = await held(rooms)
    assert await rooms.persister().run_once()
    rooms.memory.forget_departed(now_s=1e9, grace_s=0.0)
    part = rooms.catalog.entries(RUN)[0].part
    assert part is not None
    assert part.head_digest == in_memory.head_digest


async def test_whole_checkpoint_is_named_with_its_tiers(rooms: Rooms) -> None:
    await rooms.commit("hot", "cold", step=7)
    await rooms.look()
    (found,) = await held(rooms)
    assert (found.whole_in, found.part_in, found.ranks, found.head_digest) == (["hot", "cold"], [], [], "")


async def test_cold_is_listed_again_only_if_asked(rooms: Rooms) -> None:
    await rooms.commit("cold", step=7)
    assert await held(rooms) == []
    assert [each.whole_in for each in await held(rooms, lists_cold=True)] == [["cold"]]


async def test_tier_that_cannot_be_listed_is_named(rooms: Rooms) -> None:
    store = rooms.cold["cold"].store
    assert isinstance(store, DirectoryStore)
    store.root.rename(store.root.with_name("elsewhere"))
    asked = wire.Inventory(request=1, step=None, generation=None, milestone=None, lists_cold=True)
    answer = await inventory(rooms.context, restorer(rooms), RUN, asked)
    assert [reason.partition(":")[0] for reason in answer.unlisted] == ["cold"]


async def test_answer_is_narrowed_and_bounded(rooms: Rooms) -> None:
    await persist(rooms, 1, milestone="best")
    for step in range(2, 40):
        await persist(rooms, step)
    assert [each.step for each in await held(rooms)] == list(range(39, 7, -1))
    assert [each.step for each in await held(rooms, step=3)] == [3]
    assert [each.step for each in await held(rooms, milestone="best")] == [1]
    assert await held(rooms, generation=2) == await held(rooms, run="another") == []


async def test_verdict_is_told_from_the_marker_or_from_memory(rooms: Rooms) -> None:
    await persist(rooms, 1)
    seal(rooms, 2)
    assert [each.healthy for each in await held(rooms)] == [None, None]
    rooms.catalog.diagnosed(at(1), "hot", is_healthy=False)
    snapshot_set = rooms.memory.find(at(2))
    assert snapshot_set is not None
    snapshot_set.diagnosis = Diagnosis(healthy=False)
    assert [each.healthy for each in await held(rooms)] == [False, False]


def find(step: int, tier: str = "auto", *exclude: str, allow_unhealthy: bool = False) -> wire.Find:
    return wire.Find(
        request=1,
        step=step,
        generation=1,
        milestone=None,
        tier=tier,
        exclude=list(exclude),
        allow_unhealthy=allow_unhealthy,
        is_node_part=True,
    )


async def opened(rooms: Rooms, asked: wire.Find, **judge: Any) -> tuple[str, NodeFile, list[bytes]]:
    found = await restorer(rooms, **judge).find_part(RUN, asked)
    assert isinstance(found.manifest, NodeFile)
    files = found.manifest.files
    content = [os.pread(each, entry.size_bytes, 0) for each, entry in zip(found.descriptors, files, strict=True)]
    close_all(found.descriptors)
    return found.tier, found.manifest, content


async def test_part_is_handed_over_from_memory_else_from_hot(rooms: Rooms) -> None:
    seal(rooms, 1)
    tier, unpersisted, content = await opened(rooms, find(1))
    assert (tier, content) == ("memory", [b"rank 1 step 1", b"rank 2 step 1"])
    assert await rooms.persister().run_once()
    assert await opened(rooms, find(1)) == ("memory", unpersisted, content)
    assert await opened(rooms, find(1, "hot")) == ("hot", unpersisted, content)
    assert await opened(rooms, find(1, "auto", f"{at(1).name}@memory")) == ("hot", unpersisted, content)
    with pytest.raises(NotFound):
        await opened(rooms, find(1, "auto", f"{at(1).name}@memory", f"{at(1).name}@hot"))
    with pytest.raises(NotFound):
        await opened(rooms, find(2))


async def test_part_with_nan_is_handed_over_only_if_it_is_allowed(rooms: Rooms) -> None:
    await persist(rooms, 1)
    with pytest.raises(Unhealthy, match=r"or its loss was bad.*--allow-unhealthy.*#unhealthy-checkpoint"):
        await opened(rooms, find(1), healthy=False)
    assert (await opened(rooms, find(1, allow_unhealthy=True), healthy=False))[0] == "memory"


async def test_checkpoint_of_a_start_on_one_node_is_a_part_with_all_ranks(rooms: Rooms) -> None:
    """Nodes that join read it: the number of nodes may grow."""
    await rooms.commit("hot", step=7)
    await rooms.look()
    rooms.seal(8)
    for step, tier in ((7, "hot"), (8, "memory")):
        assert (await opened(rooms, find(step)))[0] == tier


async def test_hot_keeps_the_parts_that_other_nodes_may_need(rooms: Rooms) -> None:
    """The policy of hot keeps three. Another node is behind: what is not older than its newest step stays."""

    def parts() -> list[int]:
        return sorted(entry.id.step for entry in rooms.catalog.entries(RUN) if entry.part is not None)

    reaper = Reaper(rooms.context)
    for step in range(1, 8):
        await persist(rooms, step)
        rooms.catalog.set_copying("cold", None)
        assert await reaper.run_once()
    assert parts() == [1, 2, 3, 4, 5, 6, 7]  # nobody has said what the others have
    rooms.catalog.saw_everywhere(at(3))
    assert await reaper.run_once()
    assert parts() == [3, 4, 5, 6, 7]
    rooms.catalog.saw_everywhere(at(2))  # late
    rooms.catalog.saw_everywhere(at(7))
    assert await reaper.run_once()
    assert parts() == [5, 6, 7]
    assert not rooms.folder("hot", at(4)).exists()
