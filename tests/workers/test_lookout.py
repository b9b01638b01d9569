"""When a look at a cold tier has it listed at once, and what it costs."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.bucket import bucket_server
from tests.support.daemon import Daemon
from tests.support.rooms import RUN, Rooms, rooms_at
from tests.support.s3 import BUCKET
from tests.support.trainer import Trainer
from tests.support.waiting import wait_until
from tierd.catalog.decisions import halted
from tierd.catalog.listing import refresh
from tierd.config.sections import LimitsConfig
from tierd.errors import TierUnreachable
from tierd.format import layout
from tierd.format.ids import checkpoint_id
from tierd.workers.lookout import SILENCE_SHARE, Lookout

RELIST = ("relist", "cold")


@pytest.fixture
async def rooms(tmp_path: Path) -> AsyncIterator[Rooms]:
    """Two checkpoints of a run and one of another in cold, which was listed."""
    async with rooms_at(tmp_path) as rooms:
        for step in (100, 200):
            await rooms.commit("cold", step=step, sequence=step)
        await rooms.commit("cold", run="other", step=1, sequence=1)
        await refresh(rooms.catalog, rooms.cold["cold"], rooms.context.identities)
        yield rooms


def manifest_of(rooms: Rooms, run: str, step: int) -> Path:
    return rooms.folder("cold", checkpoint_id(run, step, 1)) / layout.MANIFEST


async def look(rooms: Rooms, lookout: Lookout, times: int = 2) -> int:
    """How many of the looks had the tier listed."""
    rooms.events.clear()
    for _ in range(times):
        assert await lookout.run_once()
    return rooms.events.count(RELIST)


async def test_nothing_is_listed_as_long_as_the_newest_of_each_run_is_there(rooms: Rooms) -> None:
    manifest_of(rooms, RUN, 100).unlink()
    assert await look(rooms, Lookout(rooms.context, rooms.cold["cold"]), times=4) == 0


async def test_each_run_has_its_turn(rooms: Rooms) -> None:
    lookout = Lookout(rooms.context, rooms.cold["cold"])
    manifest_of(rooms, "other", 1).unlink()
    assert await look(rooms, lookout) == 1


async def test_each_file_of_the_newest_has_its_turn(rooms: Rooms) -> None:
    lookout, folder = Lookout(rooms.context, rooms.cold["cold"]), manifest_of(rooms, RUN, 200).parent
    names = [entry.name for entry in rooms.catalog.newest(RUN, "cold").files]  # type: ignore[union-attr]
    (folder / names[-1]).unlink()
    assert await look(rooms, lookout, times=2 + 4 * len(names)) == 1
    await refresh(rooms.catalog, rooms.cold["cold"], rooms.context.identities)
    assert f"{names[-1]} is missing" in str(rooms.catalog.unreadable())


async def test_what_a_listing_still_shows_has_it_listed_only_once(rooms: Rooms) -> None:
    lookout, manifest = Lookout(rooms.context, rooms.cold["cold"]), manifest_of(rooms, RUN, 200)
    content = manifest.read_bytes()
    manifest.unlink()
    assert await look(rooms, lookout, times=6) == 1
    manifest.write_bytes(content)
    assert await look(rooms, lookout) == 0
    manifest.unlink()
    assert await look(rooms, lookout) == 1, "it was there again meanwhile"


async def test_an_empty_tier_and_one_that_is_not_known_are_not_looked_at(rooms: Rooms) -> None:
    lookout = Lookout(rooms.context, rooms.cold["cold"])
    rooms.catalog.listing_failed("cold", "no answer")
    shutil.rmtree(rooms.context.config.cold[0].url.removeprefix("file:/"))
    assert await look(rooms, lookout) == 0, "the lister tries again by itself"
    await refresh(rooms.catalog, rooms.cold["cold"], rooms.context.identities)
    assert await look(rooms, lookout) == 0


async def test_a_store_that_refuses_looks_is_listed_once_and_again_after_it_was_down(rooms: Rooms) -> None:
    """A proxy or a policy may refuse HEAD and allow all else: a listing for each look would cost 20 times as much."""
    lookout, store = Lookout(rooms.context, rooms.cold["cold"]), rooms.cold["cold"].store
    stored_checksum = store.stored_checksum

    async def refuse(key: str) -> str | None:
        raise TierUnreachable(f"read the checksum of {key}: access denied")

    store.stored_checksum = refuse  # type: ignore[method-assign]
    assert await look(rooms, lookout, times=6) == 2, "once for each run"
    rooms.catalog.listing_failed("cold", "no answer")
    assert await look(rooms, lookout) == 0
    await refresh(rooms.catalog, rooms.cold["cold"], rooms.context.identities)
    assert await look(rooms, lookout) == 2, "it was down"
    store.stored_checksum = stored_checksum  # type: ignore[method-assign]
    assert await look(rooms, lookout) == 0
    store.stored_checksum = refuse  # type: ignore[method-assign]
    assert await look(rooms, lookout) == 2, "it had answered meanwhile"


SILENT = LimitsConfig(request_timeout_s=0.6)
DEFAULTS = LimitsConfig()


def test_by_default_a_silent_tier_is_named_within_a_minute() -> None:
    assert DEFAULTS.cold_look_interval_s + DEFAULTS.request_timeout_s / SILENCE_SHARE < 60


async def test_a_tier_that_answers_nothing_is_not_known_after_a_third_of_one_timeout(tmp_path: Path) -> None:
    """The listing that follows takes several whole timeouts to find it out."""
    async with silent_rooms(tmp_path) as (rooms, silence):
        lookout = Lookout(rooms.context, rooms.cold["cold"])
        assert await look(rooms, lookout, times=1) == 1
        known = rooms.catalog.tiers["cold"]
        assert not known.is_known
        assert known.error.endswith("manifest.json in " + rooms.cold["cold"].store.url + ": no valid answer for 0.2 s")
        assert "cold" in {halt.tier for halt in halted(rooms.catalog)}, "nothing is deleted because of an old listing"
        assert await look(rooms, lookout) == 0, "the lister tries again by itself"
        silence.clear()
        await refresh(rooms.catalog, rooms.cold["cold"], rooms.context.identities)
        assert await look(rooms, lookout, times=4) == 0
        assert rooms.catalog.tiers["cold"].is_known
        silence.add("silent")
        assert await look(rooms, lookout, times=1) == 1, "it had answered meanwhile"


async def test_a_tier_that_answers_all_but_looks_is_noted_once_for_each_run(tmp_path: Path) -> None:
    """Else it would not be known for the half of the time."""
    async with silent_rooms(tmp_path) as (rooms, _):
        lookout, relisted = Lookout(rooms.context, rooms.cold["cold"]), 0
        for _ in range(6):
            relisted += await look(rooms, lookout, times=1)
            await look(rooms, lookout, times=1)  # before the listing has ended
            await refresh(rooms.catalog, rooms.cold["cold"], rooms.context.identities)
        assert relisted == 2


async def test_a_slow_look_is_no_silence_while_other_calls_are_answered(tmp_path: Path) -> None:
    async with silent_rooms(tmp_path) as (rooms, _), asyncio.TaskGroup() as group:
        looking = group.create_task(Lookout(rooms.context, rooms.cold["cold"]).run_once())
        for _ in range(12):
            await asyncio.sleep(0.05)
            await rooms.cold["cold"].store.exists()
        assert not looking.done()
        assert rooms.catalog.tiers["cold"].is_known
        looking.cancel()


@asynccontextmanager
async def silent_rooms(root: Path) -> AsyncGenerator[tuple[Rooms, set[str]]]:
    """As `rooms`, with a cold tier where no look is answered while the set has an element."""
    async with rooms_at(root, limits=SILENT) as rooms:
        for run in (RUN, "other"):
            await rooms.commit("cold", run=run, step=1, sequence=1)
        await refresh(rooms.catalog, rooms.cold["cold"], rooms.context.identities)
        store, silence = rooms.cold["cold"].store, {"silent"}
        stored_checksum = store.stored_checksum

        async def look_if_it_answers(key: str) -> str | None:
            while silence:
                await asyncio.sleep(0.01)
            return await stored_checksum(key)

        store.stored_checksum = look_if_it_answers  # type: ignore[method-assign]
        yield rooms, silence


@pytest.mark.long
def test_a_server_that_accepts_and_never_answers_is_named_soon(tmp_path: Path) -> None:
    with bucket_server() as served:
        cold = f'url = "s3://{BUCKET}/deep"\nendpoint_url = "{served.url}"'
        more = "cold_look_interval_s = 0.1\nrequest_timeout_s = 9.0\n"
        with Daemon(tmp_path, cold=cold, more=more) as daemon, Trainer() as trainer:
            trainer.connect(daemon.socket)
            trainer.train(1)
            trainer.snapshot()
            trainer.wait_replicated()
            served.script = lambda operation, key: "hold"
            wait_until(lambda: "NOT REACHABLE" in daemon.tierd("status").stdout, "the alarm")
            assert "no valid answer for 3 s" in daemon.tierd("status").stdout


@pytest.mark.parametrize("interval_s", [0.1, pytest.param(0.0, marks=pytest.mark.long)])
def test_a_look_is_one_head_and_ends_with_the_tier_named(tmp_path: Path, interval_s: float) -> None:
    """With an interval of 0, nothing is noticed until the next listing."""
    with bucket_server() as served:
        cold = f'url = "s3://{BUCKET}/deep"\nendpoint_url = "{served.url}"'
        more = f"cold_look_interval_s = {interval_s}\n"
        with Daemon(tmp_path, cold=cold, more=more) as daemon, Trainer() as trainer:
            trainer.connect(daemon.socket)
            trainer.train(1)
            trainer.snapshot()
            trainer.wait_replicated()
            before, heads = served.count("list_objects_v2"), served.count("head_object")
            if interval_s == 0:
                with served.lock:
                    served.objects.clear()
                time.sleep(1.0)
                assert (served.count("list_objects_v2"), served.count("head_object")) == (before, heads)
                return
            wait_until(lambda: served.count("head_object") >= heads + 3, "three looks")
            assert served.count("list_objects_v2") == before
            served.script = lambda operation, key: "NoSuchBucket"
            wait_until(lambda: "NOT REACHABLE" in daemon.tierd("status").stdout, "the alarm")
