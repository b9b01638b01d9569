"""Several daemons copy different files of one run and name into one cold tier, in every order, and are killed.

Nothing that a daemon knows to be in cold is lost, and no reader gets the bytes of two files as one.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import random
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.config import make_config
from tests.support.rooms import RUN, Rooms
from tests.support.simulation.loop import OWNER, Process, SimulatedLoop
from tierd.config.sections import ColdConfig
from tierd.format.sidecar import Segment, branches, parse_segment, segment_prefix
from tierd.tiers.tier import Tier
from tierd.transfer.sidecar_output import verified_segments
from tierd.workers.sidecar_follower import CHECK_S, COPY_S, POLL_S, SidecarFollower

NAME = "log.jsonl"
BUSY_S = 60.0
QUIET_S = CHECK_S + 100.0  # a slow put of another daemon may come after the listing that confirms a file


class Node:
    """A machine with a program that appends to its file, and a daemon. `known`: how much of the file a daemon has
    copied before a pass that has listed it. `former`: (content, known) of the files that the program has replaced."""

    def __init__(self, world: World, number: int, beginning: bytes) -> None:
        self.world, self.number = world, number
        self.root = world.root / f"node-{number}"
        self.file = self.root / "out" / NAME
        self.file.parent.mkdir(parents=True)
        self.file.write_bytes(beginning)
        self.known = 0
        self.former: list[tuple[bytes, int]] = []
        self.is_lost = False
        self.start()

    def start(self) -> None:
        self.process = Process(f"daemon-{self.number}")
        context = contextvars.copy_context()
        context.run(OWNER.set, self.process)
        cold = (ColdConfig(name="cold", url=f"file://{self.world.root / 'cold'}"),)
        config = make_config(self.root, cold=cold)
        sidecars = msgspec.structs.replace(config.sidecars, path=str(self.file.parent), run=RUN, keep=[NAME])
        self.rooms = Rooms(msgspec.structs.replace(config, sidecars=sidecars), monotonic_s=self.world.loop.time)
        rng = random.Random(self.world.loop.random.random())
        context.run(self.world.loop.create_task, self._follow(SidecarFollower(self.rooms.context, rng=rng)))

    def kill(self) -> None:
        self.process.is_alive = False

    async def _follow(self, worker: SidecarFollower) -> None:
        while True:
            await asyncio.sleep(self.world.loop.random.uniform(0.5, 1.5) * POLL_S)
            files = worker._files  # pyright: ignore[reportPrivateUsage]
            before, count = files.get(NAME), len(self.former)
            before = None if before is None else dataclasses.replace(before)
            await worker.run_once()
            after = files.get(NAME)
            if before is None or after is None or len(self.former) != count:
                continue
            has_copied = before.not_before_s != after.not_before_s and after.differs_since_s is None
            if has_copied and before.version == after.version:
                self.known = max(self.known, before.stored_bytes)

    def replace(self) -> None:
        """The program begins its file anew, as one that rotates it."""
        self.former.append((self.file.read_bytes(), self.known))
        new = self.file.with_name("new")
        new.write_bytes(b"begin %d of node %d\n" % (len(self.former), self.number))
        new.rename(self.file)
        self.known = 0

    async def write(self) -> None:
        rng, step = self.world.loop.random, 0
        while self.world.loop.time() < BUSY_S and not self.is_lost:
            await asyncio.sleep(rng.expovariate(1 / 4.0))
            step += 1
            with self.file.open("ab") as file:
                file.write(b"node %d step %d %s\n" % (self.number, step, b"x" * rng.choice((0, 5, 200))))


class World:
    def __init__(self, root: Path, seed: int, *, nodes: int, beginning: bytes) -> None:
        self.root = root
        self.loop = SimulatedLoop(seed)
        slow_s = self.loop.random.choice((0.02, 1.0, 4.0))
        self.loop.latency_s = lambda name: (self.loop.random.uniform(0.0, slow_s), self.loop.random.uniform(0.0, 0.1))
        (root / "cold").mkdir()
        asyncio._set_running_loop(self.loop)
        try:
            self.nodes = [Node(self, number, beginning) for number in range(nodes)]
        finally:
            asyncio._set_running_loop(None)

    def run(self, story: Callable[[World], Awaitable[None]]) -> None:
        self.loop.run_until_complete(self._run(story))
        assert self.loop.errors == []

    async def _run(self, story: Callable[[World], Awaitable[None]]) -> None:
        await asyncio.gather(story(self), *(node.write() for node in self.nodes))
        await asyncio.sleep(QUIET_S)

    @property
    def cold(self) -> Tier:
        return self.nodes[0].rooms.cold["cold"]

    def in_cold(self) -> list[list[bytes]]:
        """What a reader can get of each version, the longest first."""
        found: list[list[bytes]] = []

        async def read() -> None:
            keys = [each.key for each in await self.cold.store.list(segment_prefix(RUN))]
            versions: dict[int, list[Segment]] = {}
            for segment in filter(None, map(parse_segment, keys)):
                versions.setdefault(segment.version, []).append(segment)
            for segments in versions.values():
                found.append([])
                for path in branches(segments):
                    pieces = [piece async for _, _, piece in verified_segments(self.cold, path)]
                    found[-1].append(b"".join(pieces))

        self.loop.run_until_complete(read())
        return found


def check(world: World) -> None:
    """The files of the nodes that are left are each a version. Of the others all is there that is known, and nothing
    else is."""
    versions = world.in_cold()
    everything = [content for found in versions for content in found]
    files: list[bytes] = []
    for node in world.nodes:
        content = node.file.read_bytes()
        if not node.is_lost:
            assert any(found and found[0] == content for found in versions), f"node {node.number} has no version"
        for former, known in [*node.former, (content, node.known)]:
            files.append(former)
            is_there = any(each.startswith(former[:known]) for each in everything)
            assert is_there, f"node {node.number}: {known} bytes are lost"
    for each in everything:
        assert any(content.startswith(each) for content in files), "a mix of two files"


async def _nothing(world: World) -> None: ...


async def _kills(world: World) -> None:
    rng = world.loop.random
    while world.loop.time() < BUSY_S:
        await asyncio.sleep(rng.expovariate(1 / 8.0))
        node = rng.choice(world.nodes)
        node.kill()
        await asyncio.sleep(rng.uniform(0.0, COPY_S))
        node.start()


async def _a_node_is_lost(world: World) -> None:
    await asyncio.sleep(world.loop.random.uniform(0.0, BUSY_S))
    world.nodes[0].kill()
    world.nodes[0].is_lost = True


async def _files_are_replaced(world: World) -> None:
    rng = world.loop.random
    while world.loop.time() < BUSY_S:
        await asyncio.sleep(rng.expovariate(1 / 15.0))
        rng.choice(world.nodes).replace()


async def _all(world: World) -> None:
    await asyncio.gather(_kills(world), _files_are_replaced(world))


@pytest.fixture
def worlds(tmp_path: Path) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(seed: int, **options: Any) -> World:
        (tmp_path / f"{seed}").mkdir()
        made.append(World(tmp_path / f"{seed}", seed, **options))
        return made[-1]

    yield make
    for world in made:
        world.loop.unwind()


@pytest.mark.parametrize("story", [_nothing, _kills, _a_node_is_lost, _files_are_replaced, _all])
@pytest.mark.parametrize("beginning", [b"", b"line of both\n" * 20])
@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 25), marks=pytest.mark.long)], ids=["one", "many"])
def test_files_of_one_name_are_all_in_cold(
    worlds: Callable[..., World], story: Callable[[World], Awaitable[None]], beginning: bytes, seeds: range
) -> None:
    """`beginning`: of all files, as on a machine to which a run has moved while the first daemon still sends."""
    for seed in seeds:
        world = worlds(seed, nodes=2 + seed % 2, beginning=beginning)
        world.run(story)
        check(world)
