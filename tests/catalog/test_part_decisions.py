"""Which parts a restart may need, and which deletions of a part rest on what a cold tier has."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.support.rooms import RUN, Rooms, rooms_at
from tierd.catalog.part_decisions import parts_needed, rests_on_cold
from tierd.format import wire
from tierd.format.ids import CheckpointId, checkpoint_id

STEPS = (1, 2, 4, 5)
NODE = wire.NodeRanks(ranks=[1], lowest=[0, 1], claim="ab" * 16, base=0)


def at(step: int) -> CheckpointId:
    return checkpoint_id(RUN, step, 1)


@pytest.fixture
async def rooms(tmp_path: Path) -> AsyncIterator[Rooms]:
    """Parts of all steps but 3 in hot; step 3 is whole in cold."""
    async with rooms_at(tmp_path) as rooms:
        for step in STEPS:
            rooms.seal(step, [b"state"], node=NODE, world_size=2, number=step)
            await rooms.persister().run_once()
        await rooms.commit("cold", step=3)
        await rooms.list_tiers("cold")
        yield rooms


async def test_a_part_below_the_step_that_all_nodes_have_goes_without_cold(rooms: Rooms) -> None:
    rooms.catalog.saw_everywhere(at(2))
    assert [rests_on_cold(rooms.catalog, at(step)) for step in STEPS] == [False, True, True, True]
    rooms.catalog.left = {RUN: datetime.now(UTC)}  # then hot's own policy does not keep it either
    assert rests_on_cold(rooms.catalog, at(1))
    assert not rests_on_cold(rooms.catalog, at(9))


async def test_without_that_step_every_deletion_of_a_part_rests_on_cold(rooms: Rooms) -> None:
    assert [rests_on_cold(rooms.catalog, at(step)) for step in STEPS] == [True] * 4
    assert parts_needed(rooms.catalog, is_hot_full=False) == {at(4), at(5)}


async def test_of_a_run_that_has_left_only_parts_newer_than_cold_are_needed(rooms: Rooms) -> None:
    rooms.catalog.saw_everywhere(at(2))
    assert parts_needed(rooms.catalog, is_hot_full=False) == {at(2), at(4), at(5)}
    rooms.catalog.left = {RUN: datetime.now(UTC)}
    assert parts_needed(rooms.catalog, is_hot_full=False) == {at(4), at(5)}


async def test_a_cold_tier_with_a_manifest_that_cannot_be_read_makes_no_part_unneeded(rooms: Rooms) -> None:
    rooms.catalog.tiers["cold"].unreadable[at(2)] = "it is not JSON"
    assert rooms.catalog.newest_in_cold(at(2).run) is None
    assert parts_needed(rooms.catalog, is_hot_full=True) == {at(step) for step in STEPS}
