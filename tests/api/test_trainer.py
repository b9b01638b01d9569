"""The trainers' socket of a real daemon: its protocol, and its refusals of invalid input."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.daemon import Daemon, serving
from tests.support.nodes import nodes
from tests.support.processes import ForkedProcess, context
from tests.support.slots import PAGE_BYTES, make_memfd, make_sealed
from tests.support.waiting import DEADLINE_S, wait_until
from tests.support.wire_peer import Peer
from tierd.api.session import OUTBOX_MAX
from tierd.format import wire
from tierd.memory.progress import SILENT_MIN_S


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for all tests, each with its own run. At the end it must stop cleanly."""
    with serving(tmp_path_factory.mktemp("door"), more="hello_timeout_s = 2.0") as daemon:
        yield daemon
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.log, daemon.log


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    return "run-" + "".join(char if char.isalnum() else "-" for char in request.node.name)[-100:]


def count_slots(daemon: Daemon) -> int:
    return sum(daemon.status()["slots"].values())


@contextlib.contextmanager
def unharmed(daemon: Daemon) -> Iterator[None]:
    """Afterwards the daemon is healthy and leaks no descriptors. Each slot that it keeps may have three: the memfd, its
    mapping, and the pidfd of its writer."""
    before = daemon.descriptors() - 3 * count_slots(daemon)
    yield
    assert daemon.request("/healthz")[0] == 200
    wait_until(lambda: daemon.descriptors() - 3 * count_slots(daemon) <= before, "descriptors leak")


def refusal(peer: Peer) -> wire.Refused:
    """The daemon's last message before it closed the connection."""
    assert peer.is_dropped()
    last = peer.heard[-1]
    assert isinstance(last, wire.Refused), peer.heard
    return last


# ── snapshots and generations ──


def test_a_snapshot_is_accepted_and_persisted_and_the_next_one_releases_its_slot(daemon: Daemon, run: str) -> None:
    with Peer(daemon.socket) as peer:
        assert peer.greet(run).generation == 1
        peer.attach(0)
        peer.attach(1)
        peer.seal(0, 10, b"ten")
        assert peer.hear(wire.Persisted).step == 10
        peer.seal(1, 20, b"twenty")
        assert peer.hear(wire.Released).slot == 0
        assert peer.hear(wire.Persisted).step == 20
        peer.send(wire.Ask(step=10, generation=1))
        assert peer.hear(wire.Persisted).step == 10
        peer.send(wire.Ask(step=20, generation=1))
        assert peer.hear(wire.Accepted) == wire.Accepted(slot=1, step=20), "it is in memory too"
        assert peer.hear(wire.Persisted).step == 20
        assert peer.find().tier == "memory"
        assert peer.take_files()[1].startswith(b"twenty")
        peer.send(wire.Goodbye())
        assert peer.is_dropped()
    assert daemon.steps("hot", run) == [10, 20]


def test_only_the_lowest_rank_of_a_node_reports_step_times(daemon: Daemon, run: str) -> None:
    with Peer(daemon.socket) as first, Peer(daemon.socket) as second, Peer(daemon.socket) as operator:
        welcome = first.greet(run, rank=0, world_size=2)
        assert welcome.report_s > 0
        assert second.greet(run, rank=1, world_size=2, generation=welcome.generation).report_s == 0
        assert operator.greet(run, rank=None).report_s == 0
        first.send(wire.Stepped(seconds=0.1))
        first.send(wire.Stepped(seconds=math.nan))
        second.send(wire.Stepped(seconds=0.1))
        assert "nan s from rank 0" in refusal(first).message
        assert "from rank 1" in refusal(second).message


def test_every_node_of_a_run_gets_step_times(tmp_path: Path) -> None:
    """Else the daemon of another node than that of rank 0 would take trainers for silent between two snapshots."""
    with nodes(tmp_path) as (here, there), Peer(here.socket) as first, Peer(there.socket) as other:
        own = wire.NodeRanks(ranks=[0, 1], lowest=[0, 2])
        first.send(msgspec.structs.replace(first.hello("run", world_size=4), node=own))
        start = first.hear(wire.Welcome)
        lowest = msgspec.structs.replace(own, ranks=[2, 3], claim=start.claim, base=start.base)
        joins = other.hello("run", rank=2, world_size=4, generation=start.generation)
        other.send(msgspec.structs.replace(joins, node=lowest))
        assert other.hear(wire.Welcome).report_s == start.report_s > 0
        other.send(wire.Stepped(seconds=0.5))
        limit = 'tierd_run_pause_limit_seconds{run="run"}'
        wait_until(lambda: there.metric(limit) == SILENT_MIN_S, "the step time to be taken")


