"""Runs that were started and never had a checkpoint expire; any doubt keeps them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.support.rooms import RUN, Rooms, rooms_at
from tierd.format.claim import Claim
from tierd.format.ids import Generation, Rank, Run
from tierd.workers.run_expirer import RunExpirer

EMPTY = Run("empty")
NOW = datetime(2025, 6, 1, tzinfo=UTC)


@pytest.fixture
async def rooms(tmp_path: Path) -> AsyncIterator[Rooms]:
    """A run with a checkpoint in hot, and one that was claimed eight days ago in both tiers."""
    async with rooms_at(tmp_path, clocks={"now": lambda: NOW}) as rooms:
        await rooms.commit("hot", step=100)
        await claim(rooms, EMPTY, 1)
        await claim(rooms, RUN, 1)
        await rooms.look()
        yield rooms


async def claim(rooms: Rooms, run: Run, generation: int, *, days_ago: float = 8) -> None:
    for tier in rooms.context.tiers.values():
        assert await tier.claim_generation(run, Generation(generation), Claim.new("here"))
        path = Path(tier.store.url.removeprefix("file://")) / run / f"generation-{generation:04d}.json"
        written_s = (NOW - timedelta(days=days_ago)).timestamp()
        os.utime(path, (written_s, written_s))


def claims(rooms: Rooms, run: Run) -> int:
    roots = [Path(tier.store.url.removeprefix("file://")) for tier in rooms.context.tiers.values()]
    return sum(len(list((root / run).glob("generation-*"))) for root in roots)


async def test_a_run_without_a_checkpoint_expires_in_every_tier(rooms: Rooms) -> None:
    assert EMPTY in rooms.catalog.runs()
    assert await RunExpirer(rooms.context).run_once()
    assert claims(rooms, EMPTY) == 0
    assert EMPTY not in rooms.catalog.runs()
    assert claims(rooms, RUN) == 2, "it has a checkpoint"
    await rooms.look()
    assert rooms.catalog.runs() == [RUN]


async def test_a_run_that_was_started_lately_in_one_tier_stays_in_all(rooms: Rooms) -> None:
    await claim(rooms, EMPTY, 2, days_ago=6)
    await RunExpirer(rooms.context).run_once()
    assert claims(rooms, EMPTY) == 4


async def test_a_run_with_another_file_stays(rooms: Rooms) -> None:
    path = Path(rooms.context.hot.store.url.removeprefix("file://")) / EMPTY / "000000000001-g0001" / "rank.safetensors"
    path.parent.mkdir()
    path.write_bytes(b"x")  # an upload of another node, after the last listing
    await RunExpirer(rooms.context).run_once()
    assert claims(rooms, EMPTY) == 2


async def test_a_run_with_trainers_stays(rooms: Rooms) -> None:
    rooms.context.memory.enter(EMPTY, Generation(1), Rank(0), 1)
    await RunExpirer(rooms.context).run_once()
    assert claims(rooms, EMPTY) == 2


async def test_nothing_expires_while_a_tier_is_not_known(rooms: Rooms) -> None:
    rooms.catalog.listing_failed("cold", "no answer")
    await RunExpirer(rooms.context).run_once()
    assert claims(rooms, EMPTY) == 2


async def test_a_run_that_another_node_has_claimed_stays_in_the_shared_tier(rooms: Rooms) -> None:
    """That node may have checkpoints which cold does not keep, and a start here would claim its generation again."""
    cold = rooms.cold["cold"]
    assert await cold.claim_generation(EMPTY, Generation(2), Claim.new("elsewhere"))
    path = Path(cold.store.url.removeprefix("file://")) / EMPTY / "generation-0002.json"
    written_s = (NOW - timedelta(days=8)).timestamp()
    os.utime(path, (written_s, written_s))
    await rooms.look()
    await RunExpirer(rooms.context).run_once()
    assert claims(rooms, EMPTY) == 3
