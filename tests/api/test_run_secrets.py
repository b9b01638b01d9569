"""The secrets that a daemon has bound to runs: on a disk that cannot be written, and for root."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierd.api.packets import PacketConnection
from tierd.api.run_secrets import RunSecrets
from tierd.api.session import NO_RANK, TrainerSession
from tierd.errors import WrongSecret
from tierd.format import layout, wire
from tierd.format.ids import Generation, Rank, Run

RUN = Run("run")
PROOF, OTHER = "a" * 64, "b" * 64


@pytest.fixture
def connection() -> Iterator[PacketConnection]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection = PacketConnection(ours)
    yield connection
    connection.close()
    theirs.close()


def session(connection: PacketConnection, proof: str, rank: Rank = NO_RANK) -> TrainerSession:
    hello = wire.Hello(
        protocol=wire.PROTOCOL_VERSION, version="0", run=RUN, rank=0, world_size=1, generation=1, proof=proof
    )
    return TrainerSession(connection, RUN, rank, Generation(1), hello=hello)


async def test_a_secret_that_could_not_be_written_holds_and_is_written_by_the_next_join(
    tmp_path: Path, connection: PacketConnection
) -> None:
    folder = tmp_path / layout.RUN_SECRETS
    folder.write_text("in the way")
    secrets = RunSecrets(tmp_path)
    assert secrets.bind(RUN, PROOF, is_start=True)
    await secrets.save(RUN)
    with pytest.raises(WrongSecret):
        secrets.check(session(connection, OTHER))
    folder.unlink()
    assert not secrets.bind(RUN, PROOF, is_start=False)
    await secrets.save(RUN)
    restarted = RunSecrets(tmp_path)
    await restarted.load()
    restarted.check(session(connection, PROOF))
    with pytest.raises(WrongSecret):
        restarted.check(session(connection, OTHER))


async def test_a_daemon_without_secrets_writes_nothing(tmp_path: Path, connection: PacketConnection) -> None:
    secrets = RunSecrets(tmp_path)
    await secrets.load()
    assert not secrets.bind(RUN, "", is_start=True)
    await secrets.save(RUN)
    secrets.check(session(connection, ""))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("daemon_uid", "peer_uid", "rank", "is_allowed"),
    [
        (1000, 0, NO_RANK, True),
        (1000, 0, Rank(0), False),
        (1000, 1000, NO_RANK, False),
        (1000, 1001, NO_RANK, False),
        (0, 0, NO_RANK, False),
    ],
)
async def test_root_alone_is_an_operator_of_any_run_unless_the_daemon_is_roots(
    tmp_path: Path,
    connection: PacketConnection,
    monkeypatch: pytest.MonkeyPatch,
    daemon_uid: int,
    peer_uid: int,
    rank: Rank,
    is_allowed: bool,
) -> None:
    secrets = RunSecrets(tmp_path)
    secrets.bind(RUN, PROOF, is_start=True)
    monkeypatch.setattr(os, "geteuid", lambda: daemon_uid)
    connection.peer_uid = peer_uid
    peer = session(connection, "", rank)
    if is_allowed:
        secrets.check(peer)
    else:
        with pytest.raises(WrongSecret, match="TIERD_RUN_SECRET is not set"):
            secrets.check(peer)