def test_the_newest_complete_set_is_kept_while_a_rank_has_not_sealed_the_next(daemon: Daemon, run: str) -> None:
    with Peer(daemon.socket) as first, Peer(daemon.socket) as second:
        generation = first.greet(run, rank=0, world_size=2).generation
        second.greet(run, rank=1, world_size=2, generation=generation)
        for peer in (first, second):
            peer.attach(0)
            peer.attach(1)
            peer.seal(0, 10, b"ten")
        first.hear(wire.Persisted)
        first.seal(1, 20, b"twenty")
        assert first.find().tier == "memory"
        assert [file[:3] for file in first.take_files()[1:]] == [b"ten", b"ten"]
        second.seal(1, 20, b"twenty")
        for peer in (first, second):
            assert peer.hear(wire.Released).slot == 0


def test_a_lost_step_is_reported_to_all_ranks_counted_once_and_frees_sealed_slots(daemon: Daemon, run: str) -> None:
    lost = wire.SnapshotLost(step=2, kind="torn", message="m" * 20_000, hint="h")
    with Peer(daemon.socket) as first, Peer(daemon.socket) as second:
        generation = first.greet(run, world_size=2).generation
        second.greet(run, rank=1, world_size=2, generation=generation)
        for peer in (first, second):
            peer.attach(0)
        second.seal(0, 2, b"early")
        first.send(lost)
        first.send(lost)
        for peer in (first, second):
            failed = peer.hear(wire.Failed)
            assert (failed.step, failed.kind, failed.is_final) == (2, "torn", True)
            assert failed.message.startswith("rank 0: mmm")
        assert wire.Released(slot=0) in second.heard
        second.seal(0, 2, b"late")
        second.hear(wire.Released)
        assert daemon.metric(f'tierd_snapshots_total{{outcome="failed",run="{run}"}}') == 1


def test_trainers_that_connect_at_once_get_different_generations(daemon: Daemon, run: str) -> None:
    peers = [Peer(daemon.socket) for _ in range(8)]
    for peer in peers:
        peer.send(
            wire.Hello(protocol=wire.PROTOCOL_VERSION, version="test", run=run, rank=0, world_size=1, generation=None)
        )
    assert sorted(peer.hear(wire.Welcome).generation for peer in peers) == list(range(1, 9))
    fenced = [peer for peer in peers if peer.heard[0].generation < 8]  # type: ignore[union-attr]
    for peer in fenced:
        peer.hear(wire.Fenced)
        assert peer.is_dropped()
    for peer in peers:
        peer.close()


def test_a_stale_generation_is_fenced_and_never_commits(daemon: Daemon, run: str) -> None:
    with Peer(daemon.socket) as old, Peer(daemon.socket) as new:
        old.greet(run)
        old.attach(0)
        old.fill(0, 10, b"ten")
        fenced = daemon.metric("tierd_fenced_total")
        assert new.greet(run).generation == 2
        assert old.hear(wire.Fenced).generation == 2
        assert daemon.metric("tierd_fenced_total") == fenced, "one process goes on with a new generation"
        with contextlib.suppress(OSError):
            old.send(make_sealed(10, 3))
        assert old.is_dropped()
        with Peer(daemon.socket) as reconnected:
            with pytest.raises(AssertionError, match="stale"):
                reconnected.greet(run, generation=1)
            assert reconnected.is_dropped()
    assert daemon.steps("hot", run) == []


def greet_and_stay(path: str, hello: wire.Hello, pipe: Connection) -> None:
    with Peer(path) as peer:
        peer.send(hello)
        pipe.send(peer.hear(wire.Welcome).generation)
        with contextlib.suppress(EOFError):
            pipe.recv()


