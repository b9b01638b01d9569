"""Attacks by which a review disturbed a daemon: through claims, markers, generations, TLS and the audit trail."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.test_full_disk import fill
from tests.security.test_http_listener import make_certificate, run_without_a_request_timeout
from tests.support.bucket import bucket_server
from tests.support.daemon import Daemon, serving
from tests.support.s3 import BUCKET
from tests.support.small_disk import small_disk
from tests.support.trainer import Trainer
from tests.support.waiting import wait_until
from tests.support.wire_peer import Peer
from tierd.errors import TierUnreachable
from tierd.format import wire
from tierd.keys.key_file import make_key_file

PATIENCE_S = 15.0
NESTED = b'{"x":' + b"[" * 30_000 + b"]" * 30_000 + b"}\n"  # less than the 64 KiB of a marker


def snapshot_of(trainer: Trainer, socket: str, run: str) -> None:
    trainer.connect(socket, run=run)
    trainer.train(1)
    trainer.durable()


# ── a claim that a bucket writer has replaced ──


def test_a_nested_claim_in_cold_stops_no_copies(tmp_path: Path) -> None:
    """Without a key. "write any bytes as manifest, shard or marker: cannot cause anything but a typed error"."""
    with Daemon(tmp_path) as daemon, Trainer() as victim, Trainer() as other:
        victim.connect(daemon.socket, run="victim")
        (daemon.cold / "victim" / "generation-0001.json").write_bytes(NESTED)
        victim.train(1)
        victim.durable()
        wait_until(lambda: "Error" in daemon.log or daemon.steps("cold", "victim"), "the first attempt")
        snapshot_of(other, daemon.socket, "other")
        wait_until(lambda: daemon.steps("cold", "other"), "the copy of another run", PATIENCE_S)
        wait_until(lambda: daemon.steps("cold", "victim"), "the copy of this run", PATIENCE_S)
        assert "RecursionError" not in daemon.log


@pytest.mark.parametrize("has_key", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_claim_that_cannot_be_read_stops_no_copies(tmp_path: Path, *, has_key: bool) -> None:
    """An archived object: a writer can PUT one, and a lifecycle rule of the bucket makes one of any old claim."""
    make_key_file(tmp_path / "key")
    with bucket_server() as served:
        cold = f'url = "s3://{BUCKET}"\nendpoint_url = "{served.url}"'
        more = '[security]\nkey_file = "key"' if has_key else ""
        with Daemon(tmp_path, cold=cold, more=more) as daemon, Trainer() as victim, Trainer() as other:
            victim.connect(daemon.socket, run="victim")
            claim = "victim/generation-0001.json"
            served.objects[claim] = replace(served.objects[claim], storage_class="GLACIER")
            victim.train(1)
            victim.durable()
            time.sleep(1)
            snapshot_of(other, daemon.socket, "other")
            wait_until(lambda: daemon.steps("cold", "other"), "the copy of another run", PATIENCE_S)
            wait_until(lambda: daemon.steps("cold", "victim"), "the copy of this run", PATIENCE_S)


# ── a marker that a bucket writer has replaced, with a key ──


@pytest.mark.parametrize("milestone", [None, pytest.param("best", marks=pytest.mark.long)])
@pytest.mark.usefixtures("checkpoints_examined")
def test_a_forged_marker_in_cold_stops_the_copies_of_no_run(tmp_path: Path, milestone: str | None) -> None:
    make_key_file(tmp_path / "key")
    with Daemon(tmp_path, more='[security]\nkey_file = "key"') as daemon, Trainer() as victim, Trainer() as other:
        victim.connect(daemon.socket, run="victim")
        victim.train(1)
        victim.durable(**({"milestone": milestone} if milestone else {}))
        victim.wait_replicated()
        folder = daemon.folder(1, run="victim", tier="cold")
        marker = f"milestone-{milestone}.json" if milestone else "healthy.json"
        wait_until((folder / marker).exists, "the marker in cold")
        (folder / marker).write_bytes(b'{"x":1}\n')
        daemon.stop()
        with daemon:
            wait_until(lambda: daemon.status()["foreign"], "the listing")
            snapshot_of(other, daemon.socket, "other")
            wait_until(lambda: daemon.steps("cold", "other"), "the copy of another run", PATIENCE_S)


# ── generations ──


def test_a_peer_that_names_a_generation_that_nobody_claimed_is_refused(tmp_path: Path) -> None:
    """Each claim moves the limit by 1,000: in about 25 minutes, one peer takes a run beyond the last generation that is
    ever listed, with claims that the daemon signs. No node can then use the run's checkpoints."""
    with serving(tmp_path) as daemon:
        generation = 0
        for _ in range(20):
            with Peer(daemon.socket) as peer:
                generation = peer.greet("run").generation
            with Peer(daemon.socket) as peer:
                peer.send(peer.hello("run", generation=max(generation, int(time.time() / 60)) + 1000))
                with suppress(AssertionError):
                    peer.hear(wire.Welcome)
        assert generation <= 20


