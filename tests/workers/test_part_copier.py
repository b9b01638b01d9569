"""Copies the parts of a real other node, over HTTP, and deletes them when nobody needs them."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.cli import flip_a_bit
from tests.support.damage import cut, flip, lose
from tests.support.rooms import RUN, Rooms, rooms_at
from tierd.api.peer_parts import PeerParts
from tierd.config.sections import PeersConfig
from tierd.context import PartnerNode
from tierd.format import layout, wire
from tierd.format.ids import CheckpointId, Generation, Rank, Run, checkpoint_id
from tierd.format.manifest import Manifest
from tierd.format.node_file import NodeFile
from tierd.format.peers import PeerAddress
from tierd.format.signature import Keyring
from tierd.keys.key_file import new_key
from tierd.tiers import new_file, peer_store
from tierd.tiers import tier as tier_module
from tierd.tiers.part_copies import PartCopies
from tierd.tiers.readable_tier import ReadableTier
from tierd.tiers.store import Progress, StoredObject
from tierd.transfer import partial_file
from tierd.transfer.fetch import Fetch
from tierd.transfer.verify import verify_files
from tierd.workers import hot_space, part_copier
from tierd.workers.copy_scrubber import CopyScrubber
from tierd.workers.hot_space import MARGIN_BYTES
from tierd.workers.left_runs import RESTART_S, LeftRuns
from tierd.workers.part_copier import COPIED_MAX, IDLE_S, POLL_MIN_S, PartCopier
from tierd.workers.restorer import Restorer

HERE = wire.NodeRanks(ranks=[0], lowest=[0, 1], claim="ab" * 16, base=4)
THERE = wire.NodeRanks(ranks=[1, 2], lowest=[0, 1], claim="ab" * 16, base=4)
NODE_FILE = "node-00001-of-00003.json"
CREATED = "2026-11-01T00:00:00+00:00"


async def judge_nothing(_: CheckpointId) -> bool | None:
    return None


class TwoNodes:
    """The node `here` copies the parts of the node `there`."""

    def __init__(self, here: Rooms, there: Rooms) -> None:
        self.here, self.there = here, there
        self.copies = PartCopies(here.config, here.context.keyring)
        here.context = replace(here.context, part_copies=self.copies)
        self.copier = PartCopier(here.context, self.copies)

    async def persist(self, rooms: Rooms, step: int, node: wire.NodeRanks, **fields: object) -> None:
        shards = [f"rank {rank} step {step}".encode() * 9000 for rank in node.ranks]
        rooms.seal(step, shards, node=node, world_size=3, **{"number": step, "created_at": CREATED, **fields})
        await rooms.persister().run_once()

    async def both(self, step: int) -> None:
        await self.persist(self.there, step, THERE)
        await self.persist(self.here, step, HERE)

    async def newer_in_cold(self, run: str = RUN) -> None:
        """Step 7 is whole in cold."""
        manifest = self.here.context.signed(await self.here.commit("cold", step=7, run=run))
        (self.here.folder("cold", manifest.id) / layout.MANIFEST).write_bytes(manifest.encode())
        self.here.catalog.add(manifest, "cold")

    def size(self, rooms: Rooms) -> int:
        """In bytes, of its part of step 5."""
        entry = rooms.catalog.get(id_of(5))
        assert entry is not None
        return entry.manifest.size_bytes

    def tell(self, run: str = RUN, **changes: object) -> None:
        peer = self.there.context.peer_key.of(Run(run))
        assert peer is not None
        partner = PartnerNode(Generation(1), msgspec.structs.replace(peer, **changes), NODE_FILE)
        self.here.context.partners[Run(run)] = partner

    @property
    def steps(self) -> list[int]:
        return [part.step for part in self.copies.of_run(RUN)]

    @property
    def folder(self) -> Path:
        return self.here.config.hot_path / layout.PEERS


def id_of(step: int) -> CheckpointId:
    return checkpoint_id(RUN, step, 1)


@pytest.fixture(params=[False, True], ids=["unsigned in plain HTTP", "signed with TLS"])
async def two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> AsyncIterator[TwoNodes]:
    monkeypatch.setattr(peer_store, "RETRY_MIN_S", 0.001)
    monkeypatch.setattr(peer_store, "RETRY_MAX_S", 0.002)
    keyring = Keyring([new_key()]) if request.param else None
    peers = PeersConfig(listen="127.0.0.1:0", tls=request.param)
    clocks = {"now": lambda: datetime(2026, 11, 1, 1, tzinfo=UTC)}
    async with (
        rooms_at(tmp_path / "here", keyring=keyring, peers=peers, clocks=clocks) as here,
        rooms_at(tmp_path / "there", keyring=keyring, peers=peers) as there,
    ):
        for rooms in (here, there):
            await rooms.list_tiers()
        parts = PeerParts(there.context, Restorer(there.context, judge_nothing))
        await parts.start()
        nodes = TwoNodes(here, there)
        nodes.tell()
        yield nodes
        await parts.close()
        await nodes.copies.store.close()


async def test_part_of_the_partner_is_copied_bit_for_bit(two: TwoNodes) -> None:
    await two.both(5)
    assert await two.copier.run_once()
    assert two.steps == [5]
    for name in (NODE_FILE, layout.shard_name(1, 3), layout.shard_name(2, 3)):  # type: ignore[arg-type]
        key = layout.file_key(id_of(5), name)
        assert (two.folder / key).read_bytes() == (two.there.config.hot_path / key).read_bytes()
    assert wire.Copied(step=5, generation=1) in two.here.sent
    assert two.copier.lag_s(RUN) == 0.0


async def test_it_waits_until_both_have_persisted(two: TwoNodes) -> None:
    """What is in memory only may be lost with the node that is copied."""
    await two.persist(two.here, 5, HERE)
    two.there.seal(5, [b"one", b"two"], node=THERE, world_size=3, number=5, created_at=CREATED)
    assert await two.copier.run_once()
    assert two.steps == []
    assert (two.copier.lag_s(RUN) or 0.0) > 0
    assert two.copier.lag_s(RUN) == 3600.0
    assert not two.here.incidents.recent()


async def test_the_other_node_is_asked_soon_and_then_less_often(two: TwoNodes) -> None:
    await two.persist(two.here, 5, HERE)
    intervals: list[float] = []
    for _ in range(7):
        await two.copier.run_once()
        intervals.append(two.copier.interval_s)
    assert intervals == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    await two.persist(two.here, 6, HERE)
    await two.copier.run_once()
    assert two.copier.interval_s == POLL_MIN_S
    for step in (5, 6):
        await two.persist(two.there, step, THERE)
    await two.copier.run_once()
    assert two.copier.interval_s == IDLE_S


async def test_only_the_newest_are_begun(two: TwoNodes) -> None:
    for step in range(5, 5 + COPIED_MAX + 2):
        await two.both(step)
    await two.copier.run_once()
    assert two.steps == [8, 7]


async def test_part_of_another_start_is_refused(two: TwoNodes) -> None:
    await two.persist(two.there, 5, msgspec.structs.replace(THERE, claim="cd" * 16))
    await two.persist(two.here, 5, HERE)
    assert not await two.copier.run_once()
    assert two.steps == []
    assert "part of another checkpoint" in two.here.incidents.recent()[0].message


async def test_part_with_a_rank_of_this_node_is_refused(two: TwoNodes) -> None:
    await two.persist(two.there, 5, THERE)
    await two.persist(two.here, 5, msgspec.structs.replace(HERE, ranks=[0, 1]))
    assert not await two.copier.run_once()
    assert two.steps == []
    assert "its ranks overlap this node's part: 1" in two.here.incidents.recent()[0].message


async def test_partner_that_cannot_be_reached_is_an_incident_and_tried_again(two: TwoNodes) -> None:
    await two.both(5)
    two.tell(address="127.0.0.1:1")
    assert not await two.copier.run_once()
    assert two.here.incidents.recent()[0].stage == "copy"
    two.tell()
    assert await two.copier.run_once()
    assert two.steps == [5]


async def test_partner_that_has_another_certificate_since_is_named_and_copied_when_that_is_told(two: TwoNodes) -> None:
    """Its daemon has restarted, and the trainers have not told the new address yet."""
    await two.both(5)
    two.tell(fingerprint="ab" * 32)
    assert not await two.copier.run_once()
    (failure,) = two.here.incidents.recent()
    is_tls = bool(two.there.context.peer_key.fingerprint)
    assert ("its certificate is sha256" if is_tls else "no TLS handshake") in failure.message
    two.tell()
    assert await two.copier.run_once()
    assert two.steps == [5]


@pytest.mark.timeout(20)
async def test_a_slow_node_of_the_start_before_does_not_keep_the_new_partner_waiting(
    two: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was replaced because it is slow. Its daemon still sends, and the copy would take hours."""
    await two.both(5)
    is_begun = asyncio.Event()

    async def send_slowly(*_: object) -> None:
        is_begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(part_copier, "CHECK_S", 0.01)
    with monkeypatch.context() as slow:
        slow.setattr(Fetch, "take", send_slowly)
        passing = asyncio.create_task(two.copier.run_once())
        await is_begun.wait()
        two.tell()  # the same again, by trainers that have reconnected
        await asyncio.sleep(0.1)
        assert not passing.done()
        two.here.context.partners[RUN] = two.here.context.partners[RUN]._replace(generation=Generation(2))
        assert await passing
    two.tell()
    assert await two.copier.run_once()
    assert two.steps == [5]


