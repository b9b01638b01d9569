"""Fetches chunks of another node's part: over HTTP from a real one, each once, verified; nothing stays afterwards."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from tests.support.rooms import RUN, Rooms, rooms_at
from tierd.api.peer_parts import PeerParts
from tierd.config.sections import PeersConfig
from tierd.descriptors import close_all
from tierd.errors import BadRequest, Corrupt, NotFound, PeerUnreachable
from tierd.format import wire
from tierd.format.bitmap import pack_indexes
from tierd.format.ids import CheckpointId, Rank, checkpoint_id
from tierd.format.peers import PeerAddress
from tierd.tiers import peer_store
from tierd.workers.peer_fetcher import check_address
from tierd.workers.restorer import Restorer

NODE = wire.NodeRanks(ranks=[1, 2], lowest=[0, 1], claim="ab" * 16, base=4)
NODE_FILE, SHARD, LONG = (
    "node-00001-of-00003.json",
    "rank-00001-of-00003.safetensors",
    "rank-00002-of-00003.safetensors",
)
CHUNK = 64 << 20
CONTENT = b"".join(bytes([index]) * (1 << 20) for index in range(CHUNK + (3 << 20) >> 20)) + b"end"


class TwoNodes:
    """The node `there` has a part; the fetcher is of the node `here`."""

    def __init__(self, here: Rooms, there: Rooms) -> None:
        self.there = there
        self.restorer = Restorer(here.context, judge_nothing)
        self.hot = here.hot_store.root

    async def bring(self, needed: dict[str, list[int]], /, **fields: object) -> list[int]:
        peer = self.there.context.peer_key.of(RUN)
        assert peer is not None
        asked = wire.FindElsewhere(
            request=1,
            step=5,
            generation=1,
            peer=peer,
            node_file=NODE_FILE,
            files=list(needed),
            chunks=[pack_indexes(indexes) for indexes in needed.values()],
        )
        return await self.restorer.peer_fetcher.bring(
            RUN, msgspec.structs.replace(asked, **fields), lambda done, total: None
        )

    def change(self, content: bytes) -> None:
        """What the other node has in memory of the long shard."""
        snapshot_set = self.there.memory.find(checkpoint_id(RUN, 5, 1))
        assert snapshot_set is not None
        os.pwrite(snapshot_set.snapshots[Rank(2)].slot.fd, content, 0)

    def left(self) -> list[Path]:
        return list(self.hot.rglob("*.partial"))


async def judge_nothing(_: CheckpointId) -> bool | None:
    return None


@pytest.fixture
async def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TwoNodes]:
    monkeypatch.setattr(peer_store, "RETRY_MIN_S", 0.001)
    async with (
        rooms_at(tmp_path / "here") as here,
        rooms_at(tmp_path / "there", peers=PeersConfig(listen="127.0.0.1:0")) as there,
    ):
        for rooms in (here, there):
            await rooms.list_tiers()
        there.seal(5, [b"rank 1", CONTENT], node=NODE, world_size=3, number=1)
        parts = PeerParts(there.context, Restorer(there.context, judge_nothing))
        await parts.start()
        yield TwoNodes(here, there)
        await parts.close()


def content_of(descriptors: list[int], lengths: list[int], offset: int = 0) -> list[bytes]:
    try:
        return [os.pread(fd, length, offset) for fd, length in zip(descriptors, lengths, strict=True)]
    finally:
        close_all(descriptors)


async def test_only_chunks_that_are_asked_for_are_fetched_and_each_once(two: TwoNodes) -> None:
    (end,) = content_of(await two.bring({LONG: [1]}), [len(CONTENT) - CHUNK], CHUNK)
    assert end == CONTENT[CHUNK:]
    assert sum(path.stat().st_blocks * 512 for path in two.left()) < 8 << 20
    small, long = content_of(await two.bring({SHARD: [0], LONG: [0, 1]}), [6, len(CONTENT)])
    assert (small, long) == (b"rank 1", CONTENT)
    await two.restorer.fetcher.restored(RUN)
    assert not two.left()


async def test_what_was_fetched_is_not_fetched_again_when_the_other_node_has_lost_it(two: TwoNodes) -> None:
    content_of(await two.bring({LONG: [0]}), [1])
    two.change(b"other bytes")
    (long,) = content_of(await two.bring({LONG: [0, 1]}), [len(CONTENT)])
    assert long == CONTENT


async def test_bytes_that_differ_from_the_checksums_are_refused(two: TwoNodes) -> None:
    assert await two.there.persister().run_once()
    two.change(b"other bytes")
    with pytest.raises(Corrupt, match="the node at"):
        await two.bring({LONG: [0]})


async def test_checkpoint_that_the_node_does_not_have_is_not_found(two: TwoNodes) -> None:
    with pytest.raises(NotFound):
        await two.bring({LONG: [0]}, step=6)
    with pytest.raises(NotFound, match="is not in"):
        await two.bring({"rank-00000-of-00003.safetensors": [0]})
    with pytest.raises(NotFound):
        await two.bring({LONG: [0]}, node_file="node-00000-of-00003.json")
    assert not two.left()


async def test_wrong_token_and_a_node_that_has_gone_are_unreachable(two: TwoNodes) -> None:
    address = two.there.context.peer_key.address
    with pytest.raises(PeerUnreachable, match="with another token"):
        await two.bring({LONG: [0]}, peer=PeerAddress(address=address, token="0" * 64))
    with pytest.raises(PeerUnreachable):
        await two.bring({LONG: [0]}, peer=PeerAddress(address="127.0.0.1:1", token="0" * 64))


@pytest.mark.parametrize(
    "fields",
    [
        {"node_file": "../../secret"},
        {"files": []},
        {"chunks": []},
        {"files": ["x"] * 300, "chunks": [b""] * 300},
        {"peer": PeerAddress(address="127.0.0.1:1/admin?", token="0" * 64)},
        {"peer": PeerAddress(address="user@127.0.0.1:1", token="0" * 64)},
        {"peer": PeerAddress(address="127.0.0.1", token="0" * 64)},
        {"peer": PeerAddress(address="127.0.0.1:1", token="0\r\nX: y")},
        {"peer": PeerAddress(address="127.0.0.1:1", token="0" * 64, fingerprint="0" * 63)},
    ],
)
async def test_request_that_breaks_the_rules_is_refused(two: TwoNodes, fields: dict[str, object]) -> None:
    with pytest.raises(BadRequest):
        await two.bring({LONG: [0]}, **fields)


@pytest.mark.parametrize(
    "address",
    ["node:0", "node:65536", "node:" + "9" * 5000, "node:١٢", "rack..node:9465", "n" * 64 + ".rack:9465", "node", ":9"],
)
def test_an_address_to_which_nobody_can_connect_is_refused(address: str) -> None:
    with pytest.raises(BadRequest, match="not host:port"):
        check_address(PeerAddress(address=address, token="ab"))


@pytest.mark.parametrize("address", ["node:1", "gpu_7.rack-2.example:65535", "10.0.0.7:9465", "[::1]:9465"])
def test_an_address_of_a_node_is_taken(address: str) -> None:
    check_address(PeerAddress(address=address, token="ab"))
