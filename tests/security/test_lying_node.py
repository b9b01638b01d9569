"""Attacks by a server in place of another node: a trainer names its address, and its node files claim what it likes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from tests.support.lying_node import Answer, LyingNode, claimed_entry, entry_of, lying_node, node_file, shard_name
from tests.support.rooms import RUN, Rooms, rooms_at
from tierd.config.sections import PeersConfig
from tierd.context import PartnerNode
from tierd.descriptors import close_all
from tierd.errors import Corrupt, Foreign, PeerUnreachable, TierdError, Transient
from tierd.format import wire
from tierd.format.bitmap import pack_indexes
from tierd.format.ids import CheckpointId, Generation, Run, checkpoint_id
from tierd.format.manifest import FileEntry
from tierd.format.node_file import NodeFile
from tierd.format.peers import HeldPart, NodeAddress, NodeParts
from tierd.format.signature import Keyring
from tierd.keys.key_file import new_key
from tierd.tiers import peer_store
from tierd.tiers.node_parts import ask_nodes
from tierd.tiers.part_copies import PartCopies
from tierd.workers import part_copier
from tierd.workers.hot_space import MARGIN_BYTES
from tierd.workers.part_copier import PartCopier
from tierd.workers.reaper import Reaper
from tierd.workers.restorer import Restorer

OTHER_RUN = "other"
ID = checkpoint_id(RUN, 5, 1)
NODE_FILE, SHARD = "node-00001-of-00002.json", shard_name(1, 2)
CHUNK = 4096
STEPS = [4, 3, 2, 1]
HERE = wire.NodeRanks(ranks=[0], lowest=[0, 1], claim="ab" * 16, base=4)


async def judge_nothing(_: CheckpointId) -> bool | None:
    return None


class Victim:
    """A node with a full hot disk, and checkpoints of another run there and in cold. `more_bytes` are free."""

    def __init__(self, rooms: Rooms) -> None:
        self.rooms = rooms
        self.more_bytes = 0
        self._size_bytes = self._used_bytes() + MARGIN_BYTES
        self.restorer = Restorer(rooms.context, judge_nothing, Reaper(rooms.context).make_room)

    async def bring(self, node: LyingNode, chunks: int | Sequence[int], **fields: Any) -> int:
        """A trainer asks for these chunks of the shard. Returns its size."""
        wanted = list(range(chunks)) if isinstance(chunks, int) else list(chunks)
        asked = wire.FindElsewhere(
            request=1,
            step=5,
            generation=1,
            peer=node.peer,
            node_file=NODE_FILE,
            files=[SHARD],
            chunks=[pack_indexes(wanted)],
        )
        asked = msgspec.structs.replace(asked, **fields)
        descriptors = await self.restorer.peer_fetcher.bring(RUN, asked, lambda done, total: None)
        try:
            return os.fstat(descriptors[0]).st_size
        finally:
            close_all(descriptors)

    def _used_bytes(self) -> int:
        return sum(path.stat().st_blocks * 512 for path in self.rooms.hot_store.root.rglob("*"))

    @property
    def free_bytes(self) -> int:
        return self._size_bytes + self.more_bytes - self._used_bytes()

    @property
    def steps(self) -> list[int]:
        """Of the other run's checkpoints in hot."""
        return self.rooms.steps("hot", OTHER_RUN)

    def taken_bytes(self) -> int:
        """On the disk of hot, by what is fetched."""
        return sum(path.stat().st_blocks * 512 for path in self.rooms.hot_store.root.rglob("*.partial"))


@pytest.fixture
async def victim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> AsyncIterator[Victim]:
    monkeypatch.setattr(peer_store, "RETRY_MIN_S", 0.001)
    monkeypatch.setattr(peer_store, "RETRY_MAX_S", 0.002)
    keyring = Keyring([new_key()]) if getattr(request, "param", False) else None
    async with rooms_at(tmp_path, keyring=keyring) as rooms:
        for step in STEPS:
            await rooms.commit("hot", "cold", run=OTHER_RUN, step=step, sequence=step)
        await rooms.list_tiers()
        victim = Victim(rooms)

        async def free_bytes(_: object) -> int:
            return victim.free_bytes

        monkeypatch.setattr("tierd.workers.hot_space.free_bytes", free_bytes)
        yield victim