def test_a_trainer_whose_pid_is_not_visible_says_that_it_begins_anew_itself(daemon: Daemon, run: str) -> None:
    """As in another container. Here its generations have different processes, which look like different trainers."""
    with Peer(daemon.socket) as first, contextlib.ExitStack() as stack:
        first.greet(run)
        fenced = daemon.metric("tierd_fenced_total")
        for count, generation in ((0, 2), (1, 3)):
            here, there = context.Pipe()
            stack.callback(here.close)
            hello = msgspec.structs.replace(first.hello(run), continues=1)
            process = ForkedProcess(greet_and_stay, daemon.socket, hello, there)
            stack.callback(process.kill)
            there.close()
            assert here.recv() == generation
            assert daemon.metric("tierd_fenced_total") == fenced + count


def test_a_skipped_step_that_all_ranks_report_is_counted_once(daemon: Daemon, run: str) -> None:
    with Peer(daemon.socket) as first, Peer(daemon.socket) as second:
        first.greet(run, rank=0, world_size=2)
        second.greet(run, rank=1, world_size=2, generation=1)
        for peer in (first, second):
            peer.send(wire.Report(outcome="skipped", step=10, tier="", seconds=0.0, detail="no slot was free"))
            peer.send(wire.Ask(step=1, generation=1))
            peer.send(wire.Report(outcome="restored", step=10, tier="memory", seconds=0.5, detail=""))
    wait_until(lambda: daemon.metric(f'tierd_snapshots_total{{outcome="skipped",run="{run}"}}') == 1)


@pytest.mark.parametrize("outcome", ["skipped", "failed"])
def test_the_stall_of_a_snapshot_that_was_not_taken_is_observed(daemon: Daemon, run: str, outcome: str) -> None:
    before_s = daemon.metric("tierd_snapshot_stall_seconds_sum")
    with Peer(daemon.socket) as peer:
        peer.greet(run)
        peer.send(wire.Report(outcome=outcome, step=10, tier="", seconds=1e6, detail="no slot was free"))
        wait_until(lambda: daemon.metric("tierd_snapshot_stall_seconds_sum") >= before_s + 1e6)


def test_a_slot_that_could_not_be_page_locked_is_counted_and_logged(daemon: Daemon, run: str) -> None:
    with Peer(daemon.socket) as peer:
        peer.greet(run)
        peer.send(wire.Report(outcome="unpinned", step=10, tier="", seconds=0.0, detail="cudaHostRegister says 2"))
        wait_until(lambda: daemon.metric('tierd_failures_total{kind="full",stage="stage"}') == 1)
    assert f"{run} rank 0 step 10: cudaHostRegister says 2" in daemon.log


# ── adopting slots ──


def hold_slots(socket_path: str, run: str, leaves_a_child: bool, pipe: Connection) -> None:
    """Runs in a process: a trainer with slot 0 retained and slot 1 free, and perhaps with a forked child."""
    peer = Peer(socket_path)
    peer.greet(run)
    peer.attach(0)
    peer.attach(1)
    peer.seal(0, 10, b"ten")
    peer.hear(wire.Persisted)
    child = os.fork() if leaves_a_child else os.getpid()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    pipe.send(child)
    time.sleep(60)


@contextlib.contextmanager
def trainer(daemon: Daemon, run: str, *, leaves_a_child: bool = False) -> Iterator[ForkedProcess]:
    here, there = context.Pipe()
    process = ForkedProcess(hold_slots, daemon.socket, run, leaves_a_child, there)
    there.close()
    assert here.poll(DEADLINE_S)
    child = here.recv()
    try:
        yield process
    finally:
        here.close()
        process.kill()
        process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("leaves_a_child", [False, True])
def test_slots_of_a_dead_trainer_are_adopted_even_if_a_child_has_its_socket_open(
    daemon: Daemon, run: str, leaves_a_child: bool
) -> None:
    with trainer(daemon, run, leaves_a_child=leaves_a_child) as process, Peer(daemon.socket) as successor:
        process.kill()
        process.wait()
        welcome = successor.greet(run)
        assert [(kept.slot, kept.is_free) for kept in welcome.slots] == [(0, False), (1, True)]
        adopted = successor.descriptors[0]
        assert os.pread(adopted, 3, 0) == b"ten"
        assert successor.find().tier == "memory"
        assert successor.take_files()[1].startswith(b"ten")
        successor.attach(1, descriptor=os.dup(adopted))
        os.close(adopted)


