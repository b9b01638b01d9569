"""Drills: one restore into scratch space per tier and interval."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from tests.support.cli import make_checkpoint
from tests.support.daemon import serving
from tests.support.damage import flip
from tests.support.rooms import RUN, Rooms, rooms_at
from tests.support.waiting import wait_until
from tierd.config.sections import DrillConfig
from tierd.workers import driller
from tierd.workers.driller import Driller

INTERVAL_S = 1000.0


@pytest.fixture
async def rooms(tmp_path: Path) -> AsyncIterator[Rooms]:
    async with rooms_at(tmp_path, drill=DrillConfig(interval_s=INTERVAL_S)) as rooms:
        yield rooms


class DrillerWithClock:
    """A driller and its clock."""

    def __init__(self, rooms: Rooms) -> None:
        self.now_s = 0.0
        self.rooms = rooms
        context = replace(
            rooms.context,
            monotonic_s=lambda: self.now_s,
            now=lambda: datetime.fromtimestamp(1e9 + self.now_s, UTC),
        )
        self.worker = Driller(context)

    async def at(self, now_s: float) -> None:
        self.now_s = now_s
        assert await self.worker.run_once()

    def last(self, tier: str) -> float | None:
        return self.rooms.count("tierd_drill_last_success_timestamp_seconds", tier=tier)


async def test_each_tier_is_drilled_soon_after_the_start_and_then_once_per_interval(rooms: Rooms) -> None:
    made = await rooms.commit("hot", "cold")
    driller_with_clock = DrillerWithClock(rooms)
    await driller_with_clock.at(0.0)
    await rooms.look()
    await driller_with_clock.at(INTERVAL_S * driller.SOON)
    assert driller_with_clock.last("hot") == driller_with_clock.last("cold") == 1e9 + INTERVAL_S * driller.SOON
    assert (rooms.count("tierd_drill_restore_seconds", tier="cold") or 0) > 0
    assert rooms.count("tierd_drill_newest_step_proven", run=RUN, tier="cold") == 100
    assert rooms.count("tierd_bytes_total", tier="cold", direction="read") == made.size_bytes
    await driller_with_clock.at(INTERVAL_S)
    assert driller_with_clock.last("hot") == 1e9 + INTERVAL_S * driller.SOON
    await driller_with_clock.at(INTERVAL_S * (1 + driller.SOON))
    assert driller_with_clock.last("hot") == 1e9 + INTERVAL_S * (1 + driller.SOON)
    assert sorted(path.name for path in rooms.config.hot_path.iterdir()) == [RUN]


async def test_the_metric_is_the_newest_step_that_any_drill_has_restored(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        await rooms.commit("hot", step=step, sequence=step)
    await rooms.look()
    driller_with_clock = DrillerWithClock(rooms)
    await driller_with_clock.at(0.0)
    for step, now_s in ((2, INTERVAL_S), (1, 3 * INTERVAL_S)):
        monkeypatch.setattr(
            driller.random,
            "choice",
            lambda entries, step=step: next(entry for entry in entries if entry.id.step == step),
        )
        await driller_with_clock.at(now_s)
    assert driller_with_clock.last("hot") == 1e9 + 3 * INTERVAL_S
    assert rooms.count("tierd_drill_newest_step_proven", run=RUN, tier="hot") == 2


async def test_a_failed_drill_is_recorded_and_retried_sooner_and_does_not_delay_other_tiers(
    rooms: Rooms, tmp_path: Path
) -> None:
    made = await rooms.commit("hot", "cold")
    flip(tmp_path / "hot", made, made.files[0].name)
    await rooms.look()
    driller_with_clock = DrillerWithClock(rooms)
    await driller_with_clock.at(0.0)
    await driller_with_clock.at(INTERVAL_S)
    assert driller_with_clock.last("hot") is None
    assert driller_with_clock.last("cold") == 1e9 + INTERVAL_S
    assert rooms.count("tierd_failures_total", stage="drill", kind="corrupt") == 1
    flip(tmp_path / "hot", made, made.files[0].name)  # the same bit again: undamaged
    await driller_with_clock.at(INTERVAL_S * (1 + driller.SOON))
    assert driller_with_clock.last("hot") == 1e9 + INTERVAL_S * (1 + driller.SOON)


async def test_an_empty_tier_an_unlisted_tier_and_a_deleted_checkpoint_are_not_failures(
    rooms: Rooms, tmp_path: Path
) -> None:
    made = await rooms.commit("cold")
    await rooms.look()
    await rooms.cold["cold"].delete(made.id)
    driller_with_clock = DrillerWithClock(rooms)
    await driller_with_clock.at(0.0)
    await driller_with_clock.at(INTERVAL_S)
    assert rooms.incidents.recent() == []
    rooms.catalog.listing_failed("cold", "away")
    await driller_with_clock.at(3 * INTERVAL_S)
    assert rooms.incidents.recent() == []


async def test_too_little_scratch_space_is_not_reported_as_a_full_disk(rooms: Rooms) -> None:
    made = await rooms.commit("cold")
    await rooms.look()
    huge = msgspec.structs.replace(made.files[0], size_bytes=1 << 60)
    rooms.catalog.add(msgspec.structs.replace(made, step=200, files=[huge]), "hot")
    driller_with_clock = DrillerWithClock(rooms)
    await driller_with_clock.at(0.0)
    await driller_with_clock.at(INTERVAL_S)
    assert rooms.count("tierd_failures_total", stage="drill", kind="full") == 0
    assert rooms.count("tierd_failures_total", stage="drill", kind="transient") == 2


def test_the_daemon_drills_at_its_interval(tmp_path: Path) -> None:
    (tmp_path / "hot").mkdir()
    make_checkpoint(tmp_path / "hot", tmp_path / "cold", run="gpt")
    more = '[[cold]]\nname = "cold"\nurl = "file://cold"\n[drill]\ninterval_s = 0.2\n[health]\nexamine = false'
    with serving(tmp_path, more=more) as daemon:
        name = 'tierd_drill_newest_step_proven{run="gpt",tier="%s"}'
        wait_until(lambda: all(name % tier in daemon.request("/metrics")[1].decode() for tier in ("hot", "cold")))
        assert daemon.metric(name % "cold") == 100
        assert daemon.status()["failures"] == []
        assert daemon.steps("hot", "gpt") == [100]