def part(size_bytes: int, *, chunk_bytes: int = CHUNK, sums: int = 1) -> NodeFile:
    return node_file(ID, {1: claimed_entry(SHARD, size_bytes, chunk_bytes, sums)}, 2)


async def nothing_right(request: web.Request) -> web.StreamResponse:
    begin, end = request.http_range.start, request.http_range.stop
    return web.Response(status=206, body=b"\1" * (end - begin))


# ── sizes that are only claimed ──


@pytest.mark.parametrize("size_bytes", [400_000, 1 << 40])
async def test_size_that_a_node_file_claims_makes_no_room(victim: Victim, size_bytes: int) -> None:
    chunk_bytes = CHUNK if size_bytes < 1 << 30 else 64 << 20
    lie = part(size_bytes, chunk_bytes=chunk_bytes)
    async with lying_node({NODE_FILE: lie.encode(), SHARD: nothing_right}) as node:
        with pytest.raises(Corrupt):
            await victim.bring(node, len(lie.files[0].chunks))
    assert victim.steps == STEPS
    assert victim.taken_bytes() <= chunk_bytes + (1 << 16)


async def test_room_is_made_for_no_more_than_what_has_come(victim: Victim) -> None:
    """The server sends three true chunks. One checkpoint of the other run has 40,000 bytes."""
    true = os.urandom(3 * CHUNK)
    claimed = entry_of(SHARD, true + bytes(400_000), CHUNK)

    lie = node_file(ID, {1: claimed}, 2)
    async with lying_node({NODE_FILE: lie.encode(), SHARD: true + b"\1" * 400_000}) as node:
        with pytest.raises(Corrupt):
            await victim.bring(node, len(claimed.chunks))
    assert victim.steps == STEPS[:-1]


async def test_zeros_that_nobody_sent_make_no_room(victim: Victim) -> None:
    """A hole in the file reads as zeros, which fit to the checksums of zeros."""
    first = os.urandom(CHUNK)
    claimed = entry_of(SHARD, first + bytes(400_000), CHUNK)
    lie = node_file(ID, {1: claimed}, 2)
    async with lying_node({NODE_FILE: lie.encode(), SHARD: first + bytes(CHUNK)}) as node:
        with suppress(TierdError):
            await victim.bring(node, len(claimed.chunks))
    assert len(victim.steps) >= len(STEPS) - 1


async def test_true_part_gets_room_on_a_full_disk(victim: Victim) -> None:
    content = os.urandom(25 * CHUNK)
    honest = node_file(ID, {1: entry_of(SHARD, content, CHUNK)}, 2)
    async with lying_node({NODE_FILE: honest.encode(), SHARD: content}) as node:
        assert await victim.bring(node, 25) == len(content)
        assert await victim.bring(node, 25) == len(content)
        assert node.requested.count(SHARD) < 10
    assert len(victim.steps) < len(STEPS)


async def test_larger_chunks_than_a_daemon_writes_are_refused(victim: Victim) -> None:
    """A chunk is the least for which there must be space before anything is verified."""
    lie = part(10 << 30, chunk_bytes=5 << 30)
    async with lying_node({NODE_FILE: lie.encode(), SHARD: nothing_right}) as node:
        with pytest.raises(Corrupt, match="chunks"):
            await victim.bring(node, 2)
        assert node.requested == [NODE_FILE]
    assert (victim.steps, victim.taken_bytes()) == (STEPS, 0)


@pytest.mark.parametrize("victim", [True], indirect=True, ids=["signed"])
async def test_with_a_key_an_unsigned_node_file_is_not_used(victim: Victim) -> None:
    content = os.urandom(3 * CHUNK)
    honest = node_file(ID, {1: entry_of(SHARD, content, CHUNK)}, 2)
    other_key = Keyring([new_key()]).sign_manifest(honest)
    for lie in (honest, other_key):
        async with lying_node({NODE_FILE: lie.encode(), SHARD: content}) as node:
            with pytest.raises(Foreign):
                await victim.bring(node, 3)
            assert node.requested == [NODE_FILE]
    keyring = victim.rooms.context.keyring
    assert keyring is not None
    async with lying_node({NODE_FILE: keyring.sign_manifest(honest).encode(), SHARD: content}) as node:
        assert await victim.bring(node, 3) == len(content)


