from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.damage import flip
from tests.support.kill import kill_when_stalled
from tests.support.rooms import Rooms, rooms_at
from tierd.errors import Corrupt, Full, LockHeld
from tierd.transfer.atomic_output import atomic_output
from tierd.transfer.drill import clear, drill


@pytest.fixture
async def rooms(tmp_path: Path) -> AsyncIterator[Rooms]:
    async with rooms_at(tmp_path) as found:
        yield found


async def test_drill_restores_everything_and_leaves_nothing(rooms: Rooms, tmp_path: Path) -> None:
    made = await rooms.commit("cold", milestones=("best",))
    told: list[int] = []
    seconds = await drill(rooms.cold["cold"], made, tmp_path / "scratch", progress=told.append)
    assert seconds > 0
    assert sum(told) == made.size_bytes
    assert not (tmp_path / "scratch").exists()


async def test_drill_of_a_damaged_replica_fails_and_leaves_nothing(rooms: Rooms, tmp_path: Path) -> None:
    made = await rooms.commit("cold")
    flip(tmp_path / "cold", made, made.files[1].name)
    with pytest.raises(Corrupt, match="chunk 0 of 1"):
        await drill(rooms.cold["cold"], made, tmp_path / "scratch")
    assert not (tmp_path / "scratch").exists()


async def test_drill_needs_free_space_and_the_spare_bytes(rooms: Rooms, tmp_path: Path) -> None:
    made = await rooms.commit("cold")
    with pytest.raises(Full):
        await drill(rooms.cold["cold"], made, tmp_path / "scratch", spare_bytes=1 << 60)
    assert not (tmp_path / "scratch").exists()


async def test_drill_that_is_cancelled_while_it_begins_leaves_nothing_and_frees_its_place(
    rooms: Rooms, tmp_path: Path
) -> None:
    """The fixture refuses the removal of its folder on the event loop, where garbage collection would do it."""
    made = await rooms.commit("cold")
    for _ in range(3):
        drilling = asyncio.create_task(drill(rooms.cold["cold"], made, tmp_path / "scratch"))
        await asyncio.sleep(0)  # its thread has begun
        drilling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await drilling
        assert not (tmp_path / "scratch").exists()
    assert await drill(rooms.cold["cold"], made, tmp_path / "scratch") > 0


async def test_second_drill_of_a_tier_is_refused(rooms: Rooms, tmp_path: Path) -> None:
    made = await rooms.commit("cold")
    other = atomic_output(tmp_path / "scratch/cold", size_bytes=0)
    await asyncio.to_thread(other.__enter__)
    with pytest.raises(LockHeld):
        await drill(rooms.cold["cold"], made, tmp_path / "scratch")
    await asyncio.to_thread(other.__exit__, None, None, None)


DRILL = """
import asyncio, sys
from pathlib import Path
from tierd.format.ids import checkpoint_id
from tierd.tiers.directory import DirectoryStore
from tierd.transfer.drill import drill
from tierd.tiers.tier import Tier

class Stalling(DirectoryStore):
    async def read(self, key, offset, buffer):
        if "rank-00001" in key:
            while not list(Path(sys.argv[2]).rglob("rank-00000*.safetensors")):
                await asyncio.sleep(0.01)
            print("stalled", flush=True)
            await asyncio.Event().wait()
        await super().read(key, offset, buffer)

async def main():
    cold = Tier("cold", Stalling(Path(sys.argv[1])))
    await drill(cold, await cold.manifest(checkpoint_id("run42", 100, 1)), Path(sys.argv[2]))

asyncio.run(main())
"""


@pytest.mark.parametrize("is_drilled_again", [True, False])
async def test_leftovers_of_a_killed_drill_are_cleared_by_the_next_one_or_on_request(
    rooms: Rooms, tmp_path: Path, is_drilled_again: bool
) -> None:
    made = await rooms.commit("cold")
    scratch = tmp_path / "hot" / ".drill"
    await asyncio.to_thread(kill_when_stalled, DRILL, str(tmp_path / "cold"), str(scratch))
    assert list(scratch.rglob("*.safetensors")) != []
    assert (await rooms.hot.listing()).files == {}  # nothing takes it for a checkpoint
    if is_drilled_again:
        await drill(rooms.cold["cold"], made, scratch)
    else:
        for _ in range(2):
            await asyncio.to_thread(clear, "cold", scratch)
    assert list(scratch.iterdir()) == []
