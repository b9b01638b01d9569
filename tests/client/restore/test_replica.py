"""A replica as it is handed over: what the daemon gives is checked, and every descriptor is given back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tierd_client import Corrupt, Mismatch, NotFound, TrainingState
from tierd_client.ranks import Ranks
from tierd_client.restore.replica import Replica, RestoreRequest, restore
from tierd_client.session import DaemonSession

from tests.support.cli import make_manifest
from tests.support.state import entry_of, stage
from tests.support.waiting import DEADLINE_S
from tests.support.wire_peer import DaemonPeer as Peer
from tierd.format import wire
from tierd.format.ids import checkpoint_id
from tierd.format.manifest import Manifest, file_entry


@pytest.fixture
def peer() -> Iterator[Peer]:
    with Peer() as peer:
        yield peer


def manifest(files: int = 1) -> Manifest:
    entries = [file_entry(f"rank-{rank:05d}-of-{files:05d}.safetensors", 0, 4096, []) for rank in range(files)]
    return make_manifest(checkpoint_id("run", 5, 1), entries)


def memory(content: bytes) -> int:
    descriptor = os.memfd_create("test")
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def answer(peer: Peer, raw: bytes, files: int, *, tier: str = "hot") -> wire.Find:
    """Hand over a manifest and so many empty files, to the next Find."""
    find = peer.receive_until(wire.Find)[-1]
    assert isinstance(find, wire.Find)
    descriptors = [memory(raw), *(memory(b"") for _ in range(files))]
    peer.send(wire.FoundReplica(request=find.request, tier=tier), descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    return find


def begin(peer: Peer, session: DaemonSession, corrupt: list[str] | None = None) -> Any:
    state = TrainingState(model=torch.nn.Linear(1, 1))

    def on_corrupt(replica: Replica, error: Corrupt) -> None:
        if corrupt is not None:
            corrupt.append(replica.name)

    def take(replica: Replica) -> None:
        replica.load(state, 0, 1)

    return peer._pool.submit(restore, session, Ranks(0, 1), RestoreRequest(), take, on_corrupt=on_corrupt)


def test_only_asking_for_nothing_in_particular_means_any() -> None:
    assert RestoreRequest().is_any
    for wanted in (
        RestoreRequest(step=0),
        RestoreRequest(generation=1),
        RestoreRequest(milestone="best"),
        RestoreRequest(tier="hot"),
    ):
        assert not wanted.is_any


@pytest.mark.parametrize("files", [0, 2])
def test_a_hand_over_with_another_number_of_files_than_its_manifest_names_is_refused(peer: Peer, files: int) -> None:
    session = peer.open()
    before = len(os.listdir("/proc/self/fd"))
    restoring = begin(peer, session)
    answer(peer, manifest(1).encode(), files)
    with pytest.raises(Corrupt, match=f"{files} descriptors of 1"):
        restoring.result(DEADLINE_S)
    assert len(os.listdir("/proc/self/fd")) <= before
    session.close()


def test_a_manifest_that_is_none_is_refused(peer: Peer) -> None:
    session = peer.open()
    before = len(os.listdir("/proc/self/fd"))
    restoring = begin(peer, session)
    answer(peer, b"{}", 1)
    with pytest.raises(Corrupt, match="handed over from hot"):
        restoring.result(DEADLINE_S)
    assert len(os.listdir("/proc/self/fd")) <= before
    session.close()


def test_a_damaged_replica_is_told_and_left_out_of_the_next_question(peer: Peer) -> None:
    session = peer.open()
    before = len(os.listdir("/proc/self/fd"))
    corrupt: list[str] = []
    restoring = begin(peer, session, corrupt)
    assert answer(peer, manifest().encode(), 1).exclude == []
    find = answer(peer, manifest().encode(), 1, tier="cold")
    assert find.exclude == ["000000000005-g0001@hot"]
    find = peer.receive_until(wire.Find)[-1]
    assert isinstance(find, wire.Find)
    assert find.exclude == corrupt == ["000000000005-g0001@hot", "000000000005-g0001@cold"]
    peer.send(wire.Refused(request=find.request, kind="not_found", message="there is none", hint=""))
    with pytest.raises(NotFound):
        restoring.result(DEADLINE_S)
    assert len(os.listdir("/proc/self/fd")) <= before
    session.close()


class Part:
    """A hand-over of which only the header is good, and what the next one holds."""

    def __init__(self) -> None:
        self.saved, self.live = torch.nn.Linear(100, 100), torch.nn.Linear(100, 100)
        self.raw = stage(TrainingState(model=self.saved, rng=False))
        self.entry = entry_of(self.raw, chunk_bytes=4096)
        self.manifest = make_manifest(checkpoint_id("run", 5, 1), [self.entry])
        self.state = TrainingState(model=self.live, rng=False)
        self.header_bytes = len(self.raw) - sum(one.nbytes for one in self.saved.parameters())

    def begin(self, peer: Peer, session: DaemonSession, corrupt: list[str]) -> Any:
        return peer._pool.submit(
            restore,
            session,
            Ranks(0, 1),
            RestoreRequest(),
            lambda replica: replica.load(self.state, 0, 1),
            on_corrupt=lambda replica, error: corrupt.append(replica.name),
        )

    def hand_over(self, peer: Peer, raw: bytes, *, is_part: bool, found: Manifest | None = None) -> wire.Find:
        find = peer.receive_until(wire.Find)[-1]
        assert isinstance(find, wire.Find)
        descriptors = [memory((found or self.manifest).encode()), memory(raw)]
        peer.send(wire.FoundReplica(request=find.request, tier="cold", is_part=is_part), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        return find

    def headers_only(self, peer: Peer) -> wire.Find:
        raw = self.raw[: self.header_bytes].ljust(len(self.raw), b"\0")
        return self.hand_over(peer, raw, is_part=True)


@pytest.mark.parametrize("is_part", [True, False], ids=["part", "whole by now"])
def test_of_a_part_the_chunks_that_will_be_read_are_asked_for(peer: Peer, is_part: bool) -> None:
    session = peer.open()
    before = len(os.listdir("/proc/self/fd"))
    part, corrupt = Part(), []
    restoring = part.begin(peer, session, corrupt)
    assert part.headers_only(peer).chunks == []
    find = part.hand_over(peer, part.raw, is_part=is_part)
    assert (find.step, find.generation, find.tier, find.allow_unhealthy) == (5, 1, "cold", True)
    assert [wire.unpack_indexes(packed) for packed in find.chunks or []] == [
        list(range(part.header_bytes // 4096, len(part.entry.chunks)))
    ]
    assert restoring.result(DEADLINE_S).tier == "cold"
    assert all(map(torch.equal, part.live.parameters(), part.saved.parameters()))
    assert len(os.listdir("/proc/self/fd")) <= before
    session.close()


def test_refused_the_rest_of_a_part_the_next_replica_is_asked_for_and_nothing_reported_twice(peer: Peer) -> None:
    session = peer.open()
    before = len(os.listdir("/proc/self/fd"))
    part, corrupt = Part(), []
    restoring = part.begin(peer, session, corrupt)
    part.headers_only(peer)
    find = peer.receive_until(wire.Find)[-1]
    assert isinstance(find, wire.Find)
    peer.send(wire.Refused(request=find.request, kind="corrupt", message="chunk 3", hint=""))
    assert part.hand_over(peer, part.raw, is_part=False).exclude == ["000000000005-g0001@cold"]
    restoring.result(DEADLINE_S)
    assert corrupt == [], "who has found it has recorded it"
    assert len(os.listdir("/proc/self/fd")) <= before
    session.close()


def test_another_checkpoint_in_the_place_of_a_part_is_not_read(peer: Peer) -> None:
    session = peer.open()
    part, corrupt = Part(), []
    restoring = part.begin(peer, session, corrupt)
    part.headers_only(peer)
    other = make_manifest(checkpoint_id("run", 5, 1), [entry_of(part.raw, chunk_bytes=8192)])
    part.hand_over(peer, part.raw, is_part=True, found=other)
    assert part.hand_over(peer, part.raw, is_part=False).exclude == ["000000000005-g0001@cold"]
    restoring.result(DEADLINE_S)
    session.close()


def test_a_checkpoint_that_does_not_fit_is_a_mismatch_and_no_other_is_tried(peer: Peer) -> None:
    session = peer.open()
    restoring = begin(peer, session)
    raw = stage(TrainingState(model=torch.nn.Linear(2, 2)))
    find = peer.receive_until(wire.Find)[-1]
    assert isinstance(find, wire.Find)
    found = make_manifest(checkpoint_id("run", 5, 1), [entry_of(raw)])
    descriptors = [memory(found.encode()), memory(raw)]
    peer.send(wire.FoundReplica(request=find.request, tier="hot"), descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    with pytest.raises(Mismatch, match="differs from the state"):
        restoring.result(DEADLINE_S)
    session.close()
