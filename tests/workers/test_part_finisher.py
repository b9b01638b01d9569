"""A node that is lost in the middle of its upload: its partner sends the rest, and the checkpoint is committed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tests.health.test_examiner import shard
from tests.support.cli import flip_a_bit
from tests.support.rooms import RUN, Rooms, rooms_at
from tierd.api.peer_parts import PeerParts
from tierd.config.sections import ColdConfig, HealthConfig, PeersConfig
from tierd.context import DaemonContext
from tierd.errors import TierUnreachable
from tierd.format import layout, wire
from tierd.format.claim import Claim
from tierd.format.ids import CheckpointId, Generation, checkpoint_id
from tierd.format.node_file import NodeFile
from tierd.format.peers import PeerAddress
from tierd.tiers.part_copies import PartCopies
from tierd.workers.committer import HOME_S, Committer
from tierd.workers.part_finisher import LOST_AFTER_S, PartFinisher
from tierd.workers.restorer import Restorer

RANDOM = "ab" * 16
HERE = wire.NodeRanks(ranks=[0], lowest=[0, 1], claim=RANDOM)
THERE = wire.NodeRanks(ranks=[1], lowest=[0, 1], claim=RANDOM)
ID = checkpoint_id(RUN, 5, 1)
NOBODY = PeerAddress(address="127.0.0.1:1", token="ab")


async def judge_nothing(_: CheckpointId) -> bool | None:
    return None


class Pair:
    """Two nodes that share a cold tier. `here` has sent its part and has a copy of the other's, which was lost before
    its node file."""

    def __init__(self, here: Rooms, there: Rooms) -> None:
        self.here, self.there = here, there
        self.now_s = 1000.0
        self.copies = PartCopies(here.config)
        self.context: DaemonContext = replace(here.context, monotonic_s=lambda: self.now_s, part_copies=self.copies)
        self.cold = here.cold["cold"]
        self.finisher = PartFinisher(self.context, self.copies, self.cold)

    async def begin(self, *, peer: PeerAddress | None = NOBODY, shard: bytes = b"shard" * 5000) -> None:
        for rooms in (self.there, self.here):
            await rooms.list_tiers()
            assert await rooms.context.claim(self.cold, RUN, Generation(1), Claim(claim=RANDOM, hot="x"))
        await self.save(ID, peer=peer, shard=shard)
        assert self.names == {"node-00000-of-00002.json", "rank-00000-of-00002.safetensors"}

    async def save(self, checkpoint: CheckpointId, *, peer: PeerAddress | None, shard: bytes) -> None:
        for rooms, node in ((self.there, THERE), (self.here, HERE)):
            rooms.seal(checkpoint.step, [shard], node=node, world_size=2, number=checkpoint.step - 4)
            await rooms.persister().run_once()
        part = self.there.catalog.get(checkpoint)
        assert part is not None
        assert part.part is not None
        for file in part.part.files:
            key = layout.file_key(checkpoint, file.name)
            await self.copies.store.put_bytes(key, (self.there.config.hot_path / key).read_bytes())
        await self.copies.commit(part.part, part.part.encode(), peer=peer)
        await self.here.replicator().run_once()

    @property
    def names(self) -> set[str]:
        """Of the files in the shared cold tier."""
        return {path.name for path in self.here.folder("cold", ID).iterdir()}

    async def pass_time(self, seconds: float) -> None:
        assert await self.finisher.run_once()
        self.now_s += seconds
        assert await self.finisher.run_once()


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    cold = ColdConfig(name="cold", url=f"file://{tmp_path / 'shared'}")
    async with (
        rooms_at(tmp_path / "here", cold=(cold,)) as here,
        rooms_at(tmp_path / "there", cold=(cold,), peers=PeersConfig(listen="127.0.0.1:0")) as there,
    ):
        pair = Pair(here, there)
        yield pair
        await pair.copies.store.close()


async def test_the_partner_of_a_lost_node_sends_its_part_and_the_checkpoint_is_committed(pair: Pair) -> None:
    await pair.begin()
    await pair.pass_time(LOST_AFTER_S)
    assert {"node-00001-of-00002.json", "rank-00001-of-00002.safetensors"} <= pair.names
    committer = Committer(pair.context, pair.cold)
    await committer.run_once()
    pair.now_s += HOME_S
    await committer.run_once()
    assert layout.MANIFEST in pair.names
    manifest = await pair.cold.manifest(ID)
    assert [file.name for file in manifest.files] == [
        "rank-00000-of-00002.safetensors",
        "rank-00001-of-00002.safetensors",
    ]


async def test_it_waits_before_a_node_counts_as_lost(pair: Pair) -> None:
    await pair.begin()
    await pair.pass_time(LOST_AFTER_S - 1.0)
    assert "node-00001-of-00002.json" not in pair.names


async def test_a_node_that_answers_sends_its_part_itself(pair: Pair) -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        await pair.begin(peer=PeerAddress(address=f"{host}:{port}", token="ab"))
        await pair.pass_time(10 * LOST_AFTER_S)
        assert "node-00001-of-00002.json" not in pair.names
    await pair.pass_time(LOST_AFTER_S)
    assert "node-00001-of-00002.json" in pair.names


@pytest.mark.parametrize(
    "what", ["its disk is empty", "it has started again", "it has started again, with TLS", "it has the part"]
)
async def test_a_node_that_came_back_without_its_part_is_lost(pair: Pair, what: str) -> None:
    context = pair.there.context
    if what.endswith("with TLS"):
        peers = msgspec.structs.replace(context.config.peers, tls=True)
        context = replace(context, config=msgspec.structs.replace(context.config, peers=peers))
    parts = PeerParts(context, Restorer(context, judge_nothing))
    await parts.start()
    peer = context.peer_key.of(RUN)
    assert peer is not None
    if what.startswith("it has started again"):
        peer = msgspec.structs.replace(peer, token="ab", fingerprint=peer.fingerprint and "ab" * 32)
    await pair.begin(peer=peer)
    if what == "its disk is empty":
        pair.there.catalog.drop(ID, "hot")
    await pair.pass_time(LOST_AFTER_S)
    await parts.close()
    assert ("node-00001-of-00002.json" in pair.names) == (what != "it has the part")


async def test_an_address_that_is_not_known_is_that_of_a_lost_node(pair: Pair) -> None:
    """This daemon has restarted since."""
    await pair.begin(peer=None)
    await pair.pass_time(LOST_AFTER_S)
    assert "node-00001-of-00002.json" in pair.names


@pytest.mark.parametrize("name", [layout.GONE, layout.MANIFEST])
async def test_nothing_is_sent_to_a_checkpoint_that_is_deleted_or_whole(pair: Pair, name: str) -> None:
    await pair.begin()
    await pair.cold.store.put_bytes(layout.file_key(ID, name), b"{}")
    await pair.pass_time(LOST_AFTER_S)
    assert "node-00001-of-00002.json" not in pair.names


async def test_a_part_that_came_meanwhile_stays(pair: Pair) -> None:
    await pair.begin()
    await pair.there.replicator().run_once()
    before = (pair.here.folder("cold", ID) / "node-00001-of-00002.json").stat()
    await pair.pass_time(LOST_AFTER_S)
    after = (pair.here.folder("cold", ID) / "node-00001-of-00002.json").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


@pytest.mark.parametrize("value", [1.0, math.nan])
async def test_what_a_lost_node_did_not_live_to_examine_is_examined_before_it_is_sent(pair: Pair, value: float) -> None:
    """Else a checkpoint with NaN is committed, and pushes out a healthy one."""
    pair.finisher._context = pair.context = replace(
        pair.context, config=msgspec.structs.replace(pair.here.config, health=HealthConfig())
    )
    await pair.begin(shard=shard(value))
    await pair.pass_time(LOST_AFTER_S)
    part, _ = await pair.cold.read_manifest(layout.file_key(ID, "node-00001-of-00002.json"))
    assert isinstance(part, NodeFile)
    assert part.is_healthy is (value == 1.0)


@pytest.mark.parametrize("damage", ["a bit", "a file", "a sector"])
async def test_a_copy_that_cannot_be_read_is_not_sent_and_delays_no_other(
    pair: Pair, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = checkpoint_id(RUN, 6, 1)
    await pair.begin()
    await pair.save(newest, peer=NOBODY, shard=b"other" * 5000)
    path = pair.copies.store.root / layout.file_key(newest, "rank-00001-of-00002.safetensors")
    if damage == "a file":
        path.unlink()
    elif damage == "a bit":
        path.chmod(0o600)
        flip_a_bit(path)
    else:
        source = pair.copies.store.source

        def broken(key: str) -> object:
            if str(newest) in key:
                raise TierUnreachable(f"read {key}: Input/output error")
            return source(key)

        monkeypatch.setattr(pair.copies.store, "source", broken)
    await pair.finisher.run_once()
    pair.now_s += LOST_AFTER_S
    with suppress(TierUnreachable):
        assert not await pair.finisher.run_once()
    assert "node-00001-of-00002.json" in pair.names
    assert not (pair.here.folder("cold", newest) / "node-00001-of-00002.json").exists()
