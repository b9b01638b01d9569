"""A trainer that lies, floods or asks for too much gets a typed refusal, and costs the daemon a bounded amount."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.daemon import Daemon, serving
from tests.support.processes import run_tierd
from tests.support.slots import PAGE_BYTES, make_memfd, make_sealed
from tests.support.wire_peer import Peer
from tierd.api import quotas
from tierd.api.quotas import Rate
from tierd.format import wire
from tierd.metrics import RUNS_MAX

LONG = "x" * 60_000  # nearly fills a message


def refusal(peer: Peer) -> wire.Refused:
    assert peer.is_dropped()
    refused = peer.heard[-1]
    assert isinstance(refused, wire.Refused)
    return refused


def folders(root: Path) -> list[str]:
    return sorted(one.name for one in root.iterdir() if one.is_dir() and not one.name.startswith("."))


@pytest.mark.parametrize("outcome", ["skipped", "failed", "unpinned", "corrupt", "restored"])
def test_reports_without_end_write_a_bounded_log(tmp_path: Path, outcome: str) -> None:
    with serving(tmp_path) as daemon, Peer(daemon.socket) as peer:
        peer.greet("run")
        before = len(daemon.log)
        report = wire.Report(outcome=outcome, step=1, tier="hot", seconds=0.1, detail=LONG)
        for _ in range(500):
            peer.send(report)
        peer.send(wire.Convene(meeting=1))
        peer.hear(wire.Convened)  # all before it was taken
        assert 0 < len(daemon.log) - before < 100_000, "30 MB were sent"
        assert daemon.status()["runs"]


def test_losses_without_end_write_a_bounded_log_and_send_bounded_text(tmp_path: Path) -> None:
    with serving(tmp_path) as daemon, Peer(daemon.socket) as peer:
        peer.greet("run")
        before, began_s = len(daemon.log), time.monotonic()
        for step in range(1, 201):
            peer.send(wire.SnapshotLost(step=step, kind=LONG[:20_000], message=LONG[:20_000], hint=LONG[:20_000]))
            failed = peer.hear(wire.Failed)
            assert len(failed.kind) + len(failed.message) + len(failed.hint) < 10_000
        later_lines = quotas.LINES_PER_S * (time.monotonic() - began_s)  # many on a busy machine
        assert len(daemon.log) - before < 250_000 + 5_000 * later_lines, "12 MB were sent"


def test_connections_that_are_refused_without_end_write_a_bounded_log(tmp_path: Path) -> None:
    with serving(tmp_path) as daemon:
        before = len(daemon.log)
        for _ in range(200):
            with Peer(daemon.socket) as peer:
                peer.send_raw(b"no message" + b"\xff" * 1000)
                assert peer.is_dropped()
        assert daemon.log.count("wire:") < 100
        assert len(daemon.log) - before < 50_000


def test_a_sparse_slot_cannot_be_sealed(tmp_path: Path) -> None:
    size_bytes = 1 << 30
    with serving(tmp_path) as daemon, Peer(daemon.socket) as peer:
        peer.greet("run")
        descriptor = os.memfd_create("sparse", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        os.ftruncate(descriptor, size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        os.pwrite(descriptor, b"x", 0)
        peer.send(wire.AttachSlot(slot=0, capacity_bytes=size_bytes), descriptor)
        peer.send(wire.Filling(slot=0, step=1))
        peer.send(make_sealed(1, size_bytes))
        assert "were never written" in refusal(peer).message
        os.close(descriptor)
        assert list((daemon.hot / "run").glob("*-g*")) == []


@pytest.mark.parametrize(("more", "found"), [("slots_max = 3", "3 slots"), ("slots_gib_max = 4e-5", "at most 42950")])
def test_slots_beyond_the_quota_of_the_user_are_refused(tmp_path: Path, more: str, found: str) -> None:
    with serving(tmp_path, more=more) as daemon:
        with Peer(daemon.socket) as first, Peer(daemon.socket) as second:
            first.greet("run")
            second.greet("other")
            for index in range(2):
                first.send(wire.AttachSlot(slot=index, capacity_bytes=4 * PAGE_BYTES), make_memfd(4 * PAGE_BYTES))
            # The same memory once more replaces itself.
            first.send(wire.AttachSlot(slot=1, capacity_bytes=4 * PAGE_BYTES), make_memfd(4 * PAGE_BYTES))
            first.send(wire.Convene(meeting=1))
            first.hear(wire.Convened)
            with contextlib.suppress(BrokenPipeError):  # the daemon may hang up before the last one is sent
                for index in range(2):
                    second.send(wire.AttachSlot(slot=index, capacity_bytes=PAGE_BYTES), make_memfd(PAGE_BYTES))
                    second.send(wire.AttachSlot(slot=3, capacity_bytes=3 * PAGE_BYTES), make_memfd(3 * PAGE_BYTES))
            refused = refusal(second)
            assert refused.kind == "full"
            assert found in refused.message
        with Peer(daemon.socket) as peer:
            peer.greet("other")  # the daemon goes on


def test_runs_without_a_checkpoint_are_bounded_for_each_user(tmp_path: Path) -> None:
    with Daemon(tmp_path, more="empty_runs_max = 5") as daemon:
        for number in range(5):
            with Peer(daemon.socket) as peer:
                peer.greet(f"run{number}")
        for generation in (None, 7):  # to claim one, and to join one that is given
            with Peer(daemon.socket) as peer:
                hello = wire.Hello(
                    protocol=wire.PROTOCOL_VERSION,
                    version="0",
                    run="one-more",
                    rank=0,
                    world_size=1,
                    generation=generation,
                )
                peer.send(hello)
                refused = refusal(peer)
                assert refused.kind == "full"
                assert "limits.empty_runs_max" in refused.hint
        assert folders(daemon.hot) == folders(daemon.cold) == [f"run{number}" for number in range(5)]
        with Peer(daemon.socket) as peer:
            peer.greet("run3")  # started before


def test_many_runs_have_a_bounded_number_of_series(tmp_path: Path) -> None:
    with serving(tmp_path) as daemon:
        for number in range(RUNS_MAX + 20):
            with Peer(daemon.socket) as peer:
                peer.greet(f"run{number}")
                report = wire.Report(outcome="skipped", step=1, tier=f"tier{number}", seconds=0.1, detail="")
                peer.send(report)
                peer.send(wire.Report(outcome="corrupt", step=1, tier="t", seconds=0.1, detail="", run=f"else{number}"))
                peer.send(wire.Convene(meeting=1))
                peer.hear(wire.Convened)
        text = daemon.request("/metrics")[1].decode()
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        assert len({sample.labels["run"] for sample in samples if "run" in sample.labels}) <= RUNS_MAX + 1
        assert {sample.labels["tier"] for sample in samples if "tier" in sample.labels} <= {"hot", "memory", "other"}


def test_a_peer_that_sends_faster_than_its_rate_is_read_later() -> None:
    now_s = 100.0
    rate = Rate(10.0, 40.0, lambda: now_s)
    assert [rate.spend() for _ in range(40)] == [0.0] * 40
    assert [round(rate.spend(), 6) for _ in range(3)] == [0.1, 0.2, 0.3]
    now_s += 0.3
    assert rate.spend() == pytest.approx(0.1)
    now_s += 1000.0
    assert [rate.try_spend() for _ in range(41)] == [True] * 40 + [False]


def test_the_messages_of_one_connection_are_read_at_its_rate(tmp_path: Path) -> None:
    with serving(tmp_path, more="messages_per_s = 20") as daemon, Peer(daemon.socket) as peer:
        peer.greet("run")
        began_s = time.monotonic()
        for meeting in range(100):  # 80 of them at once
            peer.send(wire.Convene(meeting=meeting))
        for _ in range(100):
            peer.hear(wire.Convened)
        assert time.monotonic() - began_s > 0.8


def run_with_few_claims(arguments: list[str], environ: Mapping[str, str], log: str) -> None:
    quotas.CLAIMS_BURST, quotas.CLAIMS_PER_S = 3, 1e-6
    run_tierd(arguments, environ, log)


def test_generations_cannot_be_used_up_by_starting_a_run_again_and_again(tmp_path: Path) -> None:
    """Each start takes one, and a name that others have seen takes no more from the second start on."""
    daemon = serving(tmp_path)
    daemon.run_with(run_with_few_claims)
    with daemon:
        taken: list[int] = []
        for _ in range(3):
            with Peer(daemon.socket) as peer:
                peer.send(msgspec.structs.replace(peer.hello("run"), above=10**9))
                taken.append(peer.hear(wire.Welcome).generation)
        assert taken == [taken[0], taken[0] + 1, taken[0] + 2]
        with Peer(daemon.socket) as peer:
            peer.send(peer.hello("run"))
            refused = refusal(peer)
            assert (refused.kind, "at most one start each" in refused.message) == ("full", True)
        assert len(list((daemon.hot / "run").glob("generation-*"))) == 3
        with Peer(daemon.socket) as peer:
            peer.greet("other")


def run_with_a_small_burst(arguments: list[str], environ: Mapping[str, str], log: str) -> None:
    quotas.CONNECTIONS_BURST = 4
    run_tierd(arguments, environ, log)


def test_the_connections_of_one_user_are_read_at_its_rate(tmp_path: Path) -> None:
    daemon = serving(tmp_path)
    daemon.run_with(run_with_a_small_burst)
    with daemon:
        began_s = time.monotonic()
        for _ in range(24):  # 4 of them at once
            with Peer(daemon.socket) as peer:
                peer.greet("run", rank=None)
        assert time.monotonic() - began_s > 0.8 * 20 / quotas.CONNECTIONS_PER_S
