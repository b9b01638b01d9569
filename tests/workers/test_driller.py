from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from tests.support.cli import make_checkpoint
from tests.support.daemon import serving
from tests.support.damage import flip
from tests.support.rooms import RUN, Rooms, rooms_at
from tests.support.waiting import wait_until
from tierd.config import DrillConfig
from tierd.workers import driller
from tierd.workers.driller import Driller

INTERVAL_S = 1000.0


@pytest.fixture
async def rooms(tmp_path: Path) -> AsyncIterator[Rooms]:
    async with rooms_at(tmp_path, drill=DrillConfig(interval_s=INTERVAL_S)) as found:
        yield found


class Clocked:
    """A driller and its clock."""

    def __init__(self, rooms: Rooms) -> None:
        self.now_s = 0.0
        self.rooms = rooms
        self.worker = Driller(
            rooms.catalog,
            rooms.tiers,
            rooms.config,
            metrics=rooms.metrics,
            incidents=rooms.incidents,
            now_s=lambda: self.now_s,
            timestamp_s=lambda: 1e9 + self.now_s,
        )

    async def at(self, now_s: float) -> None:
        self.now_s = now_s
        assert await self.worker.run_once()

    def last(self, tier: str) -> float | None:
        return self.rooms.count("tierd_drill_last_success_timestamp_seconds", tier=tier)


async def test_each_tier_has_its_drill_soon_after_the_start_and_then_once_in_an_interval(rooms: Rooms) -> None:
    made = await rooms.commit("hot", "cold")
    clocked = Clocked(rooms)
    await clocked.at(0.0)
    await rooms.look()
    await clocked.at(INTERVAL_S * driller.SOON)
    assert clocked.last("hot") == clocked.last("cold") == 1e9 + INTERVAL_S * driller.SOON
    assert (rooms.count("tierd_drill_restore_seconds", tier="cold") or 0) > 0
    assert rooms.count("tierd_drill_newest_step_proven", run=RUN, tier="cold") == 100
    assert rooms.count("tierd_bytes_total", tier="cold", direction="read") == made.size_bytes
    await clocked.at(INTERVAL_S)
    assert clocked.last("hot") == 1e9 + INTERVAL_S * driller.SOON
    await clocked.at(INTERVAL_S * (1 + driller.SOON))
    assert clocked.last("hot") == 1e9 + INTERVAL_S * (1 + driller.SOON)
    assert sorted(one.name for one in (rooms.config.hot_path).iterdir()) == [RUN]


async def test_the_newest_that_was_ever_proven_is_what_is_published(
    rooms: Rooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        await rooms.commit("hot", step=step, sequence=step)
    await rooms.look()
    clocked = Clocked(rooms)
    await clocked.at(0.0)
    for step, now_s in ((2, INTERVAL_S), (1, 3 * INTERVAL_S)):
        monkeypatch.setattr(
            driller.random, "choice", lambda entries, step=step: next(one for one in entries if one.id.step == step)
        )
        await clocked.at(now_s)
    assert clocked.last("hot") == 1e9 + 3 * INTERVAL_S
    assert rooms.count("tierd_drill_newest_step_proven", run=RUN, tier="hot") == 2


async def test_a_drill_that_fails_is_told_and_tried_again_sooner_and_holds_up_no_other(
    rooms: Rooms, tmp_path: Path
) -> None:
    made = await rooms.commit("hot", "cold")
    flip(tmp_path / "hot", made, made.files[0].name)
    await rooms.look()
    clocked = Clocked(rooms)
    await clocked.at(0.0)
    await clocked.at(INTERVAL_S)
    assert clocked.last("hot") is None
    assert clocked.last("cold") == 1e9 + INTERVAL_S
    assert rooms.count("tierd_failures_total", stage="drill", kind="corrupt") == 1
    flip(tmp_path / "hot", made, made.files[0].name)  # the same bit: as it was
    await clocked.at(INTERVAL_S * (1 + driller.SOON))
    assert clocked.last("hot") == 1e9 + INTERVAL_S * (1 + driller.SOON)


async def test_an_empty_tier_one_out_of_reach_and_what_is_deleted_meanwhile_are_no_failure(
    rooms: Rooms, tmp_path: Path
) -> None:
    made = await rooms.commit("cold")
    await rooms.look()
    await rooms.cold["cold"].delete(made.id)
    clocked = Clocked(rooms)
    await clocked.at(0.0)
    await clocked.at(INTERVAL_S)
    assert rooms.incidents.recent() == []
    rooms.catalog.lost_tier("cold", "away")
    await clocked.at(3 * INTERVAL_S)
    assert rooms.incidents.recent() == []


async def test_no_room_to_spare_is_no_full_disk(rooms: Rooms) -> None:
    made = await rooms.commit("cold")
    await rooms.look()
    huge = msgspec.structs.replace(made.files[0], size_bytes=1 << 60)
    rooms.catalog.add(msgspec.structs.replace(made, step=200, files=[huge]), "hot")
    clocked = Clocked(rooms)
    await clocked.at(0.0)
    await clocked.at(INTERVAL_S)
    assert rooms.count("tierd_failures_total", stage="drill", kind="full") == 0
    assert rooms.count("tierd_failures_total", stage="drill", kind="transient") == 2


def test_the_daemon_drills_on_its_schedule(tmp_path: Path) -> None:
    (tmp_path / "hot").mkdir()
    make_checkpoint(tmp_path / "hot", tmp_path / "cold", run="gpt")
    more = '[[cold]]\nname = "cold"\nurl = "file://cold"\n[drill]\ninterval_s = 0.2\n[health]\nexamine = false'
    with serving(tmp_path, more=more) as daemon:
        name = 'tierd_drill_newest_step_proven{run="gpt",tier="%s"}'
        wait_until(lambda: all(name % tier in daemon.request("/metrics")[1].decode() for tier in ("hot", "cold")))
        assert daemon.metric(name % "cold") == 100
        assert daemon.status()["failures"] == []
        assert daemon.steps("hot", "gpt") == [100]
