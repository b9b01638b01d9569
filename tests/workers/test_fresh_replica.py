"""A deletion that rests on a checkpoint in a cold tier looks at it at that moment."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.rooms import RUN, Rooms, rooms_at
from tierd.config.sections import ColdPolicy, LifecycleConfig, TierPolicy
from tierd.errors import TierUnreachable
from tierd.format import layout, wire
from tierd.format.health import Diagnosis
from tierd.format.ids import CheckpointId, checkpoint_id
from tierd.workers.fresh_replica import is_newest_there
from tierd.workers.reaper import Reaper

NODE = wire.NodeRanks(ranks=[1], lowest=[0, 1], claim="ab" * 16, base=0)


def at(step: int) -> CheckpointId:
    return checkpoint_id(RUN, step, 1)


@pytest.fixture
async def rooms(tmp_path: Path) -> AsyncIterator[Rooms]:
    """Step 3 is in two cold tiers."""
    async with rooms_at(tmp_path, cold=("cold", "dr")) as rooms:
        await rooms.commit("cold", "dr", step=3)
        await rooms.list_tiers()
        yield rooms


async def ask(rooms: Rooms, least: int = 1) -> tuple[bool, set[str]]:
    failed = set[str]()
    found = await is_newest_there(rooms.context, at(3).run, at(least), failed, action="delete a part", worker="reap")
    return found, failed


async def test_one_tier_that_has_it_is_enough(rooms: Rooms) -> None:
    assert await ask(rooms) == (True, set())
    shutil.rmtree(rooms.folder("cold", at(3)))
    assert await ask(rooms) == (True, set())
    entry = rooms.catalog.get(at(3))
    assert entry is not None
    assert entry.tiers == {"dr"}
    shutil.rmtree(rooms.folder("dr", at(3)))
    assert await ask(rooms) == (False, set())


async def test_an_older_one_does_not_do(rooms: Rooms) -> None:
    assert await ask(rooms, least=3) == (True, set())
    assert await ask(rooms, least=4) == (False, set())


async def test_one_that_was_found_unhealthy_since_does_not_do(rooms: Rooms) -> None:
    """Its verdict comes after the commit, and this node may list cold once a day."""
    await rooms.cold["cold"].mark_diagnosis(at(3), Diagnosis(healthy=False))
    assert await ask(rooms) == (False, set())
    assert rooms.catalog.newest_in_cold(at(3).run) is None


async def test_a_tier_that_does_not_answer_is_not_known_from_then_on(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(prefix: str = "", **_: object) -> object:
        raise TierUnreachable("503")

    for tier in rooms.cold.values():
        monkeypatch.setattr(tier.store, "list", fails)
    assert await ask(rooms) == (False, {"cold", "dr"})
    assert rooms.catalog.newest_in_cold(at(3).run) is None


async def test_a_part_stays_when_cold_has_lost_the_newer_one_since_it_was_listed(tmp_path: Path) -> None:
    """After a restart it is not known which step all nodes have: parts go because of what cold has."""
    async with rooms_at(tmp_path) as rooms:
        for step in range(1, 6):
            rooms.seal(step, [b"state"], node=NODE, world_size=2, number=step)
            await rooms.persister().run_once()
        await rooms.commit("cold", step=6)
        await rooms.list_tiers()
        rooms.catalog.set_copying("cold", None)
        (rooms.folder("cold", at(6)) / layout.MANIFEST).unlink()
        assert await Reaper(rooms.context).run_once()
        assert parts(rooms) == 5
        assert ("relist", "cold") in rooms.events
        await rooms.commit("cold", step=6)
        await rooms.list_tiers("cold")
        assert await Reaper(rooms.context).run_once()
        assert parts(rooms) == 3


async def test_a_part_that_waits_for_cold_is_given_up_only_if_cold_still_has_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hot is full. A slower node may have the older steps only, so no restart could use what is left."""
    rules = LifecycleConfig(hot=TierPolicy(keep_last=1), cold=ColdPolicy(keep_last=9))
    async with rooms_at(tmp_path, lifecycle=rules) as rooms:
        for step in range(1, 5):
            rooms.seal(step, [b"state"], node=NODE, world_size=2, number=step)
            await rooms.persister().run_once()
        await rooms.commit("cold", step=6)
        await rooms.list_tiers()
        rooms.catalog.set_copying("cold", None)

        async def no_space() -> int:
            return 0

        monkeypatch.setattr(rooms.hot_store, "free_bytes", no_space)
        (rooms.folder("cold", at(6)) / layout.MANIFEST).unlink()
        assert await Reaper(rooms.context).run_once()
        assert parts(rooms) == 4
        await rooms.commit("cold", step=6)
        await rooms.list_tiers("cold")
        assert await Reaper(rooms.context).run_once()
        assert parts(rooms) < 4


def parts(rooms: Rooms) -> int:
    """How many there are in hot."""
    return len(list(rooms.folder("hot", at(1)).parent.glob("*/node-*.json")))