def test_death_of_a_trainer_is_noticed_while_a_child_has_its_socket_open(daemon: Daemon, run: str) -> None:
    with trainer(daemon, run, leaves_a_child=True) as process:

        def ranks_attached() -> int:
            (found,) = [of_run for of_run in daemon.status()["runs"] if of_run["run"] == run]
            return found["ranks_attached"]

        assert ranks_attached() == 1
        process.kill()
        process.wait()
        wait_until(lambda: ranks_attached() == 0, "the daemon to notice the death")


def test_slots_of_a_living_trainer_cannot_be_adopted_and_stay_restorable(daemon: Daemon, run: str) -> None:
    with trainer(daemon, run), Peer(daemon.socket) as successor:
        welcome = successor.greet(run)
        assert (welcome.generation, welcome.slots) == (2, [])
        assert successor.find().tier == "memory"
        assert successor.take_files()[1].startswith(b"ten")
        for index in (0, 1):
            successor.attach(index)
        successor.seal(1, 20, b"twenty")
        successor.hear(wire.Persisted)
        assert not any(isinstance(message, wire.Released) for message in successor.heard), (
            "its own slot 0 is not released"
        )
        successor.seal(0, 30, b"thirty")
        assert successor.hear(wire.Released).slot == 1


def test_a_trainer_that_reconnects_keeps_its_slots_and_their_content(daemon: Daemon, run: str) -> None:
    first = Peer(daemon.socket)
    generation = first.greet(run).generation
    first.attach(0)
    first.attach(1)
    first.seal(0, 10, b"ten")
    first.hear(wire.Persisted)
    first.fill(1, 20, b"twen")
    with Peer(daemon.socket) as reconnected:
        welcome = reconnected.greet(run, generation=generation)
        assert (welcome.generation, welcome.slots) == (generation, []), "it has mapped them already"
        assert first.is_dropped()
        for index, descriptor in first.slots.items():
            reconnected.attach(index, descriptor=os.dup(descriptor))
        reconnected.send(make_sealed(10, 3, slot=0, resent=True))
        reconnected.hear(wire.Accepted)
        assert reconnected.hear(wire.Persisted).step == 10, "at once"
        reconnected.seal(1, 20, b"twenty")
        assert reconnected.hear(wire.Released).slot == 0
    first.close()


def test_a_snapshot_is_kept_if_its_trainer_is_killed_directly_after_sealing(daemon: Daemon, run: str) -> None:
    """With unread answers in its socket, the kernel reports a reset before the trainer's last messages."""
    peer = Peer(daemon.socket)
    peer.greet(run)
    peer.attach(0)
    for step in range(50):
        peer.send(wire.Ask(step=step, generation=1))
    peer.send(wire.Filling(slot=0, step=10))
    os.pwrite(peer.slots[0], b"ten", 0)
    peer.send(make_sealed(10, 3))
    peer.close()
    wait_until(lambda: daemon.steps("hot", run) == [10])


# ── harmless input ──


MESSAGES = [
    wire.encode(message)
    for message in (
        make_sealed(1),
        wire.Hello(protocol=1, version="test", run="garbage", rank=0, world_size=1, generation=None),
        wire.Filling(slot=0, step=1),
        wire.Abandon(slot=3),
        wire.AttachSlot(slot=0, capacity_bytes=4096),
        wire.Report(outcome="won", step=1, tier="", seconds=0.0, detail=""),
    )
]


def with_one_byte_changed(message: bytes) -> st.SearchStrategy[bytes]:
    """A message with one byte changed."""
    return st.tuples(st.integers(0, len(message) - 1), st.integers(0, 255)).map(
        lambda change: message[: change[0]] + bytes([change[1]]) + message[change[0] + 1 :]
    )


def test_random_messages_do_not_harm_the_daemon(daemon: Daemon) -> None:
    @settings(max_examples=60, deadline=None, database=None)
    @given(
        greets=st.booleans(),
        raw=st.binary(max_size=300) | st.sampled_from(MESSAGES).flatmap(with_one_byte_changed),
        with_descriptor=st.booleans(),
    )
    def send(greets: bool, raw: bytes, with_descriptor: bool) -> None:
        with Peer(daemon.socket) as peer:
            if greets:
                peer.greet("garbage", rank=None)
            peer.send_raw(raw, *([peer.socket.fileno()] if with_descriptor else []))

    with unharmed(daemon):
        send()


