"""Job B of the same user attacks the run of job A, which has a secret: it cannot join, stop, snapshot or read it."""

from __future__ import annotations

import itertools
import shutil
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tierd_client

from tests.support.daemon import Daemon, serving
from tests.support.processes import ForkedProcess
from tests.support.waiting import DEADLINE_S
from tests.support.wire_peer import HELLO, DaemonPeer, Peer, welcome
from tierd.api.operator_socket import find_in_memory, stop_run, take_snapshot
from tierd.errors import Unsupported, WrongSecret
from tierd.format import layout, wire
from tierd.format.ids import checkpoint_id
from tierd.format.run_secret import VARIABLE, proof_of

SECRET_A, SECRET_B = "the secret of job A", "the secret of job B"
PROOF_A, PROOF_B = proof_of(SECRET_A), proof_of(SECRET_B)
WRONG = pytest.mark.parametrize("proof", ["", PROOF_B], ids=["no secret", "another secret"])


_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with serving(tmp_path_factory.mktemp("daemon")) as daemon:
        yield daemon


@pytest.fixture
def run() -> str:
    """A name that no other test uses: they share a daemon."""
    return f"run{next(_numbers)}"


@pytest.fixture
def job_a(daemon: Daemon, run: str) -> Iterator[Peer]:
    """Rank 0 of the run, with a snapshot in memory and in hot."""
    with Peer(daemon.socket) as peer:
        peer.greet(run, proof=PROOF_A)
        peer.attach(0)
        peer.seal(0, 1, b"weights")
        peer.hear(wire.Persisted)
        yield peer


def is_refused(peer: Peer) -> bool:
    """Whether the daemon ended the conversation because of the secret, without a descriptor."""
    assert peer.is_dropped()
    refused = peer.heard[-1]
    assert isinstance(refused, wire.Refused)
    assert not peer.descriptors
    return refused.kind == "wrong_secret" and "has a secret" in refused.message and VARIABLE in refused.message


def is_joined(daemon: Daemon, run: str, *, generation: int | None = None, proof: str) -> bool:
    with Peer(daemon.socket) as peer:
        peer.send(peer.hello(run, generation=generation, proof=proof))
        if (answer := peer.answer()) is not None:
            assert isinstance(answer, wire.Refused)
            return answer.kind != "wrong_secret"
        return True


@WRONG
@pytest.mark.parametrize("generation", [None, 1, 5])
def test_another_job_neither_joins_a_run_nor_fences_its_trainer(
    daemon: Daemon, run: str, job_a: Peer, proof: str, generation: int | None
) -> None:
    with Peer(daemon.socket) as job_b:
        job_b.send(job_b.hello(run, generation=generation, proof=proof))
        assert is_refused(job_b)
    job_a.send(wire.Convene(meeting=1))
    job_a.hear(wire.Convened)
    assert not any(isinstance(message, wire.Fenced) for message in job_a.heard)


@WRONG
def test_another_job_claims_no_generation(daemon: Daemon, run: str, job_a: Peer, proof: str) -> None:
    """With a newer one claimed, the trainer would be refused as soon as it connects again."""
    with Peer(daemon.socket) as job_b:
        job_b.send(job_b.hello(run, proof=proof))
        assert is_refused(job_b)
    assert [path.name for path in (daemon.hot / run).glob("generation-*")] == ["generation-0001.json"]
    with Peer(daemon.socket) as reconnected:
        reconnected.greet(run, generation=1, proof=PROOF_A)


@WRONG
def test_a_reader_without_the_secret_gets_no_welcome(daemon: Daemon, run: str, job_a: Peer, proof: str) -> None:
    """A Welcome names the newest checkpoint and the generation of the run."""
    with Peer(daemon.socket) as reader:
        reader.send(reader.hello(run, rank=None, proof=proof))
        assert is_refused(reader)
        assert [type(message) for message in reader.heard] == [wire.Refused]


@WRONG
def test_another_job_gets_no_slot_of_a_dead_trainer(daemon: Daemon, run: str, job_a: Peer, proof: str) -> None:
    job_a.close()
    with Peer(daemon.socket) as job_b:
        job_b.send(job_b.hello(run, proof=proof))
        assert is_refused(job_b)
    with Peer(daemon.socket) as restarted:
        restarted.greet(run, proof=PROOF_A)


@WRONG
def test_another_job_neither_stops_a_run_nor_takes_snapshots_nor_reads_its_memory(
    daemon: Daemon, run: str, job_a: Peer, proof: str
) -> None:
    path = Path(daemon.socket)
    with pytest.raises(WrongSecret, match=f"use run {run}: it has a secret.*{VARIABLE}"):
        stop_run(path, run, is_forced=False, wait_s=5.0, proof=proof)
    with pytest.raises(WrongSecret):
        stop_run(path, run, is_forced=True, wait_s=5.0, proof=proof)
    with pytest.raises(WrongSecret):
        take_snapshot(path, run, None, wait_s=5.0, proof=proof)
    with pytest.raises(WrongSecret):
        find_in_memory(path, checkpoint_id(run, 1, 1), proof=proof)
    assert not any(isinstance(message, wire.Requested) for message in job_a.heard)
    job_a.socket.setblocking(False)
    with pytest.raises(BlockingIOError):
        job_a.socket.recv(1)  # nothing was sent to its trainer