# ── many requests, and many checkpoints ──


async def test_checkpoints_that_are_given_up_leave_nothing(victim: Victim) -> None:
    """A restore tries one checkpoint after the other; a hostile trainer as many as it likes."""
    content = os.urandom(25 * CHUNK)
    victim.more_bytes = 1 << 40
    for step in range(5, 9):
        checkpoint = checkpoint_id(RUN, step, 1)
        honest = node_file(checkpoint, {1: entry_of(SHARD, content, CHUNK)}, 2)
        async with lying_node({NODE_FILE: honest.encode(), SHARD: content}) as node:
            assert await victim.bring(node, 25, step=step) == len(content)
    assert victim.taken_bytes() <= 110_000


async def test_node_files_in_memory_are_bounded_together(victim: Victim, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each server sends a large one, and then nothing more."""
    silent = asyncio.Event()

    async def wait(_: web.Request) -> web.StreamResponse:
        await silent.wait()
        return web.Response(status=503)

    lie = part(64 << 20).encode()
    count = (8 << 20) // len(lie)
    limits = victim.rooms.config.limits
    config = msgspec.structs.replace(victim.rooms.config, limits=msgspec.structs.replace(limits, manifests_mib_max=1))
    victim.rooms.config = config
    victim.restorer = Restorer(victim.rooms.context, judge_nothing)
    async with lying_node({NODE_FILE: lie, SHARD: wait}) as node:
        tasks = [asyncio.create_task(victim.bring(node, 1)) for _ in range(count)]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=30.0)
        assert done
        assert all(isinstance(task.exception(), Transient) for task in done)
        assert victim.restorer.peer_fetcher._node_files_bytes <= 1 << 20
        silent.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert victim.restorer.peer_fetcher._node_files_bytes == 0


# ── what a partner serves, whose parts this node copies ──


class Keeper:
    """A node whose partner lies. It has persisted its own part of step 5."""

    def __init__(self, rooms: Rooms, copies: PartCopies) -> None:
        self.rooms, self.copies = rooms, copies
        self.copier = PartCopier(rooms.context, copies)
        entry = rooms.catalog.get(ID)
        assert entry is not None
        assert entry.part is not None
        self.own = entry.part

    def part_of(self, files: dict[int, FileEntry], **changes: Any) -> NodeFile:
        """Of the same checkpoint."""
        ranks = {"ranks": sorted(files), "files": [files[rank] for rank in sorted(files)]}
        return msgspec.structs.replace(self.own, **ranks, signature=msgspec.UNSET, **changes)

    async def copy_from(self, node: LyingNode) -> str:
        """The message of the failure; empty if there was none."""
        self.rooms.context.partners[RUN] = PartnerNode(Generation(1), node.peer, NODE_FILE)
        known = len(self.rooms.incidents.recent())
        is_well = await self.copier.run_once()
        failures = self.rooms.incidents.recent()
        assert is_well == (len(failures) == known)
        return "" if is_well else failures[0].message

    def left(self) -> list[str]:
        """The files of copies, apart from what a later copy goes on with."""
        root = self.copies.store.root
        return sorted(
            str(path.relative_to(root)) for path in root.rglob("*") if path.suffix in (".json", ".safetensors")
        )


@pytest.fixture
async def keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Keeper]:
    monkeypatch.setattr(peer_store, "RETRY_MIN_S", 0.001)
    monkeypatch.setattr(peer_store, "RETRY_MAX_S", 0.002)
    async with rooms_at(tmp_path / "here", peers=PeersConfig(listen="127.0.0.1:0")) as rooms:
        await rooms.list_tiers()
        copies = PartCopies(rooms.config)
        rooms.context = replace(rooms.context, part_copies=copies)
        rooms.seal(5, [b"rank 0"], node=HERE, world_size=2, number=5, created_at="2026-11-01T00:00:00+00:00")
        await rooms.persister().run_once()
        yield Keeper(rooms, copies)
        await copies.store.close()


CONTENT = os.urandom(5 * CHUNK)
HONEST = entry_of(SHARD, CONTENT, CHUNK)


def renamed(name: str) -> FileEntry:
    return msgspec.structs.replace(HONEST, name=name)


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(status=206 if "Range" in request.headers else 200)
    await response.prepare(request)
    with suppress(ConnectionError):
        for _ in range(10_000):
            await response.write(bytes(1 << 16))
    return response


async def elsewhere(request: web.Request) -> web.StreamResponse:
    return web.Response(status=302, headers={"Location": f"/parts/v1/{RUN}/{ID.name}/stolen"})


LIES: dict[str, Callable[[Keeper], dict[str, bytes | Answer]]] = {
    "a path above": lambda keeper: {NODE_FILE: keeper.part_of({1: renamed("../../../escaped")}).encode()},
    "an absolute path": lambda keeper: {NODE_FILE: keeper.part_of({1: renamed("/tmp/escaped")}).encode()},
    "the manifest": lambda keeper: {NODE_FILE: keeper.part_of({1: renamed("manifest.json")}).encode()},
    "the shard of another rank": lambda keeper: {NODE_FILE: keeper.part_of({1: renamed(shard_name(0, 2))}).encode()},
    "the ranks of this node": lambda keeper: {NODE_FILE: keeper.own.encode()},
    "all ranks": lambda keeper: {NODE_FILE: keeper.part_of({0: renamed(shard_name(0, 2)), 1: HONEST}).encode()},
    "another run": lambda keeper: {NODE_FILE: keeper.part_of({1: HONEST}, run=OTHER_RUN).encode()},
    "an older step": lambda keeper: {NODE_FILE: keeper.part_of({1: HONEST}, step=4).encode()},
    "an older generation": lambda keeper: {NODE_FILE: keeper.part_of({1: HONEST}, generation=0).encode()},
    "another start": lambda keeper: {NODE_FILE: keeper.part_of({1: HONEST}, claim="cd" * 16).encode()},
    "another model": lambda keeper: {NODE_FILE: keeper.part_of({1: HONEST}, architecture_hash="cd" * 32).encode()},
    "no JSON": lambda keeper: {NODE_FILE: b"\0" * 1000},
    "deep JSON": lambda keeper: {NODE_FILE: b"[" * 100_000},
    "an endless node file": lambda keeper: {NODE_FILE: endless},
    "a redirection": lambda keeper: {NODE_FILE: elsewhere, "stolen": keeper.part_of({1: HONEST}).encode()},
    "other bytes": lambda keeper: {NODE_FILE: keeper.part_of({1: HONEST}).encode(), SHARD: bytes(len(CONTENT))},
    "fewer bytes": lambda keeper: {NODE_FILE: keeper.part_of({1: HONEST}).encode(), SHARD: CONTENT[:-1]},
    "endless bytes": lambda keeper: {NODE_FILE: keeper.part_of({1: HONEST}).encode(), SHARD: endless},
    "shards elsewhere": lambda keeper: {
        NODE_FILE: keeper.part_of({1: HONEST}).encode(),
        SHARD: elsewhere,
        "stolen": CONTENT,
    },
    "no shard": lambda keeper: {NODE_FILE: keeper.part_of({1: HONEST}).encode()},
}


@pytest.mark.parametrize("lie", LIES)
async def test_partner_that_lies_is_not_copied_and_nothing_else_is_written(
    keeper: Keeper, lie: str, tmp_path: Path
) -> None:
    def files() -> set[Path]:
        return {path for path in tmp_path.rglob("*") if ".peers" not in path.parts}

    before = files()
    async with lying_node(LIES[lie](keeper)) as node:
        message = await keeper.copy_from(node)
        assert "stolen" not in node.requested
    assert (keeper.copies.get(ID), keeper.left(), files()) == (None, [], before)
    assert message or lie == "no shard", message
    async with lying_node({NODE_FILE: keeper.part_of({1: HONEST}).encode(), SHARD: CONTENT}) as node:
        assert await keeper.copy_from(node) == ""
    assert len(keeper.left()) == 2
    assert {path.stat().st_mode & 0o777 for path in (keeper.copies.store.root / RUN / ID.name).iterdir()} <= {
        0o600,
        0o400,
    }


async def test_size_that_a_partner_claims_is_not_reserved(keeper: Keeper) -> None:
    """Else the snapshots of all runs would find the disk full, before one byte has come."""
    taken: list[int] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        files = (keeper.copies.store.root / RUN / ID.name).iterdir()
        taken.append(sum(path.stat().st_blocks * 512 for path in files))
        return await nothing_right(request)

    lie = keeper.part_of({1: claimed_entry(SHARD, 1 << 25, 1 << 20)})
    async with lying_node({NODE_FILE: lie.encode(), SHARD: answer}) as node:
        assert "another one" not in await keeper.copy_from(node)
    assert taken[0] < 1 << 20
    assert await keeper.copier.make_room(1 << 25) == 0  # so much that nobody sent was not freed either


async def test_slow_partner_of_one_run_does_not_keep_the_copies_of_another(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_copier, "TURN_S", 0.3)
    silent = asyncio.Event()

    async def wait(_: web.Request) -> web.StreamResponse:
        await silent.wait()
        return web.Response(status=503)

    slow, honest = keeper.part_of({1: HONEST}), {NODE_FILE: b"", SHARD: CONTENT}
    keeper.rooms.seal(5, [b"rank 0"], run=OTHER_RUN, node=HERE, world_size=2, number=5)
    await keeper.rooms.persister().run_once()
    other = keeper.rooms.catalog.get(checkpoint_id(OTHER_RUN, 5, 1))
    assert other is not None
    assert other.part is not None
    honest[NODE_FILE] = msgspec.structs.replace(other.part, ranks=[1], files=[HONEST]).encode()
    async with lying_node({NODE_FILE: slow.encode(), SHARD: wait}) as one, lying_node(honest) as node:
        keeper.rooms.context.partners[RUN] = PartnerNode(Generation(1), one.peer, NODE_FILE)
        keeper.rooms.context.partners[Run(OTHER_RUN)] = PartnerNode(Generation(1), node.peer, NODE_FILE)
        assert await keeper.copier.run_once()
        silent.set()
    assert keeper.copies.get(other.id) is not None
    async with lying_node({NODE_FILE: slow.encode(), SHARD: CONTENT}) as one:
        assert await keeper.copy_from(one) == ""
    assert keeper.copies.get(ID) is not None


# ── what a node lists, for `tierd status` and `tierd restore` ──


@pytest.mark.parametrize(
    "answer",
    [
        b'{"parts": [' + b'{"step": 1}, ' * 10_000 + b"]}",
        b'{"parts": [{"step": 1, "generation": 1, "world_size": 1, "ranks": ["x"]}]}',
        b"[" * 10_000,
        b"\xff",
        b"",
        endless,
        elsewhere,
    ],
)
async def test_list_of_a_node_that_lies_is_a_short_reason(answer: bytes | Answer) -> None:
    async with lying_node({"newest": answer, RUN: answer, "stolen": b"{}"}) as node:
        nodes = [NodeAddress(ranks=[1], peer=node.peer)]
        for only_newest in (True, False):
            (reason,) = await ask_nodes(RUN, nodes, needs_tls=False, only_newest=only_newest)
            assert isinstance(reason, PeerUnreachable), reason
            assert len(reason.message) < 500
        assert "stolen" not in node.requested


async def test_answers_of_thousands_of_nodes_are_small_each() -> None:
    part = HeldPart(
        step=1,
        generation=1,
        world_size=1 << 20,
        ranks=list(range(20_000)),
        node_file=NODE_FILE,
        head_digest="",
        created_at="",
    )
    answer = msgspec.json.encode(NodeParts(parts=[part]))
    async with lying_node({"newest": answer}) as node:
        nodes = [NodeAddress(ranks=[1], peer=node.peer)]
        (reason,) = await ask_nodes(RUN, nodes, needs_tls=False, only_newest=True)
        assert isinstance(reason, PeerUnreachable)