def attach(peer: Peer, descriptor: int, *, slot: int = 0, capacity_bytes: int = PAGE_BYTES, copies: int = 1) -> None:
    peer.send(wire.AttachSlot(slot=slot, capacity_bytes=capacity_bytes), *[descriptor] * copies)
    os.close(descriptor)


def regular_file() -> int:
    return os.open("/tmp", os.O_TMPFILE | os.O_RDWR)


def with_slot(peer: Peer, message: wire.ToDaemon) -> None:
    peer.attach(0)
    peer.send(wire.Filling(slot=0, step=1))
    peer.send(message)


VIOLATIONS: dict[str, Callable[[Peer], object]] = {
    "another hello": lambda peer: peer.send(
        wire.Hello(protocol=1, version="x", run="x", rank=0, world_size=1, generation=None)
    ),
    "no descriptor": lambda peer: peer.send(wire.AttachSlot(slot=0, capacity_bytes=PAGE_BYTES)),
    "two descriptors": lambda peer: attach(peer, make_memfd(PAGE_BYTES), copies=2),
    "most descriptors": lambda peer: attach(peer, make_memfd(PAGE_BYTES), copies=wire.DESCRIPTORS_MAX),
    "regular file": lambda peer: attach(peer, regular_file()),
    "unsealed memfd": lambda peer: attach(peer, make_memfd(PAGE_BYTES, seals=0)),
    "smaller than its capacity": lambda peer: attach(peer, make_memfd(PAGE_BYTES), capacity_bytes=2 * PAGE_BYTES),
    "capacity of 0": lambda peer: attach(peer, make_memfd(PAGE_BYTES), capacity_bytes=0),
    "slot index too high": lambda peer: attach(peer, make_memfd(PAGE_BYTES), slot=16),
    "slot index negative": lambda peer: attach(peer, make_memfd(PAGE_BYTES), slot=-1),
    "seal of unattached slot": lambda peer: peer.send(make_sealed(1, 10, slot=3)),
    "fill of unattached slot": lambda peer: peer.send(wire.Filling(slot=3, step=1)),
    "larger than its slot": lambda peer: with_slot(peer, make_sealed(1, 5 * PAGE_BYTES)),
    "empty": lambda peer: with_slot(peer, make_sealed(1, 0)),
    "filled twice": lambda peer: with_slot(peer, wire.Filling(slot=0, step=1)),
    "milestone with a path": lambda peer: with_slot(peer, make_sealed(1, 10, milestone="../../evil")),
    "not a time": lambda peer: with_slot(peer, make_sealed(1, 10, created_at="yesterday")),
    "time without a zone": lambda peer: with_slot(peer, make_sealed(1, 10, created_at="2025-01-01T00:00:00")),
    "stall of nan": lambda peer: with_slot(peer, make_sealed(1, 10, stall_s=float("nan"))),
    "step too high": lambda peer: with_slot(peer, make_sealed(10**12, 10)),
    "unknown outcome": lambda peer: peer.send(
        wire.Report(outcome="won", step=1, tier="", seconds=0.0, detail="")
    ),
    "negative time": lambda peer: peer.send(
        wire.Report(outcome="restored", step=1, tier="", seconds=-1.0, detail="")
    ),
    "negative step": lambda peer: peer.send(wire.Ask(step=-1, generation=1)),
    "too long": lambda peer: peer.send_raw(b"x" * (wire.MESSAGE_BYTES_MAX + 1)),
}  # fmt: skip


def test_a_violation_of_the_protocol_ends_only_its_connection(daemon: Daemon, run: str) -> None:
    with unharmed(daemon):
        for violation, violate in VIOLATIONS.items():
            with Peer(daemon.socket) as peer:
                peer.greet(run)
                violate(peer)
                assert refusal(peer).kind == "bad_request", violation
    assert daemon.steps("hot", run) == []


INVALID_HELLOS: list[dict[str, object]] = [
    {"protocol": 99},
    {"run": "../up"},
    {"rank": 1},
    {"rank": 3, "world_size": 2},
    {"rank": -1},
    {"world_size": 1 << 30},
    {"generation": 0},
    {"generation": -5},
    {"generation": 10**8},
]


