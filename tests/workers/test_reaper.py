"""Deletes what the plan gives up, and nothing on the strength of what is not known."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from tests.support.rooms import RUN, Rooms, rooms_at
from tierd.decisions import HaltReason, decisions, deletions, halted, pending
from tierd.errors import TierUnreachable
from tierd.format.ids import CheckpointId, Generation, Rank, Run
from tierd.lifecycle.policy import Action
from tierd.listing import refresh
from tierd.workers.reaper import Reaper

STEPS = (100, 200, 300, 400, 500)


@pytest.fixture
async def rooms(tmp_path: Path) -> AsyncIterator[Rooms]:
    """Five checkpoints of a run in hot and in cold; each keeps the last three."""
    async with rooms_at(tmp_path) as found:
        for number, step in enumerate(STEPS):
            await found.commit("hot", "cold", step=step, sequence=number + 1)
        await found.look()
        yield found


class Told:
    def __init__(self) -> None:
        self.freed = 0
        self.lost: list[str] = []
        self.forgotten: list[Run] = []

    def free(self) -> None:
        self.freed += 1


def reaper(rooms: Rooms, told: Told | None = None) -> Reaper:
    told = told or Told()
    return Reaper(
        rooms.catalog,
        rooms.memory,
        rooms.tiers,
        rooms.config,
        incidents=rooms.incidents,
        on_freed=told.free,
        on_lost=told.lost.append,
        on_forgotten=told.forgotten.append,
    )


async def test_what_no_policy_keeps_goes_from_every_tier(rooms: Rooms) -> None:
    told = Told()
    assert await reaper(rooms, told).run_once()
    assert rooms.steps("hot") == rooms.steps("cold") == [500, 400, 300]
    assert sorted(one.step for one in rooms.catalog.held("hot")) == [300, 400, 500]
    assert told.freed == 4


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
    assert rooms.steps("hot") == [*reversed(STEPS)], "left alone, the unreadable one too"
    assert rooms.steps("cold") == [*reversed(STEPS)]
    assert rooms.steps("hot", "other") == rooms.steps("cold", "other") == [500, 400, 300]
    assert [halt.reason for halt in halted(rooms.catalog)] == [HaltReason.UNREADABLE_MANIFEST]


async def test_cold_tier_that_cannot_be_listed_stops_deletions_that_depend_on_it(rooms: Rooms) -> None:
    rooms.catalog.lost_tier("cold", "503")
    assert all(action.tier == "hot" for action in deletions(rooms.catalog, rooms.config))
    await reaper(rooms).run_once()
    assert rooms.steps("cold") == [*reversed(STEPS)]
    assert rooms.steps("hot") == [500, 400, 300], "a finite disk goes on with what no policy keeps"


async def test_nothing_is_deleted_while_hot_cannot_be_listed(rooms: Rooms) -> None:
    rooms.catalog.lost_tier("hot", "I/O error")
    assert deletions(rooms.catalog, rooms.config) == []


async def test_tier_that_refuses_deletions_holds_up_no_other(rooms: Rooms) -> None:
    """A bucket whose key may not delete must not fill the local disk."""

    async def refuse(keys: Sequence[str]) -> None:
        raise TierUnreachable(f"delete {keys[0]}: access denied")

    rooms.cold["cold"].store.delete = refuse  # type: ignore[method-assign]
    assert not await reaper(rooms).run_once()
    assert rooms.steps("hot") == [500, 400, 300]
    assert [one["stage"] for one in rooms.incidents.recent()] == ["reap"], "and it is told once a pass"


async def test_change_in_the_middle_of_a_pass_is_decided_anew(rooms: Rooms) -> None:
    """A milestone marked while the first deletion was under way saves the second."""
    real_delete = rooms.hot.delete
    saved = CheckpointId(RUN, 200, 1)  # type: ignore[arg-type]

    async def delete_and_mark(checkpoint: CheckpointId) -> None:
        await real_delete(checkpoint)
        rooms.hot.delete = real_delete  # type: ignore[method-assign]
        await rooms.hot.mark_milestone(saved, "best", "now")
        await refresh(rooms.catalog, rooms.hot)

    rooms.hot.delete = delete_and_mark  # type: ignore[method-assign]
    await reaper(rooms).run_once()
    assert 100 not in rooms.steps("cold")
    assert 200 in rooms.steps("cold")


async def test_deletions_are_those_among_the_decisions(rooms: Rooms) -> None:
    await rooms.commit("hot", step=600, sequence=6)
    await rooms.look()
    decided = decisions(rooms.catalog, rooms.config)
    expected = {one for one in decided if one.action in (Action.EVICT, Action.EXPIRE)}
    assert expected
    assert set(deletions(rooms.catalog, rooms.config)) == expected
    assert {one.checkpoint.step for one in decided} == {*STEPS, 600}


async def test_slots_of_trainers_that_stay_away_are_given_back(tmp_path: Path) -> None:
    async with rooms_at(tmp_path) as rooms:
        rooms.memory.enter(RUN, Generation(1), Rank(0), 1)
        rooms.memory.leave(RUN, Rank(0), now_s=-1e9)
        told = Told()
        await reaper(rooms, told).run_once()
        assert told.forgotten == [RUN]
        assert rooms.memory.runs() == []


async def test_hot_replica_stays_when_the_cold_one_has_gone_since_the_last_look(rooms: Rooms) -> None:
    """The listing may be minutes old; the last replica may not rest on it."""
    await rooms.commit("hot", "cold", step=600, sequence=10)
    for step in (700, 800, 900):
        await rooms.commit("hot", "cold", step=step, sequence=step)
    await rooms.look()
    lost = CheckpointId(RUN, 600, 1)  # type: ignore[arg-type]
    await rooms.cold["cold"].delete(lost)
    assert await reaper(rooms).run_once()
    assert 600 in rooms.steps("hot")
    assert pending(rooms.catalog, rooms.config, "cold") == [lost], "and it is sent again"


async def test_hot_replica_stays_while_the_cold_tier_does_not_answer(rooms: Rooms) -> None:
    await rooms.commit("hot", "cold", step=600, sequence=10)
    for step in (700, 800, 900):
        await rooms.commit("hot", "cold", step=step, sequence=step)
    await rooms.look()
    root = rooms.config.cold[0].url.removeprefix("file://")
    os.rename(root, root + "-unmounted")
    told = Told()
    assert not await reaper(rooms, told).run_once()
    assert 600 in rooms.steps("hot")
    assert not rooms.catalog.tiers["cold"].is_known
    assert told.lost == ["cold"], "else nothing would be copied there before the next listing, ten minutes later"
