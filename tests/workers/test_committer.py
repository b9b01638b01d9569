"""Checkpoints over several nodes in a cold tier: each node sends its part, and one of them commits."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.rooms import RUN, Rooms, rooms_at
from tierd.catalog.decisions import decisions, deletions, pending
from tierd.catalog.selectable import selectable_replicas
from tierd.config.sections import ColdConfig, HealthConfig, TierPolicy
from tierd.errors import Corrupt, NotFound, TierUnreachable
from tierd.format import layout, wire
from tierd.format.claim import Claim
from tierd.format.health import Diagnosis
from tierd.format.ids import CheckpointId, Generation, Rank, checkpoint_id
from tierd.format.manifest import Manifest, encode_marker
from tierd.format.node_file import NodeFile
from tierd.format.signature import Keyring, new_key
from tierd.format.tombstone import Tombstone
from tierd.status.node_reports import awaited_report
from tierd.tiers.tier import Tier
from tierd.transfer.verify import verify_replica
from tierd.workers.committer import HOME_S, LIST_MAX_S, LISTING_VALID_S, Committer
from tierd.workers.reaper import Reaper
from tierd.workers.recovery import clear_uncommitted
from tierd.workers.replicator import VERDICT_S
from tierd.workers.restorer import Restorer
from tierd.workers.write_through import WriteThrough

WORLD_SIZE, RANKS = 5, ([0, 1], [2, 4], [3])  # ranks of nodes need not follow one another
CLAIM = Claim.new("home")


def id_of(step: int) -> CheckpointId:
    return checkpoint_id(RUN, step, 1)


class Node:
    """One of the nodes: its rooms, and its committer in their common cold tier."""

    def __init__(self, rooms: Rooms, number: int) -> None:
        self.rooms = rooms
        self.ranks = RANKS[number]
        lowest = [ranks[0] for ranks in sorted(RANKS)]
        self.node = wire.NodeRanks(ranks=self.ranks, lowest=lowest, claim=CLAIM.claim, base=7)
        self.committer = Committer(rooms.context, rooms.cold["cold"], rng=random.Random(number))

    def shard(self, rank: int, step: int) -> bytes:
        return f"rank {rank} step {step} ".encode() * 1000

    async def persist(self, step: int, number: int = 1, **fields: Any) -> None:
        """This node's part in hot."""
        shards = [self.shard(rank, step) for rank in self.ranks]
        self.rooms.seal(step, shards, node=self.node, world_size=WORLD_SIZE, number=number, **fields)
        assert await self.rooms.persister().run_once()

    async def send(self, step: int, number: int = 1, **fields: Any) -> None:
        """This node's part in hot and in cold."""
        await self.persist(step, number, **fields)
        assert await self.rooms.replicator().run_once()


class Nodes:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.nodes: list[Node] = []

    async def wait(self, seconds: float, *nodes: Node) -> None:
        """The committers of these nodes look, each second."""
        for _ in range(int(seconds)):
            self.now_s += 1.0
            for node in nodes or self.nodes:
                await node.committer.run_once()


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Nodes]:
    nodes = Nodes()
    cold = ColdConfig(name="cold", url=f"file://{tmp_path / 'cold'}")
    async with AsyncExitStack() as stack:
        for number in range(len(RANKS)):
            clocks = {"monotonic_s": lambda: nodes.now_s}
            rooms = await stack.enter_async_context(rooms_at(tmp_path / str(number), cold=(cold,), clocks=clocks))
            await rooms.list_tiers()
            assert await rooms.context.claim(rooms.hot, RUN, Generation(1), CLAIM)
            assert await rooms.context.claim(rooms.cold["cold"], RUN, Generation(1), CLAIM)
            nodes.nodes.append(Node(rooms, number))
        yield nodes


async def committed(node: Node, step: int) -> Manifest:
    return await node.rooms.cold["cold"].manifest(id_of(step))


