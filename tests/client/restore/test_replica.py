"""A replica that the daemon hands over is checked, damage is reported to the daemon, and every descriptor is closed."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tierd_client import Corrupt, Mismatch, NotFound, TrainingState
from tierd_client.ranks import Ranks
from tierd_client.restore import replica as replica_module
from tierd_client.restore.attempts import restore_replica
from tierd_client.restore.load import ReadPlan
from tierd_client.restore.replica import Replica, RestoreRequest
from tierd_client.session import DaemonSession

from tests.support.cli import make_manifest
from tests.support.state import entry_of, stage
from tests.support.waiting import DEADLINE_S
from tests.support.wire_peer import DaemonPeer as Peer
from tierd.format import wire
from tierd.format.bitmap import unpack_indexes
from tierd.format.ids import checkpoint_id
from tierd.format.manifest import Manifest, file_entry


@pytest.fixture
def peer() -> Iterator[Peer]:
    with Peer() as peer:
        yield peer


@pytest.fixture
def session(peer: Peer) -> Iterator[DaemonSession]:
    """A session that a restore leaves with as many open descriptors as before."""
    session = peer.open()
    before = len(os.listdir("/proc/self/fd"))
    yield session
    assert len(os.listdir("/proc/self/fd")) <= before
    session.close()


def manifest_of(files: int = 1) -> Manifest:
    """A manifest of empty files."""
    entries = [file_entry(f"rank-{rank:05d}-of-{files:05d}.safetensors", 0, 4096, []) for rank in range(files)]
    return make_manifest(checkpoint_id("run", 5, 1), entries)


def memory(content: bytes) -> int:
    descriptor = os.memfd_create("test")
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def next_find(peer: Peer) -> tuple[wire.Find, list[str]]:
    """The next request for a replica, and the tiers of the damaged replicas that were reported before it."""
    *earlier, find = peer.receive_until(wire.Find)
    assert isinstance(find, wire.Find)
    reports = [message for message in earlier if isinstance(message, wire.Report)]
    assert all(report.outcome == "corrupt" for report in reports)
    return find, [report.tier for report in reports]


def hand_over(
    peer: Peer, manifest: bytes, files: list[bytes], *, tier: str = "hot", is_part: bool = False
) -> tuple[wire.Find, list[str]]:
    """Answers the next request with this manifest and these files."""
    find, reported = next_find(peer)
    descriptors = [memory(manifest), *map(memory, files)]
    peer.send(wire.FoundReplica(request=find.request, tier=tier, is_part=is_part), descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    return find, reported


def begin(peer: Peer, session: DaemonSession, state: TrainingState | None = None) -> Future[Replica]:
    """A restore on another thread."""
    state = state or TrainingState(model=torch.nn.Linear(1, 1))
    return peer._pool.submit(
        restore_replica,
        session,
        Ranks(0, 1),
        RestoreRequest(),
        lambda replica: replica.read_into_state(state, 0, 1),
    )


def test_only_a_request_without_constraints_accepts_any_checkpoint() -> None:
    assert RestoreRequest().is_any
    for request in (
        RestoreRequest(step=0),
        RestoreRequest(generation=1),
        RestoreRequest(milestone="best"),
        RestoreRequest(tier="hot"),
    ):
        assert not request.is_any


@pytest.mark.parametrize("files", [0, 2])
def test_replica_with_another_number_of_files_than_its_manifest_is_refused(
    peer: Peer, session: DaemonSession, files: int
) -> None:
    restoring = begin(peer, session)
    hand_over(peer, manifest_of(1).encode(), [b""] * files)
    with pytest.raises(Corrupt, match=f"{files} descriptors, expected 1"):
        restoring.result(DEADLINE_S)


def test_malformed_manifest_is_refused(peer: Peer, session: DaemonSession) -> None:
    restoring = begin(peer, session)
    hand_over(peer, b"{}", [b""])
    with pytest.raises(Corrupt, match="handed over from hot"):
        restoring.result(DEADLINE_S)


def test_damaged_replica_is_reported_and_excluded_from_the_next_request(peer: Peer, session: DaemonSession) -> None:
    restoring = begin(peer, session)
    find, _ = hand_over(peer, manifest_of().encode(), [b""])
    assert find.exclude == []
    find, reported = hand_over(peer, manifest_of().encode(), [b""], tier="cold")
    assert (find.exclude, reported) == (["000000000005-g0001@hot"], ["hot"])
    find, reported = next_find(peer)
    assert (find.exclude, reported) == (["000000000005-g0001@hot", "000000000005-g0001@cold"], ["cold"])
    peer.send(wire.Refused(request=find.request, kind="not_found", message="there is none", hint=""))
    with pytest.raises(NotFound):
        restoring.result(DEADLINE_S)


def test_checkpoint_that_does_not_fit_is_a_mismatch_and_no_other_is_tried(peer: Peer, session: DaemonSession) -> None:
    restoring = begin(peer, session)
    raw = stage(TrainingState(model=torch.nn.Linear(2, 2)))
    hand_over(peer, make_manifest(checkpoint_id("run", 5, 1), [entry_of(raw)]).encode(), [raw])
    with pytest.raises(Mismatch, match="differs from the state"):
        restoring.result(DEADLINE_S)


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("is_enabled", [True, False])
def test_garbage_is_not_collected_while_a_restore_is_planned_and_then_as_before(
    peer: Peer, session: DaemonSession, fits: bool, is_enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    were_enabled: list[bool] = []

    def plan_reads(*args: Any) -> ReadPlan:
        were_enabled.append(gc.isenabled())
        return ReadPlan(*args)

    monkeypatch.setattr(replica_module, "ReadPlan", plan_reads)

    class Model(torch.nn.Linear):
        def state_dict(self, *args: Any, **options: Any) -> Any:
            were_enabled.append(gc.isenabled())
            return super().state_dict(*args, **options)

    raw = stage(TrainingState(model=torch.nn.Linear(2, 2), rng=False))
    state = TrainingState(model=Model(2, 2 if fits else 3), rng=False)
    try:
        if not is_enabled:
            gc.disable()
        restoring = begin(peer, session, state)
        hand_over(peer, make_manifest(checkpoint_id("run", 5, 1), [entry_of(raw)]).encode(), [raw])
        with nullcontext() if fits else pytest.raises(Mismatch):
            restoring.result(DEADLINE_S)
        assert gc.isenabled() == is_enabled
    finally:
        gc.enable()
    assert were_enabled == [False] * (2 if fits else 1)


# ── a replica in a cold tier, of which the daemon fetches only the chunks that are needed ──


class Partial:
    """A model's checkpoint in the cold tier, in small chunks."""

    def __init__(self) -> None:
        self.saved, self.live = torch.nn.Linear(100, 100), torch.nn.Linear(100, 100)
        self.raw = stage(TrainingState(model=self.saved, rng=False))
        self.entry = entry_of(self.raw, chunk_bytes=4096)
        self.manifest = make_manifest(checkpoint_id("run", 5, 1), [self.entry])
        self.state = TrainingState(model=self.live, rng=False)
        self.header_bytes = len(self.raw) - sum(parameter.nbytes for parameter in self.saved.parameters())

    def hand_over(self, peer: Peer, *, is_part: bool, manifest: Manifest | None = None) -> tuple[wire.Find, list[str]]:
        return hand_over(peer, (manifest or self.manifest).encode(), [self.raw], tier="cold", is_part=is_part)

    def hand_over_headers(self, peer: Peer) -> wire.Find:
        raw = self.raw[: self.header_bytes].ljust(len(self.raw), b"\0")
        return hand_over(peer, self.manifest.encode(), [raw], tier="cold", is_part=True)[0]


