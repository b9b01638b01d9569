"""The daemon process: start, stop, kill and restart."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import socket
import stat
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.cli import make_checkpoint
from tests.support.daemon import Daemon, serving
from tests.support.processes import run_tierd
from tests.support.slots import make_sealed
from tests.support.waiting import wait_until
from tests.support.wire_peer import Peer
from tierd.errors import BadConfig, LockHeld, TierdError
from tierd.format import layout, wire
from tierd.format.ids import checkpoint_id
from tierd.tiers.lock import Lock

MIB = 1 << 20


def fails_to_start(daemon: Daemon) -> tuple[int, str]:
    """(exit code, what it said)"""
    daemon.launch()
    code = daemon.wait_exit()
    assert "Traceback" not in daemon.log
    return code, daemon.log


def snapshot(daemon: Daemon, run: str, *steps: int, content: bytes = b"state") -> None:
    """Connect a trainer, persist these steps, and disconnect."""
    with Peer(daemon.socket) as peer:
        peer.greet(run)
        peer.attach(0)
        peer.attach(1)
        for number, step in enumerate(steps):
            peer.seal(number % 2, step, content)
            assert peer.hear(wire.Persisted).step == step
        peer.send(wire.Goodbye())


# ── start ──


def warnings_in(log: str) -> list[str]:
    """Without what the checks at the start say of this machine."""
    return [line for line in log.splitlines() if "WARNING" in line and "WARNING doctor, " not in line]


def test_start_and_stop_log_no_warning(tmp_path: Path) -> None:
    with serving(tmp_path) as daemon:
        assert daemon.request("/readyz")[0] == 200
        assert stat.S_IMODE(Path(daemon.socket).stat().st_mode) & 0o077 == 0
        assert daemon.stop() == 0
        assert not Path(daemon.socket).exists()
        assert not warnings_in(daemon.log)


def test_start_logs_what_the_doctor_finds_on_this_machine(tmp_path: Path) -> None:
    with serving(tmp_path) as daemon:
        daemon.wait_log("WARNING doctor, config: there is no cold tier")
        found = {one["message"] for one in json.loads(daemon.tierd("doctor", "--json").stdout)}
        logged = [line.partition("WARNING doctor, ")[2] for line in daemon.log.splitlines()]
        logged = [line.partition(": ")[2].partition(" (hint: ")[0] for line in logged if line]
        assert set(logged) <= found, "in the doctor's words"


def test_start_logs_the_config_file_the_variables_that_override_it_and_the_tiers(tmp_path: Path) -> None:
    environ = {"TIERD_LIFECYCLE_HOT_KEEP_LAST": "9", "TIERD_SOCKET": "/of-trainers"}
    with Daemon(tmp_path, environ=environ) as daemon:
        line = next(line for line in daemon.log.splitlines() if "INFO config: " in line)
    file, tiers = line.partition("INFO config: ")[2].split("; ", 1)
    path, variables = file.split(", overridden by ")
    assert path == str(daemon.config)
    names = {"TIERD_LIFECYCLE_HOT_KEEP_LAST", "TIERD_SCRUB_INTERVAL_S", "TIERD_HEALTH_EXAMINE", "TIERD_DAEMON_NICE"}
    assert set(variables.split(", ")) == names, "a variable of trainers overrides no key"
    assert tiers == f"hot tier: {daemon.hot}; cold tiers: cold file://{daemon.cold}"


def test_a_second_daemon_on_the_same_directory_is_refused_and_does_not_affect_the_first(tmp_path: Path) -> None:
    with serving(tmp_path) as daemon:
        second = Daemon(tmp_path)
        code, log = fails_to_start(second)
        assert code == LockHeld.exit_code
        assert f"pid {daemon.pid}" in log
        snapshot(daemon, "run42", 1)


def test_the_socket_of_another_daemon_is_not_replaced(tmp_path: Path) -> None:
    with serving(tmp_path) as daemon:
        other = tmp_path / "other"
        other.mkdir()
        os.link(daemon.socket, other / "tierd.sock")
        assert fails_to_start(Daemon(other))[0] == LockHeld.exit_code
        snapshot(daemon, "run42", 1)


def test_a_file_at_the_socket_path_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "tierd.sock").write_text("precious")
    code, log = fails_to_start(Daemon(tmp_path))
    assert code == BadConfig.exit_code
    assert "is not a socket" in log
    assert (tmp_path / "tierd.sock").read_text() == "precious"


def test_a_port_in_use_is_named_and_the_socket_is_removed(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        daemon = Daemon(tmp_path, environ={"TIERD_DAEMON_LISTEN": f"127.0.0.1:{taken.getsockname()[1]}"})
        code, log = fails_to_start(daemon)
    assert code == BadConfig.exit_code
    assert re.search(r"listen on 127\.0\.0\.1:\d+: another program has this port\n  hint: set daemon\.listen to", log)
    assert not Path(daemon.socket).exists()


def test_an_address_of_another_machine_is_named(tmp_path: Path) -> None:
    code, log = fails_to_start(Daemon(tmp_path, environ={"TIERD_DAEMON_LISTEN": "192.0.2.1:9464"}))
    assert code == BadConfig.exit_code
    assert "listen on 192.0.2.1:9464: Cannot assign requested address" in log
    assert "hint: set daemon.listen to an address of this machine" in log


def test_port_of_another_daemon_is_refused_with_its_pid_and_its_hot_tier(tmp_path: Path) -> None:
    with serving(tmp_path / "first") as first:
        listen = first.url.removeprefix("http://")
        code, log = fails_to_start(Daemon(tmp_path / "second", environ={"TIERD_DAEMON_LISTEN": listen}))
        assert code == BadConfig.exit_code
        assert f"{listen}: another tierd, pid {first.pid} on here with the hot tier {first.hot}, has this port" in log
        assert "set daemon.listen to a free port" in log
        snapshot(first, "run42", 1)


def test_an_unusable_hot_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "hot").write_text("a file")
    code, log = fails_to_start(Daemon(tmp_path))
    assert code == TierdError.exit_code or code > 1
    assert str(tmp_path / "hot") in log


def test_systemd_is_notified_of_start_and_stop(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(20)
        with serving(tmp_path, environ={"NOTIFY_SOCKET": str(tmp_path / "notify")}) as daemon:
            assert systemd.recv(100) == b"READY=1"
            assert daemon.stop() == 0
            assert systemd.recv(100) == b"STOPPING=1"


def test_a_daemon_ends_when_another_one_has_its_directory(tmp_path: Path) -> None:
    """Someone deleted the hot directory under the first one."""
    with serving(tmp_path / "first") as first:
        snapshot(first, "run42", 7)
        while first.hot.exists():  # the daemon may write a file meanwhile
            shutil.rmtree(first.hot, ignore_errors=True)
        second = serving(tmp_path / "second")
        second.config.write_text(second.config.read_text().replace('path = "hot"', f'path = "{first.hot}"'))
        with second:
            assert first.wait_exit() == LockHeld.exit_code
            assert "held by pid" in first.log
            assert "Traceback" not in first.log
            snapshot(second, "run43", 7)
            assert (first.hot / "run43" / "000000000007-g0001" / "manifest.json").exists()


def test_a_daemon_locks_its_directory_again_when_it_was_made_anew(tmp_path: Path) -> None:
    """It takes it for a mount point without its disk, until someone says that it is hot."""
    with serving(tmp_path) as daemon:
        (marker,) = daemon.hot.glob(f"{layout.TIER_MARKERS}*")
        # Moved, not deleted entry by entry: the daemon may write into a directory that is still being emptied.
        daemon.hot.rename(tmp_path / "removed")
        daemon.hot.mkdir()
        wait_until((daemon.hot / layout.LOCK).exists, "the lock to be taken again")
        wait_until(lambda: b"pid" in (daemon.hot / layout.LOCK).read_bytes(), "the lock to name its holder")
        with pytest.raises(LockHeld, match=f"pid {daemon.pid}"):
            Lock(daemon.hot)
        wait_until(lambda: f"has no marker {marker.name}" in str(daemon.status()["halted"]), "hot to be unreachable")
        marker.touch()
        wait_until(lambda: not daemon.status()["halted"], "hot to be listed")
        snapshot(daemon, "run42", 7)
        assert daemon.stop() == 0


# ── stop ──


def test_sigterm_closes_connections_quickly_without_a_warning(tmp_path: Path) -> None:
    with serving(tmp_path) as daemon:
        peers = [Peer(daemon.socket) for _ in range(20)]
        for number, peer in enumerate(peers):
            peer.greet(f"run{number}")
            peer.attach(0)
        silent = Peer(daemon.socket)
        began_s = time.monotonic()
        assert daemon.stop() == 0
        assert time.monotonic() - began_s < 10.0, "there is nothing to drain"
        assert "Traceback" not in daemon.log
        assert not warnings_in(daemon.log)
        assert all(peer.is_dropped() for peer in peers)
        for peer in (*peers, silent):
            peer.close()


def test_sealed_snapshots_are_persisted_before_the_daemon_exits(tmp_path: Path) -> None:
    with serving(tmp_path) as daemon:
        peers = [Peer(daemon.socket) for _ in range(3)]
        for number, peer in enumerate(peers):
            peer.greet(f"run{number}")
            peer.attach(0, size_bytes=64 * MIB)
            peer.fill(0, 7, b"state")
            peer.send(make_sealed(7, 64 * MIB))
        for peer in peers:
            peer.hear(wire.Accepted)
        assert daemon.stop() == 0
        for number, peer in enumerate(peers):
            assert (daemon.hot / f"run{number}" / "000000000007-g0001" / "manifest.json").exists()
            peer.close()


@pytest.mark.parametrize("has_begun", [True, False])
def test_the_drain_waits_for_ranks_that_are_about_to_seal(tmp_path: Path, has_begun: bool) -> None:
    """A shutdown stops trainers and daemon at once."""
    with serving(tmp_path) as daemon, Peer(daemon.socket) as first, Peer(daemon.socket) as second:
        generation = first.greet("run42", world_size=2).generation
        second.greet("run42", rank=1, world_size=2, generation=generation)
        first.attach(0)
        second.attach(0)
        if has_begun:
            second.fill(0, 7, b"two")
            wait_until(lambda: daemon.status()["slots"]["filling"] == 1, "the slot to be filled")
        else:
            first.seal(0, 7, b"one")
        daemon.signal(signal.SIGTERM)
        daemon.wait_log("draining")
        if has_begun:
            first.seal(0, 7, b"one")
            second.send(make_sealed(7, 3))
        else:
            second.seal(0, 7, b"two")
        assert daemon.wait_exit() == 0
        assert (daemon.hot / "run42" / "000000000007-g0001" / "manifest.json").exists()


def test_a_snapshot_that_cannot_be_persisted_delays_the_exit_and_sets_its_code(tmp_path: Path) -> None:
    with serving(tmp_path, environ={"TIERD_DAEMON_DRAIN_TIMEOUT_S": "0.3"}) as daemon, Peer(daemon.socket) as peer:
        peer.greet("run42")
        peer.attach(0)
        shutil.rmtree(daemon.hot / "run42")
        (daemon.hot / "run42").write_text("in the way")
        peer.seal(0, 7, b"state")
        assert peer.hear(wire.Failed).is_final is False
        assert daemon.stop() == 1
        assert "run42/000000000007-g0001 did not become durable" in daemon.log
        assert "Traceback" not in daemon.log


def test_a_second_signal_ends_the_daemon_at_once(tmp_path: Path) -> None:
    with serving(tmp_path, environ={"TIERD_DAEMON_DRAIN_TIMEOUT_S": "600"}) as daemon, Peer(daemon.socket) as peer:
        peer.greet("run42")
        peer.attach(0)
        shutil.rmtree(daemon.hot / "run42")
        (daemon.hot / "run42").write_text("in the way")
        peer.seal(0, 7, b"state")
        daemon.signal(signal.SIGTERM)
        daemon.wait_log("draining: 1")
        daemon.signal(signal.SIGINT)
        assert daemon.wait_exit() == 128 + signal.SIGINT


def test_a_region_that_never_answers_does_not_delay_the_exit(tmp_path: Path) -> None:
    """A thread that waits for S3 cannot be cancelled. The process must exit with 0 nevertheless."""
    with socket.create_server(("127.0.0.1", 0)) as hole:  # accepts connections and never answers
        more = f"""
            [[cold]]
            name = "hole"
            url = "s3://bucket/prefix"
            region = "us-east-1"
            endpoint_url = "http://127.0.0.1:{hole.getsockname()[1]}"
            """
        keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
        with serving(tmp_path, more=more, environ=keys) as daemon:
            connection, _ = hole.accept()
            began_s = time.monotonic()
            assert daemon.stop() == 0
            assert time.monotonic() - began_s < 10
            assert "Traceback" not in daemon.log
            connection.close()


# ── kill and restart ──


def test_a_restarted_daemon_keeps_committed_checkpoints_and_deletes_incomplete_ones(tmp_path: Path) -> None:
    with serving(tmp_path) as daemon:
        snapshot(daemon, "run42", 1, 2)
        incomplete = daemon.hot / "run42" / "000000000003-g0001"
        incomplete.mkdir()
        (incomplete / "rank-00000-of-00001.safetensors").write_bytes(b"complete, but never committed")
        (daemon.hot / "run42" / "000000000002-g0001" / "x.0a1b.partial").write_bytes(b"incomplete")
        daemon.kill()
    with serving(tmp_path) as daemon:
        assert daemon.steps("hot", "run42") == [1, 2]
        assert not incomplete.exists()
        assert list(daemon.hot.rglob("*.partial")) == []
        with Peer(daemon.socket) as peer:
            assert peer.greet("run42").generation == 2, "a generation is never claimed twice"
            assert peer.find().tier == "hot"
            assert peer.take_files()[1] == b"state"


def test_a_daemon_killed_while_persisting_leaves_nothing_restorable(tmp_path: Path) -> None:
    with serving(tmp_path) as daemon, Peer(daemon.socket) as peer:
        peer.greet("run42")
        peer.attach(0, size_bytes=512 * MIB)
        peer.fill(0, 7, b"state")
        peer.send(make_sealed(7, 512 * MIB))
        wait_until(lambda: list(daemon.hot.rglob("*.partial")))
        daemon.kill()
    assert list(daemon.hot.rglob("manifest.json")) == []
    with serving(tmp_path) as daemon, Peer(daemon.socket) as peer:
        assert [path for path in daemon.hot.rglob("*") if "g0001" in path.name] == []
        assert daemon.get("/api/v1/checkpoints") == []
        peer.greet("run42", rank=None)
        peer.send(wire.Find(request=1, step=None, generation=None, milestone=None, tier="auto", exclude=[]))
        with pytest.raises(AssertionError, match="not_found"):
            peer.hear(wire.FoundReplica)


def test_snapshots_that_a_trainer_resends_to_a_new_daemon_are_not_written_twice(tmp_path: Path) -> None:
    with serving(tmp_path) as daemon, Peer(daemon.socket) as peer:
        peer.greet("run42")
        peer.attach(0)
        peer.attach(1)
        peer.seal(0, 1, b"one")
        peer.hear(wire.Persisted)
        manifest = daemon.hot / "run42" / "000000000001-g0001" / "manifest.json"
        written = manifest.stat().st_ino
        daemon.kill()
        os.pwrite(peer.slots[1], b"two", 0)  # the slot that was being filled when the daemon died
        with serving(tmp_path) as daemon, Peer(daemon.socket) as reconnected:
            assert reconnected.greet("run42", generation=1).boot != peer.heard[0].boot  # type: ignore[union-attr]
            for index, slot in peer.slots.items():
                reconnected.attach(index, descriptor=os.dup(slot))
            reconnected.send(make_sealed(1, 3, slot=0, resent=True))
            assert reconnected.hear(wire.Persisted).step == 1
            reconnected.send(make_sealed(2, 3, slot=1, resent=True))
            assert reconnected.hear(wire.Released).slot == 0
            assert reconnected.hear(wire.Persisted).step == 2
            assert daemon.steps("hot", "run42") == [1, 2]
            assert manifest.stat().st_ino == written


def test_a_resent_snapshot_is_compared_with_the_committed_bytes_before_any_answer(tmp_path: Path) -> None:
    with serving(tmp_path) as daemon, Peer(daemon.socket) as peer:
        peer.greet("run42")
        peer.attach(0)
        peer.seal(0, 1, b"one")
        peer.hear(wire.Persisted)
        daemon.kill()
        os.pwrite(peer.slots[0], b"two", 0)
        with serving(tmp_path) as daemon, Peer(daemon.socket) as reconnected:
            reconnected.greet("run42", generation=1)
            reconnected.attach(0, descriptor=os.dup(peer.slots[0]))
            reconnected.send(make_sealed(1, 3, slot=0, resent=True))
            assert reconnected.hear(wire.Failed).kind == "corrupt"
            reconnected.send(wire.Ask(step=1, generation=1))
            reconnected.attach(1)
            reconnected.seal(1, 2, b"new")
            assert reconnected.hear(wire.Persisted).step == 2, "and not of step 1"
            assert any(isinstance(message, wire.Failed) and message.is_final for message in reconnected.heard)


# ── failures ──


def test_a_full_disk_loses_snapshots_but_no_slots_and_the_newest_is_persisted_later(
    tmp_path: Path,
) -> None:
    with serving(tmp_path) as daemon, Peer(daemon.socket) as peer:
        peer.greet("run42")
        peer.attach(0)
        peer.attach(1)
        shutil.move(daemon.hot / "run42", tmp_path / "aside")
        (daemon.hot / "run42").write_text("no room here")
        peer.seal(0, 1, b"one")
        peer.hear(wire.Failed)
        for step in (2, 3, 4):
            peer.seal((step - 1) % 2, step, b"more")
            assert peer.hear(wire.Released).slot == step % 2
        given_up = [message.step for message in peer.heard if isinstance(message, wire.Failed) and message.is_final]
        assert given_up[:2] == [1, 2]
        (daemon.hot / "run42").unlink()
        assert peer.hear(wire.Persisted).step == 4
        assert daemon.steps("hot", "run42") == [4]
        assert daemon.metric('tierd_snapshots_total{outcome="lost",run="run42"}') == 3


def test_a_marker_that_was_created_by_hand_is_seen_at_once(tmp_path: Path) -> None:
    with serving(tmp_path, environ={"TIERD_LIMITS_RECONCILE_INTERVAL_S": "600"}) as daemon:
        snapshot(daemon, "run42", 1)
        (daemon.hot / "run42" / "000000000001-g0001" / "milestone-best.json").write_text("{}")
        wait_until(lambda: daemon.get("/api/v1/checkpoints")[0]["milestone"] == "best")


def test_an_unreadable_manifest_halts_deletion_of_its_run_and_is_shown(tmp_path: Path) -> None:
    for number, step in enumerate((100, 200, 300, 400, 500)):
        for run in ("healthy", "damaged"):
            make_checkpoint(tmp_path / "hot", run=run, step=step, sequence=number + 1)
    (tmp_path / "hot" / "damaged" / "000000000300-g0001" / "manifest.json").write_text('{"format_version": 99}')
    with serving(tmp_path) as daemon:
        wait_until(lambda: daemon.steps("hot", "healthy") == [300, 400, 500])
        assert daemon.steps("hot", "damaged") == [100, 200, 400, 500]
        assert len(list((tmp_path / "hot" / "damaged").glob("*/rank-00000-*"))) == 5
        assert daemon.status()["halted"][0].startswith("unreadable_manifest: ")
        assert daemon.metric('tierd_halted{reason="unreadable_manifest"}') == 1


def test_an_unknown_run_is_refused_while_a_cold_tier_cannot_be_listed(tmp_path: Path) -> None:
    """If cold has a generation 5 that cannot be listed, a new generation 1 would overwrite its timeline."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    more = f"""
        request_timeout_s = 1.0
        [[cold]]
        name = "away"
        url = "s3://bucket/prefix"
        region = "us-east-1"
        endpoint_url = "http://127.0.0.1:{port}"
        """
    make_checkpoint(tmp_path / "hot", run="known", step=100, generation=3)
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_MAX_ATTEMPTS": "1"}
    with serving(tmp_path, more=more, environ=keys) as daemon, ExitStack() as stack:
        with Peer(daemon.socket) as new, pytest.raises(AssertionError, match="tier_unreachable"):
            new.greet("unknown")
        old = stack.enter_context(Peer(daemon.socket))  # connect late: Hello must come within hello_timeout_s
        assert old.greet("known").generation == 4
        assert daemon.request("/readyz")[0] == 200
        old.send(wire.Find(request=1, step=999, generation=None, milestone=None, tier="auto", exclude=[]))
        with pytest.raises(AssertionError, match="tier_unreachable"):
            old.hear(wire.FoundReplica)
        assert old.find(request=2).tier == "hot"
        for descriptor in old.descriptors:
            os.close(descriptor)
        old.descriptors = []


def test_memory_of_departed_trainers_is_freed_after_the_grace_time(tmp_path: Path) -> None:
    with serving(tmp_path, environ={"TIERD_DAEMON_MEMORY_GRACE_S": "0.1"}) as daemon:
        before = daemon.descriptors()
        snapshot(daemon, "run42", 1)
        wait_until(lambda: sum(daemon.status()["slots"].values()) == 0)
        wait_until(lambda: daemon.descriptors() <= before)
        assert daemon.steps("hot", "run42") == [1]
        with Peer(daemon.socket) as peer:
            assert peer.greet("run42").generation == 2
            assert peer.find().tier == "hot"
            peer.take_files()


@pytest.mark.parametrize("state", ["finished", "stopped", "halted"])
def test_a_run_that_ended_in_good_order_gives_its_memory_back_at_once(tmp_path: Path, state: str) -> None:
    with serving(tmp_path) as daemon:
        before = daemon.descriptors()
        for number in range(3):  # a sweep over run names must not add up
            with Peer(daemon.socket) as peer:
                peer.greet(f"run{number}")
                peer.attach(0)
                peer.attach(1)
                peer.seal(0, 1, b"state")
                peer.send(wire.Goodbye(state=state))  # the daemon may not have persisted it yet
            wait_until(lambda: sum(daemon.status()["slots"].values()) == 0)
        wait_until(lambda: daemon.descriptors() <= before)
        assert [run["state"] for run in daemon.status()["runs"]] == [state] * 3
        with Peer(daemon.socket) as peer:
            assert peer.greet("run0").slots == []
            assert peer.find().tier == "hot"
            peer.take_files()


@pytest.mark.parametrize("state", ["failed", "lost", None])
def test_a_run_that_did_not_end_in_good_order_keeps_its_memory_for_the_restart(
    tmp_path: Path, state: str | None
) -> None:
    with serving(tmp_path) as daemon:
        with Peer(daemon.socket) as peer:
            peer.greet("run42")
            peer.attach(0)
            peer.attach(1)
            peer.seal(0, 1, b"state")
            peer.hear(wire.Persisted)
            if state is not None:
                peer.send(wire.Goodbye(state=state))
        wait_until(lambda: daemon.status()["runs"][0]["ranks_attached"] == 0)
        assert sum(daemon.status()["slots"].values()) == 2
        with Peer(daemon.socket) as peer:
            peer.greet("run42")
            assert peer.find().tier == "memory"
            peer.take_files()


def run_with_few_descriptors(arguments: list[str], environ: Mapping[str, str], log: str) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    run_tierd(arguments, environ, log)


def test_without_free_descriptors_only_new_connections_wait(tmp_path: Path) -> None:
    daemon = serving(tmp_path)
    daemon.run_with(run_with_few_descriptors)
    with daemon:
        connections = []
        for _ in range(100):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.setblocking(False)
            try:
                sock.connect(str(daemon.socket))
            except BlockingIOError:
                sock.close()
                break
            connections.append(sock)
        daemon.wait_log("Too many open files")
        for sock in connections:
            sock.close()
        wait_until(lambda: daemon.request("/healthz")[0] == 200)
        snapshot(daemon, "run42", 1)
        assert daemon.stop() == 0


def test_concurrent_runs_do_not_mix(tmp_path: Path) -> None:
    with serving(tmp_path) as daemon:
        threads = [
            threading.Thread(
                target=snapshot, args=(daemon, f"run{number}", *range(1, 6)), kwargs={"content": b"%d" % number}
            )
            for number in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for number in range(4):
            wait_until(lambda number=number: daemon.steps("hot", f"run{number}") == [3, 4, 5])  # type: ignore[misc]
            name = checkpoint_id(f"run{number}", 5, 1).name
            shard = daemon.hot / f"run{number}" / name / "rank-00000-of-00001.safetensors"
            assert shard.read_bytes() == b"%d" % number
