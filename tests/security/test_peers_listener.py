"""Attacks on the listener between nodes: by another user of the node, and by whoever reaches its port."""

from __future__ import annotations

import asyncio
import resource
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from tests.api.test_peer_parts import LONG, RUN, SHARD, Served, served
from tests.support.handmade_nodes import handmade_nodes
from tests.support.other_user import OtherUser, needs_root
from tests.support.waiting import wait_until
from tierd.format.ids import Run
from tierd.keys.peer_key import PeerKey

__all__ = ["served"]
CONNECTIONS = 300
IDLE_CONNECTIONS, IDLE_KEPT = 10_000, 2_000
ACCEPTED_AT_ONCE = 300  # asyncio accepts 100 in each pass of the loop, and closes what is ended three passes later


async def raw_request(served: Served, lines: bytes) -> bytes:
    """The answer to these bytes, until the daemon closes the connection."""
    host, _, port = served.key.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(lines)
    answer = b""
    with suppress(ConnectionError):
        async with asyncio.timeout(20.0):
            answer = await reader.read()
    writer.close()
    return answer


async def test_token_of_an_earlier_daemon_opens_nothing(served: Served) -> None:
    served.seal(5)
    former = PeerKey(address=served.key.address).token(RUN)
    assert former != served.key.token(RUN)
    assert (await served.get(f"parts/v1/{RUN}/{5:012d}-g0001/{SHARD}", token=former))[0] == 401
    assert (await served.part(SHARD)) == (200, LONG)


@pytest.mark.parametrize("run", ["..", "%2e%2e", "%00", "a%2fb", "%0d%0aX", "%ff", "r" * 5000, "."])
async def test_run_of_an_odd_name_opens_nothing(served: Served, run: str) -> None:
    """Also with the token that such a name would have."""
    served.seal(5)
    path = f"/parts/v1/{run}/{5:012d}-g0001/{SHARD}"
    token = served.key.token(Run(run))
    head = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer {token}\r\n\r\n"
    assert b" 401 " in (await raw_request(served, head.encode())).split(b"\r\n")[0]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "CONNECT"])
async def test_nothing_is_written_or_deleted(served: Served, method: str) -> None:
    served.seal(5)
    path = f"/parts/v1/{RUN}/{5:012d}-g0001/{SHARD}"
    token = served.key.token(RUN)
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer {token}\r\n\r\n"
    status = (await raw_request(served, head.encode())).split(b"\r\n")[0]
    assert b" 4" in status
    assert (await served.part(SHARD)) == (200, LONG)


async def test_half_open_connections_keep_no_node_out(served: Served) -> None:
    served.seal(5)
    host, _, port = served.key.address.rpartition(":")
    writers: list[asyncio.StreamWriter] = []
    for _ in range(CONNECTIONS):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /parts/v1/")
        writers.append(writer)
    assert await served.part(SHARD) == (200, LONG)
    for writer in writers:
        writer.close()


def connect_again_and_again(host: str, port: int, count: int, kept: int) -> None:
    """Opens so many connections, sends half a request on every other one, and keeps the last ones open."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for number in range(count):
        _attacking.append(connection := socket.socket())
        connection.setblocking(False)  # the kernel drops some, as the queue of the daemon is short
        connection.connect_ex((host, port))
        if number % 2:
            with suppress(OSError):  # it is not connected yet, or ended already
                connection.sendall(b"GET /parts/v1/run/")
        if len(_attacking) > kept:
            _attacking.pop(0).close()


_attacking: list[socket.socket] = []


@pytest.mark.long
@needs_root
def test_thousands_of_idle_connections_of_another_user_leave_trainers_and_nodes_theirs(tmp_path: Path) -> None:
    with handmade_nodes(tmp_path, 2) as nodes, OtherUser() as attacker:
        nodes.save(1)
        daemon = nodes.daemons[1]
        before, before_mb = daemon.descriptors(), daemon.resident_mb()
        peer = nodes.addresses[1].peer
        assert peer is not None
        host, _, port = peer.address.rpartition(":")
        attacker.call(connect_again_and_again, host, int(port), IDLE_CONNECTIONS, IDLE_KEPT)
        assert daemon.descriptors() <= before + 128 + ACCEPTED_AT_ONCE
        nodes.save(2)  # the ranks, and the copies in both directions
        assert daemon.resident_mb() <= before_mb + 64
        wait_until(lambda: daemon.descriptors() <= before + 8, "idle connections to be ended")