def test_a_run_whose_generations_are_used_up_does_not_start_and_keeps_its_checkpoints(tmp_path: Path) -> None:
    """The end of that attack. The claim of its last round is made here, as the daemon would sign it."""
    with serving(tmp_path) as daemon:
        with Trainer() as trainer:
            snapshot_of(trainer, daemon.socket, "run")
        daemon.stop()
        (daemon.hot / "run" / "generation-90000000.json").write_bytes(b'{"node":"here"}\n')
        with daemon:
            with Trainer() as trainer, pytest.raises(TierUnreachable, match="every number up to 90000000 is taken"):
                trainer.connect(daemon.socket)
            assert daemon.tierd("restore", "--run", "run", "--to", tmp_path / "out").returncode == 0
            assert daemon.steps("hot") == [1]


# ── two starts of one hot tier in one generation ──


def test_a_generation_that_was_claimed_while_hot_was_full_is_not_given_out_again(tmp_path: Path) -> None:
    """It was claimed in cold alone, and its trainer wrote checkpoints there."""
    with small_disk(tmp_path / "hot", size_mib=10) as hot, Daemon(tmp_path) as daemon:
        with Trainer() as trainer:
            snapshot_of(trainer, daemon.socket, "run")
            trainer.wait_replicated()
        filler = fill(hot, leaving=0)
        with Trainer(width=4096) as trainer:  # its snapshots do not fit, whatever is evicted
            first = trainer.connect(daemon.socket)
            trainer.restore(resume="scratch", force=True)
            trainer.train(5)
            trainer.snapshot()
            trainer.wait_replicated()
        daemon.wait_log("wrote run/000000000005-g0002 from memory to cold")
        daemon.kill()
        filler.unlink()
        away = daemon.cold.rename(tmp_path / "away")
        with daemon, Trainer(width=4096) as trainer:
            second = trainer.connect(daemon.socket)
            trainer.restore(resume="scratch", force=True)
            trainer.train(3)
            trainer.durable()
            away.rename(daemon.cold)
            if second == first:
                wait_until(lambda: "another start has claimed" in daemon.log, "the trainer to be fenced", PATIENCE_S)


# ── the listener ──


@pytest.mark.long
def test_half_open_tls_connections_leave_the_descriptors_to_the_trainers(tmp_path: Path) -> None:
    """They never begin the handshake, so the HTTP server does not count them."""
    cert, key = make_certificate(tmp_path)
    more = f'[listen]\ncert_file = "{cert.name}"\nkey_file = "{key.name}"'
    daemon = serving(tmp_path, more=more)
    daemon.run_with(run_without_a_request_timeout)
    with daemon:
        url = next(word for word in daemon.log.split() if word.startswith("https://"))
        before = daemon.descriptors()
        host, _, port = url.removeprefix("https://").rpartition(":")
        attackers = [socket.create_connection((host, int(port))) for _ in range(400)]
        try:
            wait_until(lambda: daemon.descriptors() > before + 100, "the connections to be accepted")
            time.sleep(1)
            wait_until(lambda: daemon.descriptors() <= before + 128 + 8, "connections to be ended", PATIENCE_S)
        finally:
            for attacker in attackers:
                attacker.close()


# ── the audit trail ──


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(b'{"at":"\xff"}\n', id="not UTF-8"),
        pytest.param(NESTED[:8_000] + b"\n", id="nested", marks=pytest.mark.long),
    ],
)
def test_a_line_of_the_trail_that_is_no_text_is_reported_and_the_trail_goes_on(tmp_path: Path, line: bytes) -> None:
    """A bad sector, or an attacker on the disk."""
    with serving(tmp_path) as daemon:
        wait_until(lambda: list((daemon.hot / ".tierd-audit").glob("*")), "the trail")
        daemon.stop()
        [file] = (daemon.hot / ".tierd-audit").iterdir()
        with file.open("ab") as trail:
            trail.write(line)
        done = daemon.tierd("log", "--audit")
        print(done.stdout, done.stderr)
        assert done.returncode == 12, repr(done)
        with daemon:
            wait_until(lambda: b'"started"' in file.read_bytes().split(line, 1)[1], "the next event", PATIENCE_S)
            assert daemon.stop() == 0
