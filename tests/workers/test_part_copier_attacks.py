"""What may go wrong between two events while a node copies the parts of another one."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.support.rooms import RUN
from tests.workers.test_part_copier import HERE, NODE_FILE, THERE, TwoNodes, id_of, two
from tierd.context import Partner
from tierd.format.ids import Generation, Run
from tierd.format.peers import PeerAddress
from tierd.tiers import peer_store
from tierd.tiers.part_copies import PartCopies
from tierd.tiers.store import Progress
from tierd.tiers.tier import ReadableTier
from tierd.transfer.fetch import Fetch
from tierd.workers.part_copier import PartCopier

__all__ = ["two"]


async def test_partner_that_is_three_snapshots_behind_is_copied(two: TwoNodes) -> None:
    """With three slots a slow disk persists step 6 while this node has persisted 7, 8 and 9 already."""
    for step in (5, 6):
        await two.both(step)
    for step in (7, 8, 9):
        await two.persist(two.here, step, HERE)
    await two.copier.run_once()
    assert two.steps[:1] == [6]


async def test_copy_that_was_begun_gives_its_space_to_a_snapshot_of_this_node(
    two: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other node died in the middle. Its half copy has all of its space reserved."""

    async def dies(self: Fetch, tier: ReadableTier, progress: Progress | None = None) -> None:
        raise peer_store.PeerUnreachable("it is gone")

    await two.both(5)
    with monkeypatch.context() as patch:
        patch.setattr(Fetch, "take", dies)
        await two.copier.run_once()
    folder = two.folder / RUN / id_of(5).name
    reserved = sum(path.stat().st_blocks * 512 for path in folder.iterdir())
    assert reserved > 0
    two.tell(address="127.0.0.1:1")
    assert await two.copier.make_room(1) > 0
    assert not folder.exists()


async def test_partner_of_one_run_that_hangs_holds_up_no_other_run(two: TwoNodes) -> None:
    """Each answer is waited for 30 s, six times."""

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    other = Run("another")
    for rooms, node in ((two.there, THERE), (two.here, HERE)):
        rooms.seal(5, [b"x" * 9000 for _ in node.ranks], run=other, node=node, world_size=3, number=5)
        await rooms.persister().run_once()
    await two.both(5)
    two.tell(address=f"127.0.0.1:{port}")  # of the first run
    peer = two.there.context.peer_key.of(other)
    assert peer is not None
    two.here.context.partners[other] = Partner(Generation(1), peer, NODE_FILE)
    task = asyncio.create_task(two.copier.run_once())
    await asyncio.wait([task], timeout=5.0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    server.close()
    assert [part.step for part in two.copies.of_run(other)] == [5]


async def test_copy_with_a_damaged_node_file_is_made_again(two: TwoNodes) -> None:
    await two.both(5)
    await two.copier.run_once()
    path = two.folder / RUN / id_of(5).name / NODE_FILE
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-20])
    copies = PartCopies(two.here.config, two.here.context.keyring)
    await copies.recover()
    two.here.context = replace(two.here.context, part_copies=copies)
    copier = PartCopier(two.here.context, copies)
    try:
        assert await copier.run_once(), two.here.incidents.recent()
        assert copies.get(id_of(5)) is not None
    finally:
        await copies.store.close()


async def test_old_copy_with_a_damaged_node_file_takes_no_space_for_ever(two: TwoNodes) -> None:
    await two.both(5)
    await two.copier.run_once()
    path = two.folder / RUN / id_of(5).name / NODE_FILE
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-20])
    copies = PartCopies(two.here.config, two.here.context.keyring)
    await copies.recover()
    await copies.store.close()
    assert not path.parent.exists()


async def test_copy_of_another_part_is_no_copy_of_the_partners_part(two: TwoNodes) -> None:
    """The nodes were paired anew within a generation, after a daemon came back with another domain."""
    await two.both(5)
    await two.copier.run_once()
    other = "node-00007-of-00009.json"
    peer = PeerAddress(address="127.0.0.1:1", token="ab")
    two.here.context.partners[RUN] = Partner(Generation(1), peer, other)
    assert two.copier.lag_s(RUN) != 0.0