def test_a_reader_that_connected_before_the_run_had_a_secret_reads_nothing_after_it(daemon: Daemon, run: str) -> None:
    with Peer(daemon.socket) as reader, Peer(daemon.socket) as job_a:
        reader.greet(run, rank=None)
        job_a.greet(run, proof=PROOF_A)
        assert is_refused(reader)


def test_a_trainer_without_the_secret_that_joined_before_it_was_bound_is_disconnected(daemon: Daemon, run: str) -> None:
    with Peer(daemon.socket) as without, Peer(daemon.socket) as job_a:
        without.greet(run, rank=0, world_size=2)
        job_a.send(job_a.hello(run, rank=1, world_size=2, generation=1, proof=PROOF_A))
        job_a.hear(wire.Welcome)
        assert is_refused(without)


def attach_and_exit(path: str, run: str) -> None:
    """The process of a job without a secret. Another process may keep the memory of its slot."""
    with Peer(path) as peer:
        peer.greet(run)
        peer.attach(0)
        peer.send(wire.Convene(meeting=1))
        peer.hear(wire.Convened)  # the slot is attached


def test_slots_that_were_attached_before_the_secret_was_bound_are_not_handed_to_the_job(
    daemon: Daemon, run: str
) -> None:
    assert ForkedProcess(attach_and_exit, daemon.socket, run).wait(DEADLINE_S) == 0
    with Peer(daemon.socket) as job_a:
        welcome = job_a.greet(run, proof=PROOF_A)
        assert (welcome.generation, welcome.slots, job_a.descriptors) == (2, [], [])
    daemon.wait_log(f"bound {run} generation 2: it has a secret from now on; given up: 0 connections and 1 slots")


def test_a_shard_that_was_sealed_before_the_secret_was_bound_is_not_committed_with_those_of_the_job(
    daemon: Daemon, run: str
) -> None:
    with Peer(daemon.socket) as attacker, Peer(daemon.socket) as rank_0, Peer(daemon.socket) as rank_1:
        attacker.greet(run, world_size=2)
        attacker.attach(0)
        attacker.seal(0, 1, b"poison")
        rank_1.greet(run, rank=1, world_size=2, generation=1, proof=PROOF_A)
        assert is_refused(attacker)
        rank_1.attach(0)
        rank_1.seal(0, 1, b"weights")
        rank_0.greet(run, rank=0, world_size=2, generation=1, proof=PROOF_A)
        rank_0.attach(0)
        rank_0.seal(0, 1, b"weights")
        rank_0.hear(wire.Persisted)
        rank_0.find(step=1)
        assert [content[:7] for content in rank_0.take_files()[1:]] == [b"weights", b"weights"]


@pytest.mark.parametrize(
    "fields",
    [
        {"rank": 0, "world_size": 3, "generation": 1},
        {"generation": 0},
        {"rank": 2, "world_size": 2},
        {"rank": 1, "world_size": 2},
    ],
    ids=["another world size", "unknown generation", "no such rank", "claim by rank 1"],
)
def test_a_hello_that_is_refused_binds_no_secret(daemon: Daemon, run: str, fields: dict[str, int]) -> None:
    with Peer(daemon.socket) as job_a, Peer(daemon.socket) as refused:
        job_a.greet(run, world_size=2)
        refused.send(refused.hello(run, proof=PROOF_B, **fields))
        answer = refused.answer()
        assert answer is not None
        assert answer.kind == "bad_request"
        job_a.send(wire.Convene(meeting=1))
        job_a.hear(wire.Convened)
    assert is_joined(daemon, run, proof=PROOF_A)
    assert not is_joined(daemon, run, proof=PROOF_B)


def test_the_job_itself_is_served_after_a_wrong_secret(daemon: Daemon, run: str, job_a: Peer) -> None:
    assert not is_joined(daemon, run, proof=PROOF_B)
    files = find_in_memory(Path(daemon.socket), checkpoint_id(run, 1, 1), proof=PROOF_A)[1]
    assert len(files) == 1
    job_a.close()
    assert is_joined(daemon, run, proof=PROOF_A)


def test_a_restarted_daemon_still_knows_the_secret(daemon: Daemon, run: str, job_a: Peer) -> None:
    daemon.kill()
    daemon.start()
    assert not is_joined(daemon, run, proof="")
    assert not is_joined(daemon, run, proof=PROOF_B)
    assert is_joined(daemon, run, generation=1, proof=PROOF_A)


