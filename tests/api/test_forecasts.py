"""Which runs count for the forecast of a disk, and what of it is known."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.cli import make_manifest
from tests.support.rooms import RUN, Rooms, rooms_at
from tierd.api import forecasts as module
from tierd.api.forecasts import FORECAST_S, Forecasts, TierForecasts
from tierd.catalog.decisions import missing_room_bytes
from tierd.config.sections import ColdConfig, ColdPolicy, LifecycleConfig, TierPolicy
from tierd.format.ids import Generation, Rank, Run, checkpoint_id
from tierd.format.manifest import FileEntry
from tierd.format.run_state import RunState
from tierd.status.report import DiskForecast

NOW = datetime(2026, 11, 27, 12, tzinfo=UTC)
MB = 1_000_000
KEEP = LifecycleConfig(hot=TierPolicy(keep_last=10), cold=ColdPolicy(keep_last=10, keep_every=0))


@pytest.fixture
async def rooms(tmp_path: Path) -> AsyncIterator[Rooms]:
    async with rooms_at(tmp_path, lifecycle=KEEP, clocks={"now": lambda: NOW}) as rooms:
        yield rooms


def save(
    rooms: Rooms,
    count: int,
    *,
    run: str = RUN,
    age_s: float = 0.0,
    tiers: tuple[str, ...] = ("hot",),
    size_bytes: int = MB,
) -> None:
    """`count` checkpoints, one each minute; the newest is `age_s` old."""
    for number in range(1, count + 1):
        created_at = NOW - timedelta(seconds=age_s + 60 * (count - number))
        entry = FileEntry(
            name="rank-00000-of-00001.safetensors", size_bytes=size_bytes, crc64nvme="", chunk_bytes=MB, chunks=[]
        )
        checkpoint = checkpoint_id(run, number * 10, 1)
        manifest = make_manifest(checkpoint, [entry], sequence=number, created_at=created_at.isoformat())
        for tier in tiers:
            rooms.catalog.add(manifest, tier)


async def read(rooms: Rooms, on_hot_disk: tuple[str, ...] = (), **free: int | None) -> TierForecasts:
    return await Forecasts(rooms.context).read(free, on_hot_disk)


async def test_hot_is_full_when_what_the_policy_keeps_and_room_for_two_do_not_fit(rooms: Rooms) -> None:
    save(rooms, 3)
    assert (await read(rooms, hot=9 * MB)).disk("hot", NOW) == DiskForecast(verdict="fits"), "7 more and 2"
    full = (await read(rooms, hot=6 * MB)).disk("hot", NOW)
    assert full is not None
    assert full.verdict == "full"
    assert full.full_in_s == pytest.approx(5 * 60, abs=31)
    assert full.full_at is not None
    assert datetime.fromisoformat(full.full_at) - NOW == pytest.approx(timedelta(minutes=5), abs=timedelta(seconds=31))


async def test_room_is_for_two_of_the_largest_in_hot_as_when_checkpoints_are_deleted_for_it(rooms: Rooms) -> None:
    save(rooms, 3)
    save(rooms, 1, run="ended", age_s=1000.0, size_bytes=5 * MB)
    assert missing_room_bytes(rooms.catalog, 16 * MB) == 0
    assert (await read(rooms, hot=17 * MB)).disk("hot", NOW) == DiskForecast(verdict="fits"), "7 more and 2 of 5 MB"
    assert (full := (await read(rooms, hot=9 * MB)).disk("hot", NOW)) is not None
    assert missing_room_bytes(rooms.catalog, 9 * MB) > 0
    assert full.full_in_s == 0


async def test_a_cold_tier_on_hot_s_disk_counts_there(rooms: Rooms) -> None:
    save(rooms, 3, tiers=("hot", "cold"))
    found = await read(rooms, ("cold",), hot=9 * MB, cold=9 * MB)
    assert found.disk("cold", NOW) is None
    assert (hot := found.disk("hot", NOW)) is not None
    assert hot.full_in_s == pytest.approx(4 * 60, abs=31)


async def test_a_bucket_has_no_disk_and_a_checkpoint_is_due_there_at_the_pace_of_all_runs(rooms: Rooms) -> None:
    save(rooms, 3)
    save(rooms, 3, run="other")
    found = await read(rooms, hot=100 * MB, cold=None)
    assert found.disk("cold", NOW) is None
    assert found.due_every_s == {"cold": 30.0}


async def test_a_run_that_has_ended_does_not_count(rooms: Rooms) -> None:
    save(rooms, 3, age_s=1000.0)
    found = await read(rooms, hot=1)
    assert found.disk("hot", NOW) is None
    assert found.due_every_s == {}


@pytest.mark.parametrize("newer_elsewhere", [False, True])
async def test_a_run_whose_trainers_have_ended_here_counts_only_if_another_node_continues_it(
    rooms: Rooms, *, newer_elsewhere: bool
) -> None:
    save(rooms, 3)
    outcomes, generation = rooms.context.memory.outcomes, Generation(0 if newer_elsewhere else 1)
    outcomes.rank_entered(Run(RUN), generation, Rank(0))
    outcomes.rank_exited(Run(RUN), Rank(0), RunState.FINISHED, "")
    outcomes.rank_disconnected(Run(RUN), Rank(0))
    assert ((await read(rooms, hot=1)).disk("hot", NOW) is not None) == newer_elsewhere


async def test_what_another_node_copies_is_not_due_here(rooms: Rooms) -> None:
    """It counts on the disk of a shared tier, but no copy of this daemon is late because of it."""
    save(rooms, 3, tiers=("hot", "cold"))
    save(rooms, 3, run="other", tiers=("cold",))
    assert (await read(rooms, hot=100 * MB, cold=None)).due_every_s == {"cold": 60.0}


async def test_a_run_of_another_node_takes_no_space_in_hot(rooms: Rooms) -> None:
    """It comes into a shared cold tier only."""
    save(rooms, 3, run="other", tiers=("cold",))
    found = await read(rooms, hot=1, cold=100 * MB)
    assert (found.disk("hot", NOW), found.disk("cold", NOW)) == (None, DiskForecast(verdict="fits"))
    save(rooms, 3, tiers=("hot", "cold"))
    assert (await read(rooms, hot=10 * MB, cold=None)).disk("hot", NOW) == DiskForecast(verdict="fits"), "7 more and 2"


async def test_where_only_another_node_copies_nothing_is_due(rooms: Rooms) -> None:
    save(rooms, 3, run="other", tiers=("cold",))
    assert (await read(rooms, hot=100 * MB, cold=None)).due_every_s == {}


@pytest.mark.parametrize("count", [0, 1])
async def test_trainers_without_two_checkpoints_make_it_unknown(rooms: Rooms, count: int) -> None:
    save(rooms, count, age_s=1000.0)
    rooms.seal(80)
    found = await read(rooms, hot=100 * MB, cold=None)
    assert found.disk("hot", NOW) == DiskForecast(verdict="unknown")
    assert found.due_every_s == {}


async def test_nothing_is_deleted_in_a_tier_that_is_left_to_reap(tmp_path: Path) -> None:
    cold = ColdConfig(name="cold", url=f"file://{tmp_path / 'cold'}", deletes=False)
    async with rooms_at(tmp_path, cold=(cold,), lifecycle=KEEP, clocks={"now": lambda: NOW}) as rooms:
        save(rooms, 3, tiers=("hot", "cold"))
        found = await read(rooms, hot=100 * MB, cold=100 * MB)
    assert found.disk("hot", NOW) == DiskForecast(verdict="fits")
    assert (disk := found.disk("cold", NOW)) is not None
    assert disk.full_in_s == pytest.approx(100 * 60, rel=0.05)


async def test_it_is_computed_again_after_a_while_and_not_for_each_request(tmp_path: Path) -> None:
    clock: dict[str, Any] = {"s": 0.0}
    async with rooms_at(tmp_path, clocks={"now": lambda: NOW, "monotonic_s": lambda: clock["s"]}) as rooms:
        forecasts = Forecasts(rooms.context)
        assert (await forecasts.read({"hot": 1}, ())).disk("hot", NOW) is None
        save(rooms, 3)
        assert (await forecasts.read({"hot": 1}, ())).disk("hot", NOW) is None
        clock["s"] += FORECAST_S
        assert (await forecasts.read({"hot": 1}, ())).disk("hot", NOW) is not None


async def test_the_status_does_not_wait_long_for_it(rooms: Rooms, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()
    monkeypatch.setattr(module, "WAIT_S", 0.05)
    monkeypatch.setattr(module, "full_in_s", lambda runs, free_bytes: may_end.wait(60) and 0.0)
    save(rooms, 3)
    forecasts = Forecasts(rooms.context)
    assert (await forecasts.read({"hot": 1}, ())).disk("hot", NOW) is None, "not yet"
    may_end.set()
    monkeypatch.setattr(module, "WAIT_S", 60.0)
    assert (await forecasts.read({"hot": 1}, ())).disk("hot", NOW) is not None


HOT_FEW = LifecycleConfig(hot=TierPolicy(keep_last=2), cold=ColdPolicy(keep_last=10, keep_every=0))
HOT_FEW_TENTHS = LifecycleConfig(hot=TierPolicy(keep_last=2), cold=ColdPolicy(keep_last=2, keep_every=2))


async def hot_disk(root: Path, policy: LifecycleConfig, free_mb: int, *, copy_s: float | None) -> DiskForecast | None:
    """With a checkpoint each minute. `copy_s`: None where cold cannot be reached."""
    async with rooms_at(root, lifecycle=policy, clocks={"now": lambda: NOW}) as rooms:
        save(rooms, 3)
        if copy_s is None:
            rooms.catalog.listing_failed("cold", "no answer")
        else:
            rooms.context.copies.committed("cold", seconds=copy_s, at_s=0.0)
        with patch.object(module, "WAIT_S", 60.0):  # on a busy machine
            return (await read(rooms, hot=free_mb * MB, cold=None)).disk("hot", NOW)


@pytest.mark.parametrize("copy_s", [120.0, None])
async def test_hot_keeps_the_newest_that_a_late_cold_tier_lacks(tmp_path: Path, copy_s: float | None) -> None:
    fits = DiskForecast(verdict="fits")
    assert await hot_disk(tmp_path / "keeps up", HOT_FEW, 6, copy_s=59.0) == fits
    assert await hot_disk(tmp_path / "fits", HOT_FEW, 9, copy_s=copy_s) == fits, "7 more and 2"
    full = await hot_disk(tmp_path / "full", HOT_FEW, 6, copy_s=copy_s)
    assert full is not None
    assert full.full_in_s == pytest.approx(5 * 60, abs=31)
    assert full.waits_for == ["cold"]


@pytest.mark.parametrize(("copy_s", "every_s"), [(119.0, 0.0), (240.0, 240.0), (1200.0, 133.3), (None, 120.0)])
async def test_hot_keeps_what_lasts_in_cold_and_is_never_copied(
    tmp_path: Path, copy_s: float | None, every_s: float
) -> None:
    """Every second one lasts, one each 120 s. What a copy each 240 s does not take adds up, half of it; a tier that is
    down takes none."""
    disk = await hot_disk(tmp_path, HOT_FEW_TENTHS, 1002, copy_s=copy_s)
    assert disk is not None
    if not every_s:
        assert disk.verdict == "fits"
    else:
        assert disk.full_in_s == pytest.approx(1000 * every_s, rel=0.05)
        assert disk.waits_for == ["cold"]


async def test_a_tier_that_was_never_listed_is_not_late(tmp_path: Path) -> None:
    async with rooms_at(tmp_path, lifecycle=HOT_FEW, clocks={"now": lambda: NOW}) as rooms:
        save(rooms, 3)
        assert (await read(rooms, hot=6 * MB, cold=None)).disk("hot", NOW) == DiskForecast(verdict="fits")