async def test_the_manifest_is_written_when_all_parts_are_there(nodes: Nodes) -> None:
    home, second, third = nodes.nodes
    await second.send(10)
    await third.send(10)
    await nodes.wait(LIST_MAX_S)
    assert home.rooms.steps("cold") == []
    lacking = home.ranks
    assert second.rooms.catalog.awaited == {"cold": {RUN: (id_of(10), lacking)}}
    report = awaited_report(second.rooms.catalog, RUN, datetime.now(UTC))
    assert (report["cold"].step, report["cold"].ranks) == (10, lacking)

    await home.send(10)
    await nodes.wait(HOME_S + 1)
    manifest = await committed(home, 10)
    assert type(manifest) is Manifest
    assert [entry.name for entry in manifest.files] == [
        layout.shard_name(rank, WORLD_SIZE) for rank in range(WORLD_SIZE)
    ]
    assert manifest.sequence == 8
    for rank, entry in enumerate(manifest.files):
        raw = (home.rooms.folder("cold", id_of(10)) / entry.name).read_bytes()
        assert raw == home.shard(rank, 10)


async def test_every_node_learns_of_the_commit(nodes: Nodes) -> None:
    for node in nodes.nodes:
        await node.send(10)
    await nodes.wait(90)
    for node in nodes.nodes:
        entry = node.rooms.catalog.get(id_of(10))
        assert entry is not None
        assert entry.tiers == {"hot", "cold"}
        assert entry.is_whole
        assert entry.part is not None
        assert not node.rooms.catalog.sent_parts("cold")


@pytest.mark.parametrize("has_trainers", [True, False])
async def test_a_node_that_is_not_home_reads_no_node_file_while_one_is_missing(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, *, has_trainers: bool
) -> None:
    """Of thousands of nodes each would read thousands. Without trainers, it does not know which nodes there are."""
    read: list[str] = []
    home, second, third = nodes.nodes
    get_many = second.rooms.cold["cold"].store.get_many

    async def recording(keys: Sequence[str], **options: Any) -> Any:
        read.extend(keys)
        return await get_many(keys, **options)

    monkeypatch.setattr(second.rooms.cold["cold"].store, "get_many", recording)
    await second.send(10)
    await home.send(10)
    if not has_trainers:
        for rank in second.ranks:
            second.rooms.memory.leave(RUN, Rank(rank), now_s=nodes.now_s)
        assert second.rooms.memory.forget_departed(now_s=nodes.now_s, grace_s=0.0)
    await nodes.wait(LIST_MAX_S, second)
    assert second.rooms.catalog.awaited == {"cold": {RUN: (id_of(10), third.ranks)}}
    assert not [key for key in read if "node-" in key]
    await third.send(10)
    await nodes.wait(2 * LIST_MAX_S, second)
    assert len([key for key in read if "node-" in key]) == 3
    assert (await committed(second, 10)).world_size == WORLD_SIZE


async def test_another_node_commits_when_the_daemon_of_rank_0_is_gone(nodes: Nodes) -> None:
    for node in nodes.nodes:
        await node.send(10)
    await nodes.wait(LIST_MAX_S, *nodes.nodes[1:])
    assert (await committed(nodes.nodes[1], 10)).world_size == WORLD_SIZE


async def test_a_new_home_commits_what_lost_nodes_have_sent(nodes: Nodes, tmp_path: Path) -> None:
    """All of them have died after their node files, with their disks."""
    _, second, third = nodes.nodes
    for node in nodes.nodes:
        await node.send(10)
    for node in (second, third):
        await node.send(20, number=2)
    await second.rooms.cold["cold"].store.put_bytes(layout.file_key(id_of(30), layout.GONE), b"{}")
    clocks = {"monotonic_s": lambda: nodes.now_s}
    async with rooms_at(tmp_path / "spare", cold=second.rooms.config.cold, clocks=clocks) as rooms:
        spare = Node(rooms, 0)
        await rooms.list_tiers()
        await nodes.wait(2 * HOME_S, spare)
        assert rooms.steps("cold") == []  # it does not know yet that it is the home of the run
        await spare.persist(40, number=4)
        await nodes.wait(1, spare)
        assert rooms.steps("cold") == [10]
        assert [entry.name for entry in (await committed(spare, 10)).files] == [
            layout.shard_name(rank, WORLD_SIZE) for rank in range(WORLD_SIZE)
        ]
        await nodes.nodes[0].send(20, number=2)  # its partner sends the copy of it some minutes later
        await nodes.wait(LIST_MAX_S + 1, spare)
        assert rooms.steps("cold") == [20, 10]