async def test_a_pass_that_is_cancelled_leaves_no_copy_that_goes_on(
    two: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    await two.both(5)
    is_begun, is_ended = asyncio.Event(), asyncio.Event()

    async def send_slowly(*_: object) -> None:
        is_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            is_ended.set()

    monkeypatch.setattr(Fetch, "take", send_slowly)
    passing = asyncio.create_task(two.copier.run_once())
    await is_begun.wait()
    passing.cancel()
    with suppress(asyncio.CancelledError):
        await passing
    assert is_ended.is_set()


async def test_damaged_shard_of_the_partner_is_never_a_copy(two: TwoNodes) -> None:
    await two.both(5)
    path = two.there.config.hot_path / layout.file_key(id_of(5), layout.shard_name(1, 3))  # type: ignore[arg-type]
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(100)
        file.write(b"damage")
    assert not await two.copier.run_once()
    assert two.steps == []
    assert not list(two.folder.rglob("node-*"))


async def test_full_disk_takes_no_copy(two: TwoNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy is never the reason why a snapshot of this node has no space."""
    await two.both(5)
    monkeypatch.setattr(hot_space, "MARGIN_BYTES", 1 << 60)
    assert not await two.copier.run_once()
    assert two.steps == []
    assert two.here.incidents.recent()[0].kind == "full"


async def test_disk_that_fills_meanwhile_leaves_no_copy(two: TwoNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    await two.both(5)
    monkeypatch.setattr(os, "pwrite", full)
    assert not await two.copier.run_once()
    assert two.steps == []
    monkeypatch.undo()
    assert await two.copier.run_once()
    assert two.steps == [5]


async def test_old_copies_go_when_every_node_has_a_newer_one(two: TwoNodes) -> None:
    for step in (5, 6, 7):
        await two.both(step)
        await two.copier.run_once()
    assert two.steps == [7, 6, 5]
    two.here.catalog.saw_everywhere(id_of(6))
    await two.copier.run_once()
    assert two.steps == [7, 6]
    assert not (two.folder / RUN / id_of(5).name).exists()


@pytest.mark.parametrize("is_known_by", ["the trainers", "cold"])
async def test_a_copy_that_was_deleted_as_too_old_is_not_made_again(two: TwoNodes, is_known_by: str) -> None:
    """The newest checkpoint is safe on every node, and the next one is not persisted yet. `is_known_by`: or the daemon
    has restarted, and cold has the newest."""
    for step in (6, 7):
        await two.both(step)
        await two.copier.run_once()
    if is_known_by == "cold":
        await two.newer_in_cold()
    else:
        two.here.catalog.saw_everywhere(id_of(7))
    copied_bytes = two.here.count("tierd_peer_bytes_total", direction="in")
    for _ in range(2):
        assert await two.copier.run_once(), two.here.incidents.recent()
        assert two.steps == [7]
    assert two.here.count("tierd_peer_bytes_total", direction="in") == copied_bytes
    assert two.copier.lag_s(RUN) == 0  # type: ignore[arg-type]


async def test_old_copies_whose_deletion_fails_are_deleted_later(
    two: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else would do it before the next start, and their space would be missing until then."""
    for step in (5, 6, 7):
        await two.both(step)
        await two.copier.run_once()
    two.here.catalog.saw_everywhere(id_of(7))

    def bad_sector(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", bad_sector)
        assert not await two.copier.run_once()
    assert two.steps == [7]
    assert await two.copier.run_once()
    assert sorted(path.name for path in (two.folder / RUN).iterdir()) == [id_of(7).name]


async def test_copy_that_was_begun_and_is_too_old_now_is_deleted(two: TwoNodes) -> None:
    await two.both(5)
    two.tell(address="127.0.0.1:1")
    two.copier._begun[id_of(5)] = 5
    folder = two.folder / RUN / id_of(5).name
    folder.mkdir(parents=True)
    (folder / layout.shard_name(1, 3)).write_bytes(b"begun")  # type: ignore[arg-type]
    for step in (6, 7):
        await two.both(step)
    await two.copier.run_once()
    assert not folder.exists()


async def test_room_is_made_by_deleting_copies_that_cold_has(two: TwoNodes) -> None:
    for step in (5, 6):
        await two.both(step)
        await two.copier.run_once()
    assert await two.copier.make_room(1) == 0  # nothing else has them
    part = two.copies.get(id_of(5))
    assert isinstance(part, NodeFile)
    await two.newer_in_cold()
    assert await two.copier.make_room(1) == part.size_bytes
    assert two.steps == [6]  # the oldest was enough


@pytest.mark.parametrize(("days", "left"), [(6, [6]), (8, [])])
async def test_run_without_trainers_keeps_its_copies_for_a_week(two: TwoNodes, days: int, left: list[int]) -> None:
    await two.both(6)
    await two.copier.run_once()
    two.here.catalog.saw_everywhere(id_of(6))
    await two.newer_in_cold()
    for rooms in (two.here, two.there):
        for rank in rooms.memory.present(RUN):
            rooms.memory.leave(RUN, rank, now_s=0.0)
        rooms.memory.forget_departed(now_s=1e12, grace_s=0.0)
    now = datetime.now(UTC) + timedelta(days=days)  # the files are of today
    two.here.context = replace(two.here.context, now=lambda: now, part_copies=two.copies)
    left_runs = LeftRuns(two.here.context)
    left_runs._started_s -= RESTART_S
    await left_runs.look()
    copier = PartCopier(two.here.context, two.copies)
    await copier.run_once()
    assert two.steps == left
    assert RUN not in two.here.context.partners


async def test_copies_of_a_run_that_has_left_stay_if_cold_has_lost_the_newer_one(two: TwoNodes) -> None:
    await two.both(6)
    await two.copier.run_once()
    await two.newer_in_cold()
    for rank in two.here.memory.present(RUN):
        two.here.memory.leave(RUN, rank, now_s=0.0)
    two.here.memory.forget_departed(now_s=1e12, grace_s=0.0)
    two.here.catalog.left = {RUN: datetime.now(UTC)}
    shutil.rmtree(two.here.folder("cold", id_of(7)))
    await two.copier.run_once()
    assert two.steps == [6]
    assert ("relist", "cold") in two.here.events


async def test_copies_stay_when_the_trainers_come_back_before_they_are_deleted(two: TwoNodes) -> None:
    await two.both(6)
    await two.copier.run_once()
    await two.newer_in_cold()
    two.here.catalog.saw_everywhere(id_of(6))
    two.here.catalog.left = {RUN: datetime.now(UTC)}  # of the reaper's last pass; the trainers are here
    await two.copier.run_once()
    assert two.steps == [6]


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
    """The other node died in the middle. Where its node file is signed, its half copy has all of its space reserved."""

    async def dies(self: Fetch, tier: ReadableTier, progress: Progress | None = None) -> None:
        raise peer_store.PeerUnreachable("it is gone")

    await two.both(5)
    with monkeypatch.context() as patch:
        patch.setattr(Fetch, "take", dies)
        await two.copier.run_once()
    folder = two.folder / RUN / id_of(5).name
    reserved = sum(path.stat().st_blocks * 512 for path in folder.iterdir())
    is_signed = two.here.context.keyring is not None
    assert (reserved > 0) == is_signed
    two.tell(address="127.0.0.1:1")
    assert (await two.copier.make_room(1) > 0) == is_signed
    assert not folder.exists()


async def cut_node_file(two: TwoNodes) -> tuple[Path, PartCopies]:
    """(the node file of the copy of step 5, which has lost its end; what a daemon that starts then knows)."""
    await two.both(5)
    await two.copier.run_once()
    path = two.folder / RUN / id_of(5).name / NODE_FILE
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-20])
    copies = PartCopies(two.here.config, two.here.context.keyring)
    await copies.recover()
    return path, copies


async def test_copy_with_a_damaged_node_file_is_made_again(two: TwoNodes) -> None:
    _, copies = await cut_node_file(two)
    two.here.context = replace(two.here.context, part_copies=copies)
    copier = PartCopier(two.here.context, copies)
    try:
        assert await copier.run_once(), two.here.incidents.recent()
        assert copies.get(id_of(5)) is not None
    finally:
        await copies.store.close()


async def test_old_copy_with_a_damaged_node_file_takes_no_space_for_ever(two: TwoNodes) -> None:
    path, copies = await cut_node_file(two)
    copier = PartCopier(two.here.context, copies)
    two.here.context.partners.clear()
    try:
        assert await copier.run_once()
        assert path.exists()  # a person may want to look at it
        await two.newer_in_cold()
        assert await copier.make_room(1) > 0
        assert not path.parent.exists()
    finally:
        await copies.store.close()


async def test_copies_of_a_run_stay_when_its_trainers_come_back_while_those_of_another_are_deleted(
    two: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = {Run(RUN), Run("other")}
    memory, catalog = two.here.memory, two.here.catalog
    for run in runs:
        two.tell(run)
        for rooms, node in ((two.there, THERE), (two.here, HERE)):
            await two.persist(rooms, 6, node, run=run)
        await two.copier.run_once()
        catalog.saw_everywhere(checkpoint_id(run, 6, 1))
        await two.newer_in_cold(run)
        for rank in memory.present(run):
            memory.leave(run, rank, now_s=0.0)
    memory.forget_departed(now_s=1e12, grace_s=0.0)
    catalog.left = dict.fromkeys(runs, datetime.now(UTC))
    deleted: list[CheckpointId] = []
    delete = two.copies.delete

    async def delete_slowly(checkpoint: CheckpointId) -> None:
        deleted.append(checkpoint)
        (back,) = runs - {checkpoint.run}
        memory.enter(back, Generation(2), Rank(0), 3, HERE)
        await delete(checkpoint)

    monkeypatch.setattr(two.copies, "delete", delete_slowly)
    await two.copier.run_once()
    assert len(deleted) == 1
    assert two.copies.runs() == runs - {deleted[0].run}


async def test_an_incomplete_copy_that_cannot_be_deleted_keeps_no_other(
    two: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = [two.folder / RUN / id_of(step).name / SHARD for step in (3, 4)]
    for shard in shards:
        shard.parent.mkdir(parents=True)
        shard.write_bytes(b"begun")
    unlink, is_first = os.unlink, iter([True])

    def bad_sector(*arguments: Any, **at: Any) -> None:
        if next(is_first, False):
            raise OSError(errno.EIO, "Input/output error")
        unlink(*arguments, **at)

    copies = PartCopies(two.here.config, two.here.context.keyring)
    monkeypatch.setattr(os, "unlink", bad_sector)
    try:
        await copies.recover()
        assert len([shard for shard in shards if shard.exists()]) == 1
    finally:
        await copies.store.close()


async def test_an_incomplete_copy_that_cannot_be_deleted_hides_no_other_at_a_start(
    two: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node may be lost with its disk: then the copies are all that is left of its parts."""
    for step in (5, 6):
        await two.both(step)
        await two.copier.run_once()
    shard = two.folder / RUN / id_of(4).name / SHARD
    shard.parent.mkdir()
    shard.write_bytes(b"begun")

    def bad_sector(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    copies = PartCopies(two.here.config, two.here.context.keyring)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", bad_sector)
        await copies.recover()
    try:
        assert [part.step for part in copies.of_run(RUN)] == [6, 5]
        assert shard.exists()
        await copies.recover()
        assert not shard.parent.exists()
    finally:
        await copies.store.close()


async def test_a_copy_leaves_room_for_the_next_part_of_this_node(
    two: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    await two.both(5)
    own, there = (two.size(rooms) for rooms in (two.here, two.there))
    free_bytes = MARGIN_BYTES + there + own - 1

    async def almost_full(_: object) -> int:
        return free_bytes

    monkeypatch.setattr("tierd.workers.hot_space.free_bytes", almost_full)
    assert not await two.copier.run_once()
    assert two.steps == []
    free_bytes += 1
    assert await two.copier.run_once()
    assert two.steps == [5]


async def test_a_copy_that_was_interrupted_continues_in_the_space_that_it_has(
    two: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk has room for it and for the next part of this node, and not for it twice."""
    await two.both(5)
    folder, needed_bytes = two.folder / RUN / id_of(5).name, sum(map(two.size, (two.here, two.there)))

    async def almost_full(_: object) -> int:
        taken_bytes = sum(path.stat().st_blocks * 512 for path in folder.iterdir()) if folder.exists() else 0
        return MARGIN_BYTES + needed_bytes + 4096 * len(THERE.ranks) - taken_bytes

    async def breaks(self: Fetch, tier: ReadableTier, progress: Progress | None = None) -> None:
        raise peer_store.PeerUnreachable("the link is down")

    monkeypatch.setattr("tierd.workers.hot_space.free_bytes", almost_full)
    with monkeypatch.context() as patch:
        patch.setattr(Fetch, "take", breaks)
        assert not await two.copier.run_once()
    assert await two.copier.run_once(), two.here.incidents.recent()
    assert two.steps == [5]


async def test_the_interrupted_copy_of_a_former_partners_part_makes_room_for_that_of_the_new_one(
    two: TwoNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes were paired anew within a generation. The disk has room for one copy and for the next part here."""
    former, new = (msgspec.structs.replace(THERE, ranks=[rank]) for rank in (1, 2))
    await two.persist(two.there, 5, former)
    await two.persist(two.here, 5, HERE)
    needed_bytes, folder = sum(map(two.size, (two.here, two.there))), two.folder / RUN / id_of(5).name

    async def almost_full(_: object) -> int:
        taken_bytes = sum(path.stat().st_blocks * 512 for path in folder.iterdir()) if folder.exists() else 0
        return MARGIN_BYTES + needed_bytes + 4 * 4096 - taken_bytes

    async def breaks(self: Fetch, tier: ReadableTier, progress: Progress | None = None) -> None:
        await Fetch.take(self, tier, progress)
        raise peer_store.PeerUnreachable("the link is down")

    class Breaking(Fetch):
        take = breaks

    monkeypatch.setattr("tierd.workers.hot_space.free_bytes", almost_full)
    with monkeypatch.context() as patch:
        patch.setattr(part_copier, "Fetch", Breaking)
        assert not await two.copier.run_once()
    assert [*folder.iterdir()]
    async with rooms_at(tmp_path / "new", keyring=two.here.context.keyring, peers=two.here.config.peers) as rooms:
        await rooms.list_tiers()
        parts = PeerParts(rooms.context, Restorer(rooms.context, judge_nothing))
        await parts.start()
        await two.persist(rooms, 5, new)
        peer, name = rooms.context.peer_key.of(RUN), layout.node_file_name(2, 3)
        assert peer is not None
        two.here.context.partners[RUN] = PartnerNode(Generation(1), peer, name)
        assert await two.copier.run_once(), two.here.incidents.recent()
        await parts.close()
    assert {path.name for path in folder.iterdir()} == {name, layout.shard_name(Rank(2), 3)}
    assert await almost_full(None) >= MARGIN_BYTES + two.size(two.here)


async def test_copy_of_another_part_is_no_copy_of_the_partners_part(two: TwoNodes) -> None:
    """The nodes were paired anew within a generation, after a daemon came back with another domain."""
    await two.both(5)
    await two.copier.run_once()
    other = "node-00007-of-00009.json"
    peer = PeerAddress(address="127.0.0.1:1", token="ab")
    two.here.context.partners[RUN] = PartnerNode(Generation(1), peer, other)
    assert two.copier.lag_s(RUN) != 0.0
    assert await two.copier.run_once()
    assert two.steps == [5]  # it stays: the other node's next keeper may not have one yet


async def test_partner_that_changes_while_its_part_is_copied_is_not_told_as_copied(
    two: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a step counts as safe whose part on the new partner nobody has copied."""
    await two.both(5)
    take = Fetch.take

    async def changes(self: Fetch, tier: ReadableTier, progress: Progress | None = None) -> object:
        peer = PeerAddress(address="127.0.0.1:1", token="ab")
        two.here.context.partners[RUN] = PartnerNode(Generation(1), peer, "node-00007-of-00009.json")
        return await take(self, tier, progress)

    monkeypatch.setattr(Fetch, "take", changes)
    await two.copier.run_once()
    assert two.steps == [5]  # the copy may be needed all the same
    assert not [message for message in two.here.sent if isinstance(message, wire.Copied)]


async def test_clock_of_rank_0_that_is_ahead_is_no_negative_lag(two: TwoNodes) -> None:
    await two.persist(two.here, 5, HERE, created_at="2027-01-01T00:00:00+00:00")
    assert two.copier.lag_s(RUN) == 0.0


KILLS = ["fetch.begin", "fetch.write", "fetch.sync", "fetch.rename", "fetch.sync_folder", "tier.commit"]
KILLS += ["file.created", "file.sync", "file.link", "file.linked", "file.sync_folder", "tier.committed"]


class Killed(BaseException):
    pass


@pytest.mark.parametrize(
    "again",
    [pytest.param(False, id="at the first"), pytest.param(True, id="at the second", marks=pytest.mark.long)],
)
@pytest.mark.parametrize("instant", KILLS)
async def test_daemon_that_dies_between_two_steps_of_a_copy_keeps_it_whole_or_not_at_all(
    two: TwoNodes, monkeypatch: pytest.MonkeyPatch, instant: str, again: bool
) -> None:
    hits = 0

    def dies(name: str) -> None:
        nonlocal hits
        hits += name == instant
        if name == instant and hits == 1 + again:
            raise Killed

    await two.both(5)
    with monkeypatch.context() as patch:
        for module in (partial_file, tier_module, new_file):
            patch.setattr(module, "failpoint", dies)
        with suppress(Killed, BaseExceptionGroup):
            await two.copier.run_once()
    assert hits or again
    reader = PartCopies(two.here.config, two.here.context.keyring)
    await reader.recover()
    copy = reader.get(id_of(5))
    if copy is not None:
        assert not (await verify_files(reader.tier, copy)).sentences
    else:
        assert not [path for path in two.folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
    two.here.context = replace(two.here.context, part_copies=reader)
    try:
        assert await PartCopier(two.here.context, reader).run_once()
        copy = reader.get(id_of(5))
        assert copy is not None
        assert not (await verify_files(reader.tier, copy)).sentences
    finally:
        await reader.store.close()


# ── scrub ──


SHARD = "rank-00001-of-00003.safetensors"


@pytest.mark.parametrize(("name", "damage"), [(SHARD, flip), (SHARD, lose), (NODE_FILE, cut), (NODE_FILE, lose)])
async def test_damaged_copy_is_not_served_any_more_and_is_copied_again(
    two: TwoNodes, name: str, damage: Callable[[Path, Manifest, str], None]
) -> None:
    for step in (5, 6):
        await two.both(step)
    await two.copier.run_once()
    part = two.copies.get(id_of(5))
    assert part is not None
    damage(two.folder, part, name)
    scrubber = CopyScrubber(two.here.context, two.copies)
    assert await scrubber.run_once()
    assert two.steps == [6]
    (failure,) = two.here.incidents.recent()
    assert (failure.stage, failure.kind, failure.step) == ("scrub", "corrupt", 5)
    assert f"the copy of {NODE_FILE}" in failure.message
    assert two.here.count("tierd_scrubbed_checkpoints_total", tier="peers", proof="deep") == 2
    assert await two.copier.run_once()
    assert two.steps == [6, 5]
    assert await scrubber.run_once()
    assert len(two.here.incidents.recent()) == 1


async def test_a_copy_that_the_disk_could_not_read_once_stays_in_use(
    two: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node may be lost with its disk: nothing else would have the part."""
    await two.both(5)
    await two.copier.run_once()

    def bad_sector(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    scrubber = CopyScrubber(two.here.context, two.copies)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", bad_sector)
        assert await scrubber.run_once()
    assert await scrubber.run_once()
    assert (two.steps, two.here.incidents.recent()) == ([5], [])
    two.tell(address="127.0.0.1:1")
    scrubber = CopyScrubber(two.here.context, two.copies)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", bad_sector)
        for expected in ([5], []):
            assert await scrubber.run_once()
            assert two.steps == expected
    assert two.here.incidents.recent()[0].kind == "corrupt"


async def test_damaged_copy_of_a_node_that_has_gone_stays_for_a_person(two: TwoNodes) -> None:
    await two.both(5)
    await two.copier.run_once()
    path = two.folder / layout.file_key(id_of(5), SHARD)  # type: ignore[arg-type]
    flip_a_bit(path)
    await CopyScrubber(two.here.context, two.copies).run_once()
    two.tell(address="127.0.0.1:1")
    assert not await two.copier.run_once()
    assert (two.steps, path.exists()) == ([], True)
    await two.newer_in_cold()
    assert await two.copier.make_room(1) > 0
    assert not path.exists()


async def test_copies_are_read_once_per_interval_and_new_ones_an_interval_later(two: TwoNodes) -> None:
    now_s = 1e6
    two.here.context = replace(two.here.context, monotonic_s=lambda: now_s)
    scrubber = CopyScrubber(two.here.context, two.copies)
    interval_s = two.here.config.scrub.interval_s

    async def scrubbed() -> float | None:
        await scrubber.run_once()
        return two.here.count("tierd_scrubbed_checkpoints_total", tier="peers", proof="deep")

    assert await scrubbed() == 0
    await two.both(5)
    await two.copier.run_once()
    assert await scrubbed() == 0
    now_s += interval_s
    assert await scrubbed() == 1
    now_s += interval_s - 1
    assert await scrubbed() == 1
    now_s += 1
    assert await scrubbed() == 2


async def test_copy_that_is_deleted_while_it_is_read_is_not_damaged(
    two: TwoNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    await two.both(5)
    await two.copier.run_once()
    list_store = two.copies.store.list

    async def delete_first(prefix: str = "") -> list[StoredObject]:
        monkeypatch.undo()
        await two.copies.delete(id_of(5))
        return await list_store(prefix)

    monkeypatch.setattr(two.copies.store, "list", delete_first)
    await CopyScrubber(two.here.context, two.copies).run_once()
    assert not two.here.incidents.recent()
    assert not two.copies.unreadable
