"""What a daemon serves to other nodes: the files of its own parts, to whoever has the run's token, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from pathlib import Path

import aiohttp
import msgspec
import pytest

from tests.support.rooms import RUN, Rooms, rooms_at
from tierd.api.peer_parts import PIECE_BYTES, PeerParts
from tierd.config.sections import PeersConfig
from tierd.format import wire
from tierd.format.ids import Rank, Run, checkpoint_id
from tierd.format.node_file import decode_node_file
from tierd.format.peers import TIER_HEADER, NodeParts
from tierd.workers.restorer import Restorer

NODE = wire.NodeRanks(ranks=[1, 2], lowest=[0, 1], claim="ab" * 16, base=4)
NODE_FILE, SHARD = "node-00001-of-00003.json", "rank-00002-of-00003.safetensors"
LONG = bytes(range(251)) * (3 * PIECE_BYTES // 251)


class Served:
    def __init__(self, rooms: Rooms, parts: PeerParts) -> None:
        self.rooms, self.parts = rooms, parts
        self.key = rooms.context.peer_key

    def seal(self, step: int) -> None:
        self.rooms.seal(step, [b"rank 1", LONG], node=NODE, world_size=3, number=step)

    async def get(
        self, path: str, *, token: str | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        token = self.key.token(RUN) if token is None else token
        given = {"Authorization": f"Bearer {token}", **(headers or {})}
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://{self.key.address}/{path}", headers=given, allow_redirects=False) as answer,
        ):
            return answer.status, await answer.read()

    async def part(self, name: str, step: int = 5, **given: str) -> tuple[int, bytes]:
        return await self.get(f"parts/v1/{RUN}/{step:012d}-g0001/{name}", headers=given)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with rooms_at(tmp_path, peers=PeersConfig(listen="127.0.0.1:0")) as rooms:
        await rooms.list_tiers()

        async def judge(_: object) -> bool | None:
            return None

        parts = PeerParts(rooms.context, Restorer(rooms.context, judge))
        assert rooms.context.peer_key.of(RUN) is None
        await parts.start()
        yield Served(rooms, parts)
        await parts.close()


@pytest.mark.parametrize("is_persisted", [False, True])
async def test_part_is_served_from_memory_and_from_hot(served: Served, is_persisted: bool) -> None:
    served.seal(5)
    if is_persisted:
        assert await served.rooms.persister().run_once()
        for rank in NODE.ranks:
            served.rooms.memory.leave(RUN, Rank(rank), now_s=0.0)
        served.rooms.memory.forget_departed(now_s=1e9, grace_s=0.0)
        assert served.rooms.memory.find(checkpoint_id(RUN, 5, 1)) is None
    status, raw = await served.part(NODE_FILE)
    part = decode_node_file(raw, name=NODE_FILE, where="the other node", expect=checkpoint_id(RUN, 5, 1))
    assert (status, part.ranks, len(part.files[1].chunks)) == (200, [1, 2], 1)
    assert await served.part(SHARD) == (200, LONG)
    assert await served.part(SHARD, Range=f"bytes=7-{PIECE_BYTES + 9}") == (206, LONG[7 : PIECE_BYTES + 10])
    assert (await served.part(SHARD, Range=f"bytes=0-{len(LONG)}"))[0] == 416


async def test_node_lists_what_is_durable_and_the_newest_of_it(served: Served) -> None:
    for step in (5, 6):
        served.seal(step)
        assert await served.rooms.persister().run_once()
    served.seal(7)  # in memory only
    for path, steps in ((f"parts/v1/{RUN}", [6, 5]), (f"parts/v1/{RUN}/newest", [6]), ("parts/v1/none", [])):
        status, raw = await served.get(path, token=served.key.token(Run(path.split("/")[2])))
        answer = msgspec.json.decode(raw, type=NodeParts)
        assert (status, [part.step for part in answer.parts], answer.copies) == (200, steps, [])
    assert (answer := msgspec.json.decode((await served.get(f"parts/v1/{RUN}"))[1], type=NodeParts)).copy_lag_s is None
    assert (answer.parts[0].ranks, answer.parts[0].node_file) == ([1, 2], NODE_FILE)


async def test_run_called_newest_is_listed_as_any_other(served: Served) -> None:
    run = Run("newest")
    for step in (5, 6):
        served.rooms.seal(step, [b"rank 1", b"rank 2"], run=run, node=NODE, world_size=3, number=step)
        assert await served.rooms.persister().run_once()
    for path, steps in (("newest", [6, 5]), ("newest/newest", [6])):
        _, raw = await served.get(f"parts/v1/{path}", token=served.key.token(run))
        assert [part.step for part in msgspec.json.decode(raw, type=NodeParts).parts] == steps


@pytest.mark.parametrize("is_persisted", [False, True])
async def test_what_a_start_on_this_node_alone_has_saved_is_served_as_a_part(
    served: Served, is_persisted: bool
) -> None:
    served.rooms.seal(5, [b"rank 0", LONG])
    if is_persisted:
        assert await served.rooms.persister().run_once()
        for rank in (0, 1):
            served.rooms.memory.leave(RUN, Rank(rank), now_s=0.0)
        served.rooms.memory.forget_departed(now_s=1e9, grace_s=0.0)
    name = "node-00000-of-00002.json"
    status, raw = await served.part(name)
    part = decode_node_file(raw, name=name, where="the other node", expect=checkpoint_id(RUN, 5, 1))
    assert (status, part.ranks, len(part.files[1].chunks)) == (200, [0, 1], 1)
    assert await served.part("rank-00001-of-00002.safetensors") == (200, LONG)
    # A partner copies parts of its own checkpoints only.
    assert (await served.part(name, **{TIER_HEADER: "hot"}))[0] == 404


@pytest.mark.parametrize("token", ["", "wrong", "of another run", "\N{SNOWMAN}"])
async def test_nothing_is_served_without_the_token_of_the_run(served: Served, token: str) -> None:
    served.seal(5)
    if token == "of another run":
        token = served.key.token(Run("another"))
    for path in (
        f"parts/v1/{RUN}/{5:012d}-g0001/{SHARD}",
        f"parts/v1/{RUN}/none/{SHARD}",
        f"parts/v1/{RUN}",
        "",
        "metrics",
        "parts/v1/",
    ):
        status, body = await served.get(path, token=token.encode().decode("latin-1"))
        assert (status, SHARD.encode() in body) == (401, False)


@pytest.mark.parametrize(
    "path",
    [
        f"{7:012d}-g0001/{SHARD}",
        f"5-g1/{SHARD}",
        f"{5:012d}-g0001/rank-00000-of-00003.safetensors",
        f"{5:012d}-g0001/node-00000-of-00003.json",
        f"{5:012d}-g0001/manifest.json",
        f"{5:012d}-g0001/..%2f..%2f.tierd.lock",
        f"..%2f..%2f/{SHARD}",
    ],
)
async def test_only_files_of_a_part_are_served(served: Served, path: str) -> None:
    served.seal(5)
    assert await served.rooms.persister().run_once()
    assert (await served.get(f"parts/v1/{RUN}/{path}"))[0] == 404


@pytest.mark.parametrize("text", ["bytes=5-2", "bytes=-5", "bytes=0-1,3-4", "lines=1-2", "bytes=99999999999-", ""])
async def test_any_other_range_is_refused(served: Served, text: str) -> None:
    served.seal(5)
    assert (await served.part(SHARD, Range=text))[0] == 416


async def read_slowly(served: Served, *, first_s: float, between_s: float, size_bytes: int = 64 << 20) -> int:
    """How many bytes of a shard of this size come to a node that waits before and between its reads of 64 KiB."""
    served.rooms.seal(6, [b"rank 1", bytes(size_bytes)], node=NODE, world_size=3, number=6)
    host, _, port = served.key.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1)
    path = f"/parts/v1/{RUN}/{6:012d}-g0001/{SHARD}"
    token = served.key.token(RUN)
    writer.write(
        f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
    )
    status = await reader.readexactly(len(b"HTTP/1.1 200"))
    assert status.endswith(b"200")
    await asyncio.sleep(first_s)
    read_bytes = 0
    with suppress(ConnectionError):
        while piece := await reader.read(64 << 10):
            read_bytes += len(piece)
            await asyncio.sleep(between_s)
    writer.close()
    return read_bytes


async def test_node_that_stops_reading_is_dropped(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierd.api.peer_parts.ANSWER_TIMEOUT_S", 0.2)
    assert await read_slowly(served, first_s=1.0, between_s=0.0) < 64 << 20


async def test_node_that_reads_a_little_now_and_then_is_dropped(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is never silent for long, and holds one of the connections."""
    monkeypatch.setattr("tierd.api.peer_parts.ANSWER_TIMEOUT_S", 1.0)
    monkeypatch.setattr("tierd.api.peer_parts.RATE_MIN_BYTES_S", 1 << 30)
    assert await read_slowly(served, first_s=0.0, between_s=0.02) < 64 << 20


async def test_node_that_reads_slowly_enough_gets_the_whole_file(served: Served) -> None:
    assert await read_slowly(served, first_s=0.5, between_s=0.0, size_bytes=8 << 20) >= 8 << 20


async def test_copies_are_held_back_and_restores_are_not(served: Served) -> None:
    """The limit of the throttle applies to what is read with `Tierd-Tier: hot`, never below what the reader needs."""
    served.seal(5)
    assert await served.rooms.persister().run_once()
    served.parts.limit_copies(1e-6)
    ended: list[str] = []

    async def read(name: str, **headers: str) -> None:
        assert await served.part(SHARD, **headers) == (200, LONG)
        ended.append(name)

    async with asyncio.TaskGroup() as group:
        group.create_task(read("copy", **{TIER_HEADER: "hot"}))
        await asyncio.sleep(0)
        group.create_task(read("restore"))
    assert ended == ["restore", "copy"]
    served.parts.limit_copies(0.0)
    await read("copy", **{TIER_HEADER: "hot"})
    assert served.rooms.count("tierd_peer_bytes_total", direction="out") == 3 * len(LONG)