async def test_a_start_on_one_node_commits_what_lost_nodes_have_sent(nodes: Nodes, tmp_path: Path) -> None:
    for node in nodes.nodes:
        await node.send(10)
    clocks = {"monotonic_s": lambda: nodes.now_s}
    async with rooms_at(tmp_path / "alone", cold=nodes.nodes[0].rooms.config.cold, clocks=clocks) as rooms:
        alone = Node(rooms, 0)
        await rooms.list_tiers()
        rooms.seal(40, [b"all of it"], generation=2, number=4)
        await nodes.wait(1, alone)
        assert rooms.steps("cold") == [10]


async def test_what_lost_nodes_have_sent_is_looked_at_again_when_reading_it_took_too_long(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node in nodes.nodes:
        await node.send(10)
    clocks = {"monotonic_s": lambda: nodes.now_s}
    async with rooms_at(tmp_path / "spare", cold=nodes.nodes[0].rooms.config.cold, clocks=clocks) as rooms:
        spare = Node(rooms, 0)
        await rooms.list_tiers()
        await spare.persist(40, number=4)
        decode_many = Tier.decode_many

        async def read_slowly(cold: Tier, keys: Sequence[str]) -> Any:
            nodes.now_s += LISTING_VALID_S + 1
            return await decode_many(cold, keys)

        with monkeypatch.context() as patched:
            patched.setattr(Tier, "decode_many", read_slowly)
            await nodes.wait(1, spare)
        assert rooms.steps("cold") == []
        await nodes.wait(1, spare)
        assert rooms.steps("cold") == [10]


async def test_all_nodes_make_the_same_manifest(nodes: Nodes) -> None:
    raws = set()
    for node in nodes.nodes:
        await node.send(10)
    manifest_file = nodes.nodes[0].rooms.folder("cold", id_of(10)) / layout.MANIFEST
    for node in nodes.nodes:
        await nodes.wait(LIST_MAX_S, node)
        raws.add(manifest_file.read_bytes())
        manifest_file.unlink()
    assert len(raws) == 1


async def test_a_part_is_sent_once_and_never_counts_as_the_checkpoint(nodes: Nodes) -> None:
    home = nodes.nodes[0]
    await home.send(10)
    assert pending(home.rooms.catalog, home.rooms.config, "cold") == []
    await home.rooms.list_tiers()
    entry = home.rooms.catalog.get(id_of(10))
    assert entry is not None
    assert entry.tiers == {"hot"}
    assert not entry.is_whole
    inventory = selectable_replicas(home.rooms.catalog, RUN)
    assert not inventory.candidates
    assert [(one.id, one.tier) for one in inventory.unreadable] == [(id_of(10), "hot"), (id_of(10), "cold")]


async def test_a_part_in_hot_survives_a_restart(nodes: Nodes, tmp_path: Path) -> None:
    second = nodes.nodes[1]
    await second.persist(10)
    folder = second.rooms.folder("hot", id_of(10))
    names = {"node-00002-of-00005.json", *(layout.shard_name(Rank(rank), WORLD_SIZE) for rank in (2, 4))}
    assert {path.name for path in folder.iterdir()} == names
    async with rooms_at(tmp_path / "1", cold=tuple(second.rooms.config.cold)) as again:
        await again.list_tiers()
        entry = again.catalog.get(id_of(10))
        assert entry is not None
        assert isinstance(entry.part, NodeFile)
        assert again.replicator() is not None
        assert await again.replicator().run_once()
        assert [part.ranks for part in again.catalog.sent_parts("cold")] == [[2, 4]]


async def test_a_part_of_another_start_is_refused(nodes: Nodes) -> None:
    home, second, third = nodes.nodes
    await home.send(10)
    await third.send(10)
    second.node = wire.NodeRanks(ranks=second.ranks, lowest=second.node.lowest, claim="0" * 32, base=7)
    await second.send(10)
    await nodes.wait(HOME_S + 1, home)
    assert home.rooms.steps("cold") == []
    assert "two starts of the run hold this generation" in home.rooms.incidents.recent()[0].message
    home.rooms.folder("cold", id_of(10)).joinpath("node-00002-of-00005.json").unlink()
    second.node = wire.NodeRanks(ranks=second.ranks, lowest=second.node.lowest, claim=CLAIM.claim, base=7)
    cold = second.rooms.cold["cold"]
    (part,) = second.rooms.catalog.sent_parts("cold")
    right = msgspec.structs.replace(part, claim=CLAIM.claim)
    await cold.store.put_bytes(right.key, right.encode())
    await nodes.wait(HOME_S + 1, home)
    assert home.rooms.steps("cold") == [10]


async def test_a_part_that_differs_from_the_committed_manifest_overwrites_nothing(nodes: Nodes) -> None:
    for node in nodes.nodes:
        await node.send(10)
    await nodes.wait(HOME_S + 1, nodes.nodes[0])
    second = nodes.nodes[1]
    (part,) = second.rooms.catalog.sent_parts("cold")
    forged = [entry for entry in (await committed(second, 10)).files if entry.name == part.files[0].name]
    assert forged == part.files[:1]
    other = NodeFile(**{name: getattr(part, name) for name in part.__struct_fields__} | {"metrics": {"loss": 1.0}})
    assert "metrics" in other.contradiction(await committed(second, 10))
    with pytest.raises(Corrupt):
        second.committer._check(other, await committed(second, 10))  # pyright: ignore[reportPrivateUsage]


async def test_a_deleted_checkpoint_is_not_committed_again(nodes: Nodes) -> None:
    home, second, _ = nodes.nodes
    for node in nodes.nodes:
        await node.send(10)
    await nodes.wait(HOME_S + 1, home)
    await home.rooms.cold["cold"].delete(id_of(10))
    assert {path.name for path in home.rooms.folder("cold", id_of(10)).iterdir()} == {layout.GONE}
    await nodes.wait(2 * LIST_MAX_S, second)
    assert home.rooms.steps("cold") == []
    assert pending(second.rooms.catalog, second.rooms.config, "cold") == []


async def test_a_committer_that_slept_while_the_checkpoint_was_deleted_reports_no_commit(nodes: Nodes) -> None:
    home = nodes.nodes[0]
    for node in nodes.nodes:
        await node.send(10)
    cold = home.rooms.cold["cold"]
    commit = cold.commit

    async def sleep_first(*arguments: Any, **options: Any) -> None:
        await cold.bury(id_of(10))
        await commit(*arguments, **options)

    object.__setattr__(cold, "commit", sleep_first)
    await nodes.wait(HOME_S + 1, home)
    entry = home.rooms.catalog.get(id_of(10))
    assert entry is not None
    assert entry.tiers == {"hot"}
    assert not [message for message in home.rooms.sent if isinstance(message, wire.Replicated)]


async def test_a_deletion_that_ended_after_its_tombstone_is_begun_again(nodes: Nodes) -> None:
    """A later daemon finds all files beneath the tombstone, which proves nothing."""
    home = nodes.nodes[0]
    for node in nodes.nodes:
        await node.send(10)
    await nodes.wait(HOME_S + 1, home)
    cold, folder = home.rooms.cold["cold"], home.rooms.folder("cold", id_of(10))
    delete = cold.store.delete

    async def fail(keys: Sequence[str]) -> None:
        raise TierUnreachable("the daemon ends here")

    cold.store.delete = fail  # type: ignore[method-assign]
    with pytest.raises(TierUnreachable):
        await cold.delete(id_of(10))
    cold.store.delete = delete  # type: ignore[method-assign]
    assert {layout.MANIFEST, layout.GONE} <= {path.name for path in folder.iterdir()}
    assert id_of(10) in (await cold.listing()).partial
    cold.deleting.clear()
    assert not await clear_uncommitted(cold, id_of(10))
    assert id_of(10) in (await cold.listing()).committed
    assert await cold.delete(id_of(10))
    assert [path.name for path in folder.iterdir()] == [layout.GONE]


async def test_a_tombstone_that_is_not_signed_hides_no_checkpoint(tmp_path: Path) -> None:
    async with rooms_at(tmp_path, keyring=Keyring([new_key()])) as rooms:
        manifest, cold = await rooms.commit("hot", "cold"), rooms.cold["cold"]
        tombstone = layout.file_key(manifest.id, layout.GONE)
        await cold.store.put_bytes(tombstone, encode_marker(Tombstone()))
        listing = await cold.listing()
        assert listing.committed == {manifest.id}
        assert list(listing.foreign) == [tombstone]
        await cold.store.delete([tombstone])
        await cold.put_marker(tombstone, encode_marker(Tombstone()))
        assert set((await cold.listing()).partial) == {manifest.id}


async def test_only_the_daemon_of_rank_0_deletes_in_cold(nodes: Nodes) -> None:
    steps = list(range(1, 9))
    for step in steps:
        for node in nodes.nodes:
            await node.send(step, number=step)
        await nodes.wait(90)
    reapers = [Reaper(node.rooms.context) for node in nodes.nodes]
    for node, reaper in list(zip(nodes.nodes, reapers, strict=True))[1:]:
        await node.rooms.list_tiers()
        await reaper.run_once()
    assert nodes.nodes[0].rooms.steps("cold") == steps[::-1]
    await nodes.nodes[0].rooms.list_tiers()
    await reapers[0].run_once()
    assert nodes.nodes[0].rooms.steps("cold") == [8, 7, 6, 3]  # the last three, and the tenth: its sequence is 10


async def test_the_daemon_of_home_is_gone(nodes: Nodes, tmp_path: Path) -> None:
    """The others commit, and none of them deletes in cold. What waited is deleted by the home of the next start."""
    steps = list(range(1, 6))
    for step in steps:
        for node in nodes.nodes:
            await node.send(step, number=step)
    others = nodes.nodes[1:]
    await nodes.wait(LIST_MAX_S, *others)
    assert others[0].rooms.steps("cold") == steps[::-1]
    for node in others:
        await node.rooms.list_tiers()
        planned = deletions(decisions(node.rooms.catalog, node.rooms.config), node.rooms.config)
        assert [each.tier for each in planned].count("cold") == 2
        await Reaper(node.rooms.context).run_once()
    assert others[0].rooms.steps("cold") == steps[::-1]
    async with rooms_at(tmp_path / "spare", cold=others[0].rooms.config.cold) as rooms:
        spare = Node(rooms, 0)
        spare.node = msgspec.structs.replace(spare.node, claim=Claim.new("spare").claim)
        rooms.memory.enter(RUN, Generation(2), Rank(0), WORLD_SIZE, spare.node)
        await rooms.list_tiers()
        await Reaper(rooms.context).run_once()
        assert rooms.steps("cold") == [5, 4, 3]


async def test_the_verdict_of_the_whole_is_that_of_all_parts(nodes: Nodes) -> None:
    for number, node in enumerate(nodes.nodes):
        await node.persist(10)
        rooms, is_healthy = node.rooms, number != 1
        rooms.catalog.diagnosed(id_of(10), "hot", is_healthy=is_healthy)
        await rooms.replicator().run_once()
    await nodes.wait(HOME_S + 1)
    names = {path.name for path in nodes.nodes[0].rooms.folder("cold", id_of(10)).iterdir()}
    assert layout.UNHEALTHY in names
    assert layout.HEALTHY not in names


async def test_a_part_waits_for_its_verdict_for_a_limited_time(tmp_path: Path) -> None:
    now_s = 0.0
    cold = ColdConfig(name="cold", url=f"file://{tmp_path / 'cold'}")
    clocks = {"monotonic_s": lambda: now_s}
    async with rooms_at(tmp_path, cold=(cold,), health=HealthConfig(examine=True), clocks=clocks) as rooms:
        await rooms.list_tiers()
        for tier in rooms.tiers.values():
            assert await rooms.context.claim(tier, RUN, Generation(1), CLAIM)
        node, replicator = Node(rooms, 0), rooms.replicator()
        await node.persist(10)
        await node.persist(20, number=2)
        assert await replicator.run_once()
        assert not rooms.catalog.sent_parts("cold")
        rooms.catalog.diagnosed(id_of(20), "hot", is_healthy=True)
        assert await replicator.run_once()
        assert [(part.id.step, part.is_healthy) for part in await sent(rooms)] == [(20, True)]
        now_s = VERDICT_S
        assert await replicator.run_once()
        assert [(part.id.step, part.is_healthy) for part in await sent(rooms)] == [(10, None), (20, True)]


async def sent(rooms: Rooms) -> list[NodeFile]:
    """The node files in cold of the parts that were sent, in order of their step."""
    parts = sorted(rooms.catalog.sent_parts("cold"), key=lambda part: part.id.step)
    node_files = await rooms.cold["cold"].decode_many([part.key for part in parts])
    return [node_file for node_file in node_files if isinstance(node_file, NodeFile)]


async def test_a_milestone_of_the_snapshot_is_one_of_the_checkpoint(nodes: Nodes) -> None:
    for node in nodes.nodes:
        await node.send(10, milestone="best")
    await nodes.wait(HOME_S + 1)
    assert (nodes.nodes[0].rooms.folder("cold", id_of(10)) / "milestone-best.json").exists()


async def test_a_node_file_that_nobody_can_read_does_not_end_the_wait(nodes: Nodes) -> None:
    home = nodes.nodes[0]
    for node in nodes.nodes:
        await node.send(10)
    path = home.rooms.folder("cold", id_of(10)) / layout.node_file_name(2, WORLD_SIZE)
    raw = path.read_bytes()
    path.unlink()
    path.write_bytes(b"half")
    await nodes.wait(HOME_S + 1, home)
    assert home.rooms.steps("cold") == []
    assert home.rooms.incidents.recent()
    path.write_bytes(raw)  # a person put the right one back
    await nodes.wait(LIST_MAX_S, home)
    assert home.rooms.steps("cold") == [10]


async def test_a_run_that_has_left_memory_still_has_a_home(nodes: Nodes) -> None:
    for node in nodes.nodes:
        await node.send(10)
        for rank in node.ranks:
            node.rooms.memory.leave(RUN, Rank(rank), now_s=0.0)
        node.rooms.memory.forget_departed(now_s=1e12, grace_s=0.0)
        assert RUN not in node.rooms.memory.runs()
    assert [node.rooms.context.is_home(RUN) for node in nodes.nodes] == [True, False, False]
    await nodes.wait(HOME_S + 1)
    await committed(nodes.nodes[0], 10)
    assert not [message for message in nodes.nodes[0].rooms.sent if isinstance(message, wire.Fenced)]
    assert not nodes.nodes[0].rooms.context.incidents.recent()


async def test_a_healthy_part_does_not_make_the_whole_checkpoint_healthy(nodes: Nodes) -> None:
    home = nodes.nodes[0]
    for node in nodes.nodes:
        await node.send(10)
    home.rooms.catalog.diagnosed(id_of(10), "hot", is_healthy=True)  # after the node file
    await nodes.wait(HOME_S + 1)
    (view,) = home.rooms.catalog.views()
    assert view.tiers == {"hot", "cold"}
    assert view.healthy is None
    home.rooms.catalog.diagnosed(id_of(10), "hot", is_healthy=False)
    (view,) = home.rooms.catalog.views()
    assert view.healthy is False


async def test_a_checkpoint_that_lacks_parts_for_long_is_looked_at_seldom(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, listed = nodes.nodes[0], 0
    await home.send(10)
    store = home.rooms.cold["cold"].store
    list_all = store.list

    async def count(prefix: str, **options: Any) -> Any:
        nonlocal listed
        listed += 1
        return await list_all(prefix, **options)

    monkeypatch.setattr(store, "list", count)
    await nodes.wait(600, home)
    often = listed
    await nodes.wait(6 * 3600, home)
    assert often > 20
    assert listed - often < 6 * 3600 / 300


async def test_an_unhealthy_part_from_memory_makes_the_checkpoint_unhealthy(nodes: Nodes) -> None:
    for number, node in enumerate(nodes.nodes):
        shards = [node.shard(rank, 10) for rank in node.ranks]
        found = node.rooms.seal(10, shards, node=node.node, world_size=WORLD_SIZE, number=1)
        found.diagnosis = Diagnosis(healthy=number != 1)
        found.refused_by.add("hot")
        assert await WriteThrough(node.rooms.context).run_once()
    await nodes.wait(HOME_S + 1)
    names = {path.name for path in nodes.nodes[0].rooms.folder("cold", id_of(10)).iterdir()}
    assert layout.MANIFEST in names
    assert layout.UNHEALTHY in names


async def test_a_part_in_hot_is_verified(nodes: Nodes) -> None:
    home = nodes.nodes[0]
    await home.persist(10)
    verification = await verify_replica(home.rooms.hot, id_of(10))
    assert verification is not None
    assert verification.sentences == []
    shard = home.rooms.folder("hot", id_of(10)) / layout.shard_name(Rank(0), WORLD_SIZE)
    shard.chmod(0o600)
    shard.write_bytes(bytes(len(home.shard(0, 10))))
    verification = await verify_replica(home.rooms.hot, id_of(10))
    assert verification is not None
    assert len(verification.sentences) == 1


async def test_a_run_goes_on_without_a_part_that_never_became_whole(nodes: Nodes) -> None:
    home = nodes.nodes[0]

    async def judge(checkpoint: CheckpointId) -> bool | None:
        return None

    restorer = Restorer(home.rooms.context, judge)
    any_step = wire.Find(request=1, step=None, generation=None, milestone=None, tier="auto", exclude=[])

    async def find() -> None:
        await restorer.find(RUN, any_step, lambda *_: None)

    await home.persist(10)
    with pytest.raises(TierUnreachable, match=r"has its part .*when this node has copied its part"):
        await find()
    await home.rooms.replicator().run_once()
    with pytest.raises(NotFound, match="none is whole"):  # made years ago
        await find()
    await home.send(11, number=2, created_at=home.rooms.context.now().isoformat())
    with pytest.raises(TierUnreachable, match=r"has its part .*if the other nodes have not copied their parts"):
        await find()
    with pytest.raises(NotFound, match="none is whole"):
        await restorer.find(RUN, msgspec.structs.replace(any_step, tier="hot"), lambda *_: None)


async def test_every_node_evicts_its_own_parts(nodes: Nodes) -> None:
    for step in range(1, 9):
        for node in nodes.nodes:
            await node.send(step, number=step)
        await nodes.wait(90)
    for node in nodes.nodes:
        await node.rooms.list_tiers()
        await Reaper(node.rooms.context).run_once()
        await node.rooms.list_tiers()
        await Reaper(node.rooms.context).run_once()
        names = sorted(path.name[:12] for path in node.rooms.folder("hot", id_of(1)).parent.iterdir() if path.is_dir())
        assert len(names) == node.rooms.config.lifecycle.hot.keep_last, names


async def test_parts_that_hot_keeps_are_no_reason_to_delete_the_whole_in_cold(nodes: Nodes) -> None:
    home = nodes.nodes[0]
    for step in range(1, 9):
        for node in nodes.nodes:
            await node.send(step, number=step)
        await nodes.wait(90)
    config = home.rooms.config
    lifecycle = msgspec.structs.replace(config.lifecycle, hot=TierPolicy(keep_last=7))
    deleted = deletions(
        decisions(home.rooms.catalog, msgspec.structs.replace(config, lifecycle=lifecycle)), home.rooms.config
    )
    assert {each.checkpoint.step for each in deleted} == {1}


async def test_before_a_commit_home_learns_of_a_newer_start_on_other_nodes(nodes: Nodes) -> None:
    """What was sealed is committed all the same. Then this daemon deletes nothing in cold any more."""
    home = nodes.nodes[0]
    for node in nodes.nodes:
        await node.send(10)
    assert await home.rooms.cold["cold"].claim_generation(RUN, Generation(2), Claim.new("another"))
    for forged in (3, 10**9):  # neither names a start, and nobody can have reached the second
        path = home.rooms.folder("cold", id_of(10)).parent / f"generation-{forged:04d}.json"
        path.write_bytes(b"{}")
    assert home.rooms.context.is_home(RUN)
    await nodes.wait(HOME_S + 1, home)
    await committed(home, 10)
    assert [message for message in home.rooms.sent if isinstance(message, wire.Fenced)] == [wire.Fenced(generation=2)]
    assert home.rooms.count("tierd_fenced_total") == 1
    assert not home.rooms.context.is_home(RUN)
    for rank in home.ranks:  # nor when its trainers have ended, and its memory is given back
        home.rooms.memory.leave(RUN, Rank(rank), now_s=0.0)
    home.rooms.memory.forget_departed(now_s=1e12, grace_s=0.0)
    assert RUN not in home.rooms.memory.runs()
    assert not home.rooms.context.is_home(RUN)


@pytest.mark.parametrize("is_own", [True, False])
async def test_home_is_the_node_on_which_alone_the_last_start_was(nodes: Nodes, *, is_own: bool) -> None:
    """Its trainers have ended, and hot still has a part of the start before. The checkpoint of another node's start,
    which a restore has fetched into hot, makes no home."""
    rooms = nodes.nodes[1].rooms
    await nodes.nodes[1].persist(10)
    if is_own:
        claim = Claim.new("second")
        assert await rooms.context.claim(rooms.hot, RUN, Generation(2), claim)
        assert await rooms.context.claim(rooms.cold["cold"], RUN, Generation(2), claim)
    await rooms.commit("hot", step=20, generation=2)
    await rooms.list_tiers()
    for rank in nodes.nodes[1].ranks:
        rooms.memory.leave(RUN, Rank(rank), now_s=0.0)
    rooms.memory.forget_departed(now_s=1e12, grace_s=0.0)
    assert rooms.context.is_home(RUN) is is_own
    rooms.catalog.saw_generation(RUN, Generation(3))
    assert not rooms.context.is_home(RUN)


async def test_a_whole_checkpoint_of_the_start_over_several_nodes_makes_no_second_home(nodes: Nodes) -> None:
    """Each node claims the generation in its hot tier. A node without its part of the newest has fetched all of it."""
    home, other = nodes.nodes[:2]
    for node in (home, other):
        await node.persist(10)
        await node.rooms.commit("hot", step=20, generation=1)
        await node.rooms.list_tiers()
        for rank in node.ranks:
            node.rooms.memory.leave(RUN, Rank(rank), now_s=0.0)
        node.rooms.memory.forget_departed(now_s=1e12, grace_s=0.0)
    assert [node.rooms.context.is_home(RUN) for node in (home, other)] == [True, False]


async def test_a_generation_that_was_claimed_here_and_never_began_does_not_end_the_office_of_home(nodes: Nodes) -> None:
    home = nodes.nodes[0]
    await home.persist(10)
    home.rooms.catalog.saw_generation(RUN, 2)
    home.rooms.catalog.claims.saw(RUN, [2], "hot", is_here=True)
    assert home.rooms.context.is_home(RUN)