def test_after_a_loss_of_the_hot_disk_the_secret_holds_as_long_as_the_daemon_lives(
    daemon: Daemon, run: str, job_a: Peer
) -> None:
    folder = daemon.hot / layout.RUN_SECRETS
    shutil.rmtree(folder)
    assert not is_joined(daemon, run, proof="")
    assert not is_joined(daemon, run, proof=PROOF_B)
    job_a.close()
    assert is_joined(daemon, run, proof=PROOF_A)  # a start writes it again
    assert (folder / f"{run}.json").exists()


def test_after_a_loss_of_the_hot_disk_and_the_daemon_the_first_secret_binds_again(
    daemon: Daemon, run: str, job_a: Peer
) -> None:
    daemon.kill()
    shutil.rmtree(daemon.hot / layout.RUN_SECRETS)
    daemon.start()
    assert is_joined(daemon, run, generation=1, proof=PROOF_A)
    assert not is_joined(daemon, run, proof=PROOF_B)


def test_of_two_first_trainers_one_binds_the_run(daemon: Daemon, run: str) -> None:
    with Peer(daemon.socket) as one, Peer(daemon.socket) as other:
        one.send(one.hello(run, proof=PROOF_A))
        other.send(other.hello(run, proof=PROOF_B))
        answers = [one.answer(), other.answer()]
        assert sorted(answer is None for answer in answers) == [False, True]
        loser = PROOF_A if answers[0] is not None else PROOF_B
    assert not is_joined(daemon, run, proof=loser)


def test_a_run_without_a_secret_is_open_and_stays_so_for_readers_with_one(daemon: Daemon, run: str) -> None:
    with Peer(daemon.socket) as reader:
        reader.send(reader.hello(run, rank=None, proof=PROOF_B))  # reads, and binds nothing
        reader.hear(wire.Welcome)
    assert is_joined(daemon, run, proof="")
    assert not (daemon.hot / layout.RUN_SECRETS / f"{run}.json").exists()


def test_neither_the_secret_nor_its_proof_is_on_disk_in_the_log_or_in_a_repr(
    daemon: Daemon, run: str, job_a: Peer
) -> None:
    assert not is_joined(daemon, run, proof=PROOF_B)
    path = daemon.hot / layout.RUN_SECRETS / f"{run}.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    shown = path.read_text() + daemon.log + repr(job_a.hello(run, proof=PROOF_A)) + str(job_a.hello("r", proof=PROOF_A))
    assert not any(text in shown for text in (SECRET_A, SECRET_B, PROOF_A, PROOF_B))


def test_a_damaged_file_closes_its_run_alone(daemon: Daemon, run: str, job_a: Peer) -> None:
    daemon.kill()
    (daemon.hot / layout.RUN_SECRETS / f"{run}.json").write_text("{")
    daemon.start()
    assert not is_joined(daemon, run, proof=PROOF_A)
    assert is_joined(daemon, f"{run}-other", proof=PROOF_A)


def test_a_proof_of_another_length_is_refused(daemon: Daemon, run: str) -> None:
    with Peer(daemon.socket) as peer:
        peer.send(peer.hello(run, proof="x" * 60_000))
        answer = peer.answer()
        assert isinstance(answer, wire.Refused)
        assert answer.kind == "bad_request"


def test_a_trainer_takes_the_secret_from_the_environment(
    daemon: Daemon, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, SECRET_A)
    with tierd_client.connect(run, socket=daemon.socket, rank=0, world_size=1):
        assert not is_joined(daemon, run, proof="")
        assert not is_joined(daemon, run, proof=PROOF_B)


def test_a_client_with_a_secret_joins_no_daemon_that_does_not_check_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon of an older version ignores the field: the run would be open, and nobody would know."""
    monkeypatch.setenv(VARIABLE, SECRET_A)
    with DaemonPeer() as peer, ThreadPoolExecutor(1) as pool:
        joining = pool.submit(tierd_client.connect, "run", socket=peer.path, rank=0, world_size=1)
        assert peer.admit(welcome()).proof == PROOF_A
        with pytest.raises(Unsupported, match="does not check secrets"):
            joining.result(DEADLINE_S)


def test_commands_take_the_secret_from_the_environment(tmp_path: Path) -> None:
    with serving(tmp_path, environ={VARIABLE: SECRET_A}) as daemon:
        with Peer(daemon.socket) as job_a, Peer(daemon.socket) as job_b:
            for peer, run, proof in ((job_a, "a", PROOF_A), (job_b, "b", PROOF_B)):
                peer.greet(run, proof=proof)
                peer.attach(0)
                peer.seal(0, 1, b"weights")
                peer.hear(wire.Persisted)
        answers = [
            daemon.tierd("restore", "--run", run, "--tier", "memory", "--to", tmp_path / run) for run in ("a", "b")
        ]
    assert [answer.returncode for answer in answers] == [0, WrongSecret.exit_code]
    assert VARIABLE in answers[1].stderr


def test_messages_of_older_and_newer_peers_are_decoded() -> None:
    """A field of one side that the other does not know is ignored, and one that is missing has its default."""
    raw = wire.encode(HELLO)
    assert wire.decode_to_daemon(raw).proof == ""  # type: ignore[union-attr]
    assert not welcome().checks_secrets