def test_an_invalid_hello_is_refused(daemon: Daemon, run: str) -> None:
    plain: dict[str, object] = {
        "protocol": wire.PROTOCOL_VERSION,
        "version": "test",
        "run": run,
        "rank": 0,
        "world_size": 2,
        "generation": None,
    }
    with unharmed(daemon):
        for fields in INVALID_HELLOS:
            with Peer(daemon.socket) as peer:
                peer.send(wire.Hello(**plain | fields))  # type: ignore[arg-type]
                assert refusal(peer).kind == "bad_request", fields


def test_a_hello_of_another_protocol_is_refused_by_its_version_whatever_its_other_fields(daemon: Daemon) -> None:
    with unharmed(daemon), Peer(daemon.socket) as peer:
        peer.send_raw(msgspec.msgpack.encode({"type": "Hello", "protocol": 99, "version": "9.0", "rank": "first"}))
        message = refusal(peer).message
    assert "(tierd 9.0): it speaks protocol 99" in message
    assert message.endswith(f"speaks {wire.PROTOCOL_VERSION}")


def test_the_first_message_must_be_hello(daemon: Daemon) -> None:
    with unharmed(daemon), Peer(daemon.socket) as peer:
        peer.send(wire.Goodbye(), peer.socket.fileno())
        assert "wait for Hello" in refusal(peer).message


def test_a_peer_that_sends_nothing_is_disconnected(daemon: Daemon) -> None:
    with unharmed(daemon), Peer(daemon.socket) as peer:
        assert "nothing" in refusal(peer).message


def test_a_peer_without_a_rank_may_only_send_find_and_request(daemon: Daemon, run: str) -> None:
    with unharmed(daemon), Peer(daemon.socket) as peer:
        peer.greet(run, rank=None)
        peer.send(wire.Find(request=3, step=None, generation=None, milestone=None, tier="memory", exclude=[]))
        with pytest.raises(AssertionError, match="not_found"):
            peer.hear(wire.FoundReplica)
        peer.send(wire.Filling(slot=0, step=1))
        assert refusal(peer).kind == "bad_request"


def test_a_peer_that_never_reads_is_disconnected_and_delays_no_other(daemon: Daemon, run: str) -> None:
    with unharmed(daemon), Peer(daemon.socket) as silent, Peer(daemon.socket) as other:
        silent.greet(run)
        silent.attach(0)
        silent.seal(0, 1, b"one")
        silent.hear(wire.Persisted)

        def send_until_disconnected() -> None:
            for _ in range(100 * OUTBOX_MAX):
                silent.send(wire.Ask(step=1, generation=1))

        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            send_until_disconnected()
        other.greet(run + "-other")
        other.attach(0)
        other.seal(0, 1, b"one")
        assert other.hear(wire.Persisted).step == 1


def test_open_descriptors_are_bounded_for_a_peer_that_sends_a_thousand_finds(daemon: Daemon, run: str) -> None:
    with unharmed(daemon), Peer(daemon.socket) as peer:
        peer.greet(run)
        peer.attach(0)
        peer.seal(0, 1, b"one")
        peer.hear(wire.Persisted)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for number in range(1, 1001):
                peer.send(
                    wire.Find(request=number, step=None, generation=None, milestone=None, tier="auto", exclude=[])
                )
        assert daemon.descriptors() < 3000


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_refused(daemon: Daemon) -> None:
    other_uid = 65534
    for path in (*daemon.root.parents[:-2], daemon.root):
        with contextlib.suppress(PermissionError):
            os.chmod(path, 0o755)
    os.chmod(daemon.socket, 0o777)
    code = f"""
import os, socket
os.setgroups([])
os.setuid({other_uid})
peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
peer.connect({str(daemon.socket)!r})
peer.settimeout(10)
print(peer.recv(65536))
"""
    with unharmed(daemon):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
        assert "uid 65534" in done.stdout, done.stderr


def test_many_short_connections_leak_nothing(daemon: Daemon) -> None:
    with unharmed(daemon):
        connections = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(100)]
        for connection in connections:
            connection.connect(str(daemon.socket))
        for connection in connections:
            connection.close()
