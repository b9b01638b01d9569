"""A full hot disk under a real daemon: room is made, snapshots go to cold, and nothing waits for space in vain."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.daemon import Daemon
from tests.support.slots import make_sealed
from tests.support.small_disk import MIB, small_disk
from tests.support.waiting import wait_until
from tests.support.wire_peer import Peer
from tierd.format import wire

RUN = "run"
SIZE = 2 * MIB  # of a snapshot
LOST = f'tierd_snapshots_total{{outcome="lost",run="{RUN}"}}'
WRITTEN_THROUGH = f'tierd_snapshots_total{{outcome="written_through",run="{RUN}"}}'


@pytest.fixture
def hot(tmp_path: Path) -> Iterator[Path]:
    """Space for four snapshots."""
    with small_disk(tmp_path / "hot", size_mib=10) as hot:
        yield hot


def fill(hot: Path, *, leaving: int) -> Path:
    """A file of somebody else that leaves this many free bytes."""
    stat = os.statvfs(hot)
    filler = hot / ".filler"
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, stat.f_bavail * stat.f_frsize - leaving)
    return filler


@contextmanager
def read_only(hot: Path) -> Generator[None]:
    """A kernel makes a file system read-only when its disk fails."""
    for command in (["mount", "--bind", hot, hot], ["mount", "-o", "remount,bind,ro", hot]):
        subprocess.run(command, check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", hot], check=True)


def attach(peer: Peer, slots: int = 2) -> None:
    peer.greet(RUN)
    for index in range(slots):
        peer.attach(index, size_bytes=SIZE)


def seal(peer: Peer, slot: int, step: int) -> None:
    peer.seal(slot, step, b"%020d" % step * (SIZE // 20))


def persist_three(daemon: Daemon, peer: Peer) -> None:
    """Steps 1 to 3 in hot and in cold."""
    for step in (1, 2, 3):
        seal(peer, step % 2, step)
        assert peer.hear(wire.Persisted).step == step
    wait_until(lambda: daemon.steps("cold") == [1, 2, 3], "the copies in cold")


def test_replicas_that_cold_holds_give_way_and_new_snapshots_go_on_to_hot(tmp_path: Path, hot: Path) -> None:
    with Daemon(tmp_path) as daemon, Peer(daemon.socket) as peer:
        attach(peer)
        persist_three(daemon, peer)
        fill(hot, leaving=MIB // 2)
        for step in (4, 5, 6):
            seal(peer, step % 2, step)
            assert peer.hear(wire.Persisted).step == step
            wait_until(lambda step=step: step in daemon.steps("cold"), "the copy in cold")  # type: ignore[misc]
        assert "evicted run/000000000001-g0001 from hot: evicted under disk pressure; still in cold" in daemon.log
        assert daemon.metric("tierd_pressure_evictions_total") > 0
        assert daemon.metric(WRITTEN_THROUGH) == 0
        wait_until(lambda: daemon.steps("cold") == [4, 5, 6], "the policy of cold")


def test_snapshots_that_hot_cannot_take_become_durable_in_cold_and_go_to_hot_again_when_there_is_space(
    tmp_path: Path, hot: Path
) -> None:
    with Daemon(tmp_path) as daemon, Peer(daemon.socket) as peer:
        attach(peer)
        filler = fill(hot, leaving=MIB // 2)
        for step in (1, 2, 3):
            seal(peer, step % 2, step)
            assert peer.hear(wire.Replicated).step == step
        assert not any(isinstance(message, wire.Persisted) for message in peer.heard), "that would mean hot"
        wait_until(lambda: daemon.metric(WRITTEN_THROUGH) == 3, "the snapshots in cold")
        assert (daemon.metric(LOST), daemon.steps("hot"), daemon.steps("cold")) == (0, [], [1, 2, 3])
        status = daemon.status()
        assert [queue["checkpoints"] for queue in status["queues"]] == [0, 0]
        assert {failure["kind"] for failure in status["failures"]} >= {"full"}
        filler.unlink()
        seal(peer, 0, 4)
        assert peer.hear(wire.Persisted).step == 4
        wait_until(lambda: 4 in daemon.steps("cold"), "the copy in cold")
        daemon.kill()
        with Daemon(tmp_path) as restarted:
            wait_until(lambda: set(restarted.steps("cold")) >= {2, 3, 4}, "the listing of cold")
            assert restarted.status()["halted"] == []


def test_a_trainer_that_needs_a_slot_does_not_wait_for_a_slow_copy_to_cold(tmp_path: Path, hot: Path) -> None:
    """The copy of step 2 goes on, and step 4 takes the slot of step 3, which waits behind it."""
    cold = 'url = "file://cold"\nmax_upload_mib_s = 0.01'
    with Daemon(tmp_path, cold=cold) as daemon, Peer(daemon.socket) as peer:
        attach(peer)
        fill(hot, leaving=MIB // 2)
        seal(peer, 0, 1)
        assert peer.hear(wire.Replicated).step == 1  # at once; the cap delays the next copy
        seal(peer, 1, 2)
        assert peer.hear(wire.Released).slot == 0
        while not any(isinstance(message, wire.Failed) and message.step == 2 for message in peer.heard):
            peer.hear(wire.Failed)  # by hot: until then the slot is persisting, too
        wait_until(lambda: daemon.status()["slots"]["persisting"] == 1, "the copy to cold")
        seal(peer, 0, 3)
        while peer.hear(wire.Failed).step != 3:
            pass
        since = len(peer.heard)
        while not any(isinstance(message, wire.Released) for message in peer.heard[since:]):
            peer.send(wire.Ask(step=3, generation=1, needs_slot=True))
            peer.send(wire.Ask(step=2, generation=1))
            while peer.hear(wire.Accepted).step != 2:
                pass
        assert daemon.steps("cold") == [1]
        seal(peer, 0, 4)
        daemon.config.write_text(daemon.config.read_text().replace("max_upload_mib_s = 0.01", ""))
        daemon.signal(signal.SIGHUP)
        assert [peer.hear(wire.Replicated).step for _ in range(2)] == [2, 4]
        lost = [message.step for message in peer.heard if isinstance(message, wire.Failed) and message.is_final]
        assert lost == [3]


def test_snapshots_are_durable_in_cold_while_the_hot_disk_is_read_only(tmp_path: Path, hot: Path) -> None:
    with Daemon(tmp_path) as daemon, Peer(daemon.socket) as peer:
        attach(peer)
        seal(peer, 0, 1)
        assert peer.hear(wire.Persisted).step == 1
        with read_only(hot):
            for step in (2, 3):
                seal(peer, (step + 1) % 2, step)
                while peer.hear(wire.Replicated).step != step:
                    pass
            assert daemon.metric(WRITTEN_THROUGH) == 2
            failures = {failure["message"] for failure in daemon.status()["failures"] if failure["stage"] == "persist"}
            assert any("Read-only file system" in message for message in failures)
        seal(peer, 1, 4)
        assert peer.hear(wire.Persisted).step == 4
        assert daemon.metric(LOST) == 0


def test_a_restore_from_cold_makes_room_instead_of_taking_an_older_checkpoint(tmp_path: Path, hot: Path) -> None:
    with Daemon(tmp_path) as daemon, Peer(daemon.socket) as peer:
        attach(peer)
        persist_three(daemon, peer)
        seal(peer, 0, 4)
        wait_until(lambda: 4 in daemon.steps("cold"), "the copy in cold")
    shutil.rmtree(hot / RUN / "000000000004-g0001")
    fill(hot, leaving=MIB // 2)
    with Daemon(tmp_path) as daemon, Peer(daemon.socket) as peer:
        peer.greet(RUN)
        answer = peer.find()
        assert json.loads(peer.take_files()[0])["step"] == 4, answer.passed_over


def test_a_daemon_that_stops_waits_for_a_hot_disk_that_may_recover(tmp_path: Path, hot: Path) -> None:
    with Daemon(tmp_path, cold="") as daemon, Peer(daemon.socket) as peer:
        attach(peer)
        with read_only(hot):
            seal(peer, 0, 1)
            daemon.wait_log("Read-only file system")
            failures = 'tierd_failures_total{kind="tier_unreachable",stage="persist"}'
            wait_until(lambda: daemon.metric(failures) >= 2, "two failed attempts")
            daemon.signal(signal.SIGTERM)
            daemon.wait_log("draining")
            time.sleep(1)  # several attempts
        assert peer.hear(wire.Persisted).step == 1
    assert (hot / RUN / "000000000001-g0001" / "manifest.json").exists()


def test_a_daemon_that_stops_writes_to_cold_what_hot_has_no_space_for(tmp_path: Path, hot: Path) -> None:
    with Daemon(tmp_path) as daemon, Peer(daemon.socket) as peer:
        attach(peer)
        fill(hot, leaving=MIB // 2)
        peer.fill(0, 1, bytes(SIZE))
        peer.send(make_sealed(1, SIZE, slot=0))
        assert peer.hear(wire.Accepted).step == 1  # before it, nothing is promised
        assert daemon.stop() == 0, daemon.log
    assert (tmp_path / "cold" / RUN / "000000000001-g0001" / "manifest.json").exists()


@pytest.mark.parametrize("has_cold", [False, True])
def test_a_daemon_that_stops_does_not_wait_for_space_that_nobody_frees(
    tmp_path: Path, hot: Path, has_cold: bool
) -> None:
    options = {} if has_cold else {"cold": ""}
    environ = {"TIERD_DAEMON_DRAIN_TIMEOUT_S": "600"}
    with Daemon(tmp_path, environ=environ, **options) as daemon, Peer(daemon.socket) as peer:  # type: ignore[arg-type]
        attach(peer)
        fill(hot, leaving=MIB // 2)
        if has_cold:
            (tmp_path / "cold" / RUN).rename(tmp_path / "aside")
            (tmp_path / "cold" / RUN).write_text("in the way")
        seal(peer, 0, 1)
        assert daemon.stop() == 1
        assert "run/000000000001-g0001 did not become durable: hot did not take it" in daemon.log
        assert ("cold did not take it" in daemon.log) == has_cold
        assert "Traceback" not in daemon.log


def test_a_daemon_that_stops_does_not_wait_for_a_cold_tier_that_is_absent(tmp_path: Path, hot: Path) -> None:
    """Nothing is written to a tier that is not known, so waiting for it is in vain too."""
    environ = {"TIERD_DAEMON_DRAIN_TIMEOUT_S": "600"}
    with Daemon(tmp_path) as daemon, Peer(daemon.socket) as peer:
        peer.greet(RUN)
        wait_until(lambda: not daemon.status()["halted"], "the listing of cold, which remembers its marker")
    (tmp_path / "cold").rename(tmp_path / "aside")
    with Daemon(tmp_path, environ=environ) as daemon, Peer(daemon.socket) as peer:
        wait_until(lambda: "has no marker" in str(daemon.status()["halted"]), "the listing of cold")
        attach(peer)
        fill(hot, leaving=MIB // 2)
        seal(peer, 0, 1)
        assert daemon.stop() == 1
        assert "run/000000000001-g0002 did not become durable: hot did not take it" in daemon.log


def test_a_trainer_starts_although_hot_has_no_space_for_its_claim(tmp_path: Path, hot: Path) -> None:
    """Cold has the claim, and takes the snapshots."""
    with Daemon(tmp_path) as daemon, Peer(daemon.socket) as peer:
        with (hot / ".filler").open("ab", buffering=0) as filler, suppress(OSError):
            while True:
                filler.write(bytes(4096))
        attach(peer)
        seal(peer, 0, 1)
        assert peer.hear(wire.Replicated).step == 1


def test_a_daemon_starts_for_the_first_time_on_a_disk_without_space(tmp_path: Path, hot: Path) -> None:
    with (hot / ".filler").open("wb", buffering=0) as filler, suppress(OSError):
        while True:
            filler.write(bytes(4096))
    with Daemon(tmp_path) as daemon:
        assert "describe this daemon" in daemon.log
        assert {tier["name"] for tier in daemon.status()["tiers"]} >= {"hot", "cold"}