@pytest.mark.parametrize("is_part", [True, False], ids=["part", "fetched whole meanwhile"])
def test_chunks_to_read_are_requested_for_a_partly_fetched_replica(
    peer: Peer, session: DaemonSession, is_part: bool
) -> None:
    partial = Partial()
    restoring = begin(peer, session, partial.state)
    assert partial.hand_over_headers(peer).chunks == []
    find, _ = partial.hand_over(peer, is_part=is_part)
    assert (find.step, find.generation, find.tier, find.allow_unhealthy) == (5, 1, "cold", True)
    assert [unpack_indexes(packed) for packed in find.chunks or []] == [
        list(range(partial.header_bytes // 4096, len(partial.entry.chunks)))
    ]
    assert restoring.result(DEADLINE_S).tier == "cold"
    assert all(map(torch.equal, partial.live.parameters(), partial.saved.parameters()))


def test_next_replica_is_requested_after_a_failed_fetch_and_nothing_is_reported_twice(
    peer: Peer, session: DaemonSession
) -> None:
    partial = Partial()
    restoring = begin(peer, session, partial.state)
    partial.hand_over_headers(peer)
    find, _ = next_find(peer)
    peer.send(wire.Refused(request=find.request, kind="corrupt", message="chunk 3", hint=""))
    find, reported = partial.hand_over(peer, is_part=False)
    assert find.exclude == ["000000000005-g0001@cold"]
    assert reported == [], "the daemon found the damage and has recorded it"
    restoring.result(DEADLINE_S)


def test_replica_that_changed_during_a_fetch_is_not_read(peer: Peer, session: DaemonSession) -> None:
    partial = Partial()
    restoring = begin(peer, session, partial.state)
    partial.hand_over_headers(peer)
    other = make_manifest(checkpoint_id("run", 5, 1), [entry_of(partial.raw, chunk_bytes=8192)])
    partial.hand_over(peer, is_part=True, manifest=other)
    find, _ = partial.hand_over(peer, is_part=False)
    assert find.exclude == ["000000000005-g0001@cold"]
    restoring.result(DEADLINE_S)
