"""A replica as it is handed over: what the daemon gives is checked, and every descriptor is given back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support_cli import make_manifest
from support_peer import DEADLINE_S, Peer
from support_state import entry_of, stage
from tierd_client import Corrupt, Mismatch, NotFound, TrainingState
from tierd_client.ranks import Ranks
from tierd_client.replicas import Replica, Wanted, restore
from tierd_client.session import Session

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
    peer.send(wire.Found(request=find.request, tier=tier), descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    return find


def begin(peer: Peer, session: Session, corrupt: list[str] | None = None) -> Any:
    state = TrainingState(model=torch.nn.Linear(1, 1))

    def on_corrupt(replica: Replica, error: Corrupt) -> None:
        if corrupt is not None:
            corrupt.append(replica.name)

    def take(replica: Replica) -> None:
        replica.load(state, 0, 1)

    return peer._pool.submit(restore, session, Ranks(0, 1), Wanted(), take, on_corrupt=on_corrupt)


def test_only_asking_for_nothing_in_particular_means_any() -> None:
    assert Wanted().is_any
    for wanted in (Wanted(step=0), Wanted(generation=1), Wanted(milestone="best"), Wanted(tier="hot")):
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


def test_a_checkpoint_that_does_not_fit_is_a_mismatch_and_no_other_is_tried(peer: Peer) -> None:
    session = peer.open()
    restoring = begin(peer, session)
    raw = stage(TrainingState(model=torch.nn.Linear(2, 2)))
    find = peer.receive_until(wire.Find)[-1]
    assert isinstance(find, wire.Find)
    found = make_manifest(checkpoint_id("run", 5, 1), [entry_of(raw)])
    descriptors = [memory(found.encode()), memory(raw)]
    peer.send(wire.Found(request=find.request, tier="hot"), descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    with pytest.raises(Mismatch, match="differs from the state"):
        restoring.result(DEADLINE_S)
    session.close()
